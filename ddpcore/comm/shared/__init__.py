"""Ranks that reach each other's memory."""
