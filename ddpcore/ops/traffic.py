"""The memory traffic of the kernels, to compare a measured bandwidth with the hardware's."""

from __future__ import annotations


def bytes_per_param(optimizer: str, itemsize: int, rounded_states: bool = False) -> tuple[int, int]:
    """The smallest and the largest number of bytes that our kernel of an optimizer moves per element.

    SGD reads weight, gradient and momentum and writes weight and momentum: five elements, the least that a step with
    momentum can move. AdamW reads weight, gradient and two fp32 moments and writes moments and weight. LARS needs two
    norms before its first store, and LAMB one, so they read a tensor twice. The smallest number assumes that the second
    pass finds the tensor in cache: LARS then moves as much as SGD, and LAMB as AdamW. The largest number assumes no
    cache hit: LARS reads weight and gradient again, and LAMB weight and moments.

    Args:
        optimizer: ``sgd``, ``adamw``, ``lars`` or ``lamb``.
        itemsize: bytes of a weight and of a gradient.
        rounded_states: momentum and moments are bfloat16.
    """
    if optimizer in ("adamw", "lamb"):
        moments = 4 if rounded_states else 8  # bytes of both
        least = 3 * itemsize + 2 * moments
        return least, least if optimizer == "adamw" else least + itemsize + moments
    momentum = 2 if rounded_states else itemsize
    least = 3 * itemsize + 2 * momentum
    return least, least if optimizer == "sgd" else least + 2 * itemsize
