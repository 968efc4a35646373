"""What a process runs on: its ranks, its machine, its memory, its signals."""
