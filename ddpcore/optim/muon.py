"""Muon: momentum whose matrices are orthogonalized, with AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ddpcore.ops.dtypes import wide
from ddpcore.optim.adamw import FusedAdamW
from ddpcore.optim.checks import Group, State, check_flag, check_lr, check_new, check_number, is_number
from ddpcore.optim.newton_schulz import (
    COEFFICIENTS,
    direct_products,
    gram_products,
    orthogonalize,
    owners_of,
    takes_gram,
)
from ddpcore.optim.shard_exchange import ShardExchange
from ddpcore.optim.shards import divided, local_gradients
from ddpcore.optim.states import SavedOptimizer, check_state, check_tensors
from ddpcore.options.typed import check_choice
from ddpcore.parameters.shards import is_dtensor, local

RULES = ("muon", "adamw")
SCALES = ("original", "match_rms_adamw")
BUFFERS = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}
MAX_BATCH = 2**26  # elements of the matrices that are orthogonalized together


class Muon(SavedOptimizer):
    """Momentum orthogonalized by Newton-Schulz (Jordan et al. 2024), and AdamW for parameters that are no matrices.

    ``m = momentum*m + (1-momentum)*g; u = (1-momentum)*g + momentum*m if nesterov else m; w *= 1 - lr*weight_decay;
    w -= lr*s*O(u)``, where O(u) is the orthogonal factor of u. A convolution is a matrix of one row for each output
    channel. The scale s is ``sqrt(max(1, rows/columns))``, or with ``match_rms_adamw`` (Moonshot: Liu et al. 2025,
    arXiv:2502.16982, equation 4) ``0.2*sqrt(max(rows, columns))``, so that lr and decay of AdamW fit.

    Matrices have the rule and the state of ``torch.optim.Muon``; O(u) is rounded to bfloat16, as there. Matrices of one
    shape are one batch of matrix products, so that results differ by the rounding of these products. All other
    parameters have the rule, the kernel and the state of :class:`~ddpcore.optim.FusedAdamW`.

    **Shards.** A parameter may be a DTensor that one dimension of its mesh divides, as FSDP2 does. Each matrix is
    gathered on one of these ranks, orthogonalized there, and its shards are sent back: so no rank does the work of
    another, and an all-to-all each way carries all matrices.

    **Ranks.** With ``process_group``, whose ranks must have the same gradients, each rank orthogonalizes its share of
    the matrices and the ranks gather the results. :func:`ddpcore.distribute` sets it for ``SSGD`` and ``DDP``. A copy
    has no process group: each rank orthogonalizes all matrices.

    Args:
        params: parameters, named parameters or groups. A group has ``rule="muon"`` (default) or ``rule="adamw"``, see
            :func:`ddpcore.optim.param_groups` with ``rule="muon"``. With ``split=n`` each parameter of a group is n
            matrices of equally many rows, such as the projections of queries, keys and values. A group with parameters
            of three dimensions says what they are: ``batched=True`` for matrices ``[E, M, N]``, such as experts, and
            ``batched=False`` for the kernel of a convolution.
        lr: learning rate; a number or a tensor.
        weight_decay: decoupled.
        momentum: in [0, 1).
        nesterov: see above.
        ns_coefficients: a, b, c of :func:`~ddpcore.optim.newton_schulz.orthogonalize`.
        eps: least norm by which a matrix is divided.
        ns_steps: number of iterations, below 100.
        adjust_lr_fn: ``original`` (also None) or ``match_rms_adamw``.
        adamw_betas: of AdamW. Schedulers of torch that cycle ``betas`` find the momentum of the matrices instead.
        adamw_eps: of AdamW.
        adamw_lr: learning rate of groups with ``rule="adamw"`` that give none; None: ``lr``.
        ns_dtype: of the matrix products; float64 parameters have float64. float32 is faster on CPUs that have no
            instructions for bfloat16, and takes the Gram form where it has fewer multiplications. Autocast around a
            step changes nothing.
        process_group: see above.

    Raises:
        ValueError: a hyperparameter is invalid; a parameter with ``rule="muon"`` has less than two dimensions, or three
            without ``batched``, or is a DTensor that several dimensions of a mesh divide; a parameter is complex; there
            are no parameters.
        RuntimeError: in ``step``, a gradient is sparse, or has not the dtype or the device of its parameter.
    """

    _adamw: FusedAdamW | None = None  # steps the groups with rule="adamw", with the states of this optimizer
    process_group: dist.ProcessGroup | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_lr: float | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.process_group, self._adamw_lr, self._ns_dtype = process_group, adamw_lr, ns_dtype
        if not isinstance(ns_dtype, torch.dtype) or not ns_dtype.is_floating_point:
            raise ValueError(f"ns_dtype is {ns_dtype}: it must be a floating-point dtype")
        if adamw_lr is not None:
            check_number("adamw_lr", adamw_lr)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "rule": "muon",
            "split": 1,
            "batched": None,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
        }
        super().__init__(params, defaults)

    @override
    def add_param_group(self, param_group: Group) -> None:
        if param_group.get("rule") == "adamw" and self._adamw_lr is not None:
            param_group.setdefault("lr", self._adamw_lr)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        first = sum(len(other["params"]) for other in self.param_groups[:-1])
        names = group.get("param_names", range(first, first + len(group["params"])))
        try:
            _check_options(group)
            check_new(group)
            for name, param in zip(names, group["params"], strict=True):
                _check_parameter(name, param, group)
        except ValueError:
            self.param_groups.pop()
            raise
        self._make_adamw()

    def state_names(self, group: Group) -> tuple[str, ...]:
        """The buffers that each parameter of the group has."""
        return BUFFERS[group["rule"]]

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_adamw_lr": self._adamw_lr, "_ns_dtype": self._ns_dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            if "betas" in group:  # of ddpcore 0.2
                group["adamw_betas"] = group.pop("betas")
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._make_adamw()

    @override
    def check_loading(self, groups: Sequence[Group], saved: Mapping[Any, Tensor], state_dict: dict[str, Any]) -> None:
        for group in groups:
            _check_options(group)
            for number in group["params"]:
                _check_parameter(number, saved[number], group)
                check_state(number, saved[number], state_dict["state"].get(number, {}), BUFFERS[group["rule"]])

    @override
    def state_dtype_of(self, group: Group, param: Tensor, name: str, state: State) -> torch.dtype:
        return wide(param.dtype) if group["rule"] == "adamw" else param.dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Returns the result of ``closure``, or None. Collective if there is a ``process_group``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.note_capture()
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        check_tensors("Muon", params, [param.grad for param in params if param.grad is not None], self.state)
        groups = [group for group in self.param_groups if group["rule"] == "muon"]
        members = [member for group in groups for member in self._members(group)]
        matrices = [matrix for member in members if member.shard is None for matrix in member.matrices()]
        for matrix, update in zip(matrices, self._updates(matrices), strict=True):
            matrix.step(update)
        self._step_shards([member for member in members if member.shard is not None])
        self._step_adamw([group for group in self.param_groups if group["rule"] == "adamw"])
        return loss

    def _make_adamw(self) -> None:
        groups = [{"params": group["params"]} for group in self.param_groups if group["rule"] == "adamw"]
        self._adamw = FusedAdamW(groups) if groups else None

    def _step_adamw(self, groups: list[Group]) -> None:
        """Step other parameters. Their optimizer has the same states, and the options of now."""
        if len(groups) != (0 if self._adamw is None else len(self._adamw.param_groups)):
            self._make_adamw()  # the program has changed param_groups
        if self._adamw is None:
            return
        self._adamw.state = self.state
        for own, group in zip(self._adamw.param_groups, groups, strict=True):
            own["params"], own["lr"], own["weight_decay"] = group["params"], group["lr"], group["weight_decay"]
            own["betas"], own["eps"] = group["adamw_betas"], group["adamw_eps"]
        self._adamw.step()

    def _members(self, group: Group) -> Iterator[_Member]:
        """The parameters of a group that have gradients, after a step of their momentum."""
        params = [param for param in group["params"] if param.grad is not None and param.numel() > 0]
        for param in params:
            momentum = self.state[param].get("momentum_buffer")
            if momentum is None:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            elif momentum.dtype != param.dtype:  # the model has a new dtype
                self.state[param]["momentum_buffer"] = momentum.to(param.dtype)
        momenta = [local(self.state[param]["momentum_buffer"]) for param in params]
        grads = local_gradients(params, [param.grad for param in params], list)
        if params:
            torch._foreach_lerp_(momenta, grads, 1 - float(group["momentum"]))
        for param, grad, momentum in zip(params, grads, momenta, strict=True):
            yield _Member(param, local(param), grad, momentum, group, self._dtype_of(param))

    def _step_shards(self, members: list[_Member]) -> None:
        """Step DTensors: their matrices are orthogonalized on one rank each. Collective over the ranks of a shard."""
        kinds: dict[Any, list[_Member]] = {}
        for member in members:
            assert member.shard is not None
            kinds.setdefault((member.shard[0], member.param.dtype, member.part.device), []).append(member)
        for (group, dtype, device), mine in kinds.items():
            shapes = [member.param.shape for member in mine]
            costs = [
                sum(one.cost for one in member.on(torch.empty(member.param.shape, device="meta"))) for member in mine
            ]
            owners = owners_of(costs, dist.get_world_size(group))
            exchange = ShardExchange(group, shapes, [member.shard[1] for member in mine if member.shard], owners)
            wholes = exchange.gather([member.direction() for member in mine])
            owned = [mine[index].on(whole) for index, whole in zip(exchange.owned, wholes, strict=True)]
            updates = iter(_orthogonal([matrix for matrices in owned for matrix in matrices]))
            results = [
                torch.cat([matrix.upright(next(updates)).flatten() for matrix in matrices]).view(whole.shape)
                for matrices, whole in zip(owned, wholes, strict=True)
            ]
            stored = torch.float64 if dtype == torch.float64 else torch.bfloat16
            shards = exchange.scatter(results, torch.empty(0, dtype=stored, device=device))
            for member, shard in zip(mine, shards, strict=True):
                matrix = next(iter(member.on(torch.empty(member.param.shape, device="meta"))))
                _decay_and_add(member.part, shard, member.group, matrix.shape)

    def _dtype_of(self, param: Tensor) -> torch.dtype:
        return torch.float64 if param.dtype == torch.float64 else self._ns_dtype

    def _updates(self, matrices: list[_Matrix]) -> list[Tensor]:
        """O(u) of all matrices, with ``rows <= columns``, from this rank and the others."""
        group = self.process_group
        if group is None or dist.get_world_size(group) == 1:
            return _orthogonal(matrices)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        owners = owners_of([matrix.cost for matrix in matrices], world_size)
        mine = [matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == rank]
        computed = {id(matrix): update for matrix, update in zip(mine, _orthogonal(mine), strict=True)}
        updates: dict[int, Tensor] = {}
        for kind in dict.fromkeys((matrix.param.device, matrix.stored) for matrix in matrices):
            parts: list[list[_Matrix]] = [[] for _ in range(world_size)]
            for matrix, owner in zip(matrices, owners, strict=True):
                if (matrix.param.device, matrix.stored) == kind:
                    parts[owner].append(matrix)
            most = max(sum(matrix.param.numel() for matrix in part) for part in parts)
            sent = torch.zeros(most, dtype=kind[1], device=kind[0])
            for matrix, place in _places(parts[rank], sent):
                place.copy_(computed[id(matrix)])
            received = [torch.empty_like(sent) for _ in range(world_size)]
            dist.all_gather(received, sent, group=group)
            for part, row in zip(parts, received, strict=True):
                updates.update((id(matrix), place) for matrix, place in _places(part, row))
        return [updates[id(matrix)] for matrix in matrices]


@dataclass(frozen=True, eq=False)
class _Member:
    """A parameter of one step, or this rank's part of it."""

    param: Any
    part: Tensor
    grad: Tensor
    momentum: Tensor
    group: Group
    dtype: torch.dtype  # of the products

    @property
    def shard(self) -> tuple[dist.ProcessGroup, int] | None:
        """The ranks that have its shards, and the dimension that is divided; None if this rank has all of it."""
        return divided(self.param) if is_dtensor(self.param) else None

    def matrices(self) -> Iterator[_Matrix]:
        """Its matrices, if this rank has all of it."""
        parts = (self._parts(tensor) for tensor in (self.part, self.grad, self.momentum))
        for weights, grad, momentum in zip(*parts, strict=True):
            yield _Matrix(weights, grad, momentum, self.group, self.dtype)

    def on(self, direction: Tensor) -> list[_Matrix]:
        """The matrices of a whole u, which need no other tensor: ``lerp`` of u and u is u."""
        return [_Matrix(part, part, part, self.group, self.dtype) for part in self._parts(direction)]

    def direction(self) -> Tensor:
        """u of this rank's part."""
        momentum = float(self.group["momentum"])
        return self.grad.lerp(self.momentum, momentum) if self.group["nesterov"] else self.momentum

    def _parts(self, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.unbind() if self.group["batched"] else tensor.chunk(self.group["split"])


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A parameter of one step, or one of its parts, as a matrix."""

    param: Tensor
    grad: Tensor
    momentum: Tensor
    group: Group
    dtype: torch.dtype  # of the products

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.param.shape[0], self.param.numel() // self.param.shape[0]

    @property
    def wide(self) -> tuple[int, int]:
        """The shape, transposed if there are more rows than columns."""
        rows, columns = self.shape
        return min(rows, columns), max(rows, columns)

    @property
    def stored(self) -> torch.dtype:
        """The dtype of O(u)."""
        return torch.float64 if self.param.dtype == torch.float64 else torch.bfloat16

    @property
    def cost(self) -> int:
        """Multiplications."""
        is_gram = takes_gram(*self.wide, self.group["ns_steps"], self.dtype, self.param.device)
        form = gram_products if is_gram else direct_products
        return form(*self.wide, self.group["ns_steps"])

    @property
    def kind(self) -> tuple[Any, ...]:
        """Matrices that are equal in this can be one batch."""
        options = tuple(self.group["ns_coefficients"]), self.group["eps"], self.group["ns_steps"]
        return self.wide, self.dtype, self.param.dtype, self.param.device, options

    def direction(self) -> Tensor:
        """u, with ``rows <= columns``."""
        direction = (
            self.grad.lerp(self.momentum, float(self.group["momentum"])) if self.group["nesterov"] else self.momentum
        )
        matrix = direction.flatten(1)
        return matrix.mT if self.shape[0] > self.shape[1] else matrix

    def upright(self, update: Tensor) -> Tensor:
        """O(u) with the rows and columns of the matrix."""
        rows, columns = self.shape
        return update.mT if rows > columns else update

    def step(self, update: Tensor) -> None:
        """Decay the weights and subtract the update."""
        _decay_and_add(self.param, self.upright(update), self.group, self.shape)


def _decay_and_add(weights: Tensor, update: Tensor, group: Group, shape: tuple[int, int]) -> None:
    """Decay the weights of a matrix of this shape, or of a part of it, and subtract the update."""
    lr, (rows, columns) = float(group["lr"]), shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        scale = 0.2 * math.sqrt(max(rows, columns))
    else:
        scale = math.sqrt(max(1, rows / columns))
    weights.mul_(1 - lr * float(group["weight_decay"]))
    weights.add_(update.reshape(weights.shape), alpha=-lr * scale)


def _orthogonal(matrices: list[_Matrix]) -> list[Tensor]:
    """O(u) of each matrix, in batches of one shape."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        kinds.setdefault(matrix.kind, []).append(index)
    updates: dict[int, Tensor] = {}
    for members in kinds.values():
        first = matrices[members[0]]
        size = max(1, MAX_BATCH // first.param.numel())
        for begin in range(0, len(members), size):
            part = members[begin : begin + size]
            with torch.autocast(first.param.device.type, enabled=False):  # which would change the dtype of the stack
                directions = torch.stack([matrices[index].direction() for index in part])
            result = orthogonalize(
                directions,
                steps=first.group["ns_steps"],
                coefficients=first.group["ns_coefficients"],
                eps=first.group["eps"],
                dtype=first.dtype,
            )
            updates.update(zip(part, result.to(first.stored), strict=True))
    return [updates[index] for index in range(len(matrices))]


def _places(matrices: Sequence[_Matrix], row: Tensor) -> Iterator[tuple[_Matrix, Tensor]]:
    """The matrices, each with its part of a row in which they lie one after another."""
    begin = 0
    for matrix in matrices:
        end = begin + matrix.param.numel()
        yield matrix, row[begin:end].view(matrix.wide)
        begin = end


def _check_parameter(name: Any, param: Tensor, group: Group) -> None:
    if group["rule"] != "muon":
        return
    where = "put it in a group with rule='adamw', as param_groups(model, weight_decay, rule='muon') does"
    if param.ndim < 2:
        raise ValueError(f"parameter {name} has {param.ndim} dimensions, and Muon needs a matrix: {where}")
    if param.ndim == 3 and group["batched"] is None:
        raise ValueError(
            f"parameter {name} has three dimensions: give its group batched=True if it is {len(param)} matrices, or "
            "batched=False if it is the kernel of a convolution"
        )
    if group["batched"] and param.ndim != 3:
        raise ValueError(
            f"parameter {name} has {param.ndim} dimensions, and batched=True takes [E, M, N]: leave it out"
        )
    if is_dtensor(param):
        divided(param, name)
    if len(param) % group["split"]:
        raise ValueError(f"parameter {name} has {len(param)} rows, which split={group['split']} does not divide")


def _check_options(group: Group) -> None:
    """Raise ValueError, with name and value, if an option of the group is invalid."""
    check_choice("rule", group["rule"], RULES)
    check_lr(group["lr"])
    check_number("weight_decay", group["weight_decay"])
    check_number("momentum", group["momentum"], below=1.0)
    check_flag("nesterov", group["nesterov"])
    for name, length in (("ns_coefficients", 3), ("adamw_betas", 2)):
        values = group[name]
        if not isinstance(values, Sequence) or len(values) != length or not all(map(is_number, values)):
            raise ValueError(f"{name} is {values}: it must be {length} numbers")
    for index, beta in enumerate(group["adamw_betas"]):
        check_number(f"adamw_betas[{index}]", beta, below=1.0)
    check_number("eps", group["eps"])
    check_number("adamw_eps", group["adamw_eps"])
    if group["batched"] not in (None, True, False) or (group["batched"] and group["split"] != 1):
        raise ValueError(
            f"batched is {group['batched']!r}: it must be True, False or None, and True goes without split"
        )
    if not isinstance(group["split"], int) or group["split"] < 1:
        raise ValueError(f"split is {group['split']!r}: it must be an integer from 1 on")
    steps = group["ns_steps"]
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < 100:
        raise ValueError(f"ns_steps is {steps}: it must be an integer from 0 to 99")
    if group["adjust_lr_fn"] is not None:
        check_choice("adjust_lr_fn", group["adjust_lr_fn"], SCALES)
