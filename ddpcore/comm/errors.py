"""Error messages of operations between ranks: they name the operation, this rank and the other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor


def size_of(tensor: Tensor) -> str:
    """``5000 float32``."""
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def at(step: int | None) -> str:
    """`` at step 3``, or nothing."""
    return "" if step is None else f" at step {step}"


def check_has_average(rows: Tensor) -> None:
    """Raise ValueError if rows of this dtype have no average. Call it before anything is sent, on all ranks."""
    dtype = rows.dtype
    if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize < 2:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name} has no average: convert the values to float32, or to another dtype of 16 to 64 bits")


class Call(AbstractContextManager[None]):
    """Adds the call, this rank and its peers to an error of a process group. It can be entered repeatedly.

    Args:
        group: the process group.
        what: the call, such as ``the exchange of 5000 float32 at step 3``.
        peers: ranks of the group that take part; None means all.
    """

    def __init__(self, group: dist.ProcessGroup, what: str, peers: Iterable[int] | None = None) -> None:
        self._rank = dist.get_rank(group)
        others = range(dist.get_world_size(group)) if peers is None else peers
        self._what, self._peers = what, sorted({rank for rank in others if rank != self._rank})

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            why = str(error).partition("\n")[0]
            raise RuntimeError(
                f"{self._what} failed on rank {self._rank}: a rank of {self._peers} died, left, or did not come in "
                f"time: see which rank failed first, and why ({why})"
            ) from error
