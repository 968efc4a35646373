"""Damaged and unreadable files cost the report only what they hold, and each is named in one line."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddpcore.report.__main__ import main
from ddpcore.report.page import page_of, sections_of
from ddpcore.report.sources import Sources, read_sources
from ddpcore.storage.files import read_file

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.usefixtures("no_pictures")

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
HUGE = 10**400  # JSON allows it, and it is no float
Make = Any  # of conftest.py


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpcore.report.page.svg_of", lambda chart: "<svg/>")


def titles(sources: Sources) -> list[str]:
    return [chart.title for section in sections_of(sources) for chart in section.charts]


def problems(sources: Sources) -> list[str]:
    return [problem for section in sections_of(sources) for problem in section.problems]


def change(folder: Path, **values: Any) -> None:
    """Set these values in each line of the record that has them."""
    lines = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {key: value for key, value in values.items() if key in line}
    (folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("key", ["step", "train_loss", "total_seconds", "consensus_distance"])
def test_numbers_that_no_float_can_hold(make_run: Make, key: str) -> None:
    folder = make_run("damaged")
    change(folder, **{key: HUGE})
    sources = read_sources([folder, make_run()])
    assert "Training loss, over steps" in titles(sources) and problems(sources) == []


@pytest.mark.parametrize("key", ["compute", "exposed", "seconds", "waits", "learners", "loss"])
@pytest.mark.parametrize("value", [HUGE, ["a", 1], [[0]], {"²": 1.0}, math.nan])
def test_damaged_steps(make_run: Make, recorded_steps: Any, key: str, value: Any) -> None:
    damaged = {rank: [{**line, key: value} for line in lines] for rank, lines in recorded_steps.items()}
    folders = [make_run("damaged", steps=damaged), make_run(steps=recorded_steps)]
    sources = read_sources(folders)
    page_of(sections_of(sources))
    assert "Loss of the learners: run" in titles(sources) and problems(sources) == []


@pytest.mark.parametrize("part", [
    {"num_learners": "x"}, {"num_learners": None}, {"num_learners": 10**9}, {"spectral_gap": HUGE},
    {"edges": [[0.5, 1], [-3, 1], ["a", 0], [HUGE, 1]]},
])  # fmt: skip
def test_a_damaged_topology(make_run: Make, part: dict[str, Any]) -> None:
    drawn = {"num_learners": 2, "spectral_gap": 0.5, "edges": [[0, 1]]}
    sources = read_sources([make_run("damaged", topology=drawn | part), make_run()])
    assert "Training loss, over steps" in titles(sources) and problems(sources) == []


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_lines_that_the_parser_refuses(make_run: Make, line: str) -> None:
    folder = make_run()
    with (folder / "record.jsonl").open("a") as file:
        file.write(line + "\n")
    (problem,) = problems(read_sources([folder]))
    assert problem == (
        f"{folder / 'record.jsonl'}: line 9 is no JSON object: the file is damaged: the report shows the other lines"
    )


def test_a_damaged_study(tmp_path: Path) -> None:
    for name, file in (("one", "results.jsonl"), ("two", "manifest.json")):
        shutil.copytree(RESULTS / "batch-size-cifar10", tmp_path / name)
        (tmp_path / name / file).write_text("[" * 100_000 + "\n")
    first, second = problems(read_sources([tmp_path / "one", tmp_path / "two"]))
    assert "manifest.json is damaged" in first and "line 1 is no JSON object" in second


def test_damaged_curves_cost_only_the_curves_of_their_run(tmp_path: Path) -> None:
    """The other curves, all numbers and all verdicts of the study are shown, and one line names the run."""
    shutil.copytree(RESULTS / "mnist-effective-lr", tmp_path / "study")
    path = tmp_path / "study" / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    index = next(index for index, line in enumerate(lines) if line.get("curves"))
    whole = sections_of(read_sources([tmp_path / "study"]))
    known = lines[index]["curves"]
    beside = {"epoch": [1], "train_loss": []}, {"loss": ["a"]}, {"step": []}
    for curves in ({"step": [1]}, {"train_loss": [1]}, {"a": [1]}, 7, *({**known, **wrong} for wrong in beside)):
        path.write_text("".join(json.dumps({**line, "curves": curves} if line is lines[index] else line) + "\n"
                                for line in lines))  # fmt: skip
        sections = sections_of(read_sources([tmp_path / "study"]))
        where = f"the curves of row {lines[index]['row']}, seed {lines[index]['seed']}"
        assert [p for one in sections for p in one.problems] == [f"{path} is damaged ({where}): the rest is shown"]
        assert [(one.title, one.tables) for one in sections] == [(one.title, one.tables) for one in whole]
        assert [len(one.charts) for one in sections] == [len(one.charts) for one in whole]


def test_an_unreadable_folder_of_steps(make_run: Make, recorded_steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run is shown without them, and a line says so."""
    folder = make_run(steps=recorded_steps)
    listdir = os.listdir

    def refused(path: Any) -> list[str]:
        if Path(path).name == "steps":
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refused)
    sources = read_sources([folder])
    assert problems(sources) == [f"{folder / 'steps'} cannot be read (Permission denied): its steps are not shown"]
    assert "Training loss, over steps" in titles(sources)


