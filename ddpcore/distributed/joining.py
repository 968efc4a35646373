"""What a learner that joins a run gets from a neighbour: weights, buffers, strategy state, and momentum by policy."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.distributed.state_sync import KEEP, RESET, Policies
from ddpcore.strategies.learner import Learner


@torch.no_grad()
def give_state(learner: Learner, new: int, policies: Policies, handle_state: Callable[[], dict[str, Any]]) -> None:
    """Give a learner that joins the state of its neighbour. Collective over the learners that are there already."""
    comm = learner.comm
    if comm.member is not None:
        comm.hand_over(new, lambda: _packed(learner, policies, handle_state()))
    elif comm.membership is not None:
        _copy_row(learner, comm.membership.source_for(new), new, policies)


def received_state(learner: Learner) -> dict[str, Any]:
    """In the rank that joins: load model and optimizer from a neighbour, and return the state of its handle."""
    comm = learner.comm
    assert comm.member is not None
    content = comm.hand_over(comm.member, lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))
    assert content is not None
    state: dict[str, Any] = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)  # runs no code
    learner.models[0].load_state_dict(state["model"])
    if state["optimizer"] is not None:
        learner.optimizer.load_state_dict(state["optimizer"])
    handle_state: dict[str, Any] = state["handle"]
    return handle_state


def _takes_momentum(policies: Policies) -> bool:
    """A learner that joins begins without momentum if each learner keeps its own, or resets it."""
    return policies.momentum not in (KEEP, RESET)


def _packed(learner: Learner, policies: Policies, handle_state: dict[str, Any]) -> Tensor:
    """The state as bytes, uint8 ``[x]``."""
    buffer = io.BytesIO()
    optimizer = learner.optimizer.state_dict() if _takes_momentum(policies) else None
    torch.save({"model": learner.models[0].state_dict(), "optimizer": optimizer, "handle": handle_state}, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _copy_row(learner: Learner, source: int, new: int, policies: Policies) -> None:
    """The same for a virtual learner."""
    states = learner.optimizer.state
    for own, theirs in zip(_tensors(learner.models[new]), _tensors(learner.models[source]), strict=True):
        own.data.copy_(theirs.data)
        for name, value in states.get(own, {}).items():
            if isinstance(value, Tensor) and value.shape == own.shape:
                value.copy_(states[theirs][name]) if _takes_momentum(policies) else value.zero_()


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
