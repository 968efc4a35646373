"""A folder belongs to one study with one set of overrides and one process at a time; a crash damages nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpcore.experiments import commands as command
from ddpcore.experiments.plan import Datasets, RunPlan
from ddpcore.records.study import Folder, read_manifest, read_results
from ddpcore.storage.files import locked
from ddpcore.training import run as engine_run
from ddpcore.training.loop import Loop

Main = Callable[..., tuple[int, str, str]]


def refused(seen: tuple[int, str, str], says: str) -> None:
    code, _, error = seen
    assert code == 2 and says in error and len(error.splitlines()) == 1


def rows_of(out: Path) -> list[tuple[str, int, str]]:
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return [(line["row"], line["seed"], line["status"]) for line in lines]


def test_rows_of_one_folder_have_the_same_overrides(main: Main, tiny: Path, tmp_path: Path) -> None:
    """Otherwise a comparison would mix rows with and without --set."""
    plain, other = tmp_path / "plain", tmp_path / "other"
    assert main("run", tiny, "--out", plain, "--rows", "a")[0] == 0
    assert main("run", tiny, "--out", other, "--rows", "a", "--set", "optimizer.lr=5.0")[0] == 0
    before = (plain / "manifest.json").read_bytes(), (other / "manifest.json").read_bytes()
    refused(
        main("run", tiny, "--out", plain, "--rows", "b", "--resume", "--set", "optimizer.lr=5.0"),
        "run with set {}, not",
    )
    refused(main("run", tiny, "--out", other, "--rows", "b", "--resume"), "run with set {'optimizer.lr': 5.0}, not {}")
    assert ((plain / "manifest.json").read_bytes(), (other / "manifest.json").read_bytes()) == before
    assert main("run", tiny, "--out", other, "--rows", "b", "--resume", "--set", "optimizer.lr=5.0")[0] == 0


def test_another_study_of_the_same_file_name(main: Main, tiny: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    assert main("run", tiny, "--out", out, "--rows", "a")[0] == 0
    elsewhere.mkdir()
    (elsewhere / tiny.name).write_text(tiny.read_text().replace("A tiny study", "Another one"))
    refused(main("run", elsewhere / tiny.name, "--out", out, "--rows", "b", "--resume"), "title 'A tiny study', not")


def test_two_processes(main: Main, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with locked(out):
        refused(main("run", tiny, "--out", out), "another process works in it")
        assert [path.name for path in out.iterdir()] == [".lock"]
    assert main("run", tiny, "--out", out, "--rows", "a")[0] == 0


def test_an_incomplete_line_is_ignored(main: Main, tiny: Path, tmp_path: Path) -> None:
    """A full disk or a power failure can truncate the last line; its run is repeated and its line written again."""
    out = tmp_path / "out"
    assert main("run", tiny, "--out", out, "--rows", "a")[0] == 0
    whole = (out / "results.jsonl").read_text()
    (out / "results.jsonl").write_text(whole[: len(whole) - 30])
    code, text, _ = main("compare", out)
    assert code == 0 and "n=1" in text
    assert main("run", tiny, "--out", out, "--rows", "a", "--resume")[0] == 0
    assert rows_of(out) == [("a", 0, "finished"), ("a", 1, "finished")]


def test_a_failure_does_not_replace_a_finished_run(main: Main, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main("run", tiny, "--out", out, "--rows", "a", "--seeds", 1)[0] == 0
    Folder(out).append({"row": "a", "seed": 0, "status": "failed", "metrics": {}, "diverged": False, "error": "?"})
    assert Folder(out).finished() == {("a", 0)}
    Folder(out).append({"row": "a", "seed": 0})
    found, problems = read_results(out)
    assert list(found) == [("a", 0)] and len(problems) == 1 and "results.jsonl is damaged" in problems[0]


def test_a_manifest_of_another_shape(main: Main, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main("run", tiny, "--out", out, "--rows", "a", "--seeds", 1)[0] == 0
    (out / "manifest.json").write_text('{"format": 1}')
    refused(main("compare", out), "it has no 'study'")


def test_a_signal_at_the_end_of_a_run_stops_the_study(
    main: Main, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That run is finished and counts; the next one does not start."""
    end, asked = Loop._end, []

    def stop(self: Any) -> None:
        if not asked:
            asked.append(os.kill(os.getpid(), signal.SIGTERM))
        end(self)

    monkeypatch.setattr(Loop, "_end", stop)
    out = tmp_path / "out"
    code, _, error = main("run", tiny, "--out", out, "--rows", "a,b", "--seeds", 1)
    assert (code, rows_of(out)) == (130, [("a", 0, "finished")])
    assert "stopped by SIGTERM before b: go on with --resume" in error
    assert main("run", tiny, "--out", out, "--rows", "a,b", "--seeds", 1, "--resume")[0] == 0
    assert rows_of(out) == [("a", 0, "finished"), ("b", 0, "finished")]