def test_numbers_of_a_bench_that_json_does_not_have(tmp_path: Path, make_run: Make) -> None:
    row = {"strategy": "ssgd", "topology": None, "ratio_to_ddp": None, "bytes_per_step": 1.0}
    row |= dict.fromkeys(("test_error_pct", "loss_last", "loss_first", "samples_per_s", "exposed_comm_ms"), math.nan)
    row |= {"consensus_distance": math.inf, "world_size": 2}
    here = {"device": "a CPU", "cores": 2, "threads_per_rank": 1, "torch": "2", "ddpcore": "0", "commit": None,
            "backend": "gloo", "backend_reason": "", "transport": None, "oversubscribed": False,
            "notes": []}  # fmt: skip
    for name, value in (("nan", math.nan), ("huge", HUGE)):
        rows = [{**row, "step_ms": dict.fromkeys(("p20", "p50", "p80"), value)}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"environment": here, "rows": rows}))
    page = page_of(sections_of(read_sources([tmp_path / "nan.json", tmp_path / "huge.json", make_run()])))
    assert "Time of a step" in page and "huge.json is damaged or of another version (OverflowError" in page
    assert "Training loss, over steps" in page


def test_an_unreadable_folder_beside_a_run(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run()
    (tmp_path / "locked").mkdir()
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    assert main([str(tmp_path), "--out", str(tmp_path / "r.html")]) == 1
    reason = f"{tmp_path / 'locked'} cannot be read (Permission denied): check its name and its permissions"
    assert capsys.readouterr().err == f"ddpcore report: {reason}\n"


def test_unreadable_results_of_a_study(make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RESULTS / "batch-size-cifar10", tmp_path / "study")

    def refused(path: Path, *limits: Any) -> bytes:
        if path.name == "results.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return read_file(path, *limits)

    monkeypatch.setattr("ddpcore.storage.json_lines.read_file", refused)
    sources = read_sources([tmp_path / "study", make_run()])
    assert "Training loss, over steps" in titles(sources) and "Permission denied" in problems(sources)[0]


def test_what_only_the_page_finds_is_printed_too(
    make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "manifest.json").write_text("{")
    (tmp_path / "bench.json").write_text('{"rows": [{"a": 1}]}')
    bad, out = [str(tmp_path / "study"), str(tmp_path / "bench.json")], tmp_path / "r.html"
    for words, code in ((bad, 2), ([*bad, str(make_run())], 1)):
        assert main([*words, "--out", str(out)]) == code
        first, second = capsys.readouterr().err.splitlines()
        assert "manifest.json is damaged" in first and "is not the result of a bench that this version" in second
        assert out.exists() == (code == 1)


def test_the_recorded_steps_of_another_run(make_run: Make, recorded_steps: Any) -> None:
    lines = [{**line, "compute": 1e308} for line in recorded_steps[0]]
    sources = read_sources([make_run("damaged", steps={0: lines, 1: lines}), make_run(steps=recorded_steps)])
    assert "the recorded steps of damaged cannot be shown" in problems(sources)[0]
    assert "Who waits for whom: run" in [section.title for section in sections_of(sources)]


def test_unreadable_steps_of_one_rank(make_run: Make, recorded_steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(steps=recorded_steps)

    def refused(path: Path, *limits: Any) -> bytes:
        if path.name == "rank-1.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return read_file(path, *limits)

    monkeypatch.setattr("ddpcore.storage.json_lines.read_file", refused)
    sources = read_sources([folder])
    assert "Loss of the learners: run" in titles(sources)
    assert "Permission denied" in problems(sources)[0] and "rank-1.jsonl" in problems(sources)[0]


def test_the_page_replaces_none_of_its_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"rows": []}))
    assert main([str(file), "--out", str(tmp_path / "." / "bench.json")]) == 2
    assert capsys.readouterr().err == f"ddpcore report: --out: {file} is one of the files to show: name another file\n"
    assert file.read_text() == '{"rows": []}'


def test_a_loop_of_links(make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert main([str(make_run()), str(loop), "--out", str(loop)]) == 1
    assert capsys.readouterr().err.count("\n") == 1 and "ddpcore report" in loop.read_text()


def test_a_damaged_header_costs_only_what_it_holds(make_run: Make) -> None:
    """The curves of the run are shown, beside those of others."""
    folder = make_run("damaged")
    path = folder / "record.jsonl"
    path.write_text("{" + path.read_text())
    sources = read_sources([folder, make_run()])
    page_of(sections_of(sources))
    chart = next(one for section in sections_of(sources) for one in section.charts if one.title.startswith("Training"))
    assert [len(series.x) for series in chart.series] == [3, 3]
    what = "line 1 is no JSON object: the file is damaged"
    assert problems(sources) == [f"{path}: {what}: the report shows the other lines"]
