"""The assignment of samples to learners at each step. It is a pure function of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ddpcore.options.typed import check_range

SAMPLERS = ("global", "distributed", "fixed")
"""Values of ``sampler``; :class:`ShardedBatches` explains them."""


@dataclass(frozen=True)
class ShardedBatches:
    """Splits the samples of each step between L learners.

    Args:
        num_samples: number of samples of the training split.
        batch_size: samples of all learners together at a step; each learner takes an equal share.
        num_learners: number of learners L.
        seed: seed of the random orders.
        sampler: ``global``: each epoch has one permutation of all samples, a function of (seed, epoch). Each batch is
            the next ``batch_size`` entries, which are split between the learners in order. So a batch has the same
            samples for any number of learners.
            ``distributed``: the samples of ``torch.utils.data.DistributedSampler(shuffle=True)`` with ``set_epoch`` at
            each epoch. Learner j takes entries j, j + L, j + 2 L, ... of a permutation. If L does not divide the length
            of the permutation, its first entries are appended; with drop_last it is shortened instead.
            ``fixed``: each learner has one part of the data for the whole run, in a new order at each epoch. The parts
            are random, disjoint and of equal size.
        drop_last: omit the incomplete batch at the end of an epoch. Otherwise the last batch is smaller.
        parts: the sample numbers of each learner for the whole run, such as those of :func:`ddpcore.data.split`; they
            replace the sampler, which stays ``global``. A learner goes through its part in a random order, and then
            again in another one. All learners take equal shares of a batch, so one with a smaller part repeats it more
            often. No batch is incomplete: an epoch has as many steps as drop_last gives for parts of mean size.

    Raises:
        ValueError: the batch cannot be split equally, or is larger than the data set.
    """

    num_samples: int
    batch_size: int
    num_learners: int = 1
    seed: int = 0
    sampler: str = "global"
    drop_last: bool = True
    parts: Sequence[np.ndarray] | None = field(default=None, compare=False, repr=False)
    _passes: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        samples, batch, learners = self.num_samples, self.batch_size, self.num_learners
        if self.sampler not in SAMPLERS:
            raise ValueError(f"unknown sampler '{self.sampler}': choose one of {', '.join(SAMPLERS)}")
        check_range("num_learners", learners, least=1)
        check_range("the data seed", self.seed, least=0)
        check_range("the batch size", batch, least=1)
        if learners > samples:
            raise ValueError(
                f"{learners} learners cannot share {samples} samples: take at most {samples} learners, and a batch "
                f"size of at most {samples} that they divide"
            )
        if batch > samples:
            most = samples - samples % learners
            raise ValueError(f"the batch size is {batch} but there are only {samples} samples: take at most {most}")
        if batch < learners:
            raise ValueError(
                f"the batch size {batch} is below one sample for each of {learners} learners: take {learners}"
            )
        if batch % learners:
            below = batch - batch % learners
            above = below + learners
            nearest = above if above - batch < batch - below and above <= samples else below
            raise ValueError(f"the batch size {batch} is not a multiple of {learners} learners: take {nearest}")
        if self.parts is not None:
            self._check_parts()
        if self.sampler == "global" and not self.drop_last and samples % learners:
            raise ValueError(
                f"the last batch of {samples % batch} samples is not a multiple of {learners} learners: set drop_last"
            )

    def _check_parts(self) -> None:
        assert self.parts is not None
        if len(self.parts) != self.num_learners or min(map(len, self.parts)) == 0:
            sizes = [len(part) for part in self.parts]
            raise ValueError(f"parts have {sizes} samples: give each of {self.num_learners} learners at least one")
        if self.sampler != SAMPLERS[0]:
            raise ValueError(f"learners have parts and sampler is '{self.sampler}': leave the sampler out")
        if not self.drop_last:
            raise ValueError("learners have parts, of which no batch is incomplete: leave drop_last on")

    @property
    def samples_per_learner(self) -> int:
        """Samples that a learner has in an epoch, including those of an incomplete batch."""
        if self.parts is not None:
            return sum(map(len, self.parts)) // self.num_learners
        padded = self.sampler == "distributed" and not self.drop_last
        return -(-self.num_samples // self.num_learners) if padded else self.num_samples // self.num_learners

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch, at least 1."""
        share = self.batch_size // self.num_learners
        if self.parts is not None:
            return max(1, self.samples_per_learner // share)
        return self.samples_per_learner // share if self.drop_last else -(-self.samples_per_learner // share)

    def epoch(self, step: int) -> int:
        """The epoch of a step, both counted from 0."""
        check_range("step", step, least=0)
        return step // self.steps_per_epoch

    def indices(self, step: int) -> Tensor:
        """Sample numbers of a step (counted from 0), int64 ``[L, batch_size / L]`` on the CPU.

        Without drop_last the last step of an epoch may have fewer columns. The result depends only on the step and the
        fields of this object, so each rank can compute any step, in any order.
        """
        epoch, share = self.epoch(step), self.batch_size // self.num_learners
        if self.parts is not None:
            rows = [self._of_part(learner, step * share, share) for learner in range(self.num_learners)]
            return torch.from_numpy(np.stack(rows))
        start = step % self.steps_per_epoch * share
        # A copy, because the cached array must not change.
        return torch.from_numpy(_order(self, epoch)[:, start : start + share].copy())

    def _of_part(self, learner: int, first: int, num: int) -> np.ndarray:
        """So many samples of a learner, which has taken ``first`` before."""
        assert self.parts is not None
        part, found = self.parts[learner], []
        while num:
            number, begin = divmod(first, len(part))
            if self._passes.get(learner, (-1,))[0] != number:
                order = np.asarray(part, dtype=np.int64)[permutation(len(part), self.seed, number, learner)]
                self._passes[learner] = number, order
            found.append(self._passes[learner][1][begin : begin + num])
            num, first = num - len(found[-1]), first + len(found[-1])
        return np.concatenate(found)


@lru_cache(maxsize=4)
def _order(batches: ShardedBatches, epoch: int) -> np.ndarray:
    """The sample numbers of an epoch, int64 ``[L, samples of a learner]``, in the order of steps."""
    samples, learners, seed = batches.num_samples, batches.num_learners, batches.seed
    each = batches.samples_per_learner
    if batches.sampler == "distributed":
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(samples, generator=generator).numpy()
        # np.resize appends entries from the beginning, or shortens.
        return np.resize(order, each * learners).reshape(each, learners).T
    if batches.sampler == "fixed":
        parts = permutation(samples, seed)[: each * learners].reshape(learners, each)
        return np.stack([part[permutation(each, seed, epoch, j)] for j, part in enumerate(parts)])
    order = permutation(samples, seed, epoch)
    end = samples // batches.batch_size * batches.batch_size
    whole = order[:end].reshape(-1, learners, batches.batch_size // learners)
    rest = order[end:] if not batches.drop_last else order[:0]
    return np.concatenate([whole.transpose(1, 0, 2).reshape(learners, -1), rest.reshape(learners, -1)], axis=1)


def permutation(num_samples: int, seed: int, *key: int) -> np.ndarray:
    """A random permutation, int64 ``[num_samples]``, that depends only on (seed, key). A key may have any length.

    It sorts the raw bits of Philox, because they are the only random stream that NumPy keeps the same across versions.
    """
    return np.argsort(philox(num_samples, seed, *key), kind="stable").astype(np.int64, copy=False)


def philox(count: int, seed: int, *key: int) -> np.ndarray:
    """Raw random bits, uint64 ``[count]``, that depend only on (seed, key)."""
    return np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)).random_raw(count)


