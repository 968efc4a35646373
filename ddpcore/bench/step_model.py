"""How long a step lasts, from what its parts last alone. Times are seconds; docs/predict.md derives the formulas.

A step is no shorter than its longest chain of parts that wait for each other, and no shorter than the processor time
of all its parts divided by the cores: where ranks fill the cores, what runs beside the computation takes time from it.
The prediction is the larger of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Compute:
    """A step without communication, measured while all ranks run.

    Attributes:
        forward: from the start of the step, the batch included, to the loss.
        backward: from there to the optimizer.
        update: the optimizer's step, and what is left.
        cpu: processor time of all ranks together; 0 where it limits nothing (GPUs).
        arrivals: elements of each parameter, and the share of the backward pass after which its gradient was there, in
            the order of arrival.
    """

    forward: float
    backward: float
    update: float
    cpu: float
    arrivals: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A communication alone, waited for by all ranks: seconds of the slowest, and processor time of all together."""

    seconds: float
    cpu: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the ranks share.

    Attributes:
        cores: of all ranks together.
        background: whether a transfer goes on while a rank computes. That of shared memory is done by the ranks
            themselves: it starts when they wait for it.
    """

    cores: float
    background: bool


def ready_shares(arrivals: Sequence[tuple[int, float]], sizes: Sequence[int]) -> list[float]:
    """The share of the backward pass after which each message is complete; they fill in the order of arrival.

    Args:
        arrivals: see :class:`Compute`.
        sizes: elements, or any measure, of each message; they are scaled to the sum of the parameters, because buffers
            are padded.
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


def ssgd(compute: Compute, messages: Sequence[Transfer], sizes: Sequence[int], machine: Machine) -> float:
    """Messages go one after the other, each no sooner than it is complete; the optimizer waits for the last."""
    backward_end = compute.forward + compute.backward
    end = 0.0
    for message, share in zip(messages, ready_shares(compute.arrivals, sizes), strict=True):
        ready = compute.forward + share * compute.backward if machine.background else backward_end
        end = max(end, ready) + message.seconds
    return _longest(max(backward_end, end) + compute.update, compute, messages, machine)


def dpsgd(compute: Compute, exchange: Transfer, mix: Transfer, machine: Machine) -> float:
    """The exchange runs beside forward and backward; then the weights are mixed and the optimizer steps."""
    backward_end = compute.forward + compute.backward
    met = max(backward_end, exchange.seconds) if machine.background else backward_end + exchange.seconds
    return _longest(met + mix.seconds + compute.update, compute, (exchange, mix), machine)


def local_sgd(compute: Compute, average: Transfer, period: int, machine: Machine) -> float:
    """The mean over a period: one average of all weights, which nothing hides."""
    shared = Transfer(seconds=average.seconds / period, cpu=average.cpu / period)
    path = compute.forward + compute.backward + compute.update + shared.seconds
    return _longest(path, compute, (shared,), machine)


def _longest(path: float, compute: Compute, transfers: Sequence[Transfer], machine: Machine) -> float:
    work = compute.cpu + sum(transfer.cpu for transfer in transfers)
    return max(path, work / machine.cores)


def cores_to_have(compute: Compute, num_cores: int, num_threads: int) -> float:
    """The cores that ranks really get: where their threads fill the machine, other programs take a share of it.

    Then it is the processor time of a step without communication over the length of that step.
    """
    length = compute.forward + compute.backward + compute.update
    if num_threads < num_cores or compute.cpu <= 0 or length <= 0:
        return num_cores
    return min(num_cores, compute.cpu / length)


def error_pct(predicted: float, measured: float) -> float:
    """How far the prediction is above the measurement, percent of it; NaN where nothing was measured."""
    return 100 * (predicted - measured) / measured if measured > 0 else math.nan
