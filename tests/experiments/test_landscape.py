"""The command ``landscape``: files beside runs, the same from one process and from ranks, and errors of one line."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from torch.nn.functional import cross_entropy

from ddpcore.diagnostics import random_plane
from ddpcore.records.surface import read_surface
from ddpcore.storage.json_lines import read_lines, write_lines
from ddpcore.training import FinishedRun, TrainConfig, train
from ddpcore.training.config import merged
from helpers import ranks

Main = Callable[..., tuple[int, str, str]]
CONFIG = {
    "model": {"name": "mlp", "hidden": [6]},
    "data": {"name": "digits", "num_train": 60, "batch_size": 20},
    "run": {"steps": 4, "checkpoint_every": 0, "device": "cpu", "evaluate_every": 0},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    gossip = {"strategy": {"name": "dpsgd", "order": "adapt_then_combine", "learners": 2}}
    for seed, (name, more) in enumerate({"a": {}, "b": gossip, "c": {}}.items()):
        train(
            TrainConfig.from_dict(merged({**CONFIG, **more}, {"run": {"seed": 0}, "optimizer": {"lr": 0.5 + seed}})),
            out=folder / name,
        )
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs"


def test_two_runs(runs: Path, main: Main) -> None:
    """Each point is the loss of the run's model with the weights there; both runs are in one picture."""
    code, out, error = main("landscape", runs / "a", runs / "b", "--points", 3, "--samples", 20, "--seed", 5)
    assert (code, error) == (0, "")
    for name in ("a", "b"):
        run = FinishedRun.load(runs / name)
        found = read_surface(runs / name / "landscape" / "random-5.h5")
        lines = list(csv.reader((runs / name / "landscape" / "random-5.csv").open()))
        assert len(lines) == 10 and f"{name}: two random directions" in out
        plane = random_plane(run.model, seed=5)
        for row, y in enumerate((-1.0, 0.0, 1.0)):
            for column, x in enumerate((-1.0, 0.0, 1.0)):
                torch.nn.utils.vector_to_parameters(plane.at(x, y), run.model.parameters())
                batches = list(run.data("train", 20).batches)
                loss = cross_entropy(run.model(batches[0][0]), batches[0][1]).item()
                assert found.loss[row, column] == pytest.approx(loss, rel=1e-5)
    for suffix in ("svg", "png"):
        assert (runs / "a" / "landscape" / f"random-5-contour.{suffix}").is_file()
    assert not [*(runs / "b" / "landscape").glob("*.png")]


def test_runs_of_a_study_are_told_apart_by_their_rows(runs: Path, main: Main) -> None:
    """All their folders are named seed-N."""
    for row in "ab":
        (runs / row).rename(runs / "seed-0")
        (runs / row).mkdir()
        (runs / "seed-0").rename(runs / row / "seed-0")
    words = ("--points", 2, "--samples", 20, "--out", runs / "planes")
    code, out, error = main("landscape", runs / "a" / "seed-0", runs / "b" / "seed-0", *words)
    assert (code, error) == (0, "")
    assert "a/seed-0: two random" in out and "b/seed-0: two random" in out
    assert str(runs / "a") not in out.replace(str(runs / "planes"), "")


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(runs: Path, main: Main) -> None:
    words = ("landscape", runs / "a", "--points", 3, "--ratio", "--out", runs / "out")
    assert main(*words)[0] == 0
    path = runs / "out" / "a-random-0-ratio.h5"
    content, names = path.read_bytes(), sorted(file.name for file in (runs / "out").iterdir())
    with h5py.File(path, "a") as file:
        values, file["max_eig"][0, 0] = file["train_loss"][()], 1234.0
        file["train_loss"][2, 1], file["done"][2, 1] = 99.0, False
    assert main(*words)[0] == 0
    found = read_surface(path)
    assert found.loss[2, 1] == pytest.approx(values[2, 1], rel=1e-5), "the missing point is computed"
    assert found.values["max_eig"][0, 0] == 1234.0, "the others are kept"
    assert len(content) == path.stat().st_size
    assert names == sorted(
        [f"a-random-0-ratio.{suffix}" for suffix in ("h5", "csv")]
        + [f"random-0-ratio-{kind}.{suffix}" for kind in ("contour", "ratio") for suffix in ("svg", "png")]
    )


def test_solutions_and_eigenvectors(runs: Path, main: Main) -> None:
    three = [runs / name for name in ("a", "b", "c")]
    assert main("landscape", *three, "--plane", "solutions", "--points", 3, "--split", "test")[0] == 0
    found = read_surface(runs / "a" / "landscape" / "solutions-test.h5")
    assert found.marks["a"] == (0.0, 0.0) and found.marks["b"] == (1.0, 0.0) and found.marks["c"][1] == 1.0
    assert (found.y[0], found.y[-1]) == pytest.approx((-0.25, 1.25))
    assert found.x[0] < min(0.0, found.marks["c"][0]) and found.x[-1] > max(1.0, found.marks["c"][0])
    for _ in range(2):  # the second call computes the same plane again, or it would refuse the file
        code, out, error = main("landscape", runs / "a", "--plane", "eigenvectors", "--points", 3, "--span", 0.5)
        assert (code, error) == (0, "")
    assert "the eigenvectors of the eigenvalues" in out
    assert read_surface(runs / "a" / "landscape" / "eigenvectors.h5").x.tolist() == [-0.5, 0.0, 0.5]


