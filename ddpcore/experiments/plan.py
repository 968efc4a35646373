"""What a command will run, all of it checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ddpcore import models
from ddpcore.comm import choose_backend
from ddpcore.comm.choice import TRANSPORTS
from ddpcore.data import Dataset
from ddpcore.engine import TrainConfig
from ddpcore.engine.build import Place, build_dataset, check_parts
from ddpcore.engine.config import BOOKKEEPING
from ddpcore.experiments.folder import Folder
from ddpcore.experiments.study import Row, Study
from ddpcore.strategies import DDP


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row with one seed.

    Attributes:
        row: its name.
        seed: of everything.
        config: with that seed.
        path: the folder of the run.
        ranks: processes that it takes; 0 is none but the one that runs the study.
        hosts: machines that they stand for.
        apart: whether the hosts are network namespaces, see :mod:`ddpcore.experiments.hosts`.
        kill_rank: see :class:`Row`.
        recovered: how ranks died that the run has outlived.
    """

    row: str
    seed: int
    config: TrainConfig
    path: Path
    ranks: int = 0
    hosts: int = 1
    apart: bool = False
    kill_rank: int | None = None
    recovered: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where its learners are, in words."""
        learners = self.config.learners
        if self.ranks:
            alone = f"{self.ranks} process" + ("es" if self.ranks > 1 else "")
            if self.apart:
                return f"{alone} of one machine, in {self.hosts} network namespaces that stand for hosts"
            return alone if self.hosts == 1 else f"{alone} of one machine, standing for {self.hosts} hosts"
        return "1 process" if learners == 1 else f"{learners} virtual learners of 1 process"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The jobs of a command in the order of the study, seed after seed, and the manifest of their folder."""

    jobs: tuple[Job, ...]
    manifest: Mapping[str, Any]


class Datasets:
    """The data set of a config; the last one is kept for the next run that takes the same."""

    def __init__(self) -> None:
        self._key: Any = None
        self._dataset: Dataset | None = None

    def of(self, place: Place) -> Dataset:
        """As :func:`ddpcore.engine.build.build_dataset`, and so are its errors. Collective."""
        config = place.config
        shape = models.spec(config.model).input_shapes[0] if config.dataset == "synthetic" else None
        key = shape, *(
            getattr(config, name)
            for name in ("dataset", "data_dir", "normalize", "augment", "num_validation", "num_train", "num_test")
        ), config.random_labels, config.seed, str(config.dataset_options)  # fmt: skip
        if self._dataset is None or key != self._key:
            self._key, self._dataset = key, build_dataset(place)
        return self._dataset


def make_plan(
    study: Study,
    folder: Folder,
    *,
    rows: Sequence[str] | None = None,
    scale: str = "full",
    overrides: Mapping[str, Any] | None = None,
    first_seed: int = 0,
    num_seeds: int | None = None,
    world_size: int | None = None,
) -> Plan:
    """The jobs of a study.

    Args:
        study: which.
        folder: where its runs will be.
        rows: names; None takes those that the study has for the scale.
        scale: one of :data:`ddpcore.experiments.study.SCALES`.
        overrides: fields of all rows.
        first_seed: the others follow it.
        num_seeds: None takes as many as the study says.
        world_size: rows of so many learners run on real ranks.

    Raises:
        ValueError: a row is unknown or no valid run, or no row has ``world_size`` learners.
    """
    chosen = study.chosen(study.selections[scale] if rows is None else rows)
    configs = {row.name: row.config(scale, overrides) for row in chosen}
    ranks = {row.name: _num_ranks(row, configs[row.name], world_size) for row in chosen}
    if world_size is not None and world_size not in ranks.values():
        counts = sorted({config.learners for config in configs.values()})
        raise ValueError(f"--world-size is {world_size}: these rows have {', '.join(map(str, counts))} learners")
    seeds = [first_seed + number for number in range(study.seeds[scale] if num_seeds is None else num_seeds)]
    jobs = [
        Job(
            row=row.name,
            seed=seed,
            config=configs[row.name].overridden({"seed": seed}),
            path=folder.run_path(row.name, seed),
            ranks=ranks[row.name],
            hosts=row.hosts,
            kill_rank=row.kill_rank,
        )
        for seed in seeds
        for row in chosen
    ]
    manifest = {
        **{name: getattr(study, name) for name in ("title", "question", "source", "notes", "metrics")},
        "study": study.name,
        "published": {row.name: dict(row.published) for row in study.rows.values() if row.published},
        "claims": [asdict(claim) for claim in study.claims],
        "scale": scale,
        "set": {key: value for key, value in (overrides or {}).items() if key not in BOOKKEEPING},
        "seeds": seeds,
        "rows": {row.name: _row_manifest(row, configs[row.name], ranks[row.name]) for row in chosen},
    }
    return Plan(jobs=tuple(jobs), manifest=manifest)


def check_data(plan: Plan, datasets: Datasets) -> None:
    """Raise ValueError where data are missing or damaged, or do not fit a row, or ranks cannot run here."""
    first_seed = plan.jobs[0].seed
    for job in plan.jobs:
        if job.seed != first_seed:
            continue
        try:
            place = Place.of(job.config, None)
            dataset = datasets.of(place)
            check_parts(job.config, dataset)
            backend_of(job)
            if not job.ranks:
                _check_alone(job)
        except ValueError as error:
            raise ValueError(f"row {job.row}: {error}") from None


def _check_alone(job: Job) -> None:
    """ValueError where a job of one process is said to be of several, or must be."""
    said = {"link": job.config.link or "", "transport": job.config.transport, "hosts": job.hosts}
    for name, none in (("link", ""), ("transport", TRANSPORTS[0]), ("hosts", 1)):
        if said[name] != none:
            raise ValueError(f"{name} is {said[name]!r}: learners of one process have none, set ranks = true")
    if job.config.strategy == DDP.name:
        raise ValueError("ddp needs real ranks: set ranks = true, or take ssgd for virtual learners")


def backend_of(job: Job) -> str:
    """What connects the ranks of a job.

    Raises:
        ValueError: they would share a GPU.
    """
    num_gpus = torch.cuda.device_count()
    device = "cuda" if num_gpus and job.config.device != "cpu" else "cpu"
    choice = choose_backend("auto", world_size=max(1, job.ranks), device=device, num_gpus=num_gpus)
    if job.ranks and choice.backend == "virtual":
        raise ValueError(f"it takes {job.ranks} ranks and {choice.reason}: run it with --set device=cpu")
    return choice.backend


def _num_ranks(row: Row, config: TrainConfig, world_size: int | None) -> int:
    return config.learners if row.ranks or config.learners == world_size else 0


def _row_manifest(row: Row, config: TrainConfig, ranks: int) -> dict[str, Any]:
    return {
        "config": config.overridden({"seed": 0, "data_dir": None}).to_dict(),  # no row is of a seed or of a machine
        "published": dict(row.published),
        "about": row.about,
        "ranks": ranks,
        "hosts": row.hosts,
        "kill_rank": row.kill_rank,
    }
