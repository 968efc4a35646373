"""Tables of what was measured. Reads plain records; knows no torch."""
