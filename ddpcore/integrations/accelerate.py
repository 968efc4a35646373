"""``prepare``: a model that ``ddpcore.distribute`` trains, in a loop of Accelerate."""

import hashlib
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from ddpcore.distributed.distribute import distribute
from ddpcore.distributed.handle import Distributed
from ddpcore.distributed.saved import load_run_state, place_of, run_state
from ddpcore.options.extras import extra
from ddpcore.strategies.base import Strategy

with extra("accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME, DistributedType, load_state_dict

_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU")  # without a library that averages or shards by itself


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, strategy: Strategy, *others: Any, **options: Any
) -> tuple[Any, ...]:
    """``accelerator.prepare`` for a model that ddpcore trains, in a loop that stays as it is.

    ``accumulate(model)`` averages gradients once a step, if the strategy averages any. Call ``save_state``,
    ``save_model`` and ``get_state_dict`` on all ranks: they average the weights. ``load_state`` restores each rank,
    but gives all of them the schedulers and registered objects of rank 0, which Accelerate alone saves.

    Args:
        accelerator: without DeepSpeed, FSDP and the like.
        model, optimizer: not prepared yet.
        strategy: such as ``DPSGD()``.
        others: loaders and schedulers, for ``accelerator.prepare``.
        options: of :func:`ddpcore.distribute`.

    Returns the handle, the model to call, the optimizer, and the others.
    ValueError: Accelerate uses a library that averages, or has the model already; ``group`` lacks a process; or, in
    ``load_state``, another run has saved its weights over those of the ranks.
    """
    check_plain(accelerator, model, options)
    number = sum(isinstance(getattr(one, "no_sync", None), NoSync) for one in accelerator._models)
    model = prepare_model(accelerator, model)
    plain = accelerator._models[-1]  # not compiled
    handle = distribute(model, optimizer, strategy, scaler=accelerator.scaler, **one_learner(), **options)
    model.no_sync = plain.no_sync = NoSync(handle)  # type: ignore[assignment]
    prepared = accelerator.prepare_optimizer(optimizer)
    others = tuple(accelerator.prepare(one) for one in others)  # a scheduler looks for its optimizer
    saved = _Saved(handle, prepared, accelerator, number, plain, accelerator._models.index(plain))
    accelerator.register_save_state_pre_hook(saved.save)
    accelerator.register_load_state_pre_hook(saved.find)
    accelerator.trigger_sync_in_backward = _averaging
    state_of = accelerator.get_state_dict

    def averaged(one: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if one is not model and one is not plain:
            return state_of(one, *args, **kwargs)
        average = handle.evaluation_model()
        return state_of(getattr(average, "_orig_mod", average), *args, **kwargs)

    accelerator.get_state_dict = averaged
    accelerator.load_state = partial(saved.load_all, accelerator.load_state)
    return handle, model, prepared, *others


def check_plain(accelerator: Accelerator, model: nn.Module, options: dict[str, Any]) -> None:
    """Raise ValueError if another library averages or shards, it has the model, or ``group`` is not whole."""
    if accelerator.distributed_type not in [DistributedType[name] for name in _PLAIN]:
        other = f"{accelerator.distributed_type.value}, which averages or shards by itself"
        raise ValueError(f"Accelerate runs {other}: configure plain CPUs or GPUs for ddpcore")
    if any(accelerator.unwrap_model(one) is accelerator.unwrap_model(model) for one in accelerator._models):
        raise ValueError("accelerator.prepare() has the model already: pass the model itself, before prepare()")
    if (group := options.get("group")) is not None and group.size() != accelerator.num_processes:
        raise ValueError(f"group has {group.size()} of {accelerator.num_processes} processes: leave group= out")


def prepare_model(accelerator: Accelerator, model: nn.Module, **options: Any) -> nn.Module:
    """``accelerator.prepare_model`` without a wrapper: device, autocast and compilation, and no earlier autocast."""
    inner: Any = getattr(model, "_orig_mod", model)
    if all(one is not model for one in accelerator._models):
        vars(inner).pop("_is_accelerate_prepared", None)  # of another Accelerator, as that of an earlier Trainer
        if (forward := vars(inner).pop("_original_forward", None)) is not None:
            holder = inner if getattr(forward, "__self__", model) is inner else model
            inside = [inspect.unwrap(getattr(one, "__func__", one)) for one in (holder.forward, forward)]
            if inside[0] is not inside[1]:  # wrappers of Accelerate say what they wrap
                raise ValueError("a program replaced forward after an Accelerator wrapped it: pass the model as before")
            holder.forward = forward
    return Accelerator.prepare_model(accelerator, model, **{**options, "evaluation_mode": True})


class _Loaded(nn.Module):
    """Takes the place of our model where Accelerate loads weights, so that other models keep their numbers."""

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {}

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return [], []  # neither missing nor unexpected


class _Saved:
    """Saves the state of this rank in the folder of ``save_state``, and loads it when Accelerate loads the optimizer.

    A folder without such states, as DDP saves it, is loaded as Accelerate does. DDP loads the averaged weights.
    ``number`` is as in :func:`rank_file`, and ``place`` is the index of ``model`` among the accelerator's models.
    """

    def __init__(
        self, handle: Distributed, optimizer: Any, accelerator: Accelerator, number: int, model: Any, place: int
    ) -> None:
        self._handle, self._accelerator, self._load_plain = handle, accelerator, optimizer.load_state_dict
        self._number, self._place, self._model = number, place, model
        self._folder: str | None = None
        self._scaler: dict[str, Any] | None = None
        self._loaded: nn.Module | None = None
        optimizer.load_state_dict = self.load

    def save(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        """The hook of ``save_state``."""
        save_rank_file(self._handle, folder, self._number, self._accelerator.scaler)

    def find(self, models: list[nn.Module], folder: str) -> None:
        """The hook of ``load_state``. It takes our model out: its weights are views, which safetensors refuses."""
        models[:] = [_Loaded() if model is self._model else model for model in models]
        self._folder = folder if rank_file(folder, 0, self._number).exists() else None
        names = (SAFE_WEIGHTS_NAME, WEIGHTS_NAME)
        files = [Path(folder) / one.replace(".", f"_{self._place}." if self._place else ".") for one in names]
        self._loaded = self._model if any(map(Path.exists, files)) else None  # else a hook has saved the weights
        if self._loaded is not None or self._folder is None:
            state = load_state_dict(str(next(filter(Path.exists, files), files[0])))
            named = self._model.state_dict(keep_vars=True)
            tied = {id(named[name]): value for name, value in state.items() if name in named}
            # safetensors keeps one name of weights that are tied
            self._model.load_state_dict({name: tied[id(one)] for name, one in named.items() if id(one) in tied} | state)

    def load(self, state: dict[str, Any]) -> None:
        """Load the state of this rank, or of an optimizer that DDP has saved. Collective."""
        if self._folder is None:
            self._load_plain(state)
        else:
            self._scaler = load_rank_file(self._handle, self._folder, self._loaded, self._number)

    def load_all(self, load_state: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """``load_state``, which loads one scaler for all ranks, and then the scaler of this rank."""
        try:
            load_state(*args, **kwargs)
            if self._scaler and self._accelerator.scaler is not None:
                self._accelerator.scaler.load_state_dict(self._scaler)
        finally:  # a later state of the optimizer is of no folder
            self._folder = self._loaded = self._scaler = None


def one_learner() -> dict[str, Any]:
    """The option of ``distribute`` for one process without a process group: a virtual learner."""
    return {} if dist.is_initialized() else {"learners": 1}


class NoSync:
    """``model.no_sync()`` of a model, which Accelerate calls. A copy of the model belongs to no handle."""

    def __init__(self, handle: Distributed) -> None:
        self._handle = weakref.ref(handle)

    def __call__(self) -> AbstractContextManager[None]:
        """The context of the handle."""
        return nullcontext() if (handle := self._handle()) is None else handle.no_sync()

    def sync(self) -> AbstractContextManager[None]:
        """A context inside in which the handle averages."""
        return nullcontext() if (handle := self._handle()) is None else handle.sync()

    def __reduce__(self) -> tuple[type[partial[Any]], tuple[type[nullcontext[None]]]]:
        return partial, (nullcontext,)


def _averaging(model: nn.Module) -> AbstractContextManager[None]:
    """``Accelerator.trigger_sync_in_backward``, which knows DDP only."""
    own = getattr(model, "no_sync", None)
    return own.sync() if isinstance(own, NoSync) else Accelerator.trigger_sync_in_backward(model)


def rank_file(folder: str | Path, rank: int | str, number: int = 0) -> Path:
    """Where a rank saves its own state, beside what the library saves; ``*`` stands for all ranks.

    After a death ``rank`` counts those that are left, as a run that they resume does.
    ``number`` counts the models that one loop trains with ddpcore, from 0.
    """
    return Path(folder) / f"ddpcore_{f'{number}_' if number else ''}rank_{rank}.pt"


def save_rank_file(
    handle: Distributed, folder: str | Path, number: int = 0, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Save :func:`rank_file` of this rank. Rank 0 removes files of more ranks, which another run has left there."""
    more = {"digest": _digest(handle.evaluation_model()), "scaler": None if scaler is None else scaler.state_dict()}
    file = rank_file(folder, rank := place_of(handle), number)
    file.parent.mkdir(parents=True, exist_ok=True)  # a rank may come here before rank 0
    torch.save({**run_state(handle), **more}, file)
    if rank == 0:
        own = {rank_file(folder, one, number) for one in range(handle.comm.num_learners // len(handle.comm.learners))}
        for other in {*Path(folder).glob(rank_file("", "*", number).name)} - own:
            other.unlink()


def load_rank_file(
    handle: Distributed, folder: str | Path, loaded: nn.Module | None, number: int = 0
) -> dict[str, Any] | None:
    """Load :func:`rank_file` of this rank, or the average of the files of another number of ranks. Collective.

    Returns the state of this rank's gradient scaler, if as many ranks have saved one.
    ValueError: the weights of the folder, which ``loaded`` has, are not the average that these files belong to.
    """
    num_ranks = len([*Path(folder).glob(rank_file("", "*", number).name)])
    needed = range(num_ranks) if num_ranks != handle.comm.num_learners else (place_of(handle),)
    states: list[Any] = [None] * num_ranks
    for one in needed:
        states[one] = torch.load(rank_file(folder, one, number), map_location="cpu", weights_only=True)
    digests = {states[one].get("digest") for one in needed}  # None: of a version before 0.3.0
    if loaded is not None and digests - {None, _digest(loaded)}:
        old = rank_file("", "*", number)
        raise ValueError(f"{folder}: another run has saved its weights over those of {old}: remove these to go on")
    load_run_state(handle, states)
    return None if len(needed) > 1 else states[needed[0]].get("scaler")


def _digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for weight in model.parameters():
        found.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
