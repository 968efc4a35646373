"""``distribute``: the call that prepares a model, an optimizer and a strategy for a training loop."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcore.comm.agreement import check_agreement, facts_of
from ddpcore.comm.base import Communicator
from ddpcore.comm.connect import connect
from ddpcore.comm.link import Link
from ddpcore.comm.process import default_group
from ddpcore.comm.shared.host import TIMEOUT_SECONDS
from ddpcore.distributed.averaging import rows_of
from ddpcore.distributed.guards import check_model, check_optimizer, undone_on_error
from ddpcore.distributed.handle import Distributed
from ddpcore.distributed.hooks import HookedDistributed
from ddpcore.distributed.state_sync import Policies, StateSync, scales_inside
from ddpcore.distributed.step_guards import is_distributed
from ddpcore.optim.base import FusedOptimizer
from ddpcore.optim.muon import Muon
from ddpcore.parameters.flat import FlatParameters, MiB
from ddpcore.parameters.hook_watch import own_hooks
from ddpcore.parameters.learner_models import LearnerModels, copies_of
from ddpcore.strategies.base import Baseline, Strategy
from ddpcore.strategies.baselines import DDP
from ddpcore.strategies.learner import Learner
from ddpcore.strategies.local_sgd import LocalSGD

Handle = TypeVar("Handle", bound=Distributed)


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | Baseline,
    *,
    learners: int | None = None,
    group: dist.ProcessGroup | None = None,
    transport: str = "auto",
    timeout: float = TIMEOUT_SECONDS,
    link: Link | None = None,
    vectorize: bool | str | None = None,
    bucket_bytes: int = 25 * MiB,
    first_bucket_bytes: int = MiB,
    policies: Policies | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Distributed:
    """Train ``model`` with ``strategy``. The training loop does not change.

    All learners start from learner 0's weights (frozen ones too) and buffers. Trained weights move to a flat buffer.

    Args:
        model: the model. All its parameters that need a gradient must be in ``optimizer``. Compile it before this call.
        optimizer: any ``torch.optim.Optimizer``. FusedSGD averages and steps in one pass.
        strategy: a new strategy, such as ``SSGD()``, ``DPSGD(topology=...)``, ``LocalSGD(period=...)``, or a baseline.
        learners: None for one learner on each rank, or the number of virtual learners in this process (with ``group``:
            on each rank). Call their ``.model`` with inputs ``[learners, batch, ...]`` and add the learners' losses.
        group: the process group. None is the default group, and for virtual learners no group.
        transport: the transport between real ranks, ``shm``, ``ipc``, ``pg`` or ``auto``: see docs/transports.md.
        timeout: seconds that a living rank may let the others wait, over ``shm`` and ``ipc``.
        link: a network to emulate between real ranks: see docs/transports.md.
        vectorize: how virtual learners run, see :class:`~ddpcore.parameters.learner_models.LearnerModels`.
        bucket_bytes, first_bucket_bytes: sizes of the largest bucket of averaged gradients, and of the first one.
        policies: what happens to momentum and other state when learners average; None keeps each learner's own.
        scaler: the gradient scaler, for the policy of that name. If learners differ, the optimizer must be fused.

    Returns:
        A handle with ``.model`` to call (``model`` itself, except for virtual learners and DDP), ``no_sync()``,
        ``evaluation_model()``, ``consensus_distance()``, ``state_dict()`` and ``load_state_dict()``.

    Raises:
        ValueError: the arguments do not fit together. The message says what to change.
    """
    policies = policies or Policies()
    buckets = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
    settings = {"transport": transport, "link": link, "learners": learners, "policies": policies, "scaler": scaler}
    if isinstance(strategy, Baseline):
        options = {**settings, **buckets, "timeout": timeout, "vectorize": vectorize}
        return _baseline(model, optimizer, strategy, group, options)
    _check(model, optimizer, strategy, policies, scaler, learners)
    group = _group_of(learners, group, {"transport": transport, "link": link, "timeout": timeout}, vectorize)
    _agree(group, model, optimizer, strategy, {**settings, **buckets})
    comm = connect(group, transport, _trained(model).device, timeout, link, learners)
    _set_up(strategy, comm.num_learners, _trained(model).dtype)
    with undone_on_error(model, optimizer, strategy):
        strategy.in_use = True
        learner = _make_learner(model, optimizer, comm, learners or 1, buckets)
        called = model if learners is None else LearnerModels(learner.models, learner.flat, vectorize)
        with own_hooks():
            handle = HookedDistributed(called, learner, strategy, StateSync(policies, learner, strategy, scaler))
    return _share_work(handle, optimizer, group if learners is None and strategy.learners_stay_identical else None)


def _share_work(handle: Handle, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None) -> Handle:
    """Ranks of the group, which have the same gradients, orthogonalize each matrix once. Returns the handle."""
    if isinstance(optimizer, Muon) and optimizer.process_group is None:
        optimizer.process_group = group
    return handle


def _set_up(strategy: Strategy, num_learners: int, dtype: torch.dtype) -> None:
    """Check that the strategy supports this, and warn if it has nothing to average."""
    strategy.setup(num_learners, dtype)
    if num_learners == 1 and not strategy.averages_gradients:
        text = f"{strategy.name}: there is one learner, so nothing is averaged: start more ranks, or pass learners="
        warnings.warn(text, stacklevel=3)


def _make_learner(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, learners: int, buckets: dict[str, int]
) -> Learner:
    """Copy the model for each virtual learner, move the weights to a flat buffer, and start all learners alike."""
    models = copies_of(model, learners)
    flat = FlatParameters([one.named_parameters() for one in models], allocate=comm.allocate, **buckets)
    _add_learners(optimizer, models)
    learner = Learner(flat, comm, optimizer, models)
    _start_alike(learner)
    return learner


def _baseline(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Baseline,
    group: dist.ProcessGroup | None,
    options: dict[str, Any],
) -> Distributed:
    if given := _given({**options, "policies": None if options["policies"] == Policies() else options["policies"]}):
        raise ValueError(f"{strategy.name} does not use these options: leave {given} out")
    _check_unused(model)
    comm = strategy.connect(group)
    handle = Distributed(strategy.wrap(model, group), comm)
    return _share_work(handle, optimizer, default_group(group) if isinstance(strategy, DDP) else None)


def _given(options: dict[str, Any]) -> str:
    """The names of the options that differ from the defaults of :func:`distribute`, as ``a=, b=``."""
    parameters = inspect.signature(distribute).parameters
    return ", ".join(f"{name}=" for name, value in options.items() if value != parameters[name].default)


def _group_of(
    learners: int | None, group: dist.ProcessGroup | None, options: dict[str, Any], vectorize: bool | str | None
) -> dist.ProcessGroup | None:
    """The process group; None if all learners are virtual ones of this process. ``options`` are for real ranks."""
    if learners is None:
        if vectorize is not None:
            raise ValueError("vectorize= is for virtual learners: leave it out, or pass learners=")
        return default_group(group)
    if given := _given(options):
        raise ValueError(f"virtual learners are no ranks: leave {given} out")
    if isinstance(vectorize, str) and vectorize != "measure":
        raise ValueError(f"unknown vectorize {vectorize!r}: choose from True, False, None, 'measure'")
    return group


def _agree(
    group: dist.ProcessGroup | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    settings: dict[str, Any],
) -> None:
    """Check that all ranks of the group train the same."""
    if group is None:
        return
    if isinstance(strategy, LocalSGD) and strategy.outer is not None:  # compare the optimizer that it makes
        settings = {**settings, "outer": strategy.outer([torch.zeros(1, requires_grad=True)])}
    check_agreement(group, facts_of(model, optimizer, strategy, settings), _trained(model).device)


def _trained(model: nn.Module) -> Tensor:
    """A trained parameter. FlatParameters refuses a model of two dtypes or devices, or without trained parameters."""
    return next((parameter for parameter in model.parameters() if parameter.requires_grad), torch.zeros(0))


@torch.no_grad()
def _start_alike(learner: Learner) -> None:
    """Overwrite weights (frozen ones too) and buffers with those of learner 0."""
    comm = learner.comm
    comm.broadcast_(learner.flat.param_LP)
    for copies in zip(*(model.parameters() for model in learner.models), strict=True):
        if not copies[0].requires_grad:
            first = _first_of(copies[0], comm)
            for parameter in copies:  # mostly one that all share
                parameter.copy_(first)
    for copies in zip(*(model.buffers() for model in learner.models), strict=True):
        first = _first_of(copies[0], comm)
        for buffer in copies:
            buffer.data = first.clone()


def _add_learners(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
    """Add the other learners' parameters to the groups of learner 0's, and copies of their states."""
    trained = [
        [index for index, parameter in enumerate(group["params"]) if parameter.requires_grad]
        for group in optimizer.param_groups
    ]
    for number, model in enumerate(models[1:], start=1):
        copies = dict(zip(models[0].parameters(), model.parameters(), strict=True))
        for group, places in zip(optimizer.param_groups, trained, strict=True):
            own = [group["params"][place] for place in places]
            group["params"] += [copies[parameter] for parameter in own]
            if "param_names" in group:
                group["param_names"] += [f"{group['param_names'][place]} of learner {number}" for place in places]
            for parameter in own:
                if parameter in optimizer.state:
                    optimizer.state[copies[parameter]] = _copy_of_state(optimizer, optimizer.state[parameter])


def _copy_of_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    shared = ("step",) if isinstance(optimizer, FusedOptimizer) else ()  # one counter for a group
    return {name: value if name in shared else copy.deepcopy(value) for name, value in state.items()}


def _first_of(tensor: Tensor, comm: Communicator) -> Tensor:
    """Learner 0's values of a tensor that is not in the flat buffer."""
    rows = rows_of(tensor, comm)
    comm.broadcast_(rows)
    return rows[0].view(tensor.shape)


