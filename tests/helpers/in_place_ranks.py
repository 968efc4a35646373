"""Ranks that exchange weights in place: functions that ``shared_memory_ranks.py`` runs on ranks."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import ddpcore
from ddpcore import ops
from ddpcore.comm import SharedMemoryCommunicator
from ddpcore.optim import FusedSGD

P = 5000  # more than a memory page


def exchanges_in_place(rank: int) -> None:
    """Weights that move between buffers have the bits of weights that are copied, although rank 1 reads late."""
    comm, other = SharedMemoryCommunicator(), SharedMemoryCommunicator()
    torch.manual_seed(rank)
    weights = torch.randn(1, P)
    copies, places = weights.clone(), set()
    for step in range(8):
        exchange = comm.exchange(weights, ddpcore.Ring(), step, in_place=True)
        if step == 3:
            exchange.abandon()  # the weights stay in their buffer
            weights += 1
            copies += 1
            continue
        mixture = exchange.mixture()
        if rank == 1:
            time.sleep(0.05)
        assert (weights.data_ptr() in places) == (step > 0)
        before = weights.clone()
        ops.mix_(weights[0], mixture.peers, mixture.self_weight, mixture.peer_weights, out=mixture.out)
        assert torch.equal(weights, before)
        weights = mixture.out[None]
        places.add(weights.data_ptr())
        weights *= 1.5  # no rank reads them before the next exchange
        other.exchange(copies, ddpcore.Ring(), step).mixture().apply_(copies)
        copies *= 1.5
        assert torch.equal(weights, copies), step
    print(len(places))


def misses_a_gradient(rank: int) -> None:
    """In some steps one parameter has no gradient on rank 1, which then averages and steps separately: the same bits.

    One parameter is so large that its gradient is not copied. It has its own group.
    """

    def weights_after(transport: str, build: Callable[..., torch.optim.Optimizer]) -> list[Tensor]:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(50, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))
        small = [parameter for parameter in model.parameters() if parameter is not model[2].weight]
        groups = [{"params": small}, {"params": [model[2].weight], "weight_decay": 0.1}]
        optimizer = build(groups, lr=0.01, momentum=0.9)
        ddpcore.distribute(
            model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), connection=ddpcore.Connection(transport=transport)
        )
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 50)).square().sum().backward()
            if rank == 1 and step % 2:
                model[2].bias.grad = None
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    results = {
        (transport, build.__module__): weights_after(transport, build)
        for transport in ("shm", "pg")
        for build in (FusedSGD, torch.optim.SGD)
    }
    first, *others = results.values()
    for (transport, _), other in zip(list(results)[1:], others, strict=True):
        print(transport, all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(first, other, strict=True)))
    print(all(map(torch.equal, first, results["pg", FusedSGD.__module__])))


def freezes_and_saves(rank: int) -> None:
    """A group taken out of the optimizer is averaged and stays whole; a saved model holds one set of weights."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3))
    optimizer = FusedSGD([{"params": layer.parameters()} for layer in model], lr=0.1)
    handle = ddpcore.distribute(
        model, optimizer, ddpcore.DPSGD(ddpcore.Complete()), connection=ddpcore.Connection(transport="shm")
    )
    frozen = model[0].weight.detach().clone()
    del optimizer.param_groups[0]
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
        assert torch.allclose(model[0].weight, frozen, rtol=1e-6)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    print(file.tell() < 1.1 * handle.learner.flat.param_LP.nbytes)
