"""Muon: momentum whose matrices are orthogonalized, with AdamW for all other parameters."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ddpcore.ops.library import wide
from ddpcore.optim.adamw import FusedAdamW
from ddpcore.optim.checks import Group, State, check_flag, check_lr, check_moments, check_new, check_number
from ddpcore.optim.matrices import Divided, Matrix, direction_of, orthogonal, parts_of, places_in, results_of
from ddpcore.optim.newton_schulz import COEFFICIENTS, owners_of
from ddpcore.optim.shard_exchange import Layout, exchanged
from ddpcore.optim.shards import divided, local_gradients
from ddpcore.optim.states import SavedOptimizer, check_rule, check_state, check_tensors
from ddpcore.options.typed import check_choice
from ddpcore.parameters.shards import is_dtensor, local

RULES = ("muon", "adamw")
SCALES = ("original", "match_rms_adamw")
_NO_OPTIONS = ("self", "params", "adamw_lr", "ns_dtype", "process_group", "__class__")  # in the constructor's locals
BUFFERS = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}


class Muon(SavedOptimizer):
    """Momentum orthogonalized by Newton-Schulz (Jordan et al. 2024), and AdamW for parameters that are no matrices.

    ``m = momentum*m + (1-momentum)*g; u = (1-momentum)*g + momentum*m if nesterov else m; w *= 1 - lr*weight_decay;
    w -= lr*s*O(u)``, where O(u) is the orthogonal factor of u. A convolution is a matrix of one row for each output
    channel, and a transposed one of a row for each input channel. The scale s is ``sqrt(max(1, rows/columns))``, or
    with ``match_rms_adamw`` (Moonshot: Liu et al. 2025, arXiv:2502.16982, equation 4) ``0.2*sqrt(max(rows,
    columns))``, so that lr and decay of AdamW fit.

    Matrices have the rule and the state of ``torch.optim.Muon``; O(u) is rounded to bfloat16, as there. Matrices of one
    shape are one batch of matrix products, so that results differ by the rounding of these products. All other
    parameters have the rule, the kernel and the state of :class:`~ddpcore.optim.FusedAdamW`.

    **Shards.** A parameter may be a DTensor, as FSDP2 and tensor parallelism make it. One of the ranks that divide it
    gathers the matrix, orthogonalizes it and sends the shards of the result back. Each rank gets its share of the work,
    and meanwhile the next matrices travel.

    **Blocks** (MuonBP: Khaled et al. 2025, arXiv:2510.16981; only its abstract and accounts by others were read). With
    ``period=P`` every P-th step, beginning with the first, is the one above. In the others each rank orthogonalizes its
    shard as a matrix, with the s of the shard's own shape times ``block_lr``, and nothing is sent.

    **Ranks.** With ``process_group``, whose ranks must have the same gradients, each rank orthogonalizes its share of
    the matrices and the ranks gather the results. :func:`ddpcore.distribute` sets it for ``SSGD`` and ``DDP``.

    Args:
        params: parameters, named parameters or groups. A group has ``rule="muon"`` (default) or ``rule="adamw"``, see
            :func:`ddpcore.optim.param_groups` with ``rule="muon"``. With ``split=n`` each parameter of a group is n
            matrices of equally many rows, such as the projections of queries, keys and values. A tuple has the rows of
            each. ``num_heads=n`` is the same for heads: a fused projection has heads of queries, keys and values. A
            group with parameters of three dimensions says what they are: ``batched=True`` for matrices ``[E, M, N]``,
            such as experts, and ``batched=False`` for the kernel of a convolution. ``period`` and ``block_lr`` are
            options of a group, too.
        lr, weight_decay, momentum, nesterov: see above. The rate may be a tensor, and the momentum is in [0, 1).
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

    Raises:
        ValueError: a hyperparameter is invalid; a parameter with ``rule="muon"`` has less than two dimensions, or three
            without ``batched``, or is a DTensor that is divided in another way than by ``Shard``; a parameter is
            complex; there are no parameters.
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
        options = {name: value for name, value in locals().items() if name not in _NO_OPTIONS}
        self.process_group, self._adamw_lr, self._ns_dtype = process_group, adamw_lr, ns_dtype
        if not isinstance(ns_dtype, torch.dtype) or not ns_dtype.is_floating_point:
            raise ValueError(f"ns_dtype is {ns_dtype}: it must be a floating-point dtype")
        if adamw_lr is not None:
            check_number("adamw_lr", adamw_lr)
        of_groups = {"rule": "muon", "split": 1, "batched": None, "period": 1, "block_lr": 1.0}
        super().__init__(params, {**options, **of_groups, "steps": 0})  # steps of a group with a period

    @override
    def add_param_group(self, param_group: Group) -> None:
        if param_group.get("rule") == "adamw" and self._adamw_lr is not None:
            param_group.setdefault("lr", self._adamw_lr)
        if "num_heads" in param_group:
            if "split" in param_group:
                raise ValueError("a group has split= and num_heads=: give one, because both divide its rows")
            param_group["split"] = param_group.pop("num_heads")
        super().add_param_group(param_group)
        self.give_own_rate()
        group = self.param_groups[-1]
        try:
            _check_options(group)
            check_new(group)
            for (name, param), own in self.named_parameters():
                if own is group:
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
            group.update({**self.defaults, **group})
        self._make_adamw()

    @override
    def check_loading(self, groups: Sequence[Group], saved: Mapping[Any, Tensor], state_dict: dict[str, Any]) -> None:
        for index, (group, loaded) in enumerate(zip(groups, state_dict["param_groups"], strict=True)):
            if group["rule"] == "adamw" and "ns_steps" not in loaded:  # of AdamW
                group["adamw_eps"] = loaded.get("eps", group["adamw_eps"])
            _check_options(group)
            for number in group["params"]:
                _check_parameter(number, saved[number], group)
                check_state(number, saved[number], state_dict["state"].get(number, {}), BUFFERS[group["rule"]])
            check_rule("muon", index, state_dict)

    @override
    def state_dtype_of(self, group: Group, param: Tensor, name: str, state: State) -> torch.dtype:
        return wide(param.dtype) if group["rule"] == "adamw" else param.dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Returns the result of ``closure``, or None. Collective if there is a ``process_group``."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.note_capture()
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        check_tensors("Muon", params, [param.grad for param in params if param.grad is not None], self.state)
        matrices: list[Matrix] = []
        members: list[Divided] = []
        for group in self.param_groups:
            if group["rule"] == "muon":
                self._add_members(group, matrices, members)
        for matrix, update in zip(matrices, self._updates(matrices), strict=True):
            matrix.step(update)
        self._step_shards(members)
        self._step_adamw([group for group in self.param_groups if group["rule"] == "adamw"])
        return loss

    def _make_adamw(self) -> None:
        groups = [{"params": group["params"]} for group in self.param_groups if group["rule"] == "adamw"]
        self._adamw = FusedAdamW(groups) if groups else None
        if self._adamw is not None:
            self._adamw.state = self.state

    def _step_adamw(self, groups: list[Group]) -> None:
        """Step other parameters. Their optimizer has the same states, and the options of now."""
        known = 0 if self._adamw is None or self._adamw.state is not self.state else len(self._adamw.param_groups)
        if len(groups) != known:
            self._make_adamw()  # the program has changed param_groups or state
        if self._adamw is None:
            return
        for own, group in zip(self._adamw.param_groups, groups, strict=True):
            own["params"], own["lr"], own["weight_decay"] = group["params"], group["lr"], group["weight_decay"]
            own["betas"], own["eps"] = group["adamw_betas"], group["adamw_eps"]
        self._adamw.step()

    def _add_members(self, group: Group, matrices: list[Matrix], members: list[Divided]) -> None:
        """Step the momentum of a group, and add what is to be orthogonalized: here, and of several ranks together."""
        params = [param for param in group["params"] if param.grad is not None and param.numel() > 0]
        for param in params:
            if (momentum := self.state[param].get("momentum_buffer")) is None:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            elif momentum.dtype != param.dtype:  # the model has a new dtype
                self.state[param]["momentum_buffer"] = momentum.to(param.dtype)
        momenta = [local(self.state[param]["momentum_buffer"]) for param in params]
        grads = local_gradients(params, [param.grad for param in params], self.named_parameters)
        if params:
            torch._foreach_lerp_(momenta, grads, 1 - float(group["momentum"]))
        is_block = group["steps"] % group["period"] > 0
        if group["period"] > 1:
            group["steps"] += 1
        for param, grad, momentum in zip(params, grads, momenta, strict=True):
            dtype = torch.float64 if param.dtype == torch.float64 else self._ns_dtype
            shards = divided(param) if is_dtensor(param) else []
            if shards and not is_block:
                members.append(Divided(param, direction_of(grad, momentum, group), group, dtype, shards))
            elif momentum.numel():
                factor = group["block_lr"] if shards else 1.0
                parts = [parts_of(tensor, group) for tensor in (local(param), grad, momentum)]
                for weights, of_grad, of_momentum in zip(*parts, strict=True):
                    matrices.append(Matrix(weights, of_grad, of_momentum, group, dtype, factor))

    def _step_shards(self, members: list[Divided]) -> None:
        """Step DTensors: one rank gathers and orthogonalizes a matrix. Collective over the ranks of a shard."""
        kinds: dict[Any, list[Divided]] = {}
        for member in members:
            groups = tuple(group for group, _ in member.shards)
            kinds.setdefault((groups, member.param.dtype, member.direction.device), []).append(member)
        for (groups, dtype, device), mine in kinds.items():
            costs = [sum(matrix.cost for matrix in member.matrices()) for member in mine]
            owners = owners_of(costs, math.prod(dist.get_world_size(group) for group in groups))
            dims = [[dim for _, dim in member.shards] for member in mine]
            layouts = [Layout(*one) for one in zip([member.param.shape for member in mine], dims, owners, strict=True)]
            like = torch.empty(0, dtype=torch.float64 if dtype == torch.float64 else torch.bfloat16, device=device)
            directions, compute = [member.direction for member in mine], partial(results_of, mine)
            for number, shard in exchanged(groups, layouts, directions, compute, like):
                mine[number].step(shard)

    def _updates(self, matrices: list[Matrix]) -> list[Tensor]:
        """O(u) of all matrices, with ``rows <= columns``, from this rank and the others."""
        group = self.process_group
        if group is None or dist.get_world_size(group) == 1:
            return orthogonal(matrices)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        owners = owners_of([matrix.cost for matrix in matrices], world_size)
        mine = [matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == rank]
        computed = {id(matrix): update for matrix, update in zip(mine, orthogonal(mine), strict=True)}
        updates: dict[int, Tensor] = {}
        for device, stored in dict.fromkeys((matrix.param.device, matrix.stored) for matrix in matrices):
            parts: list[list[Matrix]] = [[] for _ in range(world_size)]
            for matrix, owner in zip(matrices, owners, strict=True):
                if (matrix.param.device, matrix.stored) == (device, stored):
                    parts[owner].append(matrix)
            most = max(sum(matrix.param.numel() for matrix in part) for part in parts)
            sent = torch.zeros(most, dtype=stored, device=device)
            for matrix, place in places_in(parts[rank], sent):
                place.copy_(computed[id(matrix)])
            received = [torch.empty_like(sent) for _ in range(world_size)]
            dist.all_gather(received, sent, group=group)
            for part, row in zip(parts, received, strict=True):
                updates.update((id(matrix), place) for matrix, place in places_in(part, row))
        return [updates[id(matrix)] for matrix in matrices]


