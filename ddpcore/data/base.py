"""Samples that live whole in one place, and which of them each learner takes at a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Split:
    """Inputs uint8 images [N, C, H, W] or floating samples [N, ...], with labels int64 [N], on one device."""

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.inputs.dtype != torch.uint8 and not self.inputs.is_floating_point():
            raise ValueError(f"Split: inputs are {self.inputs.dtype}, they must be uint8 images or floating features")
        if self.labels.dtype != torch.int64:
            raise ValueError(f"Split: labels are {self.labels.dtype}, they must be int64 class numbers")
        if self.inputs.ndim < 2 or self.labels.shape != self.inputs.shape[:1] or len(self.labels) == 0:
            shapes = f"inputs {list(self.inputs.shape)} and labels {list(self.labels.shape)}"
            raise ValueError(f"Split: {shapes} must be [N, ...] and [N], N at least 1")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs float32 [*I, ...] and labels int64 [*I] for int64 indices of shape I; uint8 is scaled to 0..1."""
        where = indices.to(self.inputs.device)
        inputs = self.inputs[where].float()
        if self.inputs.dtype == torch.uint8:
            inputs = inputs.div_(255)
        return inputs, self.labels[where]

    def to(self, device: torch.device | str) -> Split:
        """The same split on a device, so that batches are made there."""
        return Split(self.inputs.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named training split, a test split if there is one, the number of classes and the shape of one sample."""

    name: str
    train: Split
    test: Split | None
    num_classes: int
    input_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for split in (self.train, self.test):
            if split is None:
                continue
            shape = tuple(split.inputs.shape[1:])
            if shape != self.input_shape:
                raise ValueError(
                    f"{self.name}: samples are {list(shape)}, input_shape must say so, not {self.input_shape}"
                )
            if int(split.labels.min()) < 0 or int(split.labels.max()) >= self.num_classes:
                raise ValueError(f"{self.name}: a label is outside 0..{self.num_classes - 1}, raise num_classes")

    def to(self, device: torch.device | str) -> Dataset:
        """The same data set on a device."""
        test = None if self.test is None else self.test.to(device)
        return Dataset(self.name, self.train.to(device), test, self.num_classes, self.input_shape)


@dataclass(frozen=True)
class ShardedBatches:
    """Which samples each learner takes at a step; batch_size is global, over all learners.

    Each epoch walks one permutation, drawn from (seed, epoch) alone, in global batches; the incomplete last one is
    dropped. A global batch is cut into equal shards in order, so it is the same samples for any number of learners.
    ValueError if the batch cannot be cut equally or is larger than the data set.
    """

    num_samples: int
    batch_size: int
    num_learners: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        samples, batch, learners = self.num_samples, self.batch_size, self.num_learners
        if learners < 1:
            raise ValueError(f"num_learners is {learners}, it must be at least 1")
        if self.seed < 0:
            raise ValueError(f"the data seed is {self.seed}, it must be at least 0")
        if batch < 1:
            raise ValueError(f"the batch size is {batch}, it must be at least 1")
        if batch > samples:
            raise ValueError(f"the batch size is {batch} but there are only {samples} samples: take at most {samples}")
        if batch < learners:
            raise ValueError(
                f"the batch size {batch} is below one sample for each of {learners} learners: take {learners}"
            )
        if batch % learners:
            below = batch - batch % learners
            above = below + learners
            nearest = above if above - batch < batch - below and above <= samples else below
            raise ValueError(f"the batch size {batch} is not a multiple of {learners} learners: take {nearest}")

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch, at least 1."""
        return self.num_samples // self.batch_size

    def indices(self, step: int) -> Tensor:
        """Sample numbers of a step (from 0), int64 [num_learners, batch_size // num_learners] on the CPU.

        A function of the step alone: any order of calls, on any rank, gives the same.
        """
        if step < 0:
            raise ValueError(f"step is {step}, it must be at least 0")
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.batch_size
        batch = _permutation(self.seed, epoch, self.num_samples)[start : start + self.batch_size]
        return torch.from_numpy(batch.copy()).view(self.num_learners, -1)  # a copy: the permutation is shared


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    """A random order, int64 [num_samples], from raw Philox bits: the one stream NumPy keeps alike across versions."""
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(num_samples)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)
