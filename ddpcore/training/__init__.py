"""Whole training runs: config, training loop, record, checkpoints."""

from .config import TrainConfig
from .record import RunRecord
from .run import Interrupted, join_run, train
from .trainer import Trainer

__all__ = ["Interrupted", "RunRecord", "TrainConfig", "Trainer", "join_run", "train"]
