"""The assignment of samples to learners at each step. It is a pure function of the step."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ddpcore.options.typed import check_range, typed

SAMPLERS = ("global", "distributed", "fixed")
"""Values of ``sampler``; :class:`ShardedBatches` explains them."""


def check_growth(name: str, batch_size: int, growth: Sequence[tuple[int, int]]) -> None:
    """ValueError unless steps ascend from 0, and sizes ascend from above ``batch_size``; the message has ``name``."""
    steps, sizes = [step for step, _ in growth], [size for _, size in growth]
    if any(late <= early for early, late in pairwise([-1, *steps])):
        raise ValueError(f"{name} has the steps {steps}: they must ascend, from 0")
    if any(late <= early for early, late in pairwise([batch_size, *sizes])):
        raise ValueError(f"{name} has the batch sizes {sizes}: they must ascend, from above {batch_size}")


def check_sizes(name: str, sizes: Sequence[int], batch_size: int, num_learners: int) -> None:
    """ValueError unless there is a size of at least 1 for each learner, together ``batch_size``."""
    if len(sizes) != num_learners or min(sizes) < 1 or sum(sizes) != batch_size:
        each = f"give each of {num_learners} learners at least 1 sample"
        raise ValueError(f"{name} is {list(sizes)}: {each}, together the batch size {batch_size}")


@dataclass(frozen=True)
class ShardedBatches:
    """Splits the samples of each step between L learners.

    Args:
        num_samples: number of samples of the training split.
        batch_size: samples of all learners together at a step, a multiple of L; each learner takes an equal share.
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
        parts: the sample numbers of each learner for the whole run, such as :func:`ddpcore.data.split` returns; they
            replace the sampler, which stays ``global``. A learner goes through its part in a random order, and then
            again in another one. All learners take equal shares of a batch, so one with a smaller part repeats it more
            often. No batch is incomplete: an epoch has as many steps as drop_last gives for parts of mean size.
        growth: pairs of a step and the batch size from that step on, in ascending order. The samples of an epoch keep
            their order, and each step takes the next ones, so an epoch uses a sample at most once. An epoch ends when
            fewer samples are left than the next step needs; without drop_last these are its last batch.
        sizes: samples of each learner in a step, together ``batch_size``; empty for equal shares. A batch has the same
            samples with any sizes. They need the sampler ``global`` and drop_last, without parts and growth.

    Raises:
        ValueError: a batch cannot be split equally, or is larger than the data set; ``growth`` has no ascending pairs.
    """

    num_samples: int
    batch_size: int
    num_learners: int = 1
    seed: int = 0
    sampler: str = "global"
    drop_last: bool = True
    parts: Sequence[np.ndarray] | None = field(default=None, compare=False, repr=False)
    growth: tuple[tuple[int, int], ...] = ()
    sizes: tuple[int, ...] = ()
    _passes: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        samples, batch, learners = self.num_samples, self.batch_size, self.num_learners
        if self.sampler not in SAMPLERS:
            raise ValueError(f"unknown sampler '{self.sampler}': choose one of {', '.join(SAMPLERS)}")
        check_range("num_learners", learners, least=1)
        check_range("the data seed", self.seed, least=0)
        check_range("the batch size", batch, least=1)
        if learners > samples:
            advice = f"take at most {samples} learners, and a batch size of at most {samples} that they divide"
            raise ValueError(f"{learners} learners cannot share {samples} samples: {advice}")
        object.__setattr__(self, "growth", typed("growth", self.growth, tuple[tuple[int, int], ...]))
        check_growth("growth", batch, self.growth)
        for size in (batch, *(size for _, size in self.growth)):
            self._check_size(size)
        if self.sizes:
            check_sizes("sizes", self.sizes, batch, learners)
            if self.sampler != SAMPLERS[0] or not self.drop_last or self.growth or self.parts is not None:
                raise ValueError("sizes of learners need the sampler global and drop_last, without parts and growth")
        if self.parts is not None:
            self._check_parts(self.parts)
        if self.sampler == "global" and not self.drop_last and samples % learners:
            last = f"the last batch of {samples % batch} samples"
            raise ValueError(f"{last} is not a multiple of {learners} learners: set drop_last")

    def _check_size(self, batch: int) -> None:
        samples, learners = self.num_samples, self.num_learners
        if batch > samples:
            most = samples - samples % learners
            raise ValueError(f"the batch size is {batch} but there are only {samples} samples: take at most {most}")
        if batch < learners:
            below = f"the batch size {batch} is below one sample for each of {learners} learners"
            raise ValueError(f"{below}: take {learners}")
        if batch % learners:
            lower = batch - batch % learners
            upper = lower + learners
            nearest = upper if upper - batch < batch - lower and upper <= samples else lower
            also = ", which sizes need, too" if self.sizes else ""
            raise ValueError(f"the batch size {batch} is not a multiple of {learners} learners{also}: take {nearest}")

    def _check_parts(self, parts: Sequence[np.ndarray]) -> None:
        sizes = [len(part) for part in parts]
        if len(sizes) != self.num_learners or min(sizes) == 0:
            raise ValueError(f"parts have {sizes} samples: give each of {self.num_learners} learners at least one")
        if self.sampler != SAMPLERS[0]:
            raise ValueError(f"learners have parts and sampler is '{self.sampler}': leave the sampler out")
        if not self.drop_last:
            raise ValueError("learners have parts, of which no batch is incomplete: leave drop_last on")

    @property
    def samples_per_learner(self) -> int:
        """Samples that a learner has in an epoch, including the samples of an incomplete batch."""
        if self.parts is not None:
            return sum(map(len, self.parts)) // self.num_learners
        padded = self.sampler == "distributed" and not self.drop_last
        return -(-self.num_samples // self.num_learners) if padded else self.num_samples // self.num_learners

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch, at least 1. With growth: in an epoch of batches of the size of step 0."""
        return self._room(0, self._share(0))

    def batch_size_at(self, step: int) -> int:
        """Samples of all learners together at a step, if its batch is complete."""
        return [size for begin, size in ((0, self.batch_size), *self.growth) if begin <= step][-1]

    def epoch(self, step: int) -> int:
        """The epoch of a step, both counted from 0."""
        return self.place(step)[0]

    def place(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and how many of its samples each learner has taken before the step."""
        check_range("step", step, least=0)
        epoch, taken = 0, 0
        for num_steps, share in self._spans(step):
            left = self._room(taken, share)
            if num_steps < left:
                taken += num_steps * share
            else:
                epochs, steps = divmod(num_steps - left, self._room(0, share))
                epoch, taken = epoch + 1 + epochs, steps * share
        return epoch, taken

    def first_step(self, epoch: int) -> int:
        """The first step of an epoch, both counted from 0. It is also the number of steps of all epochs before it."""
        return bisect_left(range(epoch * self.steps_per_epoch), epoch, key=self.epoch)  # no epoch has more steps

    def step_without_growth(self, step: int) -> int:
        """The step at which a run without growth reaches the epoch and the sample that this step begins with.

        Such a run has the batch size of step 0. A sample inside one of its batches has the step of that batch.
        """
        epoch, taken = self.place(step)
        return epoch * self.steps_per_epoch + taken // self._share(0)

    def num_taken(self, step: int) -> int:
        """Samples that each learner has taken before a step, in all epochs."""
        if not self.drop_last:  # each epoch takes all
            epoch, taken = self.place(step)
            return epoch * self.samples_per_learner + taken
        return sum(num_steps * share for num_steps, share in self._spans(step))

    def indices(self, step: int) -> Tensor:
        """Sample numbers of a step (counted from 0), int64 ``[L, batch_size / L]`` on the CPU.

        With sizes ``[L, largest size]``, where shorter rows end with -1. Without drop_last the last step of an epoch
        may have fewer columns. The result depends only on the step and the fields of this object, so each rank can
        compute any step, in any order.
        """
        (epoch, start), share, learners = self.place(step), self._share(step), self.num_learners
        if self.parts is not None:
            chosen = np.stack([self._of_part(*one, self.num_taken(step), share) for one in enumerate(self.parts)])
        elif self.sampler != SAMPLERS[0]:
            chosen = _order(self, epoch)[:, start : start + share]
        else:
            chosen = _permuted(self.num_samples, self.seed, epoch)[start * learners : (start + share) * learners]
            if self.sizes:
                rows = np.split(chosen, np.cumsum(self.sizes)[:-1])
                chosen = np.stack([np.pad(row, (0, max(self.sizes) - len(row)), constant_values=-1) for row in rows])
        return torch.from_numpy(chosen.reshape(learners, -1).copy())  # because the cached array must not change

    def _share(self, step: int) -> int:
        return self.batch_size_at(step) // self.num_learners

    def _room(self, taken: int, share: int) -> int:
        """The number of batches for which an epoch has room after some samples of each learner."""
        left = self.samples_per_learner - taken
        if self.parts is not None and taken == 0:
            return max(1, left // share)
        return left // share if self.drop_last else -(-left // share)

    def _spans(self, step: int) -> Iterator[tuple[int, int]]:
        """Before a step: the number of steps of each size so far, and a learner's share of such a batch."""
        for begin, end in pairwise([0, *[begin for begin, _ in self.growth if begin <= step], step]):
            yield end - begin, self._share(begin)

    def _of_part(self, learner: int, part: np.ndarray, first: int, num: int) -> np.ndarray:
        """So many samples of a learner from its part, of which it has taken ``first`` before."""
        found = []
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
    """The sample numbers of an epoch, int64 ``[L, samples of a learner]``: ``distributed`` and ``fixed``."""
    samples, learners, seed = batches.num_samples, batches.num_learners, batches.seed
    each = batches.samples_per_learner
    if batches.sampler == "distributed":
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(samples, generator=generator, device="cpu").numpy()
        # np.resize appends entries from the beginning, or shortens.
        return np.resize(order, each * learners).reshape(each, learners).T
    parts = permutation(samples, seed)[: each * learners].reshape(learners, each)
    return np.stack([part[permutation(each, seed, epoch, j)] for j, part in enumerate(parts)])


def permutation(num_samples: int, seed: int, *key: int) -> np.ndarray:
    """A random permutation, int64 ``[num_samples]``, that depends only on (seed, key). A key may have any length.

    It sorts the raw bits of Philox, because they are the only random stream that NumPy keeps the same across versions.
    """
    return np.argsort(philox(num_samples, seed, *key), kind="stable").astype(np.int64, copy=False)


_permuted = lru_cache(maxsize=4)(permutation)  # of all samples, by number of samples, seed and epoch


def philox(count: int, seed: int, *key: int) -> np.ndarray:
    """Raw random bits, uint64 ``[count]``, that depend only on (seed, key)."""
    return np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)).random_raw(count)


