"""``run``: the files that it writes, how it resumes, and how it handles rows that fail."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcore.experiments import study
from ddpcore.experiments.plan import Datasets, Job, cost_of, make_plan
from ddpcore.experiments.run import _run_share, run
from ddpcore.records.study import Folder, read_manifest
from ddpcore.runtime.launch import World
from ddpcore.training import RunRecord, train
from helpers import forked, ranks

Main = Callable[..., tuple[int, str, str]]


def process(*words: object) -> subprocess.CompletedProcess[str]:
    return ranks.python("-m", "ddpcore.experiments", *words, cwd=ranks.ROOT)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_row_and_seed(main: Main, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text, error = main("run", tiny, "--out", out)
    assert (code, error) == (0, "")
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(line["seed"], line["row"]) for line in lines] == [(s, r) for s in (0, 1) for r in ("a", "b", "ssgd")]
    for line in lines:
        record = RunRecord.read(out / "runs" / line["row"] / f"seed-{line['seed']}")
        assert line["status"] == "finished"
        assert line["metrics"]["train_loss"] == record.epochs[-1]["train_loss"]
        assert line["metrics"]["accuracy"] is None, "synthetic data have no test split"
        assert record.header["config"]["run"]["seed"] == line["seed"]
        assert record.header["total_steps"] == 4
        assert f"{line['row']}, seed {line['seed']}" in text
    assert lines[0]["metrics"]["train_loss"] != lines[3]["metrics"]["train_loss"], "another seed, another run"
    assert lines[2]["place"] == "2 virtual learners of 1 process"
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["study"], manifest["scale"], manifest["seeds"]) == ("tiny", "full", [0, 1])
    assert manifest["rows"]["b"]["published"] == {"train_loss": 0.6}


@pytest.mark.slow
def test_parallel_jobs_have_the_results_of_sequential_ones(main: Main, tiny: Path, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert main("run", tiny, "--out", alone)[0] == 0
    done = process("run", tiny, "--out", shared, "--jobs", 3)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (shared / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 6, "none is run twice"
    expected = Folder(alone).results()
    assert {(line["row"], line["seed"]) for line in lines} == set(expected)
    for line in lines:
        assert line["metrics"]["train_loss"] == expected[line["row"], line["seed"]]["metrics"]["train_loss"]
    again = process("run", tiny, "--out", shared, "--jobs", 3, "--resume")
    assert again.returncode == 0 and "not repeated: 6\n" in again.stdout
    assert len((shared / "results.jsonl").read_text().splitlines()) == 6


def test_scale_rows_seeds_and_set(main: Main, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--scale", "smoke", "--rows", "b,a", "--seed", 5, "--seeds", 2, "--set", "optimizer.momentum=0.5")
    assert main("run", tiny, "--out", out, *words)[0] == 0
    assert list(Folder(out).results()) == [("a", 5), ("b", 5), ("a", 6), ("b", 6)]
    config = RunRecord.read(Folder(out).run_path("b", 6)).header["config"]
    assert (config["optimizer"]["lr"], config["run"]["steps"], config["run"]["seed"]) == (0.25, 2, 6)
    assert config["optimizer"]["momentum"] == 0.5
    assert read_manifest(out)["set"] == {"optimizer.momentum": 0.5}


def test_finished_runs_are_not_repeated(main: Main, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main("run", tiny, "--out", out, "--rows", "a", "--seeds", 1)[0] == 0
    before = files(out / "runs")
    code, text, _ = main("run", tiny, "--out", out, "--rows", "a,b", "--seeds", 2, "--resume")
    assert code == 0
    assert "not repeated: 1\n" in text and "a, seed 0" not in text
    assert {name: files(out / "runs")[name] for name in before} == before
    assert set(Folder(out).results()) == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}
    manifest = read_manifest(out)
    assert (list(manifest["rows"]), manifest["seeds"]) == (["a", "b"], [0, 1])
    assert main("run", tiny, "--out", out, "--rows", "[ab],s*", "--seeds", 1, "--resume")[0] == 0
    assert set(Folder(out).results()) == {("a", 0), ("a", 1), ("b", 0), ("b", 1), ("ssgd", 0)}


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_checkpoint(main: Main, tiny: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of a row: the resumed run ends with the numbers of an undisturbed one."""
    long = '"b" = { run.steps = 1500, run.checkpoint_every = 100,'
    tiny.write_text(tiny.read_text().replace('"b" = {', long))
    words = ("--rows", "a,b", "--seeds", 1)
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main("run", tiny, "--out", whole, *words)[0] == 0
    command = ["-m", "ddpcore.experiments", "run", tiny, "--out", out, *words]
    started = forked.start([*map(str, command)], ranks.log_folder(tmp_path, 0), ranks.environment(), ranks.ROOT)
    try:
        deadline = time.monotonic() + 120
        while not list((out / "runs" / "b").glob("seed-0/checkpoints/step-*")):
            assert started.is_alive() and time.monotonic() < deadline, "it ended before it could be killed"
            time.sleep(0.005)
    finally:
        started.kill()
        started.join()
    assert set(Folder(out).results()) == {("a", 0)}, "row a was over, b was not"
    before = files(out / "runs" / "a")
    assert main("run", tiny, "--out", out, *words, "--resume")[0] == 0
    assert files(out / "runs" / "a") == before
    lines = [json.loads(line) for line in (Folder(out).run_path("b", 0) / "record.jsonl").read_text().splitlines()]
    assert [line["step"] > 0 for line in lines if line["kind"] == "resume"] == [True]
    for row in ("a", "b"):
        ends = [Folder(folder).results()[row, 0]["metrics"]["train_loss"] for folder in (whole, out)]
        assert ends[0] == ends[1]


