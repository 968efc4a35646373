"""The parts of a step alone: timing of communication and computation, and the prediction of a step from their times.

docs/predict.md derives the formulas. A step has two lower bounds: its longest chain of dependent parts, and the
processor time of all its parts divided by the number of cores. The second matters if the ranks use all cores, because
communication then takes processor time from the computation. The prediction is the larger of the two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcore.bench.contender import Contender
from ddpcore.comm.groups import barrier
from ddpcore.parameters.buckets import messages


@dataclass(frozen=True, kw_only=True)
class Compute:
    """A step without communication, measured while all ranks run.

    Attributes:
        forward: from the start of the step, with fetching the batch, to the loss.
        backward: from the loss to the optimizer's step.
        update: the optimizer's step and everything after it.
        cpu: processor time of all ranks together; 0 if the processor is not the limit (GPUs).
        arrivals: (elements of a parameter, share of the backward pass after which its gradient is ready), in the order
            of arrival.
    """

    forward: float
    backward: float
    update: float
    cpu: float
    arrivals: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A communication in isolation: seconds until the slowest rank is done, and processor time of all ranks."""

    seconds: float
    cpu: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is sent in one step.

    Attributes:
        messages: averages of gradients. They are sent one after the other, each once it is complete; the optimizer
            waits for the last.
        sizes: of the messages, in any unit.
        hidden: what overlaps with forward and backward.
        after: what overlaps with nothing.
    """

    messages: Sequence[Transfer] = ()
    sizes: Sequence[int] = ()
    hidden: Transfer | None = None
    after: Transfer | None = None

    @property
    def cpu(self) -> float:
        """Processor seconds of all transfers, of all ranks."""
        return sum(one.cpu for one in (*self.messages, self.hidden, self.after) if one is not None)


def ready_shares(arrivals: Sequence[tuple[int, float]], sizes: Sequence[int]) -> list[float]:
    """The share of the backward pass after which each message is complete. Gradients fill messages in arrival order.

    Args:
        arrivals: see :class:`Compute`.
        sizes: of each message, in any unit. They are scaled to the sum of the parameters, because buffers are padded.
    """
    total, scale = sum(numel for numel, _ in arrivals), sum(sizes)
    shares, end, filled, latest, position = [], 0.0, 0.0, 0.0, 0
    for size in sizes:
        end += size
        while position < len(arrivals) and filled * scale < end * total * (1 - 1e-9):
            filled += arrivals[position][0]
            latest = max(latest, arrivals[position][1])
            position += 1
        shares.append(latest)
    return shares


def predict(compute: Compute, steps: Sequence[Step], *, cores: float, background: bool) -> float:
    """The seconds of a step, as the mean of these.

    Args:
        compute: a step without communication.
        steps: what is sent.
        cores: of all ranks together.
        background: whether a transfer runs while a rank computes. With shared memory the ranks copy themselves, so a
            transfer starts only when they wait for it.
    """
    path = fmean(_longest_chain(compute, step, background) for step in steps)
    work = compute.cpu + fmean(step.cpu for step in steps)
    return max(path, work / cores)


def _longest_chain(compute: Compute, step: Step, background: bool) -> float:
    backward_end, averaged = compute.forward + compute.backward, 0.0
    for message, share in zip(step.messages, ready_shares(compute.arrivals, step.sizes), strict=True):
        ready = compute.forward + share * compute.backward if background else backward_end
        averaged = max(averaged, ready) + message.seconds
    hidden = 0.0 if step.hidden is None else step.hidden.seconds
    exchanged = max(backward_end, hidden) if background else backward_end + hidden
    after = 0.0 if step.after is None else step.after.seconds
    return max(averaged, exchanged) + after + compute.update


def available_cores(compute: Compute, num_cores: int, num_threads: int) -> float:
    """The number of cores that the ranks get. If their threads fill the machine, other programs take a share of it.

    The estimate then is the processor time of a step without communication divided by the length of that step.
    """
    length = compute.forward + compute.backward + compute.update
    if num_threads < num_cores or compute.cpu <= 0 or length <= 0:
        return num_cores
    return min(num_cores, compute.cpu / length)


def error_pct(predicted: float, measured: float) -> float:
    """The prediction minus the measurement, in percent of the measurement; NaN if nothing was measured."""
    return 100 * (predicted - measured) / measured if measured > 0 else math.nan


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
    sizes = str(logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"])
    return [int(size) for size in sizes.split(",")]


def message_bytes(one: Contender) -> list[int]:
    """The sizes in bytes of the messages that carry the gradient buckets. DDP sends one message for each bucket."""
    columns = _messages(one)
    return bucket_bytes(one) if columns is None else [_ITEMSIZE * each.shape[1] for each in columns]


def averages(one: Contender) -> list[Call]:
    """For each message a blocking call that averages it. For DDP the call is an all-reduce of the same size."""
    columns, device = _messages(one), one.active.dataset.train.labels.device
    if columns is None:
        return [partial(dist.all_reduce, torch.zeros(size // _ITEMSIZE, device=device)) for size in bucket_bytes(one)]
    return [partial(_average, one, [each]) for each in columns]


def average_together(one: Contender) -> None:
    """Average all messages of a strategy of ddpcore at once, as in a backward pass. Collective."""
    _average(one, _messages(one) or [])


def _average(one: Contender, columns: list[Tensor]) -> None:
    """Average some columns of the gradients, of all learners or of each group."""
    comm, size = one.active.handle.comm, one.traits.group
    for work in [comm.average_(each) if size == 1 else comm.average_groups_(each, size) for each in columns]:
        work.wait()


@torch.no_grad()
def time_calls(calls: list[Call], device: str) -> Transfer:
    """The seconds of calls on this rank, one after the other, and their processor seconds. Collective.

    All ranks begin at a barrier.
    """
    barrier("the start of a measurement")
    cpu, start = time.process_time(), time.perf_counter()
    for call in calls:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    return Transfer(seconds=time.perf_counter() - start, cpu=time.process_time() - cpu)


class StepTimer:
    """Times the parts of a contender's steps; results are medians over steps.

    On a GPU each time stamp waits for the stream, which is harmless in a step without communication.
    """

    def __init__(self, one: Contender) -> None:
        self._trainer = one.active
        self._cuda = self._trainer.dataset.train.labels.is_cuda
        self._steps: list[tuple[float, float, float]] = []  # seconds of forward, backward and update
        self._arrivals: dict[int, list[float]] = {}
        self._sizes: dict[int, int] = {}
        self._marks: list[float] = []
        self._order: list[int] = []

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Install the hooks that :meth:`step` needs."""
        model, optimizer = self._trainer.handle.model, self._trainer.optimizer
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._sizes = {id(parameter): parameter.numel() for parameter in parameters}
        hooks: list[Any] = [
            model.register_forward_hook(lambda *_: self._marks.append(self._now())),
            optimizer.register_step_pre_hook(lambda *_: self._marks.append(self._now())),
            *(parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in parameters),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def step(self) -> None:
        """Train and time one step, inside :meth:`hooks`."""
        start = self._now()
        self._marks, self._order, index = [], [], len(self._steps)
        self._trainer.step()
        end = self._now()
        forward, backward = (mark - start for mark in self._marks)
        self._steps.append((forward, backward - forward, end - start - backward))
        for key in self._order:
            when = self._arrivals[key][index]
            self._arrivals[key][index] = min(1.0, max(0.0, (when - start - forward) / (backward - forward)))

    def compute(self, seconds: float, cpu: float = 0.0) -> Compute:
        """A step of this length in seconds, divided into parts in the measured proportions."""
        parts = [median(part) for part in zip(*self._steps, strict=True)]
        forward, backward, update = (seconds * part / sum(parts) for part in parts)
        found = [(self._sizes[key], median(shares)) for key, shares in self._arrivals.items()]
        arrivals = tuple(sorted(found, key=lambda entry: entry[1]))
        return Compute(forward=forward, backward=backward, update=update, cpu=cpu, arrivals=arrivals)

    def _arrived(self, parameter: Tensor) -> None:
        self._arrivals.setdefault(id(parameter), []).append(self._now())
        self._order.append(id(parameter))

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