Resharding = tuple[tuple[int, tuple[int, ...]], ...]
"""Steps from which other learners share the samples, in order, each with the ids of these learners."""


@dataclass(frozen=True)
class ResharedBatches:
    """Splits samples between learners of which some die and others join: each sample at most once in an epoch.

    A learner takes ``batch_size / num_learners`` samples in each step, however many learners there are. All samples of
    an epoch are in one order, as with the sampler ``global``; the learners of a step take the next ones, in the order
    of their ids. An epoch ends when there are too few samples for another step. The samples that a learner got and did
    not use because it died are not given to another one in that epoch.

    Attributes:
        batches: of the run, with the sampler ``global``.
        changes: so far, such as ``handle.deals``.
    """

    batches: ShardedBatches
    changes: Resharding = ()

    def __post_init__(self) -> None:
        if self.batches.growth:
            raise ValueError("learners that die and join share batches of one size: leave growth out")

    def epoch(self, step: int) -> int:
        """The epoch of a step, both counted from 0."""
        return self._place(step)[0]

    def members(self, step: int) -> tuple[int, ...]:
        """The learners that share the samples of a step."""
        return self._place(step)[2]

    def indices(self, step: int, learner: int) -> Tensor:
        """Sample numbers of a learner in a step, int64 ``[batch_size / num_learners]`` on the CPU. ValueError: none."""
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
        """The epoch of a step, how many of its samples are taken before the step, and who shares the next ones."""
        members, epoch, taken, now = tuple(range(self.batches.num_learners)), 0, 0, 0
        for begin, changed in (*(one for one in self.changes if one[0] <= step), (step, ())):
            epoch, taken = self._after(epoch, taken, begin - now, len(members) * self._share)
            now, members = begin, changed or members
        epoch, taken = self._after(epoch, taken, 0, len(members) * self._share)
        return epoch, taken, members

    def _after(self, epoch: int, taken: int, num_steps: int, each: int) -> tuple[int, int]:
        """Epoch and samples taken in it after more steps, with room for one more."""
        total = self.batches.num_samples
        if each > total:
            raise ValueError(f"{total} samples are too few for a step of {each}: fewer learners may join")
        left = (total - taken) // each
        if num_steps < left:
            return epoch, taken + num_steps * each
        epochs, steps = divmod(num_steps - left, total // each)
        return epoch + 1 + epochs, steps * each
