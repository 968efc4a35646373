"""Data sets by name, ``load_dataset("mnist", data_dir=...)``, and the batches that learners take from them."""

from ddpcore.data.base import Dataset, Split
from ddpcore.data.registry import DATASETS, load_dataset
from ddpcore.data.shards import SAMPLERS, ResharedBatches, ShardedBatches
from ddpcore.data.transforms import Augmentation, Normalization
from ddpcore.data.uneven import SHARDS, split, total_variation

__all__ = [
    "Augmentation", "DATASETS", "Dataset", "Normalization", "ResharedBatches", "SAMPLERS", "SHARDS", "ShardedBatches",
    "Split", "load_dataset", "split", "total_variation",
]  # fmt: skip
