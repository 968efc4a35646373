"""Where buckets of gradients begin and end, and which of them are complete during a backward pass."""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]
"""``[begin, end)`` in elements of a learner's row."""


def plan_buckets(numel: int, size: int, first_size: int, alignment: int = 1) -> list[Range]:
    """Cut ``[0, numel)`` into buckets of at most ``first_size`` (the first one) and ``size`` elements.

    Cuts are at multiples of ``alignment``. They may lie inside a tensor, so no bucket is larger than its size.

    Raises:
        ValueError: ``numel`` is negative, or a bucket holds no aligned piece.
    """
    if numel < 0 or alignment < 1:
        raise ValueError("numel must be >= 0 and alignment >= 1")
    if size < alignment or first_size < alignment:
        raise ValueError(f"a bucket must hold at least one aligned piece of {alignment} elements")
    buckets: list[Range] = []
    begin = 0
    while begin < numel:
        room = (size if buckets else first_size) // alignment * alignment
        buckets.append((begin, min(numel, begin + room)))
        begin = buckets[-1][1]
    return buckets


class BucketTracker:
    """Counts the segments that each bucket still waits for, and hands out complete buckets strictly in order.

    So every rank starts the same collectives in the same order, whatever the order in which its gradients come.
    """

    def __init__(self, segments: Sequence[Range], buckets: Sequence[Range]) -> None:
        self._buckets_of = [
            [index for index, (first, last) in enumerate(buckets) if begin < last and first < end]
            for begin, end in segments
        ]
        self._waits = [0] * len(buckets)
        for found in self._buckets_of:
            for index in found:
                self._waits[index] += 1
        self.reset()

    def reset(self) -> None:
        """Forget all marks: a new backward pass begins."""
        self._left = list(self._waits)
        self._seen = [False] * len(self._buckets_of)
        self._next = 0

    def mark(self, segment: int) -> Range:
        """Mark a segment as written; a second mark is ignored. Returns the newly complete buckets ``[first, last)``."""
        if not 0 <= segment < len(self._seen):
            raise IndexError(f"there is no segment {segment}")
        first = self._next
        if not self._seen[segment]:
            self._seen[segment] = True
            for index in self._buckets_of[segment]:
                self._left[index] -= 1
            while self._next < len(self._left) and self._left[self._next] == 0:
                self._next += 1
        return first, self._next

    def finish(self) -> Range:
        """The buckets ``[first, last)`` not handed out yet: segments without a gradient kept them waiting."""
        first, self._next = self._next, len(self._left)
        return first, self._next

    def seen(self) -> list[bool]:
        """Which segments were marked."""
        return list(self._seen)
