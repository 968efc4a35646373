"""Ordinary PyTorch idioms, each written once and run as a plain loop, on real ranks and on virtual learners."""
