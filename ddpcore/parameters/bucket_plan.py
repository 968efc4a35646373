"""The boundaries of gradient buckets, and which buckets are complete during a backward pass."""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]
"""``[begin, end)``: elements of a learner's row, or indices of buckets."""


def plan_buckets(numel: int, size: int, first_size: int, alignment: int = 1) -> list[Range]:
    """Cut ``[0, numel)`` into a bucket of at most ``first_size`` elements and buckets of at most ``size`` elements.

    Cuts are multiples of ``alignment``. A cut may be inside of a tensor, so a large tensor has several buckets.

    Raises:
        ValueError: ``numel`` is negative, or a size is smaller than ``alignment``.
    """
    if numel < 0 or alignment < 1:
        raise ValueError("numel must be >= 0 and alignment >= 1")
    if size < alignment or first_size < alignment:
        raise ValueError(f"a bucket must have at least {alignment} elements, the alignment")
    buckets: list[Range] = []
    begin = 0
    while begin < numel:
        largest = (size if buckets else first_size) // alignment * alignment
        buckets.append((begin, min(numel, begin + largest)))
        begin = buckets[-1][1]
    return buckets


class BucketTracker:
    """Counts the missing segments of each bucket, and returns complete buckets strictly in order.

    So every rank starts the same collectives in the same order, for any order of its gradients.
    """

    def __init__(self, segments: Sequence[Range], buckets: Sequence[Range]) -> None:
        self._buckets_of = [
            [index for index, (first, last) in enumerate(buckets) if begin < last and first < end]
            for begin, end in segments
        ]
        self._sizes = [0] * len(buckets)
        for found in self._buckets_of:
            for index in found:
                self._sizes[index] += 1
        self.reset()

    def reset(self) -> None:
        """Forget all marks, for a new backward pass."""
        self._missing = list(self._sizes)
        self._seen = [False] * len(self._buckets_of)
        self._next = 0

    def mark(self, segment: int) -> Range:
        """Mark a segment as written; a second mark is ignored. Returns the range of buckets that can now be sent."""
        if not 0 <= segment < len(self._seen):
            raise IndexError(f"there is no segment {segment}")
        first = self._next
        if not self._seen[segment]:
            self._seen[segment] = True
            for index in self._buckets_of[segment]:
                self._missing[index] -= 1
            while self._next < len(self._missing) and self._missing[self._next] == 0:
                self._next += 1
        return first, self._next

    def finish(self) -> Range:
        """The range of buckets that were not returned yet, because segments without a gradient belong to them."""
        first, self._next = self._next, len(self._missing)
        return first, self._next