def _check(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    policies: Policies,
    scaler: torch.amp.GradScaler | None,
    learners: int | None,
) -> None:
    if not isinstance(strategy, Strategy):
        raise ValueError(f"strategy is {strategy!r}: pass an instance, such as ddpcore.SSGD()")
    _check_unused(model)
    check_model(model)
    check_optimizer(optimizer, learners)
    _check_members(model, optimizer)
    policies.check(strategy, scaler)
    if scaler is not None and not strategy.learners_stay_identical and not scales_inside(optimizer):
        raise ValueError(
            f"with a scaler, {type(optimizer).__name__} skips a step on one learner while the others wait for it: take "
            "a fused optimizer, ddpcore's or torch's fused=True"
        )
    if isinstance(optimizer, Muon) and optimizer.process_group is not None and not strategy.learners_stay_identical:
        raise ValueError(
            f"Muon has a process_group, whose ranks need the same gradients, and under {strategy.name} they differ: "
            "leave process_group out"
        )
    if strategy.in_use:
        raise ValueError("the strategy already serves a distribute() call: make a new one")


def _check_unused(model: nn.Module) -> None:
    """Refuse a model whose parameters hold the hooks of an earlier call: they would run beside those of this call."""
    if is_distributed(model.parameters()):
        raise ValueError(
            "the model already serves a distribute() call: make a new one, or continue with a copy of it, the handle's "
            "evaluation_model()"
        )


def _check_members(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in trained:
            raise ValueError(
                f"parameter {name} is not in the optimizer: add it, or freeze it with requires_grad_(False)"
            )
    known: set[int] = {id(parameter) for parameter in model.parameters()}
    if not trained <= known:
        raise ValueError("the optimizer holds parameters that are not in the model: give both the same parameters")
