"""The jobs of a command, checked before any file is written."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from ddpcore.experiments.study import Row, Study, check_claim
from ddpcore.options.fields import dotted
from ddpcore.records.run import BOOKKEEPING
from ddpcore.records.study import MANIFEST, Folder, read_manifest
from ddpcore.runtime.launch import hosts_here
from ddpcore.storage.files import LOCK, NUM_RUNS, shown
from ddpcore.storage.json_lines import to_json
from ddpcore.training import TrainConfig
from ddpcore.training.build import Datasets, LearnerPlacement, backend_here, check_connection, check_parts, needs_ranks
from ddpcore.training.memory import activation_bytes, bytes_text, model_bytes, num_states


@dataclass(frozen=True, kw_only=True)
class Job:
    """One row with one seed, see :class:`ddpcore.experiments.study.Row`."""

    row: str  # its name
    seed: int  # of all random numbers
    config: TrainConfig  # with this seed
    path: Path  # folder of the run
    ranks: int = 0  # processes to start; 0 trains in the process that runs the study
    hosts: int = 1
    kill_rank: int | None = None
    recovered: tuple[str, ...] = ()  # the error of each rank failure from which the run resumed

    @property
    def place(self) -> str:
        """Where the learners run, as text for the results."""
        if not self.ranks:
            learners = self.config.strategy.learners
            return "1 process" if learners == 1 else f"{learners} virtual learners of 1 process"
        processes = f"{self.ranks} process" + ("es" if self.ranks > 1 else "")
        if self.config.strategy.learners > self.ranks:
            processes += f" of {self.config.strategy.learners // self.ranks} virtual learners"
        if (num_hosts := hosts_here()) > 1:
            return f"{processes} on {num_hosts} hosts"
        return processes if self.hosts == 1 else f"{processes} of one machine, standing for {self.hosts} hosts"


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The jobs of a command, seed by seed in the order of the study, and the manifest of their folder."""

    jobs: tuple[Job, ...]
    manifest: Mapping[str, Any]