@pytest.mark.slow
def test_processes_share_the_points(runs: Path) -> None:
    """Also with eigenvalues at each point. The bits are those of one process."""
    for num in (1, 2):
        words = ("landscape", runs / "a", "--points", 3, "--samples", 20, "--ratio", "--batch-norm", "recalibrate")
        more = ("--out", runs / str(num), "--world-size", num)
        ended = ranks.python("-m", "ddpcore.experiments", *words, *more, cwd=runs)
        assert ended.returncode == 0, ended.stderr
    ones = [read_surface(runs / str(num) / "a-random-0-ratio.h5") for num in (1, 2)]
    for name, values in ones[0].values.items():
        assert np.array_equal(values, ones[1].values[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2])
def test_ctrl_c_saves_the_finished_points(num: int, runs: Path) -> None:
    """The signal goes to all processes, as from a terminal."""
    words = ["landscape", str(runs / "a"), "--points", "1000", "--samples", "60", "--world-size", str(num)]
    command = [sys.executable, "-m", "ddpcore.experiments", *words, "--out", str(runs / "out")]
    terminal, theirs = os.openpty()  # where the bar is shown at once: a file has a line after ten seconds
    started = subprocess.Popen(command, env=ranks.environment(), stderr=theirs, start_new_session=True)
    os.close(theirs)
    said = b""
    try:
        while not re.search(rb"[1-9]\d*/1000000", said):
            said += os.read(terminal, 4096)
        os.killpg(started.pid, signal.SIGINT)
        with suppress(OSError):  # all processes have closed the terminal
            while more := os.read(terminal, 4096):
                said += more
        code = started.wait(timeout=900)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        os.close(terminal)
    error = re.sub(r"\x1b\[[?\d;]*\w", "", said.decode())  # without the bar's colours and moves of the cursor
    assert code == 130, error
    stopped = "ddpcore experiments: stopped: finished points are saved, and the same command goes on"
    assert error.splitlines()[-1] == stopped
    found = read_surface(runs / "out" / "a-random-0.h5")
    last = int(re.findall(r"(\d+)/1000000", error)[-1])
    assert 0 < last <= found.done.sum() < found.done.size
    assert np.isfinite(found.values["train_loss"][found.done]).all()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("a", "--points", 1), "--points is 1: it must be at least 2"),
        (("nothing",), "there is no record of a run"),
        (("a", "--samples", 61), "samples is 61: take 1 to 60"),
        (("a", "--split", "validation"), "split is 'validation'"),
        (("a", "b", "--plane", "solutions"), "--plane solutions goes through three runs, and 2 are named"),
        (("a", "b", "b", "--plane", "solutions"), "a run is named twice"),
        (("a", "--span", 0), "--span is 0"),
    ],
)
def test_refused(words: tuple[str, ...], text: str, runs: Path, main: Main) -> None:
    paths = [runs / word if str(word) in ("a", "b", "nothing") else word for word in words]
    code, out, error = main("landscape", *paths)
    assert (code, out) == (2, "")
    assert text in error and len(error.splitlines()) == 1
    assert not [*runs.rglob("landscape")]


def test_a_partial_file_of_another_plane_or_of_other_data(runs: Path, main: Main) -> None:
    assert main("landscape", runs / "a", "--points", 3, "--samples", 20)[0] == 0
    path = runs / "a" / "landscape" / "random-0.h5"
    content = path.read_bytes()
    shutil.copy(path, runs / "b-random-0.h5")
    other = [("a", "--points", 4), ("a", "--span", 2), ("a", "--samples", 21), ("a", "--batch-norm", "batch")]
    for words in [*other, ("b", "--out", runs)]:
        more = ("--samples", 20) if "--samples" not in words else ()
        code, _, error = main("landscape", runs / words[0], "--points", 3, *more, *words[1:])
        assert code == 2 and "holds another landscape" in error and len(error.splitlines()) == 1
    assert path.read_bytes() == content == (runs / "b-random-0.h5").read_bytes()
    path.write_bytes(content[:2000])
    code, _, error = main("landscape", runs / "a", "--points", 3, "--samples", 20)
    assert code == 2 and "is not a landscape, or it is damaged" in error and len(error.splitlines()) == 1


def test_models_that_do_not_fit(runs: Path, main: Main) -> None:
    path = runs / "a" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = next(iter(tensors))
    safetensors.torch.save_file({**tensors, name: tensors[name][:2].contiguous()}, path)
    assert "model.safetensors is of another model: " in main("landscape", runs / "a")[2]
    path.write_bytes(b"none")
    assert "is it damaged?" in main("landscape", runs / "a")[2]
    path.unlink()
    assert "has no model.safetensors (the file was removed)" in main("landscape", runs / "a")[2]
    record = runs / "a" / "record.jsonl"
    write_lines(record, [row for row in read_lines(record).rows if row["kind"] != "end"])
    assert "has no model.safetensors (it has not ended)" in main("landscape", runs / "a")[2]
    record = runs / "b" / "record.jsonl"
    write_lines(record, [{**row, "dataset_digest": "0"} for row in read_lines(record).rows])
    assert "was trained on other samples" in main("landscape", runs / "b")[2]
    assert not [*runs.rglob("landscape")]


def test_weights_that_are_not_finite(runs: Path, main: Main) -> None:
    path = runs / "a" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: value * float("nan") for name, value in tensors.items()}, path)
    for words, text in (((), "no point of the landscape has a finite"), (("--plane", "eigenvectors"), "is not finite")):
        code, _, error = main("landscape", runs / "a", "--points", 2, *words)
        assert code == 2 and text in error and len(error.splitlines()) == 1


def test_the_help_begins_with_an_example(capsys: pytest.CaptureFixture[str], main: Main) -> None:
    with pytest.raises(SystemExit):
        main("landscape", "--help")
    assert capsys.readouterr().out.startswith("example: ddpcore experiments landscape ")
