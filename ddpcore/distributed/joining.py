"""What a learner that joins a run gets from a neighbour: weights, buffers, strategy state, and momentum by policy."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.comm.elastic_virtual import ElasticVirtualCommunicator
from ddpcore.distributed.state_sync import KEEP, RESET, Policies
from ddpcore.strategies.learner import Learner


def takes_momentum(policies: Policies) -> bool:
    """Whether a learner that joins takes a neighbour's momentum: not if each keeps its own, or resets it."""
    return policies.momentum not in (KEEP, RESET)


def packed(state: dict[str, Any]) -> Tensor:
    """A state as bytes, uint8 ``[x]``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpacked(content: Tensor) -> dict[str, Any]:
    """The state of :func:`packed`. It is loaded without code of the sender."""
    state: dict[str, Any] = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
    return state


@torch.no_grad()
def copy_learner(learner: Learner, new: int, policies: Policies) -> None:
    """Give a virtual learner that joins what a rank that joins gets."""
    comm = learner.comm
    assert isinstance(comm, ElasticVirtualCommunicator)
    source, states = comm.membership.source_for(new), learner.optimizer.state
    pairs = zip(_tensors(learner.models[new]), _tensors(learner.models[source]), strict=True)
    for own, theirs in pairs:
        own.data.copy_(theirs.data)
        for name, value in states.get(own, {}).items():
            if isinstance(value, Tensor) and value.shape == own.shape:
                value.copy_(states[theirs][name]) if takes_momentum(policies) else value.zero_()


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