def _check_parameter(name: Any, param: Tensor, group: Group) -> None:
    if group["rule"] != "muon":
        return
    where = "put it in a group with rule='adamw', as param_groups(model, weight_decay, rule='muon') does"
    if param.ndim < 2:
        raise ValueError(f"parameter {name} has {param.ndim} dimensions, and Muon needs a matrix: {where}")
    if param.ndim == 3 and group["batched"] is None:
        kinds = f"batched=True if it is {len(param)} matrices, or batched=False if it is the kernel of a convolution"
        raise ValueError(f"parameter {name} has three dimensions: give its group {kinds}")
    if group["batched"] and param.ndim != 3:
        raise ValueError(f"parameter {name} has {param.ndim} dimensions; batched=True takes [E, M, N]: leave it out")
    if is_dtensor(param):
        divided(param, name)
    split = group["split"]
    if len(param) % split if isinstance(split, int) else len(param) != sum(split):
        raise ValueError(f"parameter {name} has {len(param)} rows, which split={split} does not divide")


def _check_options(group: Group) -> None:
    check_choice("rule", group["rule"], RULES)
    check_lr(group["lr"])
    check_number("weight_decay", group["weight_decay"])
    check_number("momentum", group["momentum"], below=1.0)
    check_flag("nesterov", group["nesterov"])
    values = group["ns_coefficients"]
    if not isinstance(values, Sequence) or len(values) != 3 or not all(isinstance(one, Real) for one in values):
        raise ValueError(f"ns_coefficients is {values}: it must be 3 numbers")
    check_number("eps", group["eps"])
    check_moments(group, "adamw_")
    if group["batched"] not in (None, True, False) or (group["batched"] and group["split"] != 1):
        raise ValueError(f"batched is {group['batched']!r}: it must be True, False or None; True goes without split")
    split, period = group["split"], group["period"]
    parts = split if isinstance(split, (tuple, list)) and split else (split,)
    if not all(isinstance(rows, int) and rows >= 1 for rows in parts):
        raise ValueError(f"split is {split!r}: it must be an integer from 1 on, or the rows of each matrix")
    if not isinstance(period, int) or period < 1 or (period > 1 and split != 1):
        raise ValueError(f"period is {period!r}: it must be an integer from 1 on, and above 1 it goes without split")
    check_number("block_lr", group["block_lr"])
    steps = group["ns_steps"]
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < 100:
        raise ValueError(f"ns_steps is {steps}: it must be an integer from 0 to 99")
    if group["adjust_lr_fn"] is not None:
        check_choice("adjust_lr_fn", group["adjust_lr_fn"], SCALES)
