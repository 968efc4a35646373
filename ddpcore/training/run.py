"""``train``: from a config to a trained model, its record and its checkpoints."""

from collections.abc import Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ddpcore.data import SAMPLERS, SHARDS, Dataset, total_variation
from ddpcore.optim.schedules import OF_ANY_LENGTH
from ddpcore.records.run import ADDRESS, CHECKPOINTS, RECORD, RunRecord, nested, read_manifest, steps_of
from ddpcore.runtime.launch import Stopped, StopSignal, World
from ddpcore.runtime.machine import machine
from ddpcore.storage.files import locked, shown
from ddpcore.storage.json_lines import read_json, read_lines, write_json
from ddpcore.topology.base import Topology
from ddpcore.topology.describe import MOST_DRAWN, describe, edges_of
from ddpcore.training.build import LearnerPlacement, balanced, build_dataset, build_trainer, threads_for, total_steps
from ddpcore.training.checkpoint import Checkpoints, load_safetensors, members_left
from ddpcore.training.config import TrainConfig, check_samples
from ddpcore.training.loop import Loop, OnProgress, OnRecord, RunWriter, StepRecorder, warn
from ddpcore.training.memory import estimate
from ddpcore.training.progress import Progress
from ddpcore.training.statistics import Measurements
from ddpcore.training.trainer import Trainer

CONNECT_SECONDS = 20.0  # a store that does not answer for so long is gone


class Interrupted(Stopped):
    """SIGINT or SIGTERM stopped the run; the message says after which step it was saved."""


def train(
    config: TrainConfig,
    *,
    out: str | Path,
    world: World | None = None,
    resume: bool = False,
    dataset: Dataset | None = None,
    on_record: OnRecord | None = None,
    on_progress: OnProgress | None = None,
    announce: bool = False,
) -> RunRecord:
    """Train as the config says, and write all results into a folder.

    Args:
        config: the run.
        out: the folder for ``record.jsonl``, ``checkpoints/`` and ``model.safetensors``, the averaged model at the end.
        world: for real ranks, the ``world`` that :func:`ddpcore.runtime.launch.run` passes to its worker, with an
            initialized process group; every rank calls ``train``. With None, or a world of one, the config's learners
            are virtual learners of this process.
        resume: continue from the last complete checkpoint in ``out``; begin if there is none.
        dataset: used instead of the data set of the config.
        on_record: called on rank 0 with each new row of the record, see :class:`RunRecord`. An error ends the run.
        on_progress: called there after step 1, every 20 steps and at the end of an epoch, with the number of steps
            taken, and that of the whole run.
        announce: print an estimate of the memory, and where a saved run goes on, before the first step.

    Returns the record, on every rank.

    Raises:
        ValueError: config, data and world do not fit together; ``out`` holds another run, a run on other data, or this
            run while ``resume`` is False; or another process uses ``out``.
        Interrupted: a signal stopped the run, and it is saved.
    """
    out = Path(out)
    may_shrink = config.strategy.on_failure == "shrink" and world is not None and world.world_size > 1
    placement = LearnerPlacement.of(config, world, members_left(out / CHECKPOINTS) if resume and may_shrink else None)
    load_safetensors()  # a missing package is reported before the training
    if (finished := _check_folder(config, out, resume, dataset)) is not None:
        return finished
    with StopSignal() as stop_signal, placement.time_limit():
        dataset = build_dataset(placement) if dataset is None else dataset
        check_samples(config, dataset)
        trainer = build_trainer(placement := balanced(placement, dataset, out if resume else None), dataset)
        measured = Measurements(config.run, trainer)
        if announce and placement.world.rank == 0:
            warn(estimate(config, trainer))
        with locked(out) if placement.world.rank == 0 else nullcontext():
            placement.barrier("the wait for the lock of the folder")  # rank 0 holds it for all
            # Check again: the data are known now, and no other process can change the folder any more.
            finished = _check_folder(config, out, resume, trainer.dataset)
            placement.barrier("the check of the folder")  # every rank has read it before rank 0 writes
            if finished is None:
                finished = _train(
                    placement, trainer, measured, out, resume, stop_signal, on_record, on_progress, announce
                )
    stop_signal.pass_on()  # a signal that came too late to stop this run
    return finished


