"""Stub."""


def prepare(a, b):
    """."""
