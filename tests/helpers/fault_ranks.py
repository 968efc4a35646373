"""Ranks on which something goes wrong in training, over each transport: ``fault_ranks.py FILE``.

Each function is a trial, as in ``shared_memory_ranks``, whose way of running them this takes.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore.comm import ProcessGroupCommunicator, SharedMemoryCommunicator
from ddpcore.diagnostics import DataLoss, Hessian
from ddpcore.optim import FusedSGD
from helpers.connection import connected
from helpers.shared_memory_ranks import main

SMALL = {"bucket_bytes": 4096, "first_bucket_bytes": 4096}


class Broken(torch.autograd.Function):
    """The identity, whose backward pass dies while ``now`` says so."""

    now = False

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Broken.now:
            raise KeyError("the backward pass died")
        return grad


class Fragile(nn.Module):
    """Several buckets, of which the last ones stand before the place that breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 600), nn.Linear(600, 600), nn.Linear(600, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(Broken.apply(torch.tanh(self.first(inputs))))))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(inputs).square().mean()


def die_in_backward(loss: Tensor) -> None:
    Broken.now = True
    try:
        loss.backward()
    except KeyError:
        Broken.now = False


def backward_dies(rank: int, transport: str, set_to_none: bool, late: str) -> None:
    """On all ranks, with averages under way; rank 1 is late, and the next gradient is right all the same."""
    torch.manual_seed(0)
    model = Fragile()
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    ddpcore.distribute(model, optimizer, ddpcore.SSGD(), **connected(transport=transport, **SMALL))
    loss_of(model, 0, rank).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    die_in_backward(1000 * loss_of(model, 1, rank))
    dist.barrier()
    if rank == 1 and late == "zero_grad":
        time.sleep(0.5)
    optimizer.zero_grad(set_to_none=set_to_none)
    plain = copy.deepcopy(model)
    loss = loss_of(model, 2, rank)
    dist.barrier()
    if rank == 1 and late == "backward":
        time.sleep(0.5)
    loss.backward()
    plain.zero_grad()
    sum(loss_of(plain, 2, other) for other in range(2)).div(2).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: name)
    print("right")


def backward_dies_on_one(rank: int) -> None:
    """Rank 1 leaves a step out, after its averages have begun: the others are a step ahead from there on."""
    model = nn.Linear(5, 3)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    ddpcore.distribute(model, optimizer, ddpcore.SSGD(), connection=ddpcore.Connection(transport="shm"))
    for step in range(4):
        inputs = torch.ones(2, 5, requires_grad=True)
        outputs = model(Broken.apply(inputs)).square().mean()
        if rank == 1 and step == 1:
            die_in_backward(outputs)
        else:
            outputs.backward()
            optimizer.step()


def buffers_of(comm: Any) -> int:
    """Sets of receive buffers, or snapshots."""
    if isinstance(comm, SharedMemoryCommunicator):
        return sum(len(slots) for slots in comm._snapshots.known.values())
    return len(comm._buffers)


def abandons(rank: int, make: str) -> None:
    """Exchanges that nobody uses, two at a time; what they held serves later ones, which are right."""
    comm = COMMUNICATORS[make]()
    rows, held = len(comm.learners), []
    for step in range(8):
        weights = torch.arange(0.0, rows).add(rows * rank)[:, None].repeat(1, 500)
        exchanges = [comm.exchange(weights, ddpcore.Complete(), step) for _ in range(2)]
        exchanges[0].abandon()
        exchanges[1].mixture().apply_(weights) if step % 2 else exchanges[1].abandon()
        if step % 2:
            assert weights.unique().tolist() == [(comm.num_learners - 1) / 2], weights.unique()
        held.append(buffers_of(comm))
    print(held[-1] == held[1])


def trains_something_else(rank: int, what: str, transport: str) -> None:
    """Rank 1 has another setting."""
    odd = rank == 1
    model = nn.Linear(5, 3)
    options: dict[str, Any] = {"transport": transport}
    strategy: Any = ddpcore.DPSGD(ddpcore.Complete())
    if what == "outer":
        strategy = ddpcore.LocalSGD(2, outer=lambda p: torch.optim.SGD(p, lr=0.1 if odd else 0.7))
    if what == "policies" and odd:
        options["policies"] = ddpcore.Policies(momentum="average")
    if what == "bucket_bytes":
        options["bucket_bytes"] = 4096 if odd else 8192
    if what == "scaler" and not odd:
        options["scaler"] = torch.amp.GradScaler("cpu")
    if what in ("learners", "strategy"):
        options |= {"learners": 3 if odd and what == "learners" else 2, "group": dist.group.WORLD}
    if what == "strategy" and odd:
        strategy = ddpcore.LocalSGD(3)
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    ddpcore.distribute(model, optimizer, strategy, **connected(**options))