def train_rank(world: World, config: TrainConfig, out: Path, resume: bool) -> None:
    """One of the ranks that :func:`ddpcore.runtime.launch.run` starts: see :func:`train`."""
    train(config, out=out, world=world, resume=resume, announce=True)


def join_run(out: str | Path, *, dataset: Dataset | None = None) -> RunRecord:
    """Join a run of real ranks with ``on_failure="shrink"`` as a new rank, and train to its end with the others.

    The record in ``out``, the folder of the run, has the config. ``dataset`` replaces the config's.

    Raises:
        ValueError: no such run is in progress there, this rank has other data, or the run can take no rank.
        RuntimeError: the run does not answer.
        Interrupted: a signal stopped the run, and it is saved.
    """
    out = Path(out)
    store, header = _store_of(out), RunRecord.read(out).header
    config = TrainConfig.from_dict(header["config"])
    placement = replace(LearnerPlacement.of(config, None), joins=True)
    load_safetensors()
    with StopSignal() as stop_signal:
        dataset = build_dataset(placement) if dataset is None else dataset
        if dataset.digest() != header["dataset_digest"]:
            raise ValueError(f"{shown(out)} holds a run on other samples: take the same samples")
        trainer = build_trainer(placement, dataset, store)
        finished = _train(placement, trainer, Measurements(config.run, trainer), out, False, stop_signal)
    stop_signal.pass_on()
    return finished


def _train(
    placement: LearnerPlacement,
    trainer: Trainer,
    measured: Measurements,
    out: Path,
    resume: bool,
    stop_signal: StopSignal,
    on_record: OnRecord | None = None,
    on_progress: OnProgress | None = None,
    announce: bool = False,
) -> RunRecord:
    config, world, num_rows = placement.config, placement.world, len(trainer.handle.comm.learners)
    member = trainer.handle.comm.member
    comm, rank = (None, world.rank) if member is None else (trainer.handle.comm, member)
    folder, num_ranks = out / CHECKPOINTS, world.world_size
    checkpoints = Checkpoints(folder=folder, config=config.to_dict(), rank=rank, num_ranks=num_ranks, comm=comm)
    progress = _resume(placement, trainer, measured, checkpoints) if resume else None
    progress = progress or Progress.start(num_rows, placement.device)
    recorder = closing(StepRecorder(out, rank, trainer)) if config.run.record_steps else nullcontext()

    is_first = world.rank == 0 and not placement.joins
    if is_first and comm is not None:
        _write_address(out)

    def write(**how: Any) -> RunWriter:
        return stack.enter_context(RunWriter(out, *_first_rows(placement, trainer), on_record, on_progress, **how))

    def take_over() -> RunWriter:
        stack.enter_context(locked(out))
        return write(takes_over=True)

    with ExitStack() as stack, recorder as steps:
        stack.enter_context(threads_for(config, trainer.dataset, world.world_size))
        writer = write(in_epoch=progress.epoch_steps > 0) if is_first else None
        loop = Loop(placement, trainer, measured, progress, checkpoints, writer, take_over, steps)
        if is_first and announce:
            begin = f", going on after step {trainer.num_steps} of {loop.total_steps}" if trainer.num_steps else ""
            warn(f"threads: {torch.get_num_threads()}{begin}")
        ended = loop.run(stop_signal)
        if loop.writer is not None:
            (out / ADDRESS).unlink(missing_ok=True)
    if comm is not None:  # only those that are left can wait for each other
        comm.gather(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))
    else:
        placement.barrier("the end of the run")  # rank 0 has closed its files
    if not ended:
        by = f" by {stop_signal.name}" if stop_signal.name and not placement.real else ""  # launchers pass on SIGTERM
        how = f"{loop.total_steps} and " + ("saved" if loop.is_saved else "not saved, because it is not finite")
        raise Interrupted(f"stopped{by} after step {trainer.num_steps} of {how}: go on with resume=True")
    return RunRecord.read(out)


