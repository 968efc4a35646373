"""300 seeded flips and cuts over all kinds of files that the package reads: named, none read wrong, little lost.

A flip changes one byte, and a cut removes the end of a file. Both are named in one line, with the file; a record also
says which line. What is read in spite of it is what was written.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ddpcore.data import load_dataset
from ddpcore.experiments.study import FOLDER as STUDIES
from ddpcore.experiments.study import load_study
from ddpcore.records.study import read_manifest, read_results
from ddpcore.report.sources import read_bench, read_run
from ddpcore.storage.json_lines import read_lines, write_json, write_lines
from ddpcore.training import RunRecord, TrainConfig
from ddpcore.training.checkpoint import Checkpoints

pytest.importorskip("safetensors")

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "saddle-escape"
EACH = 30  # damages of each kind of file
NUM_ROWS = 12


class Read(NamedTuple):
    """What reading a folder gives: the values that were read, and the sentences that name damage."""

    values: list[Any]
    problems: list[str]


class Kind(NamedTuple):
    """A kind of file, in a folder: how it is written and read."""

    file: str
    write: Callable[[Path], None]
    read: Callable[[Path], Read]


def rows() -> list[dict[str, Any]]:
    config = TrainConfig.from_dict({"run": {"steps": NUM_ROWS}}).to_dict()
    epochs = [{"kind": "epoch", "step": step, "train_loss": 1.0 / step, "lr": 0.1} for step in range(1, NUM_ROWS)]
    return [{"kind": "run", "config": config}, *epochs, {"kind": "end", "step": NUM_ROWS, "diverged": False}]


def write_record(folder: Path) -> None:
    write_lines(folder / "record.jsonl", rows())


def write_steps(folder: Path) -> None:
    write_record(folder)
    lines = [{"step": step, "loss": [0.5 / step], "waits": {"1": 0.25}} for step in range(1, NUM_ROWS)]
    (folder / "steps").mkdir()
    write_lines(folder / "steps" / "rank-0.jsonl", lines)


def read_record(folder: Path) -> Read:
    found = RunRecord.read(folder)
    return Read([line for line in (found.header, *found.epochs, found.final) if line], found.problems)


def read_report(folder: Path) -> Read:
    found = read_run(folder)
    header = found.header if "kind" in found.header else {}
    return Read([line for line in (header, *found.epochs, found.final) if line], found.problems)


def read_steps(folder: Path) -> Read:
    found = read_run(folder)
    return Read(found.steps.get(0, []), found.problems)


def write_study(folder: Path) -> None:
    manifest = json.loads((RESULTS / "manifest.json").read_text())
    lines = [json.loads(line) for line in (RESULTS / "results.jsonl").read_text().splitlines()[:NUM_ROWS]]
    write_json(folder / "manifest.json", manifest)
    write_lines(folder / "results.jsonl", lines)


def read_study(folder: Path) -> Read:
    found, problems = read_results(folder)
    return Read(list(found.values()), problems)


def write_bench(folder: Path) -> None:
    write_json(folder / "bench.json", {"rows": [{"strategy": "ssgd", "samples_per_s": 1234.5}] * 5})


def checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(folder=folder / "checkpoints", config={"run": {"steps": 2}})


def write_checkpoints(folder: Path) -> None:
    for step in (1, 2):
        state = {"weights": torch.arange(50.0) * step, "step": step, "name": "text"}
        checkpoints(folder).save(step, state, keep_last=2)


def read_checkpoints(folder: Path) -> Read:
    """The last one is damaged, so the one before it is taken."""
    said: list[str] = []
    found = checkpoints(folder).load_last("cpu", said.append)
    assert found is not None
    step, state = found
    assert torch.equal(state["weights"], torch.arange(50.0) * step)
    assert (state["step"], state["name"]) == (step, "text")
    return Read([number for number in (1, 2) if number <= step], said)


def write_features(folder: Path) -> None:
    rng = np.random.default_rng(3)
    values = {"inputs": rng.standard_normal((6, 2, 3)).astype(np.float32), "labels": np.arange(6, dtype=np.int64)}
    path = folder / "train" / "a.npz"
    path.parent.mkdir(parents=True)
    np.savez_compressed(path, **values)
    (folder / "SHA256SUMS").write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  train/a.npz\n")


def read_features(folder: Path) -> Read:
    found = load_dataset("features", data_dir=folder)
    return Read([found.train.inputs.tolist(), found.train.labels.tolist()], [])


LAST = "checkpoints/step-00000002"
KINDS = {
    "record": Kind("record.jsonl", write_record, read_record),
    "record in a report": Kind("record.jsonl", write_record, read_report),
    "steps": Kind("steps/rank-0.jsonl", write_steps, read_steps),
    "results": Kind("results.jsonl", write_study, read_study),
    "study": Kind("manifest.json", write_study, lambda folder: Read([read_manifest(folder)], [])),
    "bench": Kind("bench.json", write_bench, lambda folder: Read([read_bench(folder / "bench.json")], [])),
    "checkpoint": Kind(f"{LAST}/rank-0.safetensors", write_checkpoints, read_checkpoints),
    "checkpoint's manifest": Kind(f"{LAST}/manifest.json", write_checkpoints, read_checkpoints),
    "npz": Kind("train/a.npz", write_features, read_features),
}


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content with a byte changed, or without its end. Cuts are inside of a line, see the last test."""
    if chance.random() < 0.7:
        place = chance.randrange(len(content))
        return content[:place] + bytes([content[place] ^ chance.randrange(1, 256)]) + content[place + 1 :]
    places = [place for place in range(1, len(content) - 1) if b"\n" not in content[place - 1 : place + 1]]
    return content[: chance.choice(places)]


@pytest.mark.parametrize("name", KINDS)
def test_damage_is_named_and_costs_no_more_than_its_line(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    for seed in range(EACH):
        folder = tmp_path / str(seed)
        folder.mkdir()
        kind.write(folder)
        written = kind.read(folder)
        assert written.values and not written.problems
        path = folder / kind.file
        before = path.read_bytes()
        path.write_bytes(damaged(before, random.Random(f"{name} {seed}")))
        try:
            seen = kind.read(folder)
        except ValueError as error:
            seen = Read([], [str(error)])
        assert seen.problems, f"seed {seed}: not named"
        assert all("\n" not in problem and (path.name in problem or LAST in problem) for problem in seen.problems)
        assert all(value in written.values for value in seen.values), f"seed {seed}: read wrong"
        if path.suffix == ".jsonl":
            assert all(": line " in problem for problem in seen.problems)
            left = set(path.read_bytes().splitlines())
            num_whole = sum(line in left for line in before.splitlines())
            assert len(seen.values) >= num_whole, f"seed {seed}: lost more than the line"


def test_damaged_study_files(tmp_path: Path) -> None:
    """A study is text that a person writes, without a checksum: it is refused in one line, or read as it stands."""
    whole = (STUDIES / "saddle-escape.toml").read_bytes()
    path = tmp_path / "own.toml"
    num_named = 0
    for seed in range(100):
        path.write_bytes(damaged(whole, random.Random(f"study {seed}")))
        try:
            load_study(path)
        except ValueError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            num_named += 1
    assert num_named > 20


def test_a_record_that_was_cut_between_two_lines_says_that_it_has_not_ended(tmp_path: Path) -> None:
    """All lines that are left are as they were written, so no checksum can tell."""
    write_record(tmp_path)
    lines = (tmp_path / "record.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "record.jsonl").write_bytes(b"".join(lines[:-3]))
    assert not RunRecord.read(tmp_path).final
    assert not read_lines(tmp_path / "record.jsonl").problems
