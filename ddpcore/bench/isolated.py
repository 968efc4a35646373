"""The parts of a step alone: timing of its communication, and of its computation."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcore.bench.contender import Contender
from ddpcore.bench.step_model import Compute, Transfer
from ddpcore.comm.groups import barrier
from ddpcore.parameters.buckets import messages

Call = Callable[[], Any]
_ITEMSIZE = 4  # bytes of a gradient element: every model of the bench is float32


def _messages(one: Contender) -> list[Tensor] | None:
    """The columns of the gradients ``[L, x]`` that are averaged in one message each; None for a baseline."""
    learner = one.active.handle.learner
    return None if learner is None else [learner.flat.grad_LP[:, b:e] for b, e in messages(learner.flat)]


def bucket_bytes(one: Contender) -> list[int]:
    """The sizes in bytes of the gradient buckets. If DDP has rebuilt its buckets, these are the new sizes."""
    learner, model = one.active.handle.learner, one.active.handle.model
    if learner is not None:
        return [_ITEMSIZE * (end - begin) for begin, end in learner.flat.buckets]
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    logged = model._get_ddp_logging_data()
    return [int(size) for size in str(logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]).split(",")]


def message_bytes(one: Contender) -> list[int]:
    """The sizes in bytes of the messages that carry the gradient buckets. DDP sends one message for each bucket."""
    columns = _messages(one)
    return bucket_bytes(one) if columns is None else [_ITEMSIZE * each.shape[1] for each in columns]


def averages(one: Contender) -> list[Call]:
    """For each message a blocking call that averages it. For DDP the call is an all-reduce of the same size."""
    columns, device = _messages(one), one.active.dataset.train.labels.device
    if columns is None:
        return [partial(dist.all_reduce, torch.zeros(size // _ITEMSIZE, device=device)) for size in bucket_bytes(one)]
    return [partial(average, one, [each]) for each in columns]


def average(one: Contender, columns: Iterable[Tensor] | None = None) -> None:
    """Average messages of a strategy of ddpcore at once: all, as in a backward pass, or some. Collective."""
    columns = _messages(one) or () if columns is None else columns
    comm, size = one.active.handle.comm, one.strategy.traits.group
    for work in [comm.average_(each, 0, None if size == 1 else size) for each in columns]:
        work.wait()


@torch.no_grad()
def time_calls(calls: list[Call], device: str) -> Transfer:
    """The seconds of calls on this rank, one by one after a barrier, and their processor seconds. Collective."""
    barrier("the start of a measurement")
    cpu, start = time.process_time(), time.perf_counter()
    for call in calls:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    return Transfer(seconds=time.perf_counter() - start, cpu=time.process_time() - cpu)


class StepTimer:
    """Times the parts of a contender's steps. On a GPU each time stamp waits for the stream, as nothing is sent."""

    def __init__(self, one: Contender) -> None:
        self._trainer = one.active
        self._cuda = self._trainer.dataset.train.labels.is_cuda
        self._steps: list[tuple[float, float, float]] = []  # seconds of forward, backward and update
        self._arrivals: dict[Tensor, list[float]] = {}  # of each parameter
        self._marks: list[float] = []
        self._arrived: list[tuple[Tensor, float]] = []  # of this step: each parameter, and when

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Install the hooks that :meth:`step` needs."""
        model, optimizer = self._trainer.handle.model, self._trainer.optimizer
        with ExitStack() as hooks:
            hooks.enter_context(model.register_forward_hook(lambda *_: self._marks.append(self._now())))
            hooks.enter_context(optimizer.register_step_pre_hook(lambda *_: self._marks.append(self._now())))
            for parameter in filter(attrgetter("requires_grad"), model.parameters()):
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(self._note))
            yield

    def step(self) -> None:
        """Train and time one step, inside :meth:`hooks`."""
        start = self._now()
        self._marks, self._arrived = [], []
        self._trainer.step()
        end = self._now()
        forward, backward = (mark - start for mark in self._marks)
        self._steps.append((forward, backward - forward, end - start - backward))
        for parameter, when in self._arrived:
            share = (when - start - forward) / (backward - forward)
            self._arrivals.setdefault(parameter, []).append(min(1.0, max(0.0, share)))

    def compute(self, seconds: float, cpu: float = 0.0) -> Compute:
        """A step of this length in seconds, divided into parts in the measured proportions."""
        parts = [median(part) for part in zip(*self._steps, strict=True)]
        forward, backward, update = (seconds * part / sum(parts) for part in parts)
        found = [(parameter.numel(), median(shares)) for parameter, shares in self._arrivals.items()]
        arrivals = tuple(sorted(found, key=lambda entry: entry[1]))
        return Compute(forward=forward, backward=backward, update=update, cpu=cpu, arrivals=arrivals)

    def _note(self, parameter: Tensor) -> None:
        self._arrived.append((parameter, self._now()))

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