Deals = tuple[tuple[int, tuple[int, ...]], ...]
"""Steps from which other learners share the samples, in order, each with the ids of these learners."""


@dataclass(frozen=True)
class Redealt:
    """Deals samples to learners of which some die and others join: each sample at most once in an epoch.

    A learner takes ``batch_size / num_learners`` samples in each step, however many learners there are. All samples of
    an epoch are in one order, as with the sampler ``global``; the learners of a step take the next ones, in the order
    of their ids. An epoch ends when there are too few samples for another step. What a learner that died was dealt and
    did not use is not dealt again in that epoch.

    Attributes:
        batches: of the run, with the sampler ``global``.
        deals: the changes so far, such as ``handle.deals``.
    """

    batches: ShardedBatches
    deals: Deals = ()

    def epoch(self, step: int) -> int:
        """The epoch of a step, both counted from 0."""
        return self._place(step)[0]

    def indices(self, step: int, learner: int) -> Tensor:
        """Sample numbers of a learner in a step, int64 ``[batch_size / num_learners]`` on the CPU.

        Raises:
            ValueError: the learner takes no samples in that step.
        """
        epoch, start, members = self._place(step)
        if learner not in members:
            raise ValueError(f"learner {learner} takes no samples in step {step}: only {list(members)} do")
        first = start + members.index(learner) * self._share
        order = _permuted(self.batches.num_samples, self.batches.seed, epoch)
        return torch.from_numpy(order[first : first + self._share].copy())

    @property
    def _share(self) -> int:
        return self.batches.batch_size // self.batches.num_learners

    def _place(self, step: int) -> tuple[int, int, tuple[int, ...]]:
        """The epoch of a step, how many of its samples are dealt before the step, and who shares the next ones."""
        members = tuple(range(self.batches.num_learners))
        epoch, dealt, now = 0, 0, 0
        for begin, changed in (*self.deals, (step, ())):
            until = min(begin, step)
            epoch, dealt = self._after(epoch, dealt, until - now, len(members) * self._share)
            now = max(now, until)
            if begin <= step and changed:
                members = changed
        epoch, dealt = self._after(epoch, dealt, 0, len(members) * self._share)
        return epoch, dealt, members

    def _after(self, epoch: int, dealt: int, num_steps: int, each: int) -> tuple[int, int]:
        """Epoch and samples dealt in it after more steps, with room for one more."""
        total = self.batches.num_samples
        if each > total:
            raise ValueError(f"{total} samples are too few for a step of {each}: fewer learners may join")
        while True:
            room = (total - dealt) // each
            if num_steps < room:
                return epoch, dealt + num_steps * each
            num_steps -= room
            epoch, dealt = epoch + 1, 0


@lru_cache(maxsize=4)
def _permuted(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    return permutation(num_samples, seed, epoch)
