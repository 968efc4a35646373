"""``train``: a config becomes a trained model, its record and its checkpoints."""

from __future__ import annotations

from pathlib import Path

from ddpcore.data import Dataset
from ddpcore.engine.config import TrainConfig
from ddpcore.engine.record import RunRecord
from ddpcore.launch import World


class Interrupted(Exception):
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
            :func:`ddpcore.launch.run` gives it to its worker; every rank calls ``train``. None, or a world of one: the
            config's learners are virtual and live in this process.
        resume: go on from the last whole checkpoint in ``out``; where there is none, begin.
        dataset: takes the place of the one that the config names.
        tensorboard: write what the record has for TensorBoard too (extra ``tensorboard``).

    Returns:
        The record, on every rank.

    Raises:
        ValueError: config, data and world do not fit; ``out`` holds another run, or this one and ``resume`` is False.
        Interrupted: a signal asked the run to stop; it is saved.
    """
    raise NotImplementedError