def _check_folder(config: TrainConfig, out: Path, resume: bool, dataset: Dataset | None) -> RunRecord | None:
    """The record of this run if it is finished. ValueError: the folder has another run, or any without ``resume``."""
    path, checkpoints = out / RECORD, out / CHECKPOINTS
    if not resume and (path.exists() or (checkpoints.is_dir() and any(checkpoints.iterdir()))):
        raise ValueError(f"{shown(out)} holds a run already: take another folder, or resume=True to go on with it")
    lines = read_lines(path)
    if not lines.rows or (lines.problems and not any(row.get("kind") == "run" for row in lines.rows)):
        return None  # a new folder, or a run whose first line is damaged: its checkpoints have the config too
    known = RunRecord.read(out)
    if differences := _differences(config, known.header["config"], resume):
        raise ValueError(f"{shown(out)} holds another run: {'; '.join(differences)}: take another folder")
    if known.final and _is_longer(config, nested(known.header["config"])) and not known.final.get("diverged"):
        if not steps_of(checkpoints):
            raise ValueError(f"{shown(checkpoints)} has no checkpoint: a run without one cannot be made longer")
        return None
    digest = known.header.get("dataset_digest")  # old records have none
    if dataset is not None and digest is not None and digest != dataset.digest():
        raise ValueError(f"{shown(out)} holds a run on other samples: take another folder, or the same samples")
    return known if known.final else None


def _resume(
    placement: LearnerPlacement, trainer: Trainer, measured: Measurements, checkpoints: Checkpoints
) -> Progress | None:
    """Load the last complete checkpoint and return its progress; None if there is no checkpoint. Collective."""
    if (saved := checkpoints.load_last(placement.device, warn, moves=checkpoints.comm is None)) is None:
        return None
    step, state = saved
    if differences := _differences(placement.config, read_manifest(checkpoints.path(step))["config"], resume=True):
        raise ValueError(f"{checkpoints.path(step)} is of another run: {'; '.join(differences)}")
    if isinstance(state, list):
        return _moved(placement, trainer, measured, state)
    trainer.load_state_dict(state)
    measured.load_state_dict(state["statistics"], step)
    return Progress(**state["progress"])


def _differences(config: TrainConfig, known: Mapping[str, Any], resume: bool) -> list[str]:
    """The keys in which a saved run differs. A resumed run may be longer, or have another number of learners.

    ValueError where its learning rates depend on its length, or its learners have samples of their own.
    """
    known = nested(known)
    own, theirs = config.strategy.learners, known.get("strategy", {}).get("learners", 1)
    if resume and _is_longer(config, known):
        name = config.optimizer.schedule
        if name not in OF_ANY_LENGTH:
            what = f"the saved run is shorter, and learning rates of the schedule {name!r} depend on the length"
            advice = f"only a run with the schedule {', '.join(sorted(OF_ANY_LENGTH))} can be made longer"
            raise ValueError(f"{what}: {advice}")
        known = {**known, "run": {**known["run"], "epochs": config.run.epochs, "steps": config.run.steps}}
    if not resume or own == theirs:
        return config.difference(known)
    if config.data.sampler != SAMPLERS[0] or config.data.shards != SHARDS[0]:
        what = f"strategy.learners is {own}, not {theirs}, and each learner has samples of its own"
        deals = f"only sampler {SAMPLERS[0]!r} with {SHARDS[0]!r} shards deals samples again"
        raise ValueError(f"{what}: resume with {theirs} learners; {deals}")
    return config.difference({**known, "strategy": {**known.get("strategy", {}), "learners": own}})


