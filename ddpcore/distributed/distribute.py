"""``distribute``: the call that prepares a model, an optimizer and a strategy for a training loop."""

import copy
import inspect
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ddpcore.comm.agreement import check_agreement, facts_of
from ddpcore.comm.base import Communicator
from ddpcore.comm.connect import Connection, connect, find_run
from ddpcore.comm.groups import Fact, default_group
from ddpcore.distributed import guards
from ddpcore.distributed.handle import Distributed
from ddpcore.distributed.hooks import HookedDistributed
from ddpcore.distributed.state_sync import Policies, StateSync, received_state, scales_inside
from ddpcore.optim.base import FusedOptimizer
from ddpcore.parameters.copies import copies_of, overwrite
from ddpcore.parameters.flat import FlatParameters
from ddpcore.parameters.learner_models import LearnerModels
from ddpcore.parameters.shards import Shards, fsdp_modules, local
from ddpcore.strategies.base import Baseline, Strategy, check_deaths, check_group, check_on_nonfinite, check_transport
from ddpcore.strategies.learner import Learner


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy | Baseline,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    learners: int | None = None,
    vectorize: bool | None = None,
    connection: Connection | None = None,
    policies: Policies | None = None,
    scaler: torch.amp.GradScaler | None = None,
    on_nonfinite: str = "raise",
) -> Distributed:
    """Train ``model`` with ``strategy``, in an unchanged loop. All start from learner 0's weights and buffers.

    Args:
        model: all its parameters that need a gradient must be in ``optimizer``. Compile it before this call.
        optimizer: any ``torch.optim.Optimizer``. FusedSGD averages and steps in one pass.
        strategy: a new strategy, such as ``SSGD()``, ``DPSGD(topology=...)``, ``LocalSGD(period=...)``, or a baseline.
        group: the ranks of the learners: a process group, or a mesh of one dimension. Of a sharded model they are ranks
            with the same shards (docs/sharded.md). None is the default group, and for virtual learners no group.
        learners: the number of virtual learners in this process (with ``group``: on each rank); None: one real learner.
        vectorize: how virtual learners run, see :class:`~ddpcore.parameters.learner_models.LearnerModels`.
        connection: transport, timeout, buckets, and what to do when a rank dies; None for the defaults.
        policies: what happens to momentum and other state when learners average; None keeps each learner's own.
        scaler: the gradient scaler of the loop. If learners differ, the optimizer must be fused.
        on_nonfinite: ``raise``, ``skip`` or ``quarantine``, if a gradient is not finite: see docs/reliability.md.

    Returns:
        A handle. Virtual learners: ``handle.backward`` takes the losses of ``handle.model([learners, batch, ...])``.

    ValueError: the arguments do not fit together.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError("distribute() is called inside torch.inference_mode(), where nothing trains: call it outside")
    policies, connection = policies or Policies(), connection or Connection()
    scaler = scaler if scaler is not None and scaler.is_enabled() else None  # one that is not enabled skips no step
    if isinstance(strategy, Baseline):
        options: dict[str, Any] = {"learners": learners, "vectorize": vectorize, "scaler": scaler}
        options |= {"on_nonfinite": on_nonfinite, "policies": None if policies == Policies() else policies}
        return _baseline(model, optimizer, strategy, guards.group_of(group), connection, options)
    settings = _settings(connection, learners=learners, policies=policies, scaler=scaler, on_nonfinite=on_nonfinite)
    _check(model, optimizer, strategy, settings)
    group = _group_of(learners, guards.group_of(group), connection, vectorize)
    if (shards := guards.shards_of(model, group, learners)) is not None:
        guards.check_shards(strategy, connection, scaler, on_nonfinite)
        guards.check_codecs(strategy, shards, list(model.parameters()))
    facts = facts_of(model, optimizer, strategy, settings) + guards.layouts_of(model)
    for one in [] if group is None else [group, *([] if shards is None else shards.groups)]:
        check_agreement(one, facts, connection.timeout)
    comm = connect(group, _trained(model).device, connection, learners)
    _set_up(strategy, comm, _trained(model).dtype, facts, on_nonfinite)
    with guards.undone_on_error(model, optimizer, strategy):
        learner = _make_learner(model, optimizer, strategy, comm, learners or 1, connection, shards)
        _start_alike(learner)
        called = model if learners is None else LearnerModels(learner.models, learner.flat, vectorize)
        handle = HookedDistributed(called, learner, strategy, StateSync(policies, learner, strategy), on_nonfinite)
    if learners is None and connection.on_failure == "raise":
        _share_work(optimizer, strategy, group)
    return handle


def _settings(connection: Connection, **more: Any) -> dict[str, Any]:
    """What all ranks must have in common besides model, optimizer and strategy."""
    names = ("transport", "link", "on_failure", "bucket_bytes", "first_bucket_bytes")
    return {**{name: getattr(connection, name) for name in names}, **more}


def _share_work(optimizer: Optimizer, strategy: Strategy | Baseline, group: dist.ProcessGroup | None) -> None:
    """Let an optimizer with a ``process_group`` divide its work among ranks that have the same gradients and stay."""
    if strategy.traits.stays_identical and getattr(optimizer, "process_group", ()) is None:
        optimizer.process_group = default_group(group)  # type: ignore[attr-defined]


def _set_up(strategy: Strategy, comm: Communicator, dtype: torch.dtype, facts: list[Fact], on_nonfinite: str) -> None:
    """Check that the strategy supports this, and warn if it has nothing to average."""
    check_on_nonfinite(on_nonfinite, strategy, comm.num_learners)
    num_first = comm.num_learners if comm.membership is None else comm.membership.first
    strategy.setup(num_first, dtype)
    if comm.membership is not None:
        check_deaths(strategy, num_first)
    if comm.num_learners > 1:
        check_transport(strategy, comm.transport)
    if strategy.traits.group > 1:
        check_group(strategy, comm.num_learners, len(comm.learners))
        comm.form_groups(strategy.traits.group)
    if strategy.topology is not None:
        comm.note_topology(strategy.topology)
    comm.announce(facts, num_first)
    if comm.num_learners == 1 and not strategy.traits.averages_gradients:
        text = "there is one learner, so nothing is averaged (outer steps go on): start more ranks, or pass learners="
        warnings.warn(f"{strategy.name}: {text}", stacklevel=3)


def _make_learner(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    comm: Communicator,
    learners: int,
    connection: Connection,
    shards: Shards | None = None,
) -> Learner:
    """Copy the model for each virtual learner, and move the weights to a flat buffer."""
    strategy._in_use = True
    models = copies_of(model, learners)
    flat = FlatParameters(
        [one.named_parameters() for one in models],
        allocate=comm.allocate,
        bucket_bytes=connection.bucket_bytes,
        first_bucket_bytes=connection.first_bucket_bytes,
        shards=shards,
        sends_gradients=strategy.traits.averages_gradients,
    )
    _add_learners(optimizer, models)
    kept = None if strategy.topology is None else strategy.topology.kept_weights(comm.num_learners)
    return Learner(flat, comm, optimizer, models, shares=None if kept is None else torch.from_numpy(kept))


def join(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    store: dist.Store,
    *,
    connection: Connection | None = None,
    policies: Policies | None = None,
    on_nonfinite: str = "raise",
) -> Distributed:
    """Join a run of other ranks that has ``on_failure="shrink"``, as a new rank, between two of its steps.

    The model takes a neighbour's weights and buffers, and the strategy its state. The optimizer takes its state if the
    strategy keeps learners identical or the policy averages it. ``handle.learner.step`` is the number of steps so far.

    Args:
        model: as the other ranks have it, with any weights.
        optimizer, strategy, policies, on_nonfinite: as the other ranks gave them to :func:`distribute`.
        store: of the run's process group: a new client of its ``TCPStore``, or its ``FileStore``.
        connection: as the other ranks gave it. Its timeout limits the wait for the run.

    ValueError: this rank trains something else, or the run takes no rank, as with a scaler. Nothing has changed.
    RuntimeError: there is no such run, or it does not answer.
    """
    policies = policies or Policies()
    connection = replace(connection or Connection(), on_failure="shrink")
    settings = _settings(connection, learners=None, policies=policies, scaler=None, on_nonfinite=on_nonfinite)
    _check(model, optimizer, strategy, settings)
    if sharded := guards.layouts_of(model):
        raise ValueError(f"{sharded[0][0]} is of a sharded learner, and learners of one rank join: begin a new run")
    check_deaths(strategy)
    check_on_nonfinite(on_nonfinite, strategy, 2)  # the run has others
    facts = facts_of(model, optimizer, strategy, settings)
    comm = find_run(store, _trained(model).device, connection.timeout)
    with guards.undone_on_error(model, optimizer, strategy):
        strategy.setup(comm.membership.first, _trained(model).dtype)
        learner = _make_learner(model, optimizer, strategy, comm, 1, connection)
        comm.enter(facts)  # after the slow part, because the others wait from here on
        state_sync = StateSync(policies, learner, strategy, joins=True)
        handle = HookedDistributed(model, learner, strategy, state_sync, on_nonfinite)
        handle.load_state_dict(received_state(learner))
        return handle


def _baseline(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Baseline,
    group: dist.ProcessGroup | None,
    connection: Connection,
    options: dict[str, Any],
) -> Distributed:
    parameters = inspect.signature(distribute).parameters
    names = [f"{name}=" for name, value in options.items() if value != parameters[name].default]
    if given := ", ".join(filter(None, (*names, connection.given()))):
        more = " (init_process_group() takes its timeout)" if "timeout" in given else ""
        raise ValueError(f"{strategy.name} does not use these options: leave {given} out{more}")
    _check_unused(model)
    comm = strategy.connect(group)
    handle = Distributed(strategy.wrap(model, group), comm)
    if comm.num_learners > 1:
        handle.model.register_forward_pre_hook(handle.phases.begin_forward)
        handle.model.register_forward_hook(handle.phases.end_forward)
    _share_work(optimizer, strategy, group)
    return handle


def _group_of(
    learners: int | None, group: dist.ProcessGroup | None, connection: Connection, vectorize: bool | None
) -> dist.ProcessGroup | None:
    """The process group; None if all learners are virtual ones of this process."""
    if learners is None:
        if vectorize is not None:
            raise ValueError("vectorize= is for virtual learners: leave it out, or pass learners=")
        return default_group(group)
    if given := connection.given(("transport", "link", *(() if group else ("timeout",)))):
        raise ValueError(f"virtual learners are no ranks: leave {given} out")
    if vectorize not in (True, False, None):
        raise ValueError(f"unknown vectorize {vectorize!r}: choose from True, False, None")
    return group


def _trained(model: nn.Module) -> Tensor:
    """A trained parameter. FlatParameters refuses a model of two dtypes or devices, or without trained parameters."""
    none = torch.zeros(0, dtype=torch.float32, device="cpu")
    return next((parameter for parameter in model.parameters() if parameter.requires_grad), none)


@torch.no_grad()
def _start_alike(learner: Learner) -> None:
    """Overwrite weights (frozen ones too) and buffers with the values of learner 0."""
    comm = learner.comm
    comm.broadcast_(learner.flat.param_LP)
    for copies in zip(*([*model.parameters(), *model.buffers()] for model in learner.models), strict=True):
        if id(copies[0]) not in learner.flat.index:
            rows = local(copies[0]).contiguous().view(1, -1).repeat(len(comm.learners), 1)
            comm.broadcast_(rows)
            for one in copies:
                overwrite(local(one), rows[0].view(local(one).shape))


def _add_learners(optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
    """Add the other learners' parameters to the groups of learner 0's, and copies of their states."""
    shared = ("step",) if isinstance(optimizer, FusedOptimizer) else ()  # one counter for a group
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
            for parameter in filter(optimizer.state.__contains__, own):
                state = optimizer.state[parameter].items()
                optimizer.state[copies[parameter]] = {k: v if k in shared else copy.deepcopy(v) for k, v in state}


def _check(model: nn.Module, optimizer: Optimizer, strategy: Strategy, settings: dict[str, Any]) -> None:
    if not isinstance(strategy, Strategy):
        raise ValueError(f"strategy is {strategy!r}: pass an instance, such as ddpcore.SSGD()")
    _check_unused(model)
    for module in fsdp_modules(model):
        module.reshard()  # an evaluation before may have left gathered weights, which are no parameters
    guards.check_model(model)
    guards.check_optimizer(optimizer, settings["learners"])
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, one in model.named_parameters():
        if one.requires_grad and id(one) not in given:
            raise ValueError(f"parameter {name} is not in the optimizer: add it, or freeze it by requires_grad_(False)")
    if not given <= set(map(id, model.parameters())):
        raise ValueError("the optimizer holds parameters that are not in the model: give both the same parameters")
    settings["policies"].check(strategy)
    settings["policies"].check_moments(model, optimizer)
    if settings["scaler"] is not None and not strategy.traits.stays_identical and not scales_inside(optimizer):
        what = f"with a scaler, {type(optimizer).__name__} skips a step on one learner while the others wait for it"
        raise ValueError(f"{what}: take a fused optimizer, ddpcore's or torch's fused=True")
    if getattr(optimizer, "process_group", None) is not None:
        what, advice = f"{type(optimizer).__name__} has a process_group, whose ranks", "leave process_group out"
        if settings["on_failure"] != "raise":
            raise ValueError(f"{what} must not die, and on_failure is {settings['on_failure']!r}: {advice}")
        if not strategy.traits.stays_identical:
            raise ValueError(f"{what} need the same gradients, and under {strategy.name} they differ: {advice}")
    if strategy._in_use:
        raise ValueError("the strategy already serves a distribute() call: make a new one")


def _check_unused(model: nn.Module) -> None:
    """Refuse a model whose parameters hold the hooks of an earlier call: they would run beside this call's hooks."""
    if guards.is_distributed(model.parameters()):
        advice = "make a new one, or continue with a copy of it, the handle's evaluation_model()"
        raise ValueError(f"the model already serves a distribute() call: {advice}")