def cost_of(pending: Sequence[Job], datasets: Datasets, processes: int = 1) -> list[str]:
    """What the runs that are not finished cost, in lines: their number, memory of the largest, bytes of checkpoints."""
    samples: dict[int, str] = {}
    disk = models = 0
    for job in {job.row: job for job in pending}.values():
        config, dataset = job.config, datasets.of(LearnerPlacement.of(job.config, None))
        each = -(-config.data.batch_size // (config.strategy.learners * config.data.accumulation))
        if (found := activation_bytes(config, dataset, each)) is not None:
            samples[found * (config.strategy.learners_at_once or 1)] = f"{job.row}, a learner's {each} samples"
        size, strategy = model_bytes(config, dataset), config.strategy
        models += size * sum(other.row == job.row for other in pending)
        if config.run.checkpoint_every != 0:
            kept = config.run.keep_last + config.run.keep_best
            disk = max(disk, kept * strategy.learners * size * (1 + num_states(config)))
    rows, seeds = len({job.row for job in pending}), len({job.seed for job in pending})
    lines = [f"{len(pending)} runs: {rows} rows, {seeds} seeds"]
    if samples:
        most, who = max(samples.items())  # a process keeps freed memory, because that is faster
        lines.append(f"activations, estimated: up to {bytes_text(most)} ({who}); a process may hold five times that")
    checkpoints = f"up to {bytes_text(disk * min(processes, len(pending)))} of checkpoints until runs have finished"
    return [*lines, f"disk, estimated: {checkpoints}, then {bytes_text(models)} of models of all runs"]


def make_plan(
    study: Study,
    folder: Folder,
    *,
    rows: Sequence[str] | None = None,
    scale: str = "full",
    overrides: Mapping[str, Any] | None = None,
    first_seed: int = 0,
    num_seeds: int | None = None,
    max_runs: int = NUM_RUNS,
    world_size: int | None = None,
) -> RunPlan:
    """The jobs of a study, see ``RunOptions`` of ``ddpcore.experiments.commands`` for the arguments.

    ValueError: a row is unknown or not valid, no row has ``world_size`` learners, or there are too many runs.
    """
    chosen = study.chosen(study.selections[scale] if rows is None else rows)
    configs = {row.name: row.config(scale, overrides) for row in chosen}
    ranks = _ranks_of(chosen, configs, world_size)
    count = num_seeds or study.seeds[scale]
    if count * len(chosen) > max_runs:
        asked = f"{count:,} seeds of {len(chosen)} rows are more than {max_runs:,} runs"
        raise ValueError(f"{asked}: take fewer seeds, or raise --max-runs")
    seeds = list(range(first_seed, first_seed + count))
    jobs, of_rows = [], {}
    for row in chosen:
        config = configs[row.name].overridden({"run": {"seed": 0}, "data": {"data_dir": None}}).to_dict()
        where: dict[str, Any] = {"ranks": ranks[row.name], "hosts": row.hosts, "kill_rank": row.kill_rank}
        of_rows[row.name] = {"config": config, "published": dict(row.published), "about": row.about, **where}
        for seed in seeds:
            own, path = configs[row.name].overridden({"run": {"seed": seed}}), folder.run_path(row.name, seed)
            jobs.append(Job(row=row.name, seed=seed, config=own, path=path, **where))
    jobs.sort(key=attrgetter("seed"))
    manifest = {
        **{name: getattr(study, name) for name in ("title", "question", "source", "notes", "metrics", "charts")},
        "study": study.name,
        "published": {row.name: dict(row.published) for row in study.rows.values() if row.published},
        "claims": [asdict(claim) for claim in study.claims],
        "scale": scale,
        "set": {key: value for key, value in dotted(overrides or {}).items() if key not in BOOKKEEPING},
        "seeds": seeds,
        "rows": of_rows,
    }
    return RunPlan(jobs=tuple(jobs), manifest=manifest)


def _ranks_of(rows: Sequence[Row], configs: Mapping[str, TrainConfig], world_size: int | None) -> dict[str, int]:
    """The number of ranks of each row, 0 for virtual learners of one process."""
    learners = {name: config.strategy.learners for name, config in configs.items()}
    found = {row.name: learners[row.name] * row.ranks for row in rows}
    if world_size is None:
        return found
    spread = [num == world_size or (world_size > 1 and num % world_size == 0) for num in learners.values()]
    if not any(spread):
        counts = ", ".join(map(str, sorted(set(learners.values()))))
        raise ValueError(f"--world-size is {world_size}: these rows have {counts} learners")
    return {name: found[name] or world_size * shares for name, shares in zip(learners, spread, strict=True)}


def check_folder(path: Path, manifest: Mapping[str, Any], resume: bool) -> None:
    """Raise ValueError unless the folder is new, or contains the same study and ``resume`` is set."""
    if not path.exists() or (path.is_dir() and all(item.name == LOCK for item in path.iterdir())):
        return
    if not path.is_dir():
        raise ValueError(f"{shown(path)} is a file: name a folder")
    if not (path / MANIFEST).exists():
        raise ValueError(f"{shown(path)} contains other files: take another folder with --out")
    known = read_manifest(path, check_claim)
    for key in ("study", "title", "source", "scale", "set"):
        if known[key] != to_json(manifest[key]):
            was = f"{shown(path)} was run with {key} {known[key]!r}, not {manifest[key]!r}"
            raise ValueError(f"{was}: take another folder with --out")
    for name, row in manifest["rows"].items():
        before = known["rows"].get(name, row)
        unlike = [key for key in ("ranks", "hosts", "kill_rank") if row[key] != before[key]]
        differences = [f"{key} is {row[key]!r}, not {before[key]!r}" for key in unlike]
        if differences := differences + TrainConfig.from_dict(row["config"]).difference(before["config"]):
            other = f"{shown(path)} contains another row {name}: {'; '.join(differences)}"
            raise ValueError(f"{other}: take another folder")
    if not resume:
        raise ValueError(f"{shown(path)} contains this study already: continue with --resume, or take another folder")


def check_data(plan: RunPlan, datasets: Datasets) -> None:
    """Raise ValueError if data are missing or damaged, do not fit a row, or its ranks cannot run here."""
    for job in [job for job in plan.jobs if job.seed == plan.jobs[0].seed]:
        try:
            check_parts(job.config, datasets.of(LearnerPlacement.of(job.config, None)))
            backend_of(job)
            check_connection(job.config, job.ranks, job.hosts)
            if job.hosts != 1 and not job.ranks:
                raise ValueError(f"hosts is {job.hosts}: learners of one process have none, set ranks = true")
            if needs_ranks(job.config) and not job.ranks:
                raise ValueError("ddp needs real ranks: set ranks = true, or take ssgd for virtual learners")
        except ValueError as error:
            raise ValueError(f"row {job.row}: {error}") from None


def backend_of(job: Job) -> str:
    """The backend that connects the ranks of a job. ValueError: they would share a GPU."""
    choice = backend_here(job.config, job.ranks, hosts_here())
    if job.ranks and choice.name == "virtual":
        raise ValueError(f"it needs {job.ranks} ranks and {choice.reason}: run it with --set run.device=cpu")
    return choice.name
