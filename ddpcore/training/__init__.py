"""Whole training runs: config, training loop, record, checkpoints."""

from ddpcore.records.run import RunRecord

from .config import TrainConfig
from .finished import FinishedRun
from .run import Interrupted, join_run, train
from .sections import DataConfig, ModelConfig, OptimizerConfig, RunConfig, StrategyConfig
from .trainer import Trainer

__all__ = [
    "DataConfig", "FinishedRun", "Interrupted", "ModelConfig", "OptimizerConfig", "RunConfig", "RunRecord",
    "StrategyConfig", "TrainConfig", "Trainer", "join_run", "train",
]  # fmt: skip
