"""The loop around a distributed model."""

from .trainer import Trainer

__all__ = ["Trainer"]
