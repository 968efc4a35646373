"""Learning-rate schedules: pure functions of the step, counted from 0 at the start of training."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from ddpcore.optim.checks import check_number
from ddpcore.options.registry import Registry
from ddpcore.options.typed import check_range

Schedule = Callable[[int], float]


def linear_scaling(lr: float, batch_size: int, reference_batch_size: int) -> float:
    """The learning rate for a batch size, given the one for a reference batch size: lr * batch / reference.

    Goyal et al. 2017, "Accurate, Large Minibatch SGD", the linear scaling rule. Both sizes are global, in samples.
    """
    check_number("the learning rate", lr)
    if batch_size < 1 or reference_batch_size < 1:
        raise ValueError(f"batch sizes {batch_size} and {reference_batch_size} (reference) must be at least 1")
    return lr * batch_size / reference_batch_size


def constant(lr: float) -> Schedule:
    """The same learning rate at every step."""
    check_number("the learning rate", lr)
    return lambda step: lr


def warmup(schedule: Schedule, num_steps: int, start: float = 0.0) -> Schedule:
    """Warm-up: schedule(t), times start + (1 - start) * (t + 1) / num_steps at each step t < num_steps.

    Goyal et al. 2017, gradual warmup; theirs starts at the learning rate of the reference batch, so at the share
    start = reference / batch. The schedule is not delayed: its steps count from the start of training. 0: no warmup.
    """
    check_range("warmup: num_steps", num_steps, least=0)
    check_range("warmup: start", start, least=0, most=1)

    def ramp(step: int) -> float:
        return start + (1 - start) * (step + 1) / num_steps if step < num_steps else 1.0

    return lambda step: schedule(step) * ramp(step)


def cosine(lr: float, num_steps: int) -> Schedule:
    """From lr at step 0 to 0 at step num_steps and after: lr * (1 + cos(pi * step / num_steps)) / 2.

    Loshchilov and Hutter 2017, "SGDR", equation 5 without restarts.
    """
    check_number("the learning rate", lr)
    check_range("cosine: num_steps", num_steps, least=1)
    return lambda step: lr * (1 + math.cos(math.pi * min(step, num_steps) / num_steps)) / 2


def step_decay(lr: float, milestones: Sequence[int], gamma: float = 0.1) -> Schedule:
    """Multiply lr by gamma at each milestone; the step of a milestone is the first with the new rate."""
    check_number("the learning rate", lr)
    check_range("gamma", gamma, above=0, most=1)
    marks = tuple(milestones)
    if any(mark < 0 for mark in marks) or any(early >= late for early, late in pairwise(marks)):
        raise ValueError(f"step_decay: milestones are {list(marks)}, they must be steps in ascending order")
    return lambda step: float(lr * gamma ** bisect_right(marks, step))


def exponential(lr: float, gamma: float, steps_per_unit: int = 1) -> Schedule:
    """lr * gamma^(step / steps_per_unit): times gamma every steps_per_unit steps, smoothly."""
    check_number("the learning rate", lr)
    check_range("gamma", gamma, above=0, most=1)
    each = gamma ** (1 / steps_per_unit)
    return lambda step: float(lr * each**step)


# What a caller sets: num_steps is the length of training, milestones are steps, steps_per_unit an epoch's steps or 1.
SCHEDULES: Registry[Schedule] = Registry(
    "schedule",
    "ddpcore.schedules",
    Callable,  # type: ignore[arg-type]
    {"constant": constant, "step": step_decay, "cosine": cosine, "exponential": exponential},
    reserved=("lr", "num_steps", "milestones", "gamma", "steps_per_unit"),
)

OF_ANY_LENGTH = frozenset({"constant", "step", "exponential"})  # they do not take num_steps, so a run may become longer
