"""Atomic files, JSON lines, and state as tensors and JSON."""
