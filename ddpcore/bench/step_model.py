"""The time of a step, from the times of its parts in isolation, in seconds; docs/predict.md derives the formulas.

A step has two lower bounds: its longest chain of dependent parts, and the processor time of all its parts divided by
the number of cores. The second matters if the ranks use all cores, because communication then takes processor time from
the computation. The prediction is the larger of the two.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean


@dataclass(frozen=True, kw_only=True)
class Compute:
    """A step without communication, measured while all ranks run.

    ``arrivals`` has the elements of each parameter, and the share of the backward pass after which its gradient is
    ready, in the order of arrival.
    """

    forward: float  # from the start of the step, with fetching the batch, to the loss
    backward: float  # from the loss to the optimizer's step
    update: float  # the optimizer's step and everything after it
    cpu: float  # processor time of all ranks together; 0 if the processor is not the limit (GPUs)
    arrivals: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A communication in isolation: seconds until the slowest rank is done, and processor time of all ranks."""

    seconds: float
    cpu: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is sent in one step.

    Averages of gradients are messages. They are sent in turn, each when complete; the optimizer waits for the last.
    """

    messages: Sequence[Transfer] = ()
    sizes: Sequence[int] = ()  # of the messages, in any unit
    hidden: Transfer | None = None  # what overlaps with forward and backward
    after: Transfer | None = None  # what overlaps with nothing

    @property
    def cpu(self) -> float:
        """Processor seconds of all transfers, of all ranks."""
        return sum(one.cpu for one in (*self.messages, self.hidden, self.after) if one is not None)


def ready_shares(arrivals: Sequence[tuple[int, float]], sizes: Sequence[int]) -> list[float]:
    """The share of the backward pass after which each message is complete. Gradients fill messages in arrival order.

    Sizes of messages are scaled to the sum of the parameters (:class:`Compute`), because buffers are padded.
    """
    filled = [*accumulate((numel for numel, _ in arrivals), initial=0)]
    latest = [*accumulate((share for _, share in arrivals), max, initial=0.0)]
    scale = filled[-1] * (1 - 1e-9) / max(1, sum(sizes))
    return [latest[bisect_left(filled, end * scale)] for end in accumulate(sizes)]


def predict(compute: Compute, steps: Sequence[Step], *, cores: float, background: bool) -> float:
    """The seconds of a step, as the mean of these, with so many cores of all ranks together.

    ``background``: a transfer runs while a rank computes. With shared memory the ranks copy themselves, so a transfer
    starts only when they wait for it.
    """
    path = fmean(_longest_chain(compute, step, background) for step in steps)
    return max(path, (compute.cpu + fmean(step.cpu for step in steps)) / cores)


def _longest_chain(compute: Compute, step: Step, background: bool) -> float:
    backward_end, averaged = compute.forward + compute.backward, 0.0
    for message, share in zip(step.messages, ready_shares(compute.arrivals, step.sizes), strict=True):
        ready = compute.forward + share * compute.backward if background else backward_end
        averaged = max(averaged, ready) + message.seconds
    hidden = 0.0 if step.hidden is None else step.hidden.seconds
    exchanged = max(backward_end, hidden) if background else backward_end + hidden
    return max(averaged, exchanged) + (0.0 if step.after is None else step.after.seconds) + compute.update


def available_cores(compute: Compute, num_cores: int, num_threads: int) -> float:
    """The number of cores that the ranks get. If their threads fill the machine, other programs take a share of it.

    The estimate then is the processor time of a step without communication divided by the length of that step.
    """
    length = compute.forward + compute.backward + compute.update
    if num_threads < num_cores or compute.cpu <= 0 or length <= 0:
        return num_cores
    return min(num_cores, compute.cpu / length)
