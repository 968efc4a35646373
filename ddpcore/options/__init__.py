"""Values that a person writes: their types, names of parts, and what an error line suggests."""
