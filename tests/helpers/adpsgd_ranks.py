"""Ranks that train with AD-PSGD over shared memory and over gloo: ``adpsgd_ranks.py FILE``.

Each function is a trial, as in ``shared_memory_ranks``, whose way of running them this takes.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import ddpcore
from ddpcore import ADPSGD
from ddpcore.comm import ProcessGroupCommunicator, SharedMemoryCommunicator, VirtualCommunicator, served
from ddpcore.comm.base import Job
from ddpcore.comm.shared import memory
from ddpcore.runtime.launch import World
from ddpcore.strategies.a2cid2 import A2CiD2, Acceleration
from ddpcore.training import TrainConfig, train
from ddpcore.training.build import build_batches, read_dataset
from helpers.connection import connected
from helpers.shared_memory_ranks import main

SIZE, RATE = 70_000, 0.05  # three chunks of an average
STEPS, MEETINGS = 100, 400
EPS = torch.finfo(torch.float32).eps


class Pull(nn.Module):
    """Its loss pulls all weights towards a number."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((SIZE,), start))

    def forward(self, goal: float) -> Tensor:
        return (self.weight - goal).square().sum() / 2


def parts(transport: str, **options: Any) -> tuple[Pull, torch.optim.Optimizer, Any]:
    model = Pull(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return (
        model,
        optimizer,
        ddpcore.distribute(model, optimizer, ADPSGD(**options), connection=ddpcore.Connection(transport=transport)),
    )


def connect(transport: str) -> Any:
    return SharedMemoryCommunicator() if transport == "shm" else ProcessGroupCommunicator()


def step(model: Pull, optimizer: torch.optim.Optimizer, goal: float) -> float:
    """One step. Returns by how much it moves each weight."""
    optimizer.zero_grad()
    model(goal).backward()
    optimizer.step()
    return -RATE * float(model.weight.grad[0])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def trains(rank: int, transport: str) -> None:
    """Fast steps, with evaluations between: nothing is torn, and the mean moves by the gradients alone.

    All columns start alike and have the same gradient, so they stay alike, bit for bit, as long as every average is
    atomic.
    """
    model, optimizer, handle = parts(transport)
    moved, largest = 0.0, 1.0
    for number in range(STEPS):
        moved += step(model, optimizer, goal=float(rank + number % 7))
        assert bool((model.weight == model.weight[0]).all()), f"torn at step {number}"
        largest = max(largest, abs(float(model.weight.detach()[0])))
        if number % 25 == 24:
            total = handle.comm.gather(torch.tensor([[moved, largest]], dtype=torch.float64))
            mean = float(handle.evaluation_model().weight.detach().unique())
            error = 3 * (number + 1) * EPS * float(total[:, 1].max())  # five roundings by half a unit in each job
            assert abs(mean - (1 + float(total[:, 0].mean()))) <= error, (mean, total, error)
            assert error < RATE / 50, "a lost step, RATE / 4 for a gradient of 1, would not be seen"
    assert handle.consensus_distance() > 0
    print("right")


def meets(rank: int, transport: str) -> None:
    """All ranks average with all as fast as they can, without a model between."""
    comm = connect(transport)
    rows = comm.live(torch.full((1, SIZE), float(rank)))
    generator = torch.Generator().manual_seed(rank)
    for peer in torch.randint(comm.num_learners, (MEETINGS,), generator=generator).tolist():
        job = Job(torch.zeros(SIZE), torch.full((SIZE,), 0.25))
        rows.meet(rank, peer, job)
        assert bool((job.model == job.model[0]).all()), "torn"
        assert torch.equal(job.read, job.model)
    rows.settle()
    everyone = comm.gather(rows.own())
    mean = float(everyone.double().mean())
    expected = (comm.num_learners - 1) / 2 + MEETINGS * 0.25
    assert abs(mean - expected) <= 3 * MEETINGS * EPS * expected, mean
    print(everyone.unique(dim=1).shape[1] == 1)


def trains_accelerated(rank: int, transport: str) -> None:
    """As ``trains``: the mean of weights and doubles together moves by the gradients alone."""
    model, optimizer, handle = parts(transport, topology=ddpcore.Ring(), accelerated=True)
    moved, largest = 0.0, 1.0
    for number in range(STEPS):
        moved += step(model, optimizer, goal=float(rank + number % 7))
        assert bool((model.weight == model.weight[0]).all()), f"torn at step {number}"
        largest = max(largest, float(handle.learner.live.rows().abs().max()))
        if number % 25 == 24:
            total = handle.comm.gather(torch.tensor([[moved, largest]], dtype=torch.float64))
            handle.learner.live.settle()
            everyone = handle.comm.gather(handle.learner.live.rows()[..., :SIZE].flatten(1)).view(-1, 2, SIZE)
            assert bool((everyone == everyone[..., :1]).all()), "torn"
            # A job rounds each of its rows at most ten times by half a unit: in the flow, the meeting and the step.
            error = 5 * (number + 1) * EPS * float(total[:, 1].max())
            mean = float(everyone[..., 0].double().mean())
            assert abs(mean - (1 + float(total[:, 0].mean()))) <= error, (mean, total, error)
            assert error < RATE / 25, "a step lost in a double, RATE / 8 for a gradient of 1, would not be seen"
            weights = float(handle.evaluation_model().weight.detach().unique())
            assert abs(weights - float(everyone[:, 0, 0].double().mean())) <= EPS * float(total[:, 1].max())
            assert bool((everyone[:, 0] != everyone[:, 1]).any())
            handle.comm.gather(total[:1])  # nobody meets until all have read
    print("right")


def meets_in_order(rank: int, transport: str) -> None:
    """One rank after the other: the rows are those of virtual learners."""
    alpha, num = 0.8, 3
    comm, generator = connect(transport), torch.Generator().manual_seed(1)
    first = torch.randn(num, SIZE, generator=generator)
    rule = A2CiD2(Acceleration(0.4, alpha))
    rows, virtual = comm.live(first[rank : rank + 1], rule), VirtualCommunicator(num).live(first, rule)
    for number in range(18):
        one, peer, added = number % num, (number + 1 + number // num) % num, first[number % num] / 10
        virtual.drift(one, 1.0)
        expected = Job(torch.zeros(SIZE), added.clone())
        virtual.meet(one, peer, expected)
        if rank == one:
            rows.drift(one, 1.0)
            job = Job(torch.zeros(SIZE), added.clone())
            rows.meet(one, peer, job)
            torch.testing.assert_close(job.model, expected.model, rtol=0, atol=1e-5)
        rows.settle()
        torch.testing.assert_close(rows.rows()[0], virtual.rows()[rank], rtol=0, atol=1e-5)
        torch.testing.assert_close(rows.own()[0], virtual.own()[rank], rtol=0, atol=1e-5)
        rows.settle()
    print(float((virtual.rows()[:, 0] - virtual.rows()[:, 1]).abs().max()) > 0.1)


def resumes_accelerated(rank: int, transport: str) -> None:
    """What was saved is loaded, with the doubles. Of two learners, alpha would be 1/2 and the doubles the weights."""
    model, optimizer, handle = parts(transport, topology=ddpcore.Ring(), accelerated=True, alpha=0.8)
    for _ in range(5):
        step(model, optimizer, float(rank))
    handle.learner.weights()  # all ranks are here
    saved = copy.deepcopy((model.state_dict(), handle.state_dict()))
    rows = handle.learner.live.rows()
    handle.learner.weights()
    for _ in range(5):
        step(model, optimizer, 3.0)
    changed = not torch.equal(handle.learner.live.rows(), rows)
    model, _, handle = parts(transport, topology=ddpcore.Ring(), accelerated=True, alpha=0.8)
    model.load_state_dict(saved[0])
    handle.load_state_dict(saved[1])
    print(changed, torch.equal(handle.learner.live.rows(), rows), not torch.equal(rows[:, 0], rows[:, 1]))


def begins_again(rank: int, transport: str) -> None:
    """All load what they saved before the first step, while rank 1 still takes steps of before."""
    folder = Path(os.environ["ADPSGD_FOLDER"], f"again-{transport}")
    model, optimizer, handle = parts(transport)
    saved = copy.deepcopy((model.state_dict(), handle.state_dict()))
    step(model, optimizer, float(rank))
    if rank == 1:
        wait_for(folder.exists)
        for _ in range(20):
            time.sleep(0.01)
            step(model, optimizer, float(rank))
    else:
        folder.mkdir()
    model.load_state_dict(saved[0])
    handle.load_state_dict(saved[1])
    same = torch.equal(handle.learner.weights()[0, :SIZE], torch.ones(SIZE))
    step(model, optimizer, 3.0 + rank)
    mean = handle.evaluation_model().weight.detach()
    torch.testing.assert_close(mean, torch.full((SIZE,), 1 + RATE * 2.5))
    print(same)


def is_slow(rank: int, transport: str) -> None:
    """Rank 1 ends its second step after the others have ended all theirs: they do not wait for it."""
    folder, (model, optimizer, handle) = Path(os.environ["ADPSGD_FOLDER"], transport), parts(transport)
    for number in range(20):
        if rank == 1 and number == 1:
            wait_for(lambda: all((folder / f"{other}").exists() for other in (0, 2)))
        step(model, optimizer, float(rank))
    folder.mkdir(exist_ok=True)
    (folder / f"{rank}").touch()
    print(handle.learner.step, bool(handle.evaluation_model().weight.isfinite().all()))


def dies(rank: int, transport: str) -> None:
    model, optimizer, _ = parts(transport)
    for number in range(10**6):
        if rank == 1 and number == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer, float(rank))


def dies_in_an_average(rank: int) -> None:
    """Rank 1, with the row of rank 0 half written. Rank 2 does not ask whether rank 1 lives."""
    comm = SharedMemoryCommunicator()
    rows, zeros = comm.live(torch.zeros(1, SIZE)), torch.zeros(SIZE)
    if rank == 1:
        rows._rule.meet_ = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        rows.meet(1, 0, Job(zeros.clone(), zeros.clone()))
    wait_for(lambda: not memory.is_held(comm._coordinator._descriptors[1]))
    if rank == 2:
        rows.meet(2, 0, Job(zeros.clone(), zeros.clone()))
    else:
        while True:
            rows.own()


def stops_in_an_average(rank: int) -> None:
    """Rank 1 keeps the locks longer than the timeout."""
    comm = SharedMemoryCommunicator()
    rows, zeros = comm.live(torch.zeros(1, SIZE)), torch.zeros(SIZE)
    if rank == 1:
        rows._rule.meet_ = lambda *_: time.sleep(2)
    else:
        rows._coordinator.timeout = 0.5
        wait_for(lambda: rows._marks.read(0) == 2)  # rank 1 has the locks
    rows.meet(rank, 1 - rank, Job(zeros.clone(), zeros.clone()))


def dies_in_a_meeting(rank: int, dead: int) -> None:
    """Over gloo: a rank has asked another one for a meeting, and does not send its part."""
    comm = ProcessGroupCommunicator(timeout=30)
    rows, zeros = comm.live(torch.zeros(1, SIZE)), torch.zeros(SIZE)
    if rank == dead:
        send = served._Row.send

        def send_and_die(self: Any, tensor: Tensor, peer: int, tag: int) -> None:
            if tag != served._TO_THREAD:
                os.kill(os.getpid(), signal.SIGKILL)
            send(self, tensor, peer, tag)

        served._Row.send = send_and_die
        rows.meet(dead, 1, Job(zeros.clone(), zeros.clone()))
    while True:
        rows.own()
        if rank != 1:
            rows.meet(rank, 1, Job(zeros.clone(), zeros.clone()))


def does_not_answer(rank: int) -> None:
    """Over gloo: the thread of rank 1 is held up."""
    comm = ProcessGroupCommunicator(timeout=2)
    rows, zeros = comm.live(torch.zeros(1, SIZE)), torch.zeros(SIZE)
    if rank == 1:
        with rows._shared._lock:
            dist.barrier()
            dist.barrier()
    else:
        dist.barrier()  # rank 1 has the lock
        try:
            rows.meet(0, 1, Job(zeros.clone(), zeros.clone()))
        finally:
            dist.barrier()  # until here


def leaves(rank: int) -> None:
    """Over gloo: an average with rank 1, which has left, is an error that changes nothing; others go on."""
    comm = ProcessGroupCommunicator(timeout=30)
    rows, zeros = comm.live(torch.full((1, 8), float(rank))), torch.zeros(8)
    if rank == 1:
        del rows
    comm.gather(zeros[None])
    if rank != 1:
        for _ in range(2):
            try:
                rows.meet(rank, 1, Job(zeros.clone(), zeros.clone()))
            except RuntimeError as error:
                print(error)
        assert float(rows.own()[0, 0]) == rank
    comm.gather(zeros[None])
    if rank == 0:
        rows.meet(0, 2, Job(zeros.clone(), zeros.clone()))
    comm.gather(zeros[None])
    if rank != 1:
        print(float(rows.own()[0, 0]))


def keeps_weights(rank: int) -> None:
    """Over gloo: after an average that fails, the model has the weights of before the step."""
    model, optimizer, _ = parts("pg")
    for number in range(10**6):
        if rank == 1 and number == 5:
            os._exit(0)
        before = model.weight.detach().clone()
        try:
            step(model, optimizer, 3.0)
        except RuntimeError:
            print(torch.equal(model.weight, before))
            return


def ends(rank: int) -> None:
    """The threads end when all ranks have let their weights go; a second connection follows the first."""
    comm = ProcessGroupCommunicator()
    for number in range(3):
        rows, zeros = comm.live(torch.full((1, 8), float(rank))), torch.zeros(8)
        rows.meet(rank, (rank + 1 + number) % comm.num_learners, Job(zeros.clone(), zeros.clone()))
        rows.settle()
        total = float(comm.gather(rows.own()).mean())
        assert total == (comm.num_learners - 1) / 2, total
        del rows
    wait_for(lambda: not any("live weights" in thread.name for thread in threading.enumerate()))
    print("ended")
    comm.gather(zeros[None])  # a rank that has left sends nothing more


def resumes(rank: int, transport: str) -> None:
    """What was saved is loaded, also when peers have changed the rows meanwhile."""
    model, optimizer, handle = parts(transport)
    for _ in range(5):
        step(model, optimizer, float(rank))
    handle.learner.weights()  # all ranks are here
    saved = copy.deepcopy((model.state_dict(), handle.state_dict()))
    mean = float(handle.evaluation_model().weight.detach()[0])
    for _ in range(5):
        step(model, optimizer, 3.0)
    model.load_state_dict(saved[0])
    handle.load_state_dict(saved[1])
    print(float(handle.evaluation_model().weight.detach()[0]) == mean, handle.learner.step)
    model, _, handle = parts(transport)
    model.load_state_dict(saved[0])
    handle.load_state_dict(saved[1])
    print(float(handle.evaluation_model().weight.detach()[0]) == mean)


class Late(nn.Module):
    """A linear model of zeros. Rank 0 ends a step long before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10, 64))

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled() and dist.is_initialized() and dist.get_rank() > 0:
            time.sleep(0.03)
        return inputs.flatten(1) @ self.weight.T


def saves(rank: int, transport: str) -> None:
    """The sum of the rows of a checkpoint has each gradient once. The rate is small, so gradients stay the same."""
    rate, out = 1e-5, Path(os.environ["ADPSGD_FOLDER"], f"saves-{transport}")
    values = {
        "model": "helpers.adpsgd_ranks:Late",
        "data": {"name": "digits", "batch_size": 60},
        "optimizer": {"name": "torch_sgd", "lr": rate},
        "strategy": {"name": "adpsgd", "learners": 3, "transport": transport},
        "run": {"steps": 17, "checkpoint_every": 4, "keep_last": 9, "evaluate_every": 0},
    }
    config = TrainConfig.from_dict(values)
    train(config, out=out, world=World(rank, 3, rank, 3))
    dataset, model = read_dataset(config, first=True), Late()
    batches, errors = build_batches(config, dataset), []
    for step in range(17):
        for indices in batches.indices(step):
            inputs, labels = dataset.train.batch(indices, batches.epoch(step))
            nn.functional.cross_entropy(model(inputs), labels).backward()
        if (step + 1) % 4 == 0:
            files = [out / "checkpoints" / f"step-{step + 1:08d}" / f"rank-{one}.safetensors" for one in range(3)]
            rows = sum(load_file(file)[".handle.strategy.live"].flatten()[:640].double() for file in files)
            expected = -rate * model.weight.grad.flatten()
            errors.append(float((rows - expected).norm() / expected.norm()))
    print("right" if max(errors) < 1e-3 else errors)


def is_refused(rank: int, what: str) -> None:
    """And the model is as it was."""
    model = Pull(float(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options = {
        "link": {"link": ddpcore.comm.Link.parse("1Gb/s,1us")},
        "rows": {"learners": 2, "group": dist.group.WORLD},
        "speeds": {},
    }[what]
    try:
        ddpcore.distribute(
            model, optimizer, ADPSGD(speeds=(1, 1) if what == "speeds" else None), **connected(**options)
        )
    finally:
        assert model.weight.unique().tolist() == [rank]
        step(model, optimizer, 0.0)


TRIALS: list[tuple[Any, ...]] = [
    *((function, num, transport) for function, num in ((trains, 4), (meets, 4), (is_slow, 3), (dies, 3), (resumes, 2),
                              (trains_accelerated, 4), (meets_in_order, 3), (resumes_accelerated, 2),
                              (begins_again, 2), (saves, 3))
      for transport in ("shm", "pg")),
    (dies_in_an_average, 3),
    (stops_in_an_average, 2),
    (dies_in_a_meeting, 3, 0),
    (dies_in_a_meeting, 3, 2),
    (does_not_answer, 2),
    (ends, 3),
    (leaves, 3),
    (keeps_weights, 2),
    *((is_refused, 2, what) for what in ("link", "rows", "speeds")),
]  # fmt: skip

if __name__ == "__main__":
    main(TRIALS)
