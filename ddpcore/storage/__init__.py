"""Files that are whole or absent, JSON lines, and state as tensors and JSON."""
