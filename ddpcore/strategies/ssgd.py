"""Synchronous SGD, and the averages of gradients that other strategies share, with weights of learners.

Shapes: n learners in all, L held by this process.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Work
from ddpcore.options.typed import check_range, typed
from ddpcore.strategies.base import ALL, Strategy, Traits
from ddpcore.strategies.learner import Learner
from ddpcore.topology.base import Topology, checked_weights, relative
from ddpcore.topology.wrapped import BetweenGroups

Weights = Sequence[float] | str | None
"""A number for each learner, one of ``COUNTED``, or None: all learners count alike."""

COUNTED = ("samples", "tokens")


def weights_of(name: str, wanted: Sequence[float] | str) -> Weights:
    """The weights as they are kept. ValueError: a number is negative, all are 0, or there is no such word."""
    if isinstance(wanted, str) and wanted in COUNTED:
        return wanted
    if isinstance(wanted, str):
        raise ValueError(f"{name}: weights is {wanted!r}: give a number for each learner, or {' or '.join(COUNTED)}")
    return checked_weights(name, wanted, zeros=True)


def own_samples(learner: Learner) -> Tensor:
    """The samples of this step, float64 ``[L]``; NaN where the loop has not set them."""
    return counts_of(learner.num_samples, len(learner.comm.learners))


def counts_of(num: Any, rows: int) -> Tensor:
    """What a loop sets as samples, one number for all rows or one for each, as float64 ``[rows]``; NaN for None."""
    counts = [*num] if hasattr(num, "__len__") and getattr(num, "ndim", True) else [num] * rows
    counts = counts if len(counts) == rows else [None] * rows
    return torch.tensor([math.nan if one is None else float(one) for one in counts], dtype=torch.float64, device="cpu")


def shares_of(name: str, weights: Weights, learner: Learner, counts_L: Tensor | None, size: int = 0) -> Tensor | None:
    """The weight of each learner divided by the mean weight, float64 ``[n]``; None if all are equal.

    Collective if weights are counted: ``counts_L`` are the samples of the learners held here. ``size`` learners are a
    group, whose mean divides; 0: all are one group. ValueError, on all learners: a number of samples is negative or was
    not set, or all are 0.
    """
    num = learner.comm.num_learners
    if weights is None:
        return None
    if isinstance(weights, str):
        assert counts_L is not None
        all_n = learner.comm.gather(_alike(counts_L.to(learner.flat.param_LP.device), learner), learner.step).cpu()
        if bad := [rank for rank, count in enumerate(all_n.tolist()) if not count >= 0]:
            what = f"num_samples of learner {', '.join(map(str, bad))} was not set in each step, is negative,"
            what += " or differs between the learner's ranks"
            advice = "before each backward pass set handle.num_samples to the samples of its loss"
            raise ValueError(f"{name}: {what}: {advice}, one for each learner here")
        weights = (all_n.square() if weights == "tokens" else all_n).tolist()
    size = size or num
    table = torch.tensor(weights, dtype=torch.float64, device="cpu").view(-1, size)
    if not bool(table.any(dim=1).all()):
        raise ValueError(f"{name}: all learners{' of a group' if size < num else ''} have 0 samples: skip the step")
    return None if bool((table == table[:, :1]).all()) else (table / table.mean(dim=1, keepdim=True)).view(-1)


def _alike(counts_L: Tensor, learner: Learner) -> Tensor:
    """The samples of learners; NaN where the ranks of a sharded learner set other numbers. Collective over them."""
    if (shards := learner.flat.shards) is None:
        return counts_L
    mean_L, square_L = shards.add_(torch.stack([counts_L, counts_L.square()])) / int(shards.mesh.size())
    return torch.where(square_L - mean_L.square() <= 1e-12 * square_L, counts_L, math.nan)


def scale_(rows_LX: Tensor, shares_n: Tensor | None, learner: Learner) -> None:
    """Multiply the rows of the learners held here by their shares. A share of 0 gives 0, even for NaN."""
    if shares_n is None:
        return
    for row, share in zip(rows_LX, shares_n[list(learner.comm.learners)].tolist(), strict=True):
        if share == 0:
            row.zero_()
        elif share != 1:
            row.mul_(share)


class GradientAverages(Strategy):
    """A strategy that averages gradients of all learners, or of groups of ``group`` learners, as its ``plan`` says.

    Buckets of gradients are averaged during the backward pass. When it returns, ``.grad`` holds the mean, as under
    DistributedDataParallel. With a group of 1 there are no groups. :class:`SSGD` has ``weights``.
    """

    group: int = 1
    weights: Weights = None

    def __init__(self, group: int = 1, weights: Weights = None) -> None:
        group = typed(f"{self.name}: group", group, int)
        check_range(f"{self.name}: group", group, least=1)
        # Options of their defaults are no attributes: checkpoints of version 0.2 have a description without them.
        if group > 1:
            self.group = group
        if weights is not None:
            self.weights = weights_of(self.name, weights)
        self._works: list[Work] = []
        self._shares: Tensor | None = None  # [n], of this backward pass

    def _between(self, topology: Topology) -> Topology:
        """A topology of the groups as one of their learners."""
        return topology if self.group == 1 else BetweenGroups(self.group, topology)

    @override
    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        if self.weights is not None and not isinstance(self.weights, str):
            relative(self.name, self.weights, num_learners)

    @override
    def before_forward(self, learner: Learner) -> None:
        """After a backward pass that failed: finish its averages and zero the gradients, as ``zero_grad`` does.

        All ranks have started these averages, and they write to the buffer of the next gradients.
        """
        if self._works:
            self.after_backward(learner)
            learner.flat.grad_LP.zero_()

    @override
    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        """Start to average the columns, in a step whose plan says so.

        RuntimeError: the last backward pass failed, and no forward pass has run since then.
        """
        is_first = columns.storage_offset() == learner.flat.grad_LP.storage_offset()
        if is_first and self._works:
            self.after_backward(learner)  # raises the error of the connection if a rank died
            what = "the backward pass runs on the graph of an earlier pass that failed while averages were in progress"
            others = "or inside another one (use_reentrant=True), so its gradients are wrong"
            raise RuntimeError(f"{what}, {others}: call zero_grad() and the model again, with use_reentrant=False")
        size, comm, step = self.plan(learner.step).gradients, learner.comm, learner.step
        if size == 1:
            return
        if is_first:
            self._shares = shares_of(self.name, self.weights, learner, own_samples(learner), size)
        scale_(columns, self._shares, learner)
        self._works.append(comm.average_(columns, step, None if size == ALL else size))

    bucket_ready.only_averages = True  # type: ignore[attr-defined]

    @override
    def after_backward(self, learner: Learner) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()


class SSGD(GradientAverages):
    r"""Synchronous SGD: every learner steps along the mean of all gradients, so all hold the same weights.

    ``w_a(t+1) = w_a(t) - a/n sum_k g_k(w_a(t))`` (Goyal et al. 2017, equation 2).

    Args:
        weights: p, how much each learner counts: the mean is ``sum_k p_k g_k / sum_k p_k``. Numbers, or ``samples``:
            the loop sets ``handle.num_samples`` before each backward pass. If losses are means over so many samples,
            ``.grad`` is the gradient of the mean over all of them; a learner with 0 samples needs no pass.

    ValueError: a weight is negative, all are 0, or there is not one for each learner.
    """

    name: ClassVar[str] = "ssgd"
    _unweighted = Traits(averages_gradients=True, stays_identical=True)

    def __init__(self, weights: Weights = None) -> None:
        super().__init__(weights=weights)

    @property
    @override
    def traits(self) -> Traits:
        return self._unweighted if self.weights is None else replace(self._unweighted, weights=self.weights)

    def __repr__(self) -> str:
        return f"SSGD({'' if self.weights is None else f'weights={self.weights!r}'})"