@pytest.mark.parametrize("made", ["the data", "the model"])
def test_a_signal_while_a_run_is_built_stops_it_at_its_first_step(
    made: str, main: Main, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, name = {"the data": (Datasets, "of"), "the model": (engine_run, "build_trainer")}[made]
    make = getattr(place, name)

    def stop(*args: Any) -> Any:
        if (out / "manifest.json").exists():  # not while the plan is checked
            monkeypatch.setattr(place, name, make)
            os.kill(os.getpid(), signal.SIGINT)
        return make(*args)

    monkeypatch.setattr(place, name, stop)
    out = tmp_path / "out"
    code, _, error = main("run", tiny, "--out", out, "--rows", "a,b", "--seeds", 1)
    assert code == 130 and not (out / "results.jsonl").exists()
    assert error == "ddpcore experiments: stopped by SIGINT after step 1 of 4 and saved: go on with --resume\n"


def test_a_study_that_was_run_meanwhile_is_not_changed(
    main: Main, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process can run between the first check of the folder and the lock."""
    check, out = command.check_data, tmp_path / "out"

    def slowly(plan: RunPlan, datasets: Datasets) -> None:
        monkeypatch.setattr(command, "check_data", check)
        assert main("run", tiny, "--out", out, "--rows", "a", "--seeds", 1)[0] == 0
        check(plan, datasets)

    monkeypatch.setattr(command, "check_data", slowly)
    refused(main("run", tiny, "--out", out, "--rows", "b", "--seeds", 1), "contains this study already")
    assert list(read_manifest(out)["rows"]) == ["a"]


def test_a_result_names_every_commit_and_machine_of_its_run(
    main: Main, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, machine, train_on = tmp_path / "out", engine_run.machine, Loop.run
    words = ("run", tiny, "--out", out, "--rows", "a", "--seeds", 1)

    def stop(self: Any, listener: Any) -> bool:
        listener.asked = True
        return train_on(self, listener)

    monkeypatch.setattr(Loop, "run", stop)
    for number, commit in enumerate(("one", "two", "one")):
        said = {"commit": commit, "device": f"CPU {number}"}
        monkeypatch.setattr(engine_run, "machine", lambda device, said=said: {**machine(device), **said})
        assert main(*words, *(["--resume"] if number else []))[0] == 130
    monkeypatch.setattr(Loop, "run", train_on)
    assert main(*words, "--resume")[0] == 0
    result = Folder(out).results()["a", 0]
    assert (result["commit"], result["device"]) == ("one, two", "CPU 0, CPU 1, CPU 2")


def test_results_that_do_not_count_are_named(main: Main, tiny: Path, tmp_path: Path) -> None:
    """A line of a wrong type, which has no checksum, and a line of a row that the study does not have."""
    out = tmp_path / "out"
    assert main("run", tiny, "--out", out, "--rows", "a", "--seeds", "1")[0] == 0
    (line,) = [json.loads(text) for text in (out / "results.jsonl").read_text().splitlines()]
    del line["checksum"]
    wrong = [{**line, "metrics": {**line["metrics"], "train_loss": "2.0"}}, {**line, "row": "of another study"}]
    (out / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in wrong))
    code, _, error = main("compare", out)
    assert code == 0 and "train_loss is '2.0'" in error and "results of row of another study" in error
    code, output, error = main("run", tiny, "--out", out, "--rows", "a", "--seeds", "1", "--resume")
    assert code == 0 and "train_loss is '2.0'" in error and "not repeated" not in output
    assert rows_of(out)[-1] == ("a", 0, "finished")
