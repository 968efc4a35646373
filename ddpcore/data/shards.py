"""Which samples each learner takes at a step: pure functions of the step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

SAMPLERS = ("global", "distributed", "fixed")
"""Values of ``ShardedBatches(sampler=)``, explained there."""


@dataclass(frozen=True)
class ShardedBatches:
    """Which samples each learner takes at a step; batch_size is global, over all learners, each takes an equal share.

    sampler:
        "global": each epoch walks one permutation, drawn from (seed, epoch) alone, in global batches, and each of them
        is cut into shards in order: the same samples for any number of learners.
        "distributed": what `torch.utils.data.DistributedSampler(shuffle=True)` gives rank j, with `set_epoch` called
        each epoch: learner j takes entries j, j + L, j + 2 L ... of the permutation, which begins anew where L does not
        divide it (or, with drop_last, is cut there).
        "fixed": each learner owns one part of the data for the whole run, walks it in an order of its own each epoch
        and never sees the rest; the parts are random, equal and disjoint.
    drop_last: leave the incomplete batch at the end of an epoch out; otherwise the epoch ends with a smaller one.

    ValueError if the batch cannot be cut equally or is larger than the data set.
    """

    num_samples: int
    batch_size: int
    num_learners: int = 1
    seed: int = 0
    sampler: str = "global"
    drop_last: bool = True

    def __post_init__(self) -> None:
        samples, batch, learners = self.num_samples, self.batch_size, self.num_learners
        if self.sampler not in SAMPLERS:
            raise ValueError(f"unknown sampler '{self.sampler}': choose one of {', '.join(SAMPLERS)}")
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
        if self.sampler == "global" and not self.drop_last and samples % learners:
            raise ValueError(
                f"the last batch of {samples % batch} samples is not a multiple of {learners} learners: set drop_last"
            )

    @property
    def samples_per_learner(self) -> int:
        """Samples that a learner takes in an epoch, if none is dropped with an incomplete batch."""
        padded = self.sampler == "distributed" and not self.drop_last
        return -(-self.num_samples // self.num_learners) if padded else self.num_samples // self.num_learners

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch, at least 1."""
        share = self.batch_size // self.num_learners
        return self.samples_per_learner // share if self.drop_last else -(-self.samples_per_learner // share)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, in which a step lies. ValueError for a step below 0."""
        if step < 0:
            raise ValueError(f"step is {step}, it must be at least 0")
        return step // self.steps_per_epoch

    def indices(self, step: int) -> Tensor:
        """Sample numbers of a step (from 0), int64 [num_learners, batch_size // num_learners] on the CPU.

        The last step of an epoch may have fewer columns without drop_last. A function of the step alone: any order of
        calls, on any rank, gives the same. ValueError for a step below 0.
        """
        epoch, share = self.epoch(step), self.batch_size // self.num_learners
        start = step % self.steps_per_epoch * share
        return torch.from_numpy(_order(self, epoch)[:, start : start + share].copy())  # a copy: the order is shared


@lru_cache(maxsize=4)
def _order(batches: ShardedBatches, epoch: int) -> np.ndarray:
    """The sample numbers of an epoch, int64 [L, samples of a learner], in the order of steps."""
    samples, learners, seed = batches.num_samples, batches.num_learners, batches.seed
    each = batches.samples_per_learner
    if batches.sampler == "distributed":
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(samples, generator=generator).numpy()
        return np.resize(order, each * learners).reshape(each, learners).T  # resize begins anew at the end, or cuts
    if batches.sampler == "fixed":
        parts = permutation(samples, seed)[: each * learners].reshape(learners, each)
        return np.stack([part[permutation(each, seed, epoch, j)] for j, part in enumerate(parts)])
    order = permutation(samples, seed, epoch)
    end = samples // batches.batch_size * batches.batch_size
    whole = order[:end].reshape(-1, learners, batches.batch_size // learners)
    rest = order[end:] if not batches.drop_last else order[:0]
    return np.concatenate([whole.transpose(1, 0, 2).reshape(learners, -1), rest.reshape(learners, -1)], axis=1)


def permutation(num_samples: int, seed: int, *key: int) -> np.ndarray:
    """A random order, int64 [num_samples], of (seed, key) alone: another key, of any length, is another stream.

    From raw Philox bits, the one stream NumPy keeps alike across versions.
    """
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)).random_raw(num_samples)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)