def _is_longer(config: TrainConfig, known: Mapping[str, Any]) -> bool:
    """Whether the config is longer than a saved one, counted in the same unit."""
    run = known.get("run", {})
    return any((getattr(config.run, unit) or 0) > (run.get(unit) or 0) > 0 for unit in ("epochs", "steps"))


def _moved(placement: LearnerPlacement, trainer: Trainer, measured: Measurements, states: list[Any]) -> Progress:
    """Go on with another number of learners, which take the samples of the epoch that are left. Collective."""
    config, step = placement.config, states[0]["step"]
    trainer.load_moved(states, "reset" if config.strategy.policies.get("momentum") == "reset" else "average")
    measured.load_state_dict(None, step)
    progress, num_rows = dict(states[0]["progress"]), len(trainer.handle.comm.learners)
    for name, value in progress.items():
        if name.endswith("_L"):
            progress[name] = torch.cat([state["progress"][name] for state in states]).mean().repeat(num_rows).to(value)
    return Progress(**progress)


def _first_rows(placement: LearnerPlacement, trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The header of a record, and of a resumed run its row."""
    config, dataset, step = placement.config, trainer.dataset, trainer.num_steps
    left = {} if placement.left is None else {"members": list(placement.left.members)}
    batches, parts = trainer.batches, trainer.batches.parts
    here = {**machine(placement.device.type), "threads": torch.get_num_threads()}
    header: dict[str, Any] = {
        "kind": "run",
        "config": config.to_dict(),
        "num_parameters": sum(parameter.numel() for parameter in trainer.module.parameters()),
        "num_samples": {name: len(split) for name, split in dataset.splits().items()},
        "dataset": dataset.name,
        "dataset_digest": dataset.digest(),
        "num_classes": dataset.num_classes,
        "total_variation": None if parts is None else total_variation(dataset.train.labels.cpu(), parts),
        "steps_per_epoch": batches.steps_per_epoch,
        "total_steps": total_steps(config, batches),
        "ranks": placement.world.world_size,
        "communication": trainer.handle.comm.description,
        "learners_run": trainer.handle.learners_run,
        "topology": _topology(config),
        **here,
    }
    learners = {"learners": config.strategy.learners}
    return header, {"kind": "resume", "step": step, **learners, **left, **here} if step else None


def _topology(config: TrainConfig) -> dict[str, Any] | None:
    """Edges and spectral gap of the topology, for a drawing; None without neighbours, or with too many to draw."""
    topology = getattr(config.checked_strategy, "topology", None)
    num = config.strategy.learners
    if not isinstance(topology, Topology) or not 1 < num <= MOST_DRAWN:
        return None
    return {"num_learners": num, "spectral_gap": describe(topology, num).spectral_gap, "edges": edges_of(topology, num)}


# ---- how a new rank finds a run in progress: the address of its store ----


def _write_address(out: Path) -> None:
    """Write where new ranks find the store of the default process group."""
    store = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        write_json(out / ADDRESS, {"host": store.host, "port": store.port})
    elif isinstance(store, dist.FileStore):
        write_json(out / ADDRESS, {"path": store.path})  # type: ignore[attr-defined]


def _store_of(out: Path) -> dist.Store:
    """A new client of the store of the run in a folder. ValueError: none is in progress there that a rank can join."""
    if not (out / ADDRESS).exists():
        raise ValueError(f"{shown(out)} has no run in progress with real ranks and on_failure='shrink': start that")
    address = read_json(out / ADDRESS)
    if "path" in address:
        return dist.FileStore(address["path"], -1)
    host, port = address["host"], address["port"]
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))
    except RuntimeError as error:
        advice = "the run has ended, or this is another machine and the run was not started by torchrun"
        raise ValueError(f"{shown(out)}: the store at {host}:{port} does not answer: {advice}") from error