DIFFERENCES = {
    "outer": "SGD(lr=0.1, momentum=0, ",
    "policies": "policies is Policies(momentum='average', ",
    "bucket_bytes": "bucket_bytes is 4096 on rank 1 and 8192 on rank 0",
    "scaler": "scaler is None on rank 1 and GradScaler() on rank 0",
    "learners": "learners is 3 on rank 1 and 2 on rank 0",
    "strategy": "strategy is LocalSGD(period=3, ",
}


def is_late(rank: int, transport: str, strategy: str, seconds: float) -> None:
    """Rank 1 takes longer than distribute(timeout=) lets the others wait."""
    model = nn.Linear(5, 3)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    ddpcore.distribute(
        model, optimizer, STRATEGIES[strategy](), connection=ddpcore.Connection(transport=transport, timeout=seconds)
    )
    for step in range(3):
        if rank == 1 and step == 2:
            time.sleep(seconds + 2)
        loss_of(model, step, rank).backward()
        optimizer.step()


def has_fewer_batches(rank: int, learners: int | None, transport: str, strategy: str, call: str) -> None:
    """Rank 0 calls ``call`` while rank 1 has a batch left. A mixture, as of weights and gradients, would be silent."""
    model = nn.Linear(5, 3)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(
        model,
        optimizer,
        STRATEGIES[strategy](),
        learners=learners,
        group=dist.group.WORLD if learners else None,
        connection=ddpcore.Connection(transport=transport, timeout=1.5),
    )
    for step in range(2 + rank):
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * step + rank))
        outputs = handle.model(inputs.expand(learners, 8, 5) if learners else inputs)
        handle.backward(outputs.square().mean(dim=(-2, -1)))
        optimizer.step()
    if call == "DataLoss":
        DataLoss(model, F.mse_loss, [(torch.ones(8, 5), torch.ones(8, 3))], group=dist.group.WORLD)
    elif call == "distribute":
        again = nn.Linear(5, 3)
        ddpcore.distribute(again, FusedSGD(again.parameters(), lr=0.1), STRATEGIES[strategy]())
    elif call == "gather":
        handle.comm.gather(torch.ones(1, 3))
    else:
        getattr(handle, call)()


def mixes_in_own_calls(rank: int, strategy: str, call: str) -> None:
    """Rank 0 begins a call of the program's own on the default group before a step, and rank 1 after it."""
    torch.manual_seed(0)
    models = [model := nn.Linear(5, 3), copy.deepcopy(model)]
    for number, model in enumerate(models):
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        ddpcore.distribute(model, optimizer, STRATEGIES[strategy](), **connected(transport="pg"))
        for step in range(3):
            own = torch.full((32,), 100.0 * rank)  # as large as the message of a step
            found = [torch.zeros(32) for _ in range(2)]
            begin = {
                "barrier": lambda: dist.barrier(async_op=True),
                "all_reduce": lambda: dist.all_reduce(own, async_op=True),  # noqa: B023
                "all_gather": lambda: dist.all_gather(found, own, async_op=True),  # noqa: B023
                "broadcast": lambda: dist.broadcast(own, src=1, async_op=True),  # noqa: B023
            }[call]
            work = begin() if number and rank == 0 else None
            loss_of(model, step, rank).backward()
            optimizer.step()
            if number:
                (work or begin()).wait()
                result = {"all_reduce": own, "broadcast": own, "all_gather": found[1]}.get(call)
                assert result is None or result.unique().tolist() == [100.0], result
            optimizer.zero_grad()
    for plain, mixed in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(plain, mixed)
    print("right")


def calls_in_another_order(rank: int) -> None:
    """Rank 0 averages models and then takes a product of a Hessian, of as many numbers. Rank 1 does the reverse."""
    model = nn.Linear(512, 16, bias=False)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), **connected(transport="pg"))
    hessian = Hessian(model, lambda: model(torch.ones(2, 512)).square().mean(), group=dist.group.WORLD)
    calls = [handle.evaluation_model, lambda: hessian.product(torch.ones(hessian.numel))]
    for call in calls[:: 1 - 2 * rank]:
        call()


def does_not_come(rank: int, seconds: float) -> None:
    """Rank 1 calls distribute later than its timeout lets the others wait."""
    if rank == 1:
        time.sleep(seconds + 2)
    model = nn.Linear(5, 3)
    ddpcore.distribute(
        model, FusedSGD(model.parameters(), lr=0.1), ddpcore.SSGD(), connection=ddpcore.Connection(timeout=seconds)
    )


