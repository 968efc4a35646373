"""The lists that every step takes: which tensor is of which group, and what the group says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor


class Groups:
    """Learning rates, weight decays and step counts, one a group."""

    def __init__(
        self,
        group_sizes: Sequence[int],
        lr: Sequence[float],
        weight_decay: Sequence[float],
        device_lr: Sequence[Tensor],
        steps: Sequence[Tensor],
        adapt: Sequence[int] = (),
    ) -> None:
        self.sizes, self.weight_decay, self.steps, self.adapt = group_sizes, weight_decay, steps, adapt
        self.lr = [float(tensor) for tensor in device_lr] or list(lr)

    def of_each(self) -> Iterator[int]:
        """The group of every tensor, in order."""
        return (group for group, size in enumerate(self.sizes) for _ in range(size))

    def taken(self, group: int) -> int | None:
        """Steps taken before this one, where they are counted."""
        return int(self.steps[group].item()) if self.steps else None

    def count(self) -> None:
        """Count this step."""
        for step in self.steps:
            step.add_(1)
