"""The sums of the last steps, which noise scales average.

Shapes: T steps, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ddpcore.diagnostics.estimates import Array, NoiseScale, noise_scale

MEASURED = 20  # steps that are averaged if only measured steps have sums


class Series:
    """The sums of the last steps, and the noise scales that they give.

    Args:
        batch_size: b.
        names: of the segments.
        per_segment: whether to estimate each segment too.
        population: as of :class:`ddpcore.diagnostics.NoiseStatistics`.
    """

    def __init__(
        self, batch_size: int, names: Sequence[str], per_segment: bool = True, population: int | None = None
    ) -> None:
        self.batch_size, self.names = batch_size, tuple(names)
        self._per_segment, self._population = per_segment, population
        self._own: list[Array] = []
        self._mean: list[Array] = []
        self._kind: tuple[int, bool] = (0, True)

    def add(self, own_TS: Array, mean_TS: Array, num_learners: int, at_mean: bool, kept: int) -> int:
        """Add steps and keep the last ``kept`` ones; returns the number of steps with sums that are not finite.

        If the number of learners or ``at_mean`` differs from earlier steps, those are discarded: they do not compare.
        """
        if (num_learners, at_mean) != self._kind:
            self._own, self._mean, self._kind = [], [], (num_learners, at_mean)
        finite_T = np.isfinite(own_TS).all(axis=1) & np.isfinite(mean_TS).all(axis=1)
        self._own = [*self._own, *own_TS[finite_T]][-kept:]
        self._mean = [*self._mean, *mean_TS[finite_T]][-kept:]
        return int((~finite_T).sum())

    def __len__(self) -> int:
        return len(self._own)

    def state_dict(self) -> dict[str, Any]:
        """The kept steps, as tensors."""
        own, mean = ([torch.from_numpy(row) for row in rows] for rows in (self._own, self._mean))
        return {"own": own, "mean": mean, "num_learners": self._kind[0], "at_mean": self._kind[1]}

    def load_state_dict(self, state: dict[str, Any], order: Sequence[int]) -> None:
        """Restore :meth:`state_dict`; ``order`` holds the saved index of each segment."""
        self._kind = state["num_learners"], state["at_mean"]
        self._own, self._mean = ([row.numpy()[list(order)] for row in state[name]] for name in ("own", "mean"))

    def whole(self) -> NoiseScale | None:
        """The noise scale of all segments together; None before the first step, or with one learner."""
        if not self._own or self._kind[0] < 2:
            return None
        return self._scale(np.array(self._own).sum(axis=1), np.array(self._mean).sum(axis=1))

    def segments(self) -> dict[str, NoiseScale]:
        """The noise scale of each segment."""
        if not self._own or self._kind[0] < 2 or not self._per_segment:
            return {}
        own_TS, mean_TS = np.array(self._own), np.array(self._mean)
        return {name: self._scale(own_TS[:, s], mean_TS[:, s]) for s, name in enumerate(self.names)}

    def _scale(self, own_T: Array, mean_T: Array) -> NoiseScale:
        return noise_scale(
            own_T, mean_T, num_learners=self._kind[0], batch_size=self.batch_size, population=self._population
        )
