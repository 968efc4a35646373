"""What a learner that joins a run gets from a neighbour: weights, buffers, strategy state, and momentum by policy."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddpcore.distributed.state_sync import KEEP, RESET, Policies
from ddpcore.strategies.learner import Learner


@torch.no_grad()
def give_state(learner: Learner, new: int, policies: Policies, handle_state: Callable[[], dict[str, Any]]) -> None:
    """Give a learner that joins the state of its neighbour. Collective over the learners that are there already."""
    comm, optimizer = learner.comm, learner.optimizer
    # It begins without momentum if each learner keeps its own, or resets it.
    takes_momentum = policies.momentum not in (KEEP, RESET)

    def packed() -> Tensor:
        """The state as bytes, uint8 ``[x]``."""
        buffer, model = io.BytesIO(), learner.models[0].state_dict()
        states = optimizer.state_dict() if takes_momentum else None
        torch.save({"model": model, "optimizer": states, "handle": handle_state()}, buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    if comm.member is not None:
        comm.hand_over(new, packed)
        return
    assert comm.membership is not None
    models = learner.models[new], learner.models[comm.membership.source_for(new)]  # virtual learners
    pairs = [*zip(*(model.parameters() for model in models), strict=True)]
    pairs += zip(*(model.buffers() for model in models), strict=True)
    for own, theirs in pairs:
        own.data.copy_(theirs.data)
        for name, value in optimizer.state.get(own, {}).items():
            if isinstance(value, Tensor) and value.shape == own.shape:
                value.copy_(optimizer.state[theirs][name]) if takes_momentum else value.zero_()


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
