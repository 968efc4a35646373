"""How much memory the kernels move: what a measured bandwidth is a share of."""

from __future__ import annotations


def bytes_per_param(optimizer: str, itemsize: int) -> tuple[int, int]:
    """(least, most) bytes that our kernel of an optimizer moves for each element.

    SGD reads weight, gradient and momentum and writes weight and momentum: five elements, and no step with momentum
    moves less. LARS needs two norms before its first store, and LAMB one, so they walk a tensor twice. The least holds
    where the second walk finds the tensor in cache: LARS is then SGD, and LAMB reads weight, gradient and two fp32
    moments and writes moments and weight. The most holds where it finds nothing: LARS reads weight and gradient once
    more, LAMB weight and moments.
    """
    if optimizer == "lamb":
        return 3 * itemsize + 16, 4 * itemsize + 24
    return 5 * itemsize, 5 * itemsize if optimizer == "sgd" else 7 * itemsize
