"""``distribute``: one line around a training loop that stays as it is."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import nn

from ddpcore.comm.agreement import check_agreement, facts_of
from ddpcore.comm.base import Communicator
from ddpcore.comm.connect import connect
from ddpcore.comm.grid import GridCommunicator
from ddpcore.comm.process import default_group
from ddpcore.comm.virtual import VirtualCommunicator
from ddpcore.distributed import Distributed, Engine
from ddpcore.evaluation import row_of
from ddpcore.flat import FlatParameters, MiB
from ddpcore.learner import Learner
from ddpcore.optim import FusedOptimizer
from ddpcore.policies import Companions, Policies, scales_inside
from ddpcore.stacked import StackedModel
from ddpcore.strategies.base import FOREVER, Baseline, Strategy


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | Baseline,
    *,
    learners: int | None = None,
    group: dist.ProcessGroup | None = None,
    transport: str = "auto",
    vectorize: bool | str | None = None,
    bucket_bytes: int = 25 * MiB,
    first_bucket_bytes: int = MiB,
    policies: Policies | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Distributed:
    """Train ``model`` with ``strategy``. The loop around it stays: ``zero_grad``, forward, ``backward``, ``step``.

    All learners start from learner 0's weights and buffers. The model's parameters move into one flat buffer, as views.

    Args:
        model: its parameters that need a gradient must all be in ``optimizer``.
        optimizer: any ``torch.optim.Optimizer``; ddpcore's fused ones take the one-pass path.
        strategy: ``SSGD()``, ``DPSGD(topology=...)``, ``LocalSGD(period=...)``, or a baseline.
        learners: None, one a rank. A number, that many virtual ones in this process: call the returned ``.model`` with
            ``[learners, batch, ...]`` and add up the learners' losses. With ``group`` so many on each of its ranks.
        group: the process group; None is the default one for real ranks, and none for virtual learners.
        transport: what carries bytes between real ranks, ``shm``, ``ipc``, ``pg`` or ``auto``: see docs/transports.md.
        vectorize: how virtual learners run, see :class:`~ddpcore.stacked.StackedModel`.
        bucket_bytes: largest bucket of averaged gradients.
        first_bucket_bytes: size of the first.
        policies: what becomes of momentum and other state when learners average; None keeps each learner's own.
        scaler: of mixed precision, for the policy of that name.

    Returns:
        A handle: ``.model`` to call (``model`` itself but for virtual learners and DDP), ``no_sync()``,
        ``evaluation_model()``, ``consensus_distance()``, ``state_dict()`` and ``load_state_dict()``.

    Raises:
        ValueError: the model, the optimizer, the world and the strategy do not fit together; the message says how.
    """
    if isinstance(strategy, Baseline):
        return _baseline(model, strategy, learners, group, transport, policies)
    _check(model, optimizer, strategy, scaler)
    comm = _connect(model, optimizer, strategy, learners, group, transport)
    buckets = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
    flat = FlatParameters(model.named_parameters(), stack=learners, allocate=comm.allocate, **buckets)
    learner = Learner(flat, comm, optimizer)
    strategy.setup(learner)
    strategy.in_use = True
    _IN_USE.add(optimizer)
    if isinstance(optimizer, FusedOptimizer):
        optimizer.bind(flat)
    comm.broadcast_(flat.param_LP)
    if learners is None:
        _broadcast_buffers(model, comm)
    else:
        model = StackedModel(model, learners, vectorize)
    return Engine(model, learner, strategy, Companions(policies or Policies(), model, learner, strategy, scaler))


def _baseline(
    model: nn.Module,
    strategy: Baseline,
    learners: int | None,
    group: dist.ProcessGroup | None,
    transport: str,
    policies: Policies | None,
) -> Distributed:
    if learners is not None or transport != "auto":
        raise ValueError(f"{strategy.name} takes no virtual learners and no transport: leave them out")
    if policies not in (None, Policies()):
        raise ValueError(f"{strategy.name} averages nothing of its own: leave policies= out")
    comm = strategy.connect(group)
    return Distributed(strategy.wrap(model, group), comm)


_IN_USE: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _connect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    learners: int | None,
    group: dist.ProcessGroup | None,
    transport: str,
) -> Communicator:
    """The learners' connection; of real ranks once it is known that they are about to train the same."""
    if learners is not None:
        if transport != "auto":
            raise ValueError("virtual learners take no transport: leave transport= out")
        return VirtualCommunicator(learners) if group is None else GridCommunicator(learners, group)
    group = default_group(group)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    check_agreement(group, facts_of(model, optimizer, strategy, transport), device)
    return connect(group, transport, device)


def _broadcast_buffers(model: nn.Module, comm: Communicator) -> None:
    for buffer in model.buffers():
        row = row_of(buffer)
        comm.broadcast_(row)
        buffer.data = row.view(buffer.shape)


def _check(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy, scaler: torch.amp.GradScaler | None
) -> None:
    _check_optimizer(model, optimizer)
    if scaler is not None and not strategy.averages_at(FOREVER) and not scales_inside(optimizer):
        raise ValueError(
            f"with a scaler, {type(optimizer).__name__} skips a step on one learner and not on another, which would "
            "wait for it: take a fused optimizer, ddpcore's or torch's fused=True"
        )
    if strategy.in_use or optimizer in _IN_USE:
        raise ValueError("the strategy or the optimizer already serves a distribute() call: make a new one for this")


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in trained:
            raise ValueError(
                f"parameter {name} is not in the optimizer: add it, or freeze it with requires_grad_(False)"
            )
    known: set[int] = {id(parameter) for parameter in model.parameters()}
    if not trained <= known:
        raise ValueError("the optimizer holds parameters that are not in the model: give both the same parameters")