COMMUNICATORS = {
    "shm": SharedMemoryCommunicator,
    "pg": ProcessGroupCommunicator,
    "grid": lambda: ProcessGroupCommunicator(num_rows=2),
}


def dies(rank: int, make: str, call: str) -> None:
    """Rank 1 is killed at step 2."""
    comm = COMMUNICATORS[make]()
    small, large = (torch.zeros(len(comm.learners), num) for num in (500, 500_000))
    calls: dict[str, Callable[[int], object]] = {
        "exchange": lambda step: comm.exchange(small, ddpcore.Complete(), step).mixture().apply_(small),
        "average": lambda step: comm.average_(small, step).wait(),
        "reduction": lambda step: comm.average_(large, step).wait(),
        "broadcast": lambda step: comm.broadcast_(small),
        "gathering": lambda step: comm.gather(small),
    }
    for step in range(4):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        calls[call](step)
        dist.barrier() if step < 1 else time.sleep(0.2)


DEATHS = {
    "exchange": "the exchange of 500 float32 at step {step}",
    "average": "an average of 500 float32 at step {step}",
    "reduction": "an average of 500000 float32 at step {step}",
    "broadcast": "the broadcast of 500 float32",
    "gathering": "the gathering of {rows} float32",
}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "local_sgd": lambda: ddpcore.LocalSGD(1),
    "slowmo": lambda: ddpcore.SlowMo(period=1),
    "ssgd": ddpcore.SSGD,
    "dpsgd": lambda: ddpcore.DPSGD(ddpcore.Ring()),
}
DYING, LATE = ("local_sgd", "slowmo", "ssgd"), ("ssgd", "dpsgd")
FEWER = ((None, "shm"), (None, "pg"), (2, "auto"))  # learners of a rank, transport
CALLS = {
    "evaluation_model": " average of 32 float32",
    "slow_ranks": "the gather",
    "gather": "the gathering of 3 float32",
    "DataLoss": "a sum of 1 int64 over ranks",
    "distribute": "the check that all ranks train the same",
}  # words of errors
OF_PROGRAM = ("barrier", "all_reduce", "all_gather", "broadcast")
OF_HANDLE = ("evaluation_model", "slow_ranks")


def dies_in_training(rank: int, transport: str, strategy: str) -> None:
    """Rank 1 is killed before the backward pass of step 2."""
    model = nn.Linear(5, 3)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    ddpcore.distribute(model, optimizer, STRATEGIES[strategy](), **connected(transport=transport, **SMALL))
    for step in range(4):
        loss = loss_of(model, step, rank)
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()


def goes_on_backwards(rank: int, transport: str) -> None:
    """Rank 1 is killed, and rank 0 goes on with the graph that it has kept, three times; says what each pass says."""
    torch.manual_seed(0)
    model = Fragile()
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    ddpcore.distribute(model, optimizer, ddpcore.SSGD(), **connected(transport=transport, **SMALL))
    loss = loss_of(model, 0, rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        try:
            loss.backward(retain_graph=True)
            print("went on")
        except RuntimeError as error:
            print(error)


TRIALS: list[tuple[Any, ...]] = [  # function, number of ranks, arguments
    *(
        (backward_dies, 2, transport, set_to_none, late)
        for transport in ("shm", "pg")
        for set_to_none, late in ((True, "backward"), (False, "zero_grad"))
    ),
    (backward_dies_on_one, 2),
    *((trains_something_else, 2, what, "auto") for what in DIFFERENCES),
    (trains_something_else, 2, "policies", "pg"),
    *((is_late, 2, transport, strategy, 1.5) for transport in ("shm", "pg") for strategy in LATE),
    *((is_late, 2, transport, "ssgd", seconds) for transport in ("shm", "pg") for seconds in (-1.0, 0.0)),
    (does_not_come, 2, 0.5),
    *(
        (has_fewer_batches, 2, *place, strategy, call)
        for place in FEWER
        for strategy in STRATEGIES
        for call in OF_HANDLE
    ),
    *((has_fewer_batches, 2, None, "pg", "ssgd", call) for call in CALLS if call not in OF_HANDLE),
    (calls_in_another_order, 2),
    *((mixes_in_own_calls, 2, strategy, call) for strategy in LATE for call in OF_PROGRAM),
    *((dies, 2, make, call) for make in ("pg", "grid") for call in DEATHS),
    *((dies_in_training, 2, transport, strategy) for transport in ("shm", "pg") for strategy in DYING),
    *((goes_on_backwards, 2, transport) for transport in ("shm", "pg")),
    *((abandons, 2, make) for make in COMMUNICATORS),
]

if __name__ == "__main__":
    main(TRIALS)
