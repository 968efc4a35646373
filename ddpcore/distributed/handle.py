"""The handle of a model in training, as ``distribute`` returns it; baselines have this one. Observers of the loop."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.comm.base import Communicator
from ddpcore.comm.membership import Change
from ddpcore.distributed.averaging import BATCH_NORM, average_buffers, recalibrate
from ddpcore.distributed.phases import PhaseClock, SlowRank, slow_ranks
from ddpcore.distributed.samples import SampleWatch
from ddpcore.parameters.copies import copy_of
from ddpcore.parameters.shards import is_dtensor
from ddpcore.strategies.learner import Learner, NonFinite
from ddpcore.strategies.ssgd import counts_of

Resharding = tuple[tuple[int, tuple[int, ...]], ...]


class Observer:
    """Diagnostics that follow a loop: methods are called on every rank in this order, read a learner, change nothing.

    ``bucket_ready`` and ``gradients_averaged`` are called only in steps that average gradients. If a step calls its
    closure repeatedly, all are called in the first call alone.
    """

    def before_forward(self, learner: Learner) -> None:
        """Called before a forward pass that records gradients."""

    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        """Called during backward: columns ``[L, n]`` of ``grad_LP`` hold each learner's own gradients."""

    def gradients_averaged(self, learner: Learner) -> None:
        """Called at the end of a backward pass: all rows of ``grad_LP`` hold the average."""

    def before_step(self, learner: Learner) -> None:
        """Called before the optimizer's step, with the weights and gradients that the backward pass left."""


