"""The loop around a distributed model, and all that a training run needs: config, record, checkpoints."""

from .config import TrainConfig
from .record import RunRecord
from .run import Interrupted, train
from .trainer import Trainer

__all__ = ["Interrupted", "RunRecord", "TrainConfig", "Trainer", "train"]
