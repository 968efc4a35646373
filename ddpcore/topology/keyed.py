"""A keyed permutation of 0..n-1 that computes one value, or its inverse, in constant time."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

NUM_ROUNDS = 8
_MASK = 2**64 - 1

Numbers = TypeVar("Numbers", int, "npt.NDArray[Any]")


class KeyedPermutation:
    """A permutation of 0..n-1 that depends on the key only. Memory and time of a value do not grow with n.

    A Feistel network (Luby and Rackoff 1988) permutes the numbers of as many bits as n - 1 has: each round changes one
    half of the bits by a hash of the other half and of a round key. A result that is not below n is permuted again
    until it is (cycle walking; Black and Rogaway 2002), at most twice on average. The hash is the finalizer of
    SplitMix64. It is good for statistics and is no cipher.

    Args:
        size: n, from 1 to 2**62.
        key: of any length.
    """

    def __init__(self, size: int, key: bytes) -> None:
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._shift = bits // 2
        low, high = (1 << self._shift) - 1, (1 << bits - self._shift) - 1
        self._low = low
        digest = blake2b(key, digest_size=8 * NUM_ROUNDS).digest()
        keys = (int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))
        self._rounds = [(key, bool(index % 2), low if index % 2 else high) for index, key in enumerate(keys)]

    def __call__(self, number: int) -> int:
        """The value at a place."""
        number = self._network(number, self._rounds)
        while number >= self.size:
            number = self._network(number, self._rounds)
        return number

    def inverse(self, number: int) -> int:
        """The place of a value."""
        number = self._network(number, self._rounds[::-1])
        while number >= self.size:
            number = self._network(number, self._rounds[::-1])
        return number

    def values(self) -> npt.NDArray[np.uint64]:
        """All n values in order, uint64 ``[n]``."""
        numbers: npt.NDArray[np.uint64] = self._network(np.arange(self.size, dtype=np.uint64), self._rounds)
        while (outside := np.flatnonzero(numbers >= self.size)).size:
            numbers[outside] = self._network(numbers[outside], self._rounds)
        return numbers

    def _network(self, numbers: Numbers, rounds: Sequence[tuple[int, bool, int]]) -> Numbers:
        """The permutation of all numbers of these bits. The rounds in reverse order are its inverse."""
        high, low = numbers >> self._shift, numbers & self._low
        for key, is_low, mask in rounds:
            mixed = (high if is_low else low) ^ key
            mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
            mixed = (mixed ^ mixed >> 31) & mask
            if is_low:
                low = low ^ mixed
            else:
                high = high ^ mixed
        return high << self._shift | low
