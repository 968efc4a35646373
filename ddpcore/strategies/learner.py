"""What one process trains: strategies change it and diagnostics read it. Numbers in it that are not finite."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore import ops
from ddpcore.comm.base import Communicator, LiveWeights
from ddpcore.ops.library import KERNEL_DTYPES, wide
from ddpcore.parameters.flat import FlatParameters
from ddpcore.parameters.shards import local

ON_NONFINITE = ("raise", "skip", "quarantine")


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """A gradient, or weights, that are not finite."""

    step: int  #: the optimizer step, counted from 1
    learner: int | None  #: whose; None if only the average over learners is not finite
    parameter: str  #: the first parameter, in the order of ``model.named_parameters()``, that is not finite
    what: str  #: ``gradient`` or ``weights``
    action: str  #: one of ``ON_NONFINITE``

    def __str__(self) -> str:
        whose = "the average over learners" if self.learner is None else f"learner {self.learner}"
        verb = "is" if self.what == "gradient" else "are"
        return f"step {self.step}, {whose}: the {self.what} of {self.parameter} {verb} not finite"


_ADVICE = {
    "gradient": "no weight has changed: lower the learning rate, clip gradients, or pass on_nonfinite='skip'",
    "weights": "no other learner has got them: begin at the last checkpoint, with a lower learning rate",
}


class NonFiniteError(RuntimeError):
    """A gradient, or weights to be sent, are not finite. No other learner has got such a weight.

    Attributes:
        found: a :class:`NonFinite` for each learner.
    """

    def __init__(self, found: Sequence[NonFinite]) -> None:
        self.found = tuple(found)
        first = self.found[0]
        others = f", and {len(self.found) - 1} more learners" if len(self.found) > 1 else ""
        super().__init__(f"{first}{others}: {_ADVICE[first.what]}")

    def __reduce__(self) -> "tuple[type[NonFiniteError], tuple[tuple[NonFinite, ...]]]":
        return NonFiniteError, (self.found,)


def row_sums(rows_LX: Tensor) -> Tensor:
    """The sum ``[L]`` of each row, not finite if a number of the row is not. 16-bit numbers are added in fp32."""
    return rows_LX.sum(dim=1, dtype=wide(rows_LX.dtype))


def suspects(sums_L: Tensor) -> list[int]:
    """The rows whose sum is not finite. It waits for the device."""
    return [row for row, total in enumerate(sums_L.tolist()) if not math.isfinite(total)]


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all floating-point and complex numbers of the tensors are finite."""
    numbers = [local(tensor.detach()) for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    found = [tensor._values() if tensor.is_sparse else tensor for tensor in numbers]
    return all(bool(tensor.isfinite().all()) for tensor in found)


def first_nonfinite(model: nn.Module, *, gradients: bool) -> str | None:
    """The name of the first parameter of a model whose gradient, or whose weights, are not finite; None if all are."""
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter
        if tensor is not None and parameter.requires_grad and not is_finite([tensor]):
            return name
    return None


@dataclass
class Learner:
    """The learner of a real rank (L = 1), or the L virtual learners of a process. n is the number of all learners."""

    flat: FlatParameters  #: parameters and gradients, ``[L, P]``
    comm: Communicator  #: the connection to the other learners
    optimizer: torch.optim.Optimizer  #: the user's optimizer, with the parameters of all learners held here
    models: Sequence[nn.Module]  #: one per learner held here
    step: int = 0  #: optimizer steps taken so far, the t of the equations
    #: of the loss of each learner held here, if averages count samples; one number for one learner
    num_samples: int | Sequence[int] | None = None
    hooks_paused: bool = False  #: whether forward passes call no strategy and no observer, as in passes of diagnostics
    lent: bool = False  #: whether the models have averages in the place of their weights, which the flat buffer keeps
    shares: Tensor | None = None  #: float64 ``[n]``, the weight of each learner in averages; None for equal weights
    share_mean: float = 1.0  #: the mean of ``shares``: 1, until a learner dies and its share is lost
    #: the weights that peers change at any time, if they are not the models' weights; else None
    live: LiveWeights | None = None
    had_backward: bool = False  #: whether a backward pass has given a gradient
    left: Tensor | None = None  #: beside ``live``: ``[L, P]``, the models' weights after the last step
    loaded: Counter[int] = field(default_factory=Counter)  #: how often a state has brought a parameter, by its id
    #: checks the weights that are sent: a ``ddpcore.distributed.watch.LoopWatch``, which ``distribute`` sets
    watch: Any = None

    @property
    def models_read(self) -> list[nn.Module]:
        """The models, with the first one of the living in the place of each virtual learner that has died."""
        rows = self.comm.rows_read
        return [model if row in rows else self.models[rows[0]] for row, model in enumerate(self.models)]

    def named_nonfinite(self, rows: list[int], *, gradients: bool) -> dict[int, str]:
        """The first parameter that is not finite, for each of these rows that takes part and has one.

        Collective over the ranks of a sharded learner: all of them return a row if one of them has such a parameter.
        """
        rows = list(filter(self.comm.reads, rows))  # a virtual learner that has died keeps its row
        found = {row: name for row in rows if (name := first_nonfinite(self.models[row], gradients=gradients))}
        if self.flat.shards is None:
            return found
        num = torch.tensor([float(len(found))], dtype=torch.float64, device=self.flat.param_LP.device)
        return {0: found.get(0, "a shard on another rank")} if self.flat.shards.add_(num).item() else {}

    def check_own(self, advice: str) -> None:
        """Raise RuntimeError if an average is in the place of the weights, with ``advice`` what to do."""
        if self.lent:
            raise RuntimeError(f"the model has averaged weights while it is evaluated: {advice}")

    def check_sent(self, columns_LX: Tensor | None = None) -> None:
        """Check that weights which are about to be sent, all or some columns, are finite. It costs one sum over them.

        Raises NonFiniteError if they are not, such as after a step that overflowed. Nothing was sent then.
        """
        if self.watch is not None:
            self.watch.check_sent(columns_LX)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the program has changed the weights since :meth:`check_sent`, by a versioned change."""
        if self.watch is not None:
            self.watch.check_unchanged()

    def advice(self, otherwise: str) -> str:
        """What to do where weights were changed: ``otherwise``, or another strategy if ``max_norm`` changes them."""
        if self.watch is None or self.watch.renormalized.isdisjoint(self.flat.index):
            return otherwise
        does_so = "max_norm of an embedding changes weights in forward passes"
        return f"{does_so}, so take LocalSGD or DPSGD(order='adapt_then_combine')"

    @torch.no_grad()
    def weights(self) -> Tensor:
        """The weights ``[L, P]`` whose average is evaluated. Collective.

        They are the models', or a copy of the live ones with what the program has changed in the models after a step:
        a change is added, and what ``load_state_dict`` of any model or part has brought is in its place.
        """
        if self.live is None:
            return self.flat.param_LP
        self.live.settle()
        live_LP, rows_LP = self.live.own(), self.flat.param_LP
        if self.left is None:
            return live_LP
        is_other_LP, is_loaded_LP = rows_LP != self.left, torch.zeros_like(rows_LP, dtype=torch.bool)
        for parameter, view in zip(self.flat.parameters, self.flat.views_of(is_loaded_LP), strict=True):
            if id(parameter) in self.loaded:
                view.fill_(True)
        loads = int(bool((is_other_LP & is_loaded_LP).any()))
        has_loaded = any(any(row) for row in self.gather([loads]))  # else a resumed run has loaded its own weights
        own_LP = torch.where(is_other_LP, live_LP + (rows_LP - self.left), live_LP)
        return torch.where(is_loaded_LP, rows_LP, own_LP) if has_loaded else own_LP

    def gather(self, numbers: Sequence[int], step: int | None = None) -> list[list[int]]:
        """Whole numbers of each learner, which those held here share. Collective."""
        if self.comm.transport == "virtual" and self.comm.membership is None:  # without a wait for the device
            return [[*numbers]] * self.comm.num_learners
        row = torch.tensor([numbers], dtype=torch.int64, device=self.flat.param_LP.device)
        return self.comm.gather(row.repeat(self.flat.num_rows, 1), step).tolist()

    @torch.no_grad()
    def average_of(self, weights_LX: Tensor) -> Tensor:
        """Return ``[L, X]``, each row the average over all n learners of their weights or some columns. Collective."""
        average_LX = weights_LX.clone()
        if self.shares is not None:
            average_LX.mul_(self.shares[list(self.comm.learners), None].to(average_LX))
        self.comm.average_(average_LX).wait()
        return average_LX if self.share_mean == 1.0 else average_LX.div_(self.share_mean)

    @torch.no_grad()
    def common_weights(self, rows_LP: Tensor) -> Tensor:
        """Return ``[1, P]``: the rows of all learners, and their average if a program gave them different weights.

        It compares two sums of each. Collective.
        """
        kind = torch.float64
        sums = torch.stack([rows_LP.sum(1, dtype=kind), torch.linalg.vector_norm(rows_LP, dim=1, dtype=kind)], dim=1)
        everyone = self.comm.gather(sums)
        common_LP = rows_LP if bool((everyone == everyone[0]).all()) else self.average_of(rows_LP)
        return common_LP.narrow(0, self.comm.rows_read[0], 1)

    @torch.no_grad()
    def squared_distances(self) -> Tensor:
        """Return float64 ``[L]``: the squared distance of each learner held here to the average of all. Collective.

        It sums squared differences without the padding: they are exact where weights are close.
        """
        flat, weights_LP = self.flat, self.weights()
        average_LP = self.average_of(weights_LP)
        if average_LP.dtype not in KERNEL_DTYPES:
            apart_LP = average_LP.sub_(weights_LP)
            parts = [apart_LP[:, segment.offset : segment.offset + segment.numel] for segment in flat.segments]
            return self.whole(torch.stack([part.double().square().sum(dim=1) for part in parts], dim=1))
        bounds = [bound for segment in flat.segments for bound in (segment.offset, segment.offset + segment.numel)]
        pairs = zip(weights_LP, average_LP, strict=True)
        # every second interval is padding
        sums_LS = [ops.noise_sums([row], [*bounds, flat.numel], average)[::2, 0, 0] for row, average in pairs]
        return self.whole(torch.stack(sums_LS))

    def whole(self, sums_LS: Tensor) -> Tensor:
        """The sum ``[L]`` over segments, and over the shards of a sharded learner. Collective over its ranks."""
        shards = self.flat.shards
        return (sums_LS if shards is None else shards.whole(sums_LS, self.flat.parameters)).sum(dim=1)