class Distributed:
    """The handle of a model in training, as :func:`distribute` returns it. This base class serves the baselines.

    Attributes:
        model: the module to call in the loop.
        comm: the connection of the learners.
        learner: weights, gradients and optimizer; None for the baselines.
        nonfinite: what ``on_nonfinite`` has left out, see :class:`ddpcore.NonFinite`. A state does not keep it.
        deals: with ``on_failure="shrink"``: steps from which other learners share the samples, and their ids, for
            :class:`ddpcore.data.ResharedBatches`.
    """

    learner: Learner | None = None
    deals: Resharding = ()
    _num_samples: int | Sequence[int] | None = None
    _samples: SampleWatch | None = None

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.model, self.comm, self.phases = model, comm, PhaseClock()
        self.nonfinite: list[NonFinite] = []

    def __repr__(self) -> str:
        strategy = getattr(self, "strategy", None)  # a baseline has none
        return f"<{'torch alone' if strategy is None else repr(strategy)}, {self.comm.description}>"

    @property
    def counts_samples(self) -> bool:
        """Whether the strategy has weights that :attr:`num_samples` gives."""
        return self._samples is not None and self._samples.is_on

    @property
    def num_samples(self) -> int | Sequence[int] | None:
        """For a strategy with ``weights="samples"``: the samples of a step, set by the loop before the backward pass.

        A number; for virtual learners a sequence of one for each. It is kept as a tuple. The value when a backward pass
        runs counts for the pass. All passes whose gradients are added need the same value. A step sets it to None, as a
        loop does that leaves a step out.
        """
        return self._num_samples

    @num_samples.setter
    def num_samples(self, num: int | Sequence[int] | None) -> None:
        self._num_samples = num
        if self._samples is not None and self._samples.is_on:
            counts = None if num is None else counts_of(num, len(self.models))
            self._num_samples = None if counts is None else tuple(counts.tolist())  # only an assignment is noted
            self._samples.set(counts)

    @property
    def learners_run(self) -> str:
        """How virtual learners run, and why: ``together: ...`` in vmap, or ``in turn: ...``. Empty for real ranks."""
        return ""

    @property
    def models(self) -> Sequence[nn.Module]:
        """The models of the learners of this process: ``[model]`` for a baseline."""
        return [self.model]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> list[Tensor]:
        """Clip each learner's gradient to a norm, and return them. A learner without a pass takes its average first."""
        self._join_average()
        sharded = any(map(is_dtensor, self.models[0].parameters()))  # torch 2.11 scales no list of partial sums
        clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=max_norm, foreach=False if sharded else None)
        norms: list[Any] = [clip(model.parameters()) for model in self.models]
        return [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]

    def _join_average(self) -> None:
        """Take part in an average of gradients, if this step has one."""

    def backward(self, losses: Tensor | Sequence[Tensor]) -> None:
        """Compute the gradients of all learners of this process. Collective if the strategy averages gradients.

        Args:
            losses: one for each learner, a tensor ``[learners]`` or a sequence of scalars; or a scalar of one learner.
                A ValueError refuses their mean, which would divide each gradient by the number of learners.
        """
        stacked = losses if isinstance(losses, Tensor) else torch.stack(list(losses))
        num = len(getattr(self.model, "rows", self.models))
        if stacked.shape not in ([(num,)] if num > 1 else [(), (1,)]):
            what = f"losses have shape {tuple(stacked.shape)}: pass one loss for each of {num} learners"
            raise ValueError(f"{what}, such as torch.stack([loss(o, y) for o, y in zip(outputs, labels)])")
        stacked.sum().backward()

    def split(self, *tensors: Tensor, at_once: int | None = None) -> Iterator[tuple[Tensor, ...]]:
        """Yield a batch by learners, so that the activations of one learner live at once, with the same bits.

        ``for x, y in handle.split(x, y): handle.backward(loss_of_each(handle.model(x), y))`` runs forward and backward
        passes of some virtual learners after others' passes. One such loop is one pass of all learners. On a real rank
        ``split`` yields the batch as it is.

        Tensors are ``[learners, batch, ...]``. Each part has the rows of ``at_once`` learners. None: one; all where
        the learners run together.
        """
        yield tensors

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes do not average gradients."""
        return self._passes(averages=False)

    def sync(self) -> AbstractContextManager[None]:
        """A context inside :meth:`no_sync`. Its backward passes average all gradients that the step has added up.

        RuntimeError: DistributedDataParallel trains the model, and decides in the forward pass what it averages.
        """
        return self._passes(averages=True)

    def _passes(self, *, averages: bool) -> AbstractContextManager[None]:
        if not isinstance(self.model, nn.parallel.DistributedDataParallel):
            return nullcontext()
        if averages:
            raise RuntimeError("DDP averages where the forward pass ran outside no_sync(): run both passes there")
        return self.model.no_sync()

    def evaluation_model(self, batch_norm: str = "average", batches: Iterable[Any] | None = None) -> nn.Module:
        """Return a copy of the model with the average of all learners' weights. Collective.

        push_sum weights learners by their push weights p: ``sum_j p_j z_j / sum_j p_j``, which mixing preserves.

        Args:
            batch_norm: ``average``: the mean of all learners' buffers. ``local``: the buffers of this rank.
                ``recalibrate``: statistics of batch normalization, computed again with the averaged weights.
            batches: training inputs of this rank, for ``recalibrate`` alone: tensors, or tuples of arguments.

        ValueError: an unknown ``batch_norm``, ``recalibrate`` and ``batches`` not together, ``recalibrate`` of shards.
        """
        if batch_norm not in BATCH_NORM:
            raise ValueError(f"batch_norm is {batch_norm!r}: choose from {', '.join(BATCH_NORM)}")
        if (batch_norm == "recalibrate") != (batches is not None):
            raise ValueError("batch_norm='recalibrate' and batches= go together: pass both or none")
        model = self._copy(batch_norm)
        vars(getattr(model, "_orig_mod", model)).pop("_is_accelerate_prepared", None)  # else Accelerate leaves DDP out
        if batches is not None:
            recalibrate(model, batches, self.comm)
        return model

    @torch.no_grad()
    def _copy(self, batch_norm: str) -> nn.Module:
        inner = self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model
        model = copy_of(inner)
        if batch_norm != "local":
            average_buffers(dict(model.named_buffers()), [inner], self._average_of)
        return model

    def _average_of(self, rows_LX: Tensor) -> Tensor:
        self.comm.average_(average_LX := rows_LX.clone()).wait()
        return average_LX

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank for a checkpoint, beside the states of model, optimizer and random numbers."""
        return {}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError, as :meth:`load_state_dict`, if the state cannot be loaded here. Changes nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, after the states of model and optimizer. Collective.

        ValueError: the state belongs to a model with other parameters or to another strategy.
        """

    @property
    def changes(self) -> Sequence[Change]:
        """The deaths and joins so far, with ``on_failure="shrink"``: the same on every rank."""
        return () if self.comm.membership is None else tuple(self.comm.membership.changes)

    def play(self, script: Iterable[Change]) -> None:
        """Let virtual learners die as the ``changes`` of another run say, each from its operation on.

        ValueError: the learners are ranks, ``on_failure`` is not ``shrink``, or an operation is over already.
        """
        self.comm.play(script)

    def lose(self, learner: int) -> None:
        """Let a virtual learner die now, as :meth:`play` does. ValueError, too: there is no such learner."""
        members = self.comm.members
        if learner not in members:
            raise ValueError(f"learner {learner} is not among those that are left, {list(members)}")
        left = tuple(one for one in members if one != learner)
        self.play([Change(operation=getattr(self.comm, "num_operations", 0), step=None, members=left, lost=(learner,))])

    def slow_ranks(self) -> list[SlowRank]:
        """The ranks for which the others wait, and in which phase of the step they lose the time. Collective.

        It covers the steps since the last call, so the first call after a warm-up drops that. Nobody is named if the
        others wait less than 10 % of a step, or if no rank explains 80 % of the waiting. Call it before an evaluation.
        """
        device, num_rows = next(self.model.parameters()).device, len(self.comm.learners)
        rows_LX = torch.tensor([self.phases.row()] * num_rows, dtype=torch.float64, device="cpu").to(device)
        everyone = self.comm.gather(rows_LX)[::num_rows].tolist()
        self.phases.restart()
        rows = zip(self.comm.members[::num_rows], everyone, strict=False)
        own = {rank: tuple(one / row[0] for one in row[1:]) for rank, row in rows if row[0]}
        few = len(own) < max(2, len(everyone))
        return [] if few else slow_ranks({k: v[:3] for k, v in own.items()}, {k: v[3] for k, v in own.items()})

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Return the root mean square, over learners, of the distance of their weights to the average weights w_a.

        ``sqrt(1/n sum_j |w_j - w_a|^2)`` (Kong et al. 2021), with w_a as in :meth:`evaluation_model`. Collective.
        """
        return float(self.comm.gather(self._squared_distances()).mean().sqrt())

    def _squared_distances(self) -> Tensor:
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])
        apart_LP = self._average_of(weights[None]).sub_(weights)
        return torch.linalg.vector_norm(apart_LP, dim=1, dtype=torch.float64).square()


class CopiedHandle:
    """What a copy or a pickle of a handle becomes, such as that in an attribute of a module: its hooks stay behind."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for these
            raise AttributeError(name)
        advice = "call distribute() with the handle's evaluation_model(), or save and load RunState(handle)"
        raise RuntimeError(f"this is a copy of a handle, whose model no strategy trains: {advice}")
