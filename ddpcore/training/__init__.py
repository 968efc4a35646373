"""Whole training runs: config, training loop, record, checkpoints."""

from ddpcore.records.run import RunRecord

from .config import TrainConfig
from .finished import FinishedRun
from .run import Interrupted, join_run, train
from .trainer import Trainer

__all__ = ["FinishedRun", "Interrupted", "RunRecord", "TrainConfig", "Trainer", "join_run", "train"]
