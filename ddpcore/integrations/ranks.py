"""What integrations of trainers share: the file of a rank, its learners, and ``no_sync`` of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpcore.distributed.handle import Distributed
from ddpcore.distributed.saved import load_run_state


def one_learner() -> dict[str, Any]:
    """The option of ``distribute`` for one process without a process group: a virtual learner."""
    return {} if dist.is_initialized() else {"learners": 1}


class NoSync:
    """``model.no_sync()`` of a model, which Accelerate calls. A copy of the model belongs to no handle."""

    def __init__(self, handle: Distributed) -> None:
        self._handle = weakref.ref(handle)

    def __call__(self) -> AbstractContextManager[None]:
        """The context of the handle."""
        handle = self._handle()
        return nullcontext() if handle is None else handle.no_sync()

    def __reduce__(self) -> tuple[Callable[[], type], tuple[()]]:
        return _nothing, ()


def _nothing() -> type[AbstractContextManager[None]]:
    return nullcontext


def rank_file(folder: str | Path, rank: int | str, number: int = 0) -> Path:
    """Where a rank saves its own state, beside what the library saves; ``*`` stands for all ranks.

    ``number`` counts the models that one loop trains with ddpcore, from 0.
    """
    return Path(folder) / f"ddpcore_{f'{number}_' if number else ''}rank_{rank}.pt"


def load_rank_file(handle: Distributed, folder: str | Path, rank: int, number: int = 0) -> None:
    """Load :func:`rank_file` of this rank, or the average of those of another number of ranks. Collective."""
    num_ranks = len([*Path(folder).glob(rank_file("", "*", number).name)])
    needed = range(num_ranks) if num_ranks != handle.comm.num_learners else (rank,)
    states: list[Any] = [None] * num_ranks
    for one in needed:
        states[one] = torch.load(rank_file(folder, one, number), map_location="cpu", weights_only=True)
    load_run_state(handle, states)
