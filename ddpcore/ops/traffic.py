"""The memory traffic of the kernels, to compare a measured bandwidth with the hardware's."""

from __future__ import annotations


def bytes_per_param(optimizer: str, itemsize: int) -> tuple[int, int]:
    """The smallest and the largest number of bytes that our kernel of an optimizer moves per element.

    SGD reads weight, gradient and momentum and writes weight and momentum: five elements, the least that a step with
    momentum can move. AdamW reads weight, gradient and two fp32 moments and writes moments and weight. LARS needs two
    norms before its first store, and LAMB one, so they read a tensor twice. The smallest number assumes that the second
    pass finds the tensor in cache: LARS then moves as much as SGD, and LAMB as AdamW. The largest number assumes no
    cache hit: LARS reads weight and gradient again, and LAMB weight and moments.
    """
    if optimizer == "adamw":
        return 3 * itemsize + 16, 3 * itemsize + 16
    if optimizer == "lamb":
        return 3 * itemsize + 16, 4 * itemsize + 24
    return 5 * itemsize, 5 * itemsize if optimizer == "sgd" else 7 * itemsize
