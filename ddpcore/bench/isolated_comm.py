"""Timing of a contender's communication alone: blocking calls, one after the other, without other work."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcore.bench.contender import Contender
from ddpcore.comm.base import Work
from ddpcore.comm.groups import barrier
from ddpcore.parameters.buckets import messages

Call = Callable[[], Any]
_ITEMSIZE = 4  # bytes of a gradient element: every model of the bench is float32


def bucket_bytes(one: Contender) -> list[int]:
    """The sizes in bytes of the gradient buckets. If DDP has rebuilt its buckets, these are the new sizes."""
    assert one.trainer is not None
    learner, model = one.trainer.handle.learner, one.trainer.handle.model
    if learner is not None:
        return [_ITEMSIZE * (end - begin) for begin, end in learner.flat.buckets]
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    logged = model._get_ddp_logging_data()
    sizes = str(logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"])
    return [int(size) for size in sizes.split(",")]


def message_bytes(one: Contender) -> list[int]:
    """The sizes in bytes of the messages that carry the gradient buckets. DDP sends one message for each bucket."""
    assert one.trainer is not None
    learner = one.trainer.handle.learner
    if learner is None:
        return bucket_bytes(one)
    return [_ITEMSIZE * (end - begin) for begin, end in messages(learner.flat)]


def averages(one: Contender) -> list[Call]:
    """For each message a blocking call that averages it. For DDP the call is an all-reduce of the same size."""
    assert one.trainer is not None
    learner = one.trainer.handle.learner
    if learner is None:
        device = one.trainer.dataset.train.labels.device
        return [partial(dist.all_reduce, torch.zeros(size // _ITEMSIZE, device=device)) for size in bucket_bytes(one)]
    flat = learner.flat
    return [lambda b=begin, e=end: _start(one, flat.grad_LP[:, b:e]).wait() for begin, end in messages(flat)]  # type: ignore[misc]


def average_together(one: Contender) -> None:
    """Average all messages of a strategy of ddpcore at once, as in a backward pass. Collective."""
    assert one.trainer is not None
    assert one.trainer.handle.learner is not None
    flat = one.trainer.handle.learner.flat
    for work in [_start(one, flat.grad_LP[:, begin:end]) for begin, end in messages(flat)]:
        work.wait()


def _start(one: Contender, columns: torch.Tensor) -> Work:
    """Begin the average of some columns of the gradients, of all learners or of each group."""
    assert one.trainer is not None
    assert one.trainer.handle.learner is not None
    comm, size = one.trainer.handle.learner.comm, one.traits.group
    return comm.average_(columns) if size == 1 else comm.average_groups_(columns, size)


@torch.no_grad()
def time_calls(calls: list[Call], device: str) -> tuple[list[float], float]:
    """The seconds of each call on this rank, and the processor seconds of all calls. Collective.

    All ranks begin at a barrier.
    """
    barrier("the start of a measurement")
    cpu, seconds = time.process_time(), []
    for call in calls:
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds, time.process_time() - cpu
