"""``prepare``: a model that ``ddpcore.distribute`` trains, in a loop of Accelerate."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcore.distributed.distribute import distribute
from ddpcore.distributed.handle import Distributed
from ddpcore.distributed.saved import load_run_state, run_state
from ddpcore.options.extras import extra
from ddpcore.strategies.base import Strategy

with extra("accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU")  # without a library that averages or shards by itself


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    *others: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """``accelerator.prepare`` for a model that ddpcore trains, in a loop that stays as it is.

    ``accelerator.accumulate(model)`` averages gradients once a step, if the strategy averages any. ``save_state``
    writes the averaged weights and, beside them, the state of each rank; ``load_state`` restores it.

    Args:
        accelerator: without DeepSpeed, FSDP and the like.
        model: not prepared yet.
        optimizer: of that model, not prepared yet.
        strategy: such as ``DPSGD()``.
        others: loaders and schedulers, for ``accelerator.prepare``.
        options: of :func:`ddpcore.distribute`.

    Returns:
        The handle, the model to call, the optimizer, and the others.

    Raises:
        ValueError: Accelerate uses a library that averages or shards, or it has prepared the model already.
    """
    check_plain(accelerator, model)
    others = tuple(accelerator.prepare(one) for one in others)
    model = accelerator.prepare_model(model, evaluation_mode=True)  # device, autocast and compilation, no wrapper
    handle = distribute(model, optimizer, strategy, scaler=accelerator.scaler, **one_learner(), **options)
    model.no_sync = NoSync(handle)  # type: ignore[assignment]
    saved = _Saved(handle, accelerator.process_index, accelerator.num_processes)
    accelerator.register_for_checkpointing(saved)
    accelerator.register_save_state_pre_hook(saved.save)
    accelerator.register_load_state_pre_hook(saved.find)
    return handle, model, accelerator.prepare_optimizer(optimizer), *others


def check_plain(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise ValueError if another library averages or shards, or if Accelerate has prepared the model."""
    if accelerator.distributed_type not in [DistributedType[name] for name in _PLAIN]:
        raise ValueError(
            f"Accelerate runs {accelerator.distributed_type.value}, which averages or shards by itself: "
            "configure plain CPUs or GPUs for ddpcore"
        )
    if getattr(model, "_is_accelerate_prepared", False):
        raise ValueError("accelerator.prepare() has the model already: pass the model itself, before prepare()")


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


def rank_file(folder: str | Path, rank: int | str) -> Path:
    """Where a rank saves its own state, beside what the library saves; ``*`` stands for all ranks."""
    return Path(folder) / f"ddpcore_rank_{rank}.pt"


class _Saved:
    """Saves the state of this rank in the folder of ``save_state``. Accelerate loads it last, after the optimizer."""

    def __init__(self, handle: Distributed, rank: int, num_ranks: int) -> None:
        self._handle, self._rank, self._num_ranks = handle, rank, num_ranks
        self._folder: str | None = None

    def save(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        """The hook of ``save_state``. The weights that Accelerate saves become the averaged ones. Collective."""
        torch.save(run_state(self._handle), rank_file(folder, self._rank))
        average = self._handle.evaluation_model().state_dict()
        for model, one in zip(models, weights, strict=True):
            if model is self._handle.models[0]:
                one.update(average)

    def find(self, models: list[nn.Module], folder: str) -> None:
        """The hook of ``load_state``, which must not load the averaged weights into this model."""
        self._folder = folder
        models[:] = [model for model in models if model is not self._handle.models[0]]

    def state_dict(self) -> dict[str, Any]:
        """What Accelerate saves once for all ranks."""
        return {"num_ranks": self._num_ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of this rank. Collective."""
        assert self._folder is not None
        load_rank_file(self._handle, self._folder, self._rank, state["num_ranks"])


def load_rank_file(handle: Distributed, folder: str | Path, rank: int, num_ranks: int) -> None:
    """Load :func:`rank_file` of this rank, or the average of those of another number of ranks. Collective."""
    needed = range(num_ranks) if num_ranks != handle.comm.num_learners else (rank,)
    states: list[Any] = [None] * num_ranks
    for one in needed:
        states[one] = torch.load(rank_file(folder, one), map_location="cpu", weights_only=True)
    load_run_state(handle, states)