@pytest.mark.parametrize("cores", [(4, 1, 2), (1, 4, 2)])
def test_a_resumed_run_had_the_fewest_cores_of_its_parts(
    cores: tuple[int, ...], main: Main, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They decide whether its ranks shared cores."""

    def resumed(config: Any, **rest: Any) -> RunRecord:
        record = train(config, **rest)
        header, *resumed = ({**record.header, "cores": count} for count in cores)
        return replace(record, header=header, resumed=resumed)

    monkeypatch.setattr("ddpcore.experiments.run.train", resumed)
    assert main("run", tiny, "--out", tmp_path / "out", "--rows", "a", "--seeds", 1)[0] == 0
    result = Folder(tmp_path / "out").results()["a", 0]
    assert result["cores"] == result["threads"] == 1  # one thread, because the model is small


def test_a_failed_row_does_not_lose_the_others(
    main: Main, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(config: Any, *, out: Path, **rest: Any) -> RunRecord:
        if "/a/" in str(out):
            raise RuntimeError("the device failed\nfor an unknown reason")
        return train(config, out=out, **rest)

    monkeypatch.setattr("ddpcore.experiments.run.train", fails)
    out = tmp_path / "out"
    code, text, _ = main("run", tiny, "--out", out, "--seeds", 1)
    assert code == 1
    results = Folder(out).results()
    assert {key: result["status"] for key, result in results.items()} == {
        ("a", 0): "failed", ("b", 0): "finished", ("ssgd", 0): "finished",
    }  # fmt: skip
    assert results["a", 0]["error"] == "for an unknown reason"
    assert "a, seed 0, 1 process: failed" in text
    assert "finished: 2 of 3" in text
    code, text, _ = main("run", tiny, "--out", out, "--seeds", 1, "--resume")
    assert code == 1, "it is tried again, and fails again"
    assert "b, seed 0" not in text
    monkeypatch.undo()
    assert main("run", tiny, "--out", out, "--seeds", 1, "--resume")[0] == 0


def test_a_diverged_row_is_a_result(main: Main, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        main(
            "run",
            tiny,
            "--out",
            out,
            "--rows",
            "a",
            "--seeds",
            1,
            "--set",
            "optimizer.lr=1e30",
            "--set",
            "run.steps=60",
        )[0]
        == 0
    )
    result = Folder(out).results()["a", 0]
    assert (result["status"], result["diverged"]) == ("finished", True)
    assert result["metrics"]["train_loss"] is None


RANKS = """
[groups.two]
strategy.name = "ssgd"
ranks = true
hosts = 2
strategy.transport = "pg"
strategy.learners = 2

[rows]
"here" = {}
"broken" = { strategy.name = "ssgd", strategy.learners = 2, ranks = true, strategy.transport = "ipc" }
"killed" = { groups = ["two"], kill_rank = 1, run.steps = 400, run.checkpoint_every = 40 }
"left alone" = { groups = ["two"], run.steps = 400, run.checkpoint_every = 40 }
"""


@pytest.mark.slow
def test_ranks_that_fail_and_ranks_that_are_killed(tiny: Path, tmp_path: Path) -> None:
    """A row that fails on its ranks is recorded; one that loses a rank resumes and ends with the undisturbed result."""
    text = tiny.read_text()
    tiny.write_text(text[: text.index("[rows]")] + RANKS)
    out = tmp_path / "out"
    done = process("run", tiny, "--out", out, "--seeds", 1)
    results: dict[Any, Any] = Folder(out).results()
    assert done.returncode == 1, done.stderr
    assert results["here", 0]["place"] == "1 process"
    assert results["broken", 0]["status"] == "failed"
    assert "ipc" in results["broken", 0]["error"]
    killed, alone = results["killed", 0], results["left alone", 0]
    assert killed["recovered"] == ["rank 1 was ended by SIGKILL"]
    assert (killed["metrics"]["recoveries"], alone["metrics"]["recoveries"]) == (1, 0)
    assert killed["metrics"]["train_loss"] == alone["metrics"]["train_loss"]
    assert killed["place"] == "2 processes of one machine, standing for 2 hosts"
    assert re.search(r"about \d+\.\d\d h for \d runs, if all take as long", done.stdout), "one rank says it"


def test_virtual_learners_as_real_ranks(main: Main, tiny: Path, tmp_path: Path) -> None:
    words = ("--rows", "ssgd", "--seeds", 1)
    assert main("run", tiny, "--out", tmp_path / "virtual", *words)[0] == 0
    done = process("run", tiny, "--out", tmp_path / "real", *words, "--world-size", 2)
    assert done.returncode == 0, done.stderr
    real, virtual = (Folder(tmp_path / name).results()["ssgd", 0] for name in ("real", "virtual"))
    assert (real["place"], virtual["place"]) == ("2 processes", "2 virtual learners of 1 process")
    assert real["metrics"]["train_loss"] == pytest.approx(virtual["metrics"]["train_loss"], rel=1e-5)


@pytest.mark.slow
def test_torchrun_runs_a_study(tiny: Path, tmp_path: Path) -> None:
    """Two ranks of torchrun give what the study's own two ranks give; a second start says what is there."""
    words = ("run", tiny, "--rows", "ssgd", "--seeds", 1, "--set", "strategy.learners=4", "--set", "data.batch_size=16")
    assert process(*words, "--out", tmp_path / "own", "--world-size", 2).returncode == 0
    command = ["-m", "ddpcore.experiments", *words, "--out", tmp_path / "out"]
    first, other = ranks.printed(ranks.as_torchrun(command, ranks.ROOT))
    assert ("1 runs: 1 rows, 1 seeds" in first, "1 runs" in other) == (True, False)
    own, joined = (Folder(tmp_path / name).results()["ssgd", 0] for name in ("own", "out"))
    assert own["place"] == joined["place"] == "2 processes of 2 virtual learners"
    assert own["metrics"]["train_loss"] == joined["metrics"]["train_loss"]
    for again in ranks.as_torchrun(command, ranks.ROOT):
        assert again.returncode != 0
        assert "contains this study already" in again.stderr


def test_a_finished_run_keeps_its_model_only(main: Main, tiny: Path, tmp_path: Path) -> None:
    words = ("--rows", "a", "--seeds", 1, "--set", "run.checkpoint_every=1")
    assert main("run", tiny, "--out", tmp_path / "out", *words)[0] == 0
    kept = {path.name for path in Folder(tmp_path / "out").run_path("a", 0).iterdir()}
    assert "model.safetensors" in kept
    assert "checkpoints" not in kept


def test_each_process_of_several_jobs_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr("ddpcore.experiments.run._run_in_process", lambda *args: None)
    for rank in range(5):
        _run_share(World(rank, 5), [], None, None)
    assert taken == [0, 1, 2, 0, 1]


def test_several_jobs_say_how_long_the_rest_takes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two processes: this one takes runs 1 and 3 to 6 of six, and the other one run 2. A step takes an hour."""
    folder, next_index = Folder(tmp_path), torch.multiprocessing.get_context("spawn").Value("i", 0)
    jobs = make_plan(study.find_study(str(tiny)), folder).jobs
    taken: list[tuple[str, int]] = []

    def trained(job: Job, world: None, datasets: object, on_progress: Any) -> dict[str, Any]:
        next_index.value += not taken
        taken.append((job.row, job.seed))
        for step, now in ((1, 50.0), (21, 50.0 + 20 * 3600.0), (41, 50.0 + 60 * 3600.0)):
            monkeypatch.setattr("ddpcore.experiments.run.time.perf_counter", lambda now=now: now)
            on_progress(step, 4)
        return {"row": job.row, "seed": job.seed, "place": "here", "status": "failed", "error": "none"}

    monkeypatch.setattr("ddpcore.experiments.run._train", trained)
    _run_share(World(0, 2), jobs, next_index, folder)
    assert taken == [(job.row, job.seed) for job in (jobs[0], *jobs[2:])]
    said = re.findall(r"about (.*) h for (\d) runs, if all take as long", capsys.readouterr().out)
    assert said == [("12.00", "6"), ("8.00", "4"), ("6.00", "3"), ("4.00", "2")]


def test_the_cost_is_said_before_the_first_run(main: Main, tiny: Path, tmp_path: Path) -> None:
    _, text, _ = main("run", tiny, "--out", tmp_path / "out", "--rows", "a,ssgd", "--seeds", 2)
    assert "4 runs: 2 rows, 2 seeds" in text
    who = r"\((a|ssgd), a learner's \d+ samples\); a process may hold five times that"
    assert re.search(rf"activations, estimated: up to \d+\.\d\d (K|M)iB {who}", text)
    assert re.search(r"disk, estimated: up to \d+\.\d\d KiB of checkpoints", text)
    assert re.findall(r"about \d+\.\d\d h for (\d) runs, if all take as long", text) == ["4", "3", "2"]
    jobs = make_plan(study.find_study(str(tiny)), Folder(tmp_path / "two"), rows=["a"], num_seeds=2).jobs
    lines = (cost_of(jobs, Datasets(), processes)[-1] for processes in (1, 2, 3))
    one, two, three = (float(re.findall(r"up to (\d+\.\d\d) KiB", line)[0]) for line in lines)
    assert (two, three) == pytest.approx((2 * one, 2 * one), rel=1e-2), "of runs at the same time"


def test_rows_of_one_world_size_and_two_backends(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row runs once, on its own backend."""
    text = tiny.read_text()
    rows = '[rows]\n"cpu" = { groups = ["two"] }\n"gpu" = { groups = ["two"], run.device = "auto" }\n'
    two = '[groups.two]\nstrategy.name = "ssgd"\nranks = true\nstrategy.learners = 2\n'
    tiny.write_text(text[: text.index("[rows]")] + two + rows)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    folder = Folder(tmp_path / "out")
    started = []

    def start(work: object, given: tuple[Any, ...], world_size: int, backend: str) -> None:
        started.append((backend, [job.row for job in given[0]]))

    monkeypatch.setattr("ddpcore.experiments.run.launch.run", start)
    run(make_plan(study.find_study(str(tiny)), folder, num_seeds=1), folder, Datasets())
    assert sorted(started) == [("gloo", ["cpu"]), ("nccl", ["gpu"])]
