"""Options that change over a run: functions of the step, as learning-rate schedules are, or milestones of a file."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

from ddpcore.options.typed import check_range, typed

T = TypeVar("T")
Varying = float | Callable[[int], float] | Sequence[tuple[int, float]]
"""A number, a function from the step to the number, such as a learning-rate schedule, or stages of `Milestones`."""


@dataclass(frozen=True)
class Milestones(Generic[T]):
    """A schedule of pieces, pairs of a step and the value from there on: ``((0, 64), (600, 1))``.

    ValueError: ``stages`` are no such pairs, or their steps do not ascend from 0; it begins with ``name``.
    """

    stages: Sequence[tuple[int, T]]
    name: InitVar[str] = "a schedule"

    def __post_init__(self, name: str) -> None:
        try:
            stages = tuple((step, value) for step, value in self.stages)
        except (TypeError, ValueError):
            stages = ()
        steps = [step for step, _ in stages]
        if any(type(step) is not int for step in steps) or steps[:1] != [0] or any(a >= b for a, b in pairwise(steps)):
            form = "pairs of a step and a value, in ascending order from step 0, such as [[0, 64], [600, 1]]"
            raise ValueError(f"{name} is {self.stages!r}: it must be {form}")
        object.__setattr__(self, "stages", stages)

    def __call__(self, step: float) -> T:
        """The value of a step."""
        return self.stages[bisect_right([first for first, _ in self.stages], step) - 1][1]

    def check_run(self, name: str, num_steps: int) -> None:
        """Raise ValueError if the run ends before the last milestone. ``name`` is the name of the option."""
        if (last := self.stages[-1][0]) >= num_steps:
            raise ValueError(f"{name} has the step {last}: the run ends after {num_steps} steps, take earlier steps")


class Setting:
    """A number, or a schedule of it (:data:`Varying`), of the type ``kind``. ValueError: it is outside of the limits.

    Attributes:
        value: with :class:`Milestones` for stages.
        changes: whether it is a schedule.
    """

    def __init__(self, name: str, value: Any, kind: type[float] = float, **limits: Any) -> None:
        self.value: Any = Milestones(value, name) if isinstance(value, list | tuple) else value
        self.name, self.changes, self._limits = name, callable(self.value), limits
        for step, one in self.value.stages if isinstance(self.value, Milestones) else ((0, value),):
            if not callable(one):
                typed(name, one, kind)
            self.at(step)

    def at(self, step: int) -> Any:
        """The number of the step. ValueError: a schedule leaves the limits."""
        value = self.value(step) if self.changes else self.value
        check_range(f"{self.name} at step {step}" if self.changes else self.name, value, **self._limits)
        return value

    def check_run(self, num_steps: int) -> None:
        """Raise ValueError if a schedule leaves its limits in a run of so many steps, or goes past its end."""
        if isinstance(self.value, Milestones):
            self.value.check_run(self.name, num_steps)
        for step in range(num_steps if self.changes else 0):
            self.at(step)


class Rounds(Setting):
    """Rounds of local steps: the one that begins at step t has ``period(t)`` steps, at least ``least``.

    The first one begins at step ``start``. ValueError: see :class:`Setting`.
    """

    def __init__(self, name: str, period: Any, start: int = 0, least: int = 1) -> None:
        super().__init__(f"{name}: period", period, int, least=least)
        self._begins = [start]  # of the rounds of a schedule, as far as they were asked for

    def number(self, step: int) -> int:
        """The round of a step. They count from the first one."""
        if self.changes:
            return max(0, bisect_right(self._known(step), step) - 1)
        return max(0, step - self._begins[0]) // self.value

    def ends(self, step: int) -> bool:
        """Whether a round ends when so many steps are taken."""
        start = self._begins[0]
        if not self.changes or step <= start:
            return step > start and bool((step - start) % self.value == 0)
        begins = self._known(step)
        return begins[bisect_right(begins, step) - 1] == step

    def _known(self, step: int) -> list[int]:
        """The beginnings of all rounds up to a later step."""
        while self._begins[-1] <= step:
            self._begins.append(self._begins[-1] + round(self.at(self._begins[-1])))
        return self._begins
