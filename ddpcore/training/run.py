"""``train``: a config becomes a trained model, its record and its checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ddpcore.data import Dataset
from ddpcore.runtime.launch import Stopped, World
from ddpcore.runtime.machine import machine
from ddpcore.runtime.signals import StopSignal
from ddpcore.storage.files import locked
from ddpcore.training import record
from ddpcore.training.build import LearnerPlacement, build_dataset, build_trainer
from ddpcore.training.checkpoint import Checkpoints
from ddpcore.training.config import TrainConfig
from ddpcore.training.loop import Loop
from ddpcore.training.progress import Progress
from ddpcore.training.record import RunRecord
from ddpcore.training.run_writer import RunWriter, check_tensorboard


class Interrupted(Stopped):
    """The run was asked to stop (SIGINT or SIGTERM); its message says after which step it was saved."""


def train(
    config: TrainConfig,
    *,
    out: str | Path,
    world: World | None = None,
    resume: bool = False,
    dataset: Dataset | None = None,
    tensorboard: bool = False,
) -> RunRecord:
    """Train as the config says, and write everything into a folder.

    Args:
        config: the run.
        out: its folder: ``record.jsonl``, ``model.safetensors`` (the averaged model at the end), ``checkpoints/``.
        world: this process's place among real ranks, whose process group is initialised, as
            :func:`ddpcore.runtime.launch.run` gives it to its worker; every rank calls ``train``. None, or a world of
            one: the config's learners are virtual and live in this process.
        resume: go on from the last whole checkpoint in ``out``; where there is none, begin.
        dataset: takes the place of the one that the config names.
        tensorboard: write what the record has for TensorBoard too (extra ``tensorboard``).

    Returns:
        The record, on every rank.

    Raises:
        ValueError: config, data and world do not fit; ``out`` holds another run, or one on other data, or this one and
            ``resume`` is False, or another process is at work in it.
        Interrupted: a signal asked the run to stop; it is saved.
    """
    out, place = Path(out), LearnerPlacement.of(config, world)
    check_tensorboard(tensorboard)
    finished = _check_folder(config, out, resume, dataset)
    if finished is not None:
        return finished
    with StopSignal() as listener:
        loop = _build(place, out, dataset)
        with _locked(place, out):
            # again: from here on nobody else writes into it, and the data are known
            finished = _check_folder(config, out, resume, loop.trainer.dataset)
            place.barrier()  # every rank has seen it as it was
            if finished is None:
                step = _resume(loop) if resume else 0
                with _outputs(loop, out, step, tensorboard) as loop.outputs:
                    ended = loop.run(listener)
                place.barrier()
                finished = RunRecord.read(out) if ended else None
    if finished is None:
        raise Interrupted(
            f"stopped{' by ' + listener.name if listener.name else ''} after step {loop.trainer.num_steps} of "
            f"{loop.total} and saved: go on with resume=True"
        )
    listener.pass_on()  # too late to stop this run, in time for what comes after it
    return finished


def _build(place: LearnerPlacement, out: Path, dataset: Dataset | None) -> Loop:
    trainer, model = build_trainer(place, build_dataset(place) if dataset is None else dataset)
    world = place.world
    checkpoints = Checkpoints(
        folder=out / "checkpoints", config=place.config.to_dict(), rank=world.rank, num_ranks=world.world_size
    )
    return Loop(place, trainer, model, checkpoints, Progress.start(len(trainer.handle.comm.learners), place.device))


@contextmanager
def _locked(place: LearnerPlacement, out: Path) -> Iterator[None]:
    """The folder is this run's: the first rank has it for all."""
    with nullcontext() if place.world.rank else locked(out):
        place.barrier()
        yield


@contextmanager
def _outputs(loop: Loop, out: Path, step: int, tensorboard: bool) -> Iterator[RunWriter | None]:
    """Where the first rank writes."""
    if loop.place.world.rank:
        yield None
        return
    resumed = {"kind": "resume", "step": step, **machine(loop.place.device.type)} if step else None
    with RunWriter(
        out, total_steps=loop.total, header=_header(loop), resumed=resumed, step=step, tensorboard=tensorboard
    ) as outputs:
        yield outputs


def _check_folder(config: TrainConfig, out: Path, resume: bool, dataset: Dataset | None) -> RunRecord | None:
    """The record of a run that is over already.

    Raises:
        ValueError: the folder is in use, by another run or without ``resume``.
    """
    path, checkpoints = out / record.FILE, out / "checkpoints"
    if not resume and (path.exists() or (checkpoints.is_dir() and any(checkpoints.iterdir()))):
        raise ValueError(f"{out} holds a run already: take another folder, or resume=True to go on with it")
    if not any(True for _ in record.rows(path)):
        return None  # a new folder, or a run that was ended before it had begun to write
    known = RunRecord.read(out)
    differences = config.difference(known.header["config"])
    if differences:
        raise ValueError(f"{out} holds another run: {'; '.join(differences)}: take another folder")
    if dataset is not None and known.header.get("dataset_digest") not in (
        None,
        dataset.digest(),
    ):  # None: an old record
        raise ValueError(f"{out} holds a run on other samples: take another folder, or the same samples")
    return known if known.final else None


def _resume(loop: Loop) -> int:
    """Go on from the last whole checkpoint; the step, 0 where there is none."""
    saved = loop.checkpoints.load_last(loop.place.device, _say)
    if saved is None:
        return 0
    step, state = saved
    differences = loop.config.difference(loop.checkpoints.manifest(step)["config"])
    if differences:
        raise ValueError(f"{loop.checkpoints.path(step)} is of another run: {'; '.join(differences)}")
    loop.load_state_dict(state)
    return step


def _say(line: str) -> None:
    print(f"ddpcore: {line}", file=sys.stderr, flush=True)


def _header(loop: Loop) -> dict[str, Any]:
    """The first row of a run."""
    dataset, num_learners = loop.trainer.dataset, loop.config.learners
    num_elements = sum(parameter.numel() for parameter in loop.model.parameters())
    return {
        "kind": "run",
        "config": loop.config.to_dict(),
        "num_parameters": num_elements // num_learners if loop.trainer.stacked else num_elements,
        "num_samples": {name: len(split) for name, split in dataset.splits().items()},
        "dataset": dataset.name,
        "dataset_digest": dataset.digest(),
        "num_classes": dataset.num_classes,
        "steps_per_epoch": loop.steps_per_epoch,
        "total_steps": loop.total,
        "ranks": loop.place.world.world_size,
        "communication": loop.trainer.handle.comm.description,
        **machine(loop.place.device.type),
    }
