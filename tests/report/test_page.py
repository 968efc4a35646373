"""The page of a report: what it shows, and what it does with bad input."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ddpcore.bench.topology import TopologyConfig, measure
from ddpcore.options.fields import dotted, parse_settings, put
from ddpcore.records.run import BOOKKEEPING, KEYS_0_2
from ddpcore.report.__main__ import main
from ddpcore.report.groups import config_of, constants, grouped
from ddpcore.report.page import page_of, sections_of
from ddpcore.report.sources import read_sources
from ddpcore.storage.json_lines import write_json
from ddpcore.training import TrainConfig
from ddpcore.training.config import merged

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

RESULTS = Path(__file__).resolve().parent.parent.parent / "docs" / "results"
Make = Any  # of conftest.py


class Reader(HTMLParser):
    """Elements of a page, and its text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.text = ""
        self._tag = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        self._tag = tag

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag not in ("script", "style"):
            self.text += data


def report(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([*map(str, words)])
    out, error = capsys.readouterr()
    return code, out, error


def page_with(*folders: Path) -> str:
    return page_of(sections_of(read_sources(folders)))


def test_a_run(make_run: Make, recorded_steps: Any) -> None:
    folder = make_run(steps=recorded_steps)
    page = page_with(folder)
    reader = Reader(page)
    for words in ("Result", "dpsgd", "a CPU, 2 cores", "0.2.0 (abc)", "Gradient noise scale", "Consensus distance",
                  "spectral gap 0.5", "Who waits for whom: run", "Rank 1 is slow in the backward pass"):  # fmt: skip
        assert words in reader.text, words
    titles = [attrs["alt"] for tag, attrs in reader.tags if tag == "img"]
    assert len(titles) == len(set(titles))
    for title in ("Training loss, over steps", "Training loss, over seconds", "Compute of each rank at each step"):
        assert title in titles
    pictures = [attrs["src"] for tag, attrs in reader.tags if tag == "img"]
    for picture in pictures:
        assert b"<svg" in base64.b64decode(picture.removeprefix("data:image/svg+xml;base64,"))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the static pictures, which take most of the time."""
    monkeypatch.setattr("ddpcore.report.page.svg_of", lambda chart: "<svg/>")


def test_curves_have_the_recorded_numbers(make_run: Make) -> None:
    sections = {one.title: one for one in sections_of(read_sources([make_run()]))}
    (scales,) = sections["Noise statistics"].charts[0].series
    assert scales.x == [2, 4, 6] and scales.y == [102, 104, 106]
    assert scales.low == [92, 94, 96] and scales.high == [112, 114, 116], "the band is the recorded interval"


def test_losses_of_the_learners(make_run: Make, recorded_steps: Any) -> None:
    sections = {one.title: one for one in sections_of(read_sources([make_run(steps=recorded_steps)]))}
    (chart,) = sections["Loss of the learners"].charts
    (series,) = chart.series
    assert series.x == [1, 2, 3, 4, 5, 6] and series.low == pytest.approx([1 / step for step in range(1, 7)])
    assert series.high == pytest.approx([1 / step + 1 for step in range(1, 7)])
    assert series.y == pytest.approx([1 / step + 0.5 for step in range(1, 7)]) and "band" in chart.note


@pytest.mark.usefixtures("no_pictures")
def test_the_page_needs_no_network(make_run: Make) -> None:
    page = page_with(make_run())
    reader = Reader(page)
    for tag, attrs in reader.tags:
        for key in ("src", "href"):
            assert attrs.get(key, "#").startswith(("#", "data:")), (tag, attrs)
    policy = next(attrs["content"] for tag, attrs in reader.tags if "content-security-policy" in str(attrs).lower())
    assert policy.startswith("default-src 'none'") and "http" not in policy
    assert page == page_with(make_run("other").parent / "run")


NAME = "<script>alert(1)<svg onload=alert(2)>\x1b[31m\n& $x$"


def test_names_are_shown_as_text(make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(NAME.replace("/", "-"), device=NAME, commit="</script><script>alert(3)</script>")
    code, out, error = report(capsys, folder, "--out", tmp_path / "r.html")
    assert (code, error) == (0, "")
    assert "\x1b" not in out and out.count("\n") == 1
    page = (tmp_path / "r.html").read_text()
    reader = Reader(page)
    assert len([tag for tag, _ in reader.tags if tag == "script"]) == 1, "only that of the template"
    assert not [tag for tag, _ in reader.tags if tag == "svg"] and "\x1b" not in page
    assert r"<script>alert(1)<svg onload=alert(2)>\x1b[31m\n& $x$" in reader.text
    assert "</script><script>alert(3)</script>" in reader.text


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "other.json").write_text("[1]")
    for name, reason in (
        ("empty", "holds neither a run (record.jsonl) nor a study (manifest.json): name another folder"),
        ("gone", "there is no such file or folder: check the name"),
        ("text.json", "is no JSON file: name a folder, or a file that a bench wrote with --json"),
        ("other.json", "is not the result of a bench: it has no list of rows: name another file"),
    ):
        code, _, error = report(capsys, tmp_path / name, "--out", tmp_path / "r.html")
        assert code == 2 and reason in error and error.count("\n") == 1
    assert not (tmp_path / "r.html").exists()


@pytest.mark.usefixtures("no_pictures")
def test_the_rest_of_the_report_is_made(make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = report(capsys, make_run(), tmp_path / "gone", "--out", tmp_path / "r.html")
    assert code == 1 and "1 run:" in out and "gone: there is no such" in error
    text = Reader((tmp_path / "r.html").read_text()).text
    assert "gone: there is no such file or folder" in text and "Training loss" in text


@pytest.mark.usefixtures("no_pictures")
def test_a_damaged_record_keeps_the_other_lines(make_run: Make) -> None:
    folder = make_run()
    lines = (folder / "record.jsonl").read_text().splitlines()
    (folder / "record.jsonl").write_text("\n".join([*lines[:3], "{broken", *lines[3:]]) + "\n")
    sources = read_sources([folder])
    (run,) = sources.runs
    assert [line["step"] for line in run.epochs] == [2, 4, 6] and run.final
    text = Reader(page_of(sections_of(sources))).text
    assert "line 4 is no JSON object: the file is damaged: the report shows the other lines" in text


@pytest.mark.usefixtures("no_pictures")
def test_a_half_written_record(make_run: Make) -> None:
    folder = make_run()
    text = (folder / "record.jsonl").read_text()
    (folder / "record.jsonl").write_text(text[:-20])
    (run,) = read_sources([folder]).runs
    assert len(run.problems) == 1 and "line 8 is incomplete, as after a crash" in run.problems[0]
    assert not run.final and [line["step"] for line in run.epochs] == [2, 4, 6]
    assert "not ended: step 6 of 6" in Reader(page_with(folder)).text


@pytest.mark.parametrize("value", ["text", [1], {"a": 1}, True, None])
def test_values_of_another_type_lose_only_their_part(value: Any, make_run: Make) -> None:
    folder = make_run("damaged", topology=value, total_steps=value, device=value)
    lines = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line |= {"train_loss": value, "whole": value, "dynamics": value, "flatness": value}
    (folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_with(folder, make_run())
    assert "Accuracy on the evaluation split" in Reader(page).text


def test_a_study_with_verdicts() -> None:
    (section,) = sections_of(read_sources([RESULTS / "mnist-effective-lr"]))
    claims = section.tables[0]
    assert claims.headings[0] == "claim" and "predicate" not in claims.headings
    assert any("holds" in row[-1] for row in claims.rows)
    assert section.charts[0].title == "error_pct"
    assert "published numbers" not in claims.headings, "the document has no such numbers"
    claims_known = json.loads((RESULTS / "mnist-effective-lr" / "manifest.json").read_text())["claims"]
    assert (
        f": {len(claims_known)} claims, " in section.lines[1]
        and "3 with the verdict 'does not hold'" in section.lines[1]
    )


def test_claims_with_published_numbers() -> None:
    (section,) = sections_of(read_sources([RESULTS / "gpu-configs-cifar10"]))
    claims = section.tables[0]
    assert claims.headings[2] == "published numbers"
    assert {row[2].split(" (")[0] for row in claims.rows} <= {"holds", "does not hold", "-"}


def test_studies_that_cannot_be_compared_are_shown_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(RESULTS / "batch-size-cifar10", tmp_path / name)
    manifest = json.loads((tmp_path / "two" / "manifest.json").read_text())
    (tmp_path / "two" / "manifest.json").write_text(json.dumps(manifest | {"question": "What?"}))
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "manifest.json").write_text("{}")
    problems, *sections = sections_of(read_sources([tmp_path / name for name in ("one", "two", "three")]))
    assert len(problems.problems) == 2
    assert "three" in problems.problems[0] and "damaged" in problems.problems[0]
    assert "its question differs from the question of" in problems.problems[1]
    assert len(sections) == 2 and sections[1].lines[0] == "What?"


def test_a_bench_result(tmp_path: Path) -> None:
    write_json(tmp_path / "topology.json", measure(TopologyConfig(world_size=8)))
    (section,) = sections_of(read_sources([tmp_path / "topology.json"]))
    assert section.tables[0].headings[0] == "topology"
    ring = next(chart for chart in section.charts if chart.title.startswith("ring"))
    assert ring.kind == "network" and len(ring.series[0].x) == 3 * 8, "eight edges"
    gaps = dict(zip(section.charts[0].series[0].x, section.charts[0].series[0].y, strict=True))
    assert gaps["complete"] == 1


def test_a_damaged_bench_result(tmp_path: Path) -> None:
    for name, rows, reason in (
        ("unknown", [{"a": 1}], "is not the result of a bench that this version knows"),
        ("damaged", [{"op": "mix"}], "is damaged or of another version (KeyError"),
        ("types", [{"spectral_gap": "x", "topology": 3}], "is damaged or of another version"),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"rows": rows}))
        (section,) = sections_of(read_sources([path]))
        assert reason in section.problems[0] and str(path) in section.problems[0]


def test_missing_libraries(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "ddpcore.report.page")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    error = "ddpcore report: jinja2 is not installed: pip install 'ddpcore[report]'\n"
    assert report(capsys, "x") == (2, "", error)


def result(*folders: Path, by: tuple[str, ...] = ()) -> tuple[Any, list[list[str]]]:
    """The first section, and the first, second and last but one cell of each row of its table."""
    (section, *_) = sections_of(read_sources(folders), by=by)
    return section, [[row[0], row[1], row[-2]] for row in section.tables[0].rows]


FIELDS = {"run": {"steps": 6}, "strategy": {"learners": 2, "name": "dpsgd", "topology": "ring"}}


def config_with(*settings: str) -> dict[str, Any]:
    return TrainConfig.from_dict(merged(FIELDS, parse_settings(settings))).to_dict()


def test_a_batch_that_grows(make_run: Make) -> None:
    """Runs that differ in the growth alone do not look the same."""
    _, rows = result(make_run("grows", config=config_with("data.batch_growth=[[4,256]]")), make_run("stays"))
    assert [row[0] for row in rows] == ["batch_growth=[[4, 256]]", "batch_growth=[]"]


def test_an_option_of_a_part_is_what_differs(make_run: Make) -> None:
    section, rows = result(*(
        make_run(f"p{period}", config=config_with("strategy=local_sgd", f"strategy.period={period}"))
        for period in (4, 16)
    ))  # fmt: skip
    assert [row[0] for row in rows] == ["period=4", "period=16"]
    assert "local_sgd" in section.lines[1] and "period" not in section.lines[1]


def test_a_strategy_without_neighbours_has_no_topology(make_run: Make) -> None:
    _, rows = result(make_run("a"), make_run("b", topology=None, config=config_with("strategy=ssgd")))
    assert [row[0] for row in rows] == ["dpsgd, ring", "ssgd"]


def seeds_of(make_run: Make) -> list[Path]:
    """Three seeds of a config, and two of another one whose runs are all worse."""
    folders = [make_run(f"a{seed}", seed=seed, accuracy=0.6 + 0.1 * seed) for seed in range(3)]
    slow = config_with("optimizer.lr=0.01")
    return folders + [
        make_run(f"b{seed}", accuracy=0.5 + 0.02 * seed, config={**slow, "run": {**slow["run"], "seed": seed}})
        for seed in range(2)
    ]


def test_seeds_are_one_group(make_run: Make) -> None:
    folders = seeds_of(make_run)
    section, rows = result(*folders)
    assert rows == [["lr=0.1", "0.7 ± 0.1", "3"], ["lr=0.01", "0.51 ± 0.014", "2"]], "the best is first"
    assert section.lines[0] == (
        "lr=0.1 has the highest accuracy: 0.7 ± 0.1 (3 runs). Next is lr=0.01: 0.51 ± 0.014 (2 runs); each of its runs "
        "is better than each of theirs."
    )
    assert "ring" in section.lines[1] and "lr=" not in section.lines[1]
    each, where = section.folded
    assert [row[0] for row in each.rows] == ["a0", "a1", "a2", "b0", "b1"]
    assert [row[0] for row in where.rows] == ["all"], "equal machines are one row"
    sections = {one.title: one for one in sections_of(read_sources(folders))}
    loss = sections["Curves"].charts[0].series
    assert [one.name for one in loss] == ["lr=0.1", "lr=0.01"] and [one.color for one in loss] == [0, 1]
    first = loss[0]
    assert first.x == [2, 4, 6] and first.low is not None and first.high is not None
    assert first.y[0] == pytest.approx(0.51) and (first.low[0], first.high[0]) == pytest.approx((0.5, 0.52))
    assert len(sections["Topologies"].charts) == 1, "one drawing of equal topologies"


def test_what_is_named_twice_counts_once(make_run: Make, tmp_path: Path) -> None:
    """By its own name, through a link and inside of a folder, which is read also after a folder that holds it."""
    folders = [make_run(f"a{seed}", seed=seed) for seed in range(2)]
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"rows": []}))
    link = tmp_path / "link"
    link.symlink_to(folders[0])
    twice = [bench, *folders, folders[0] / ".." / "a0", link, tmp_path, RESULTS, RESULTS, tmp_path / "." / "bench.json"]
    sources = read_sources(twice)
    assert ([run.label for run in sources.runs], len(sources.benches)) == (["a0", "a1"], 1)
    assert len(sources.studies) == len(set(sources.studies)) and not sources.problems
    inner = shutil.copytree(folders[0], tmp_path / "more" / "inner").parent
    assert [run.label for run in read_sources([tmp_path, inner, inner]).runs] == ["a0", "a1", "inner"]


def test_runs_that_diverged_or_have_no_number_do_not_count(make_run: Make) -> None:
    """The mean is that of the others, with their number where it is smaller than that of the runs."""
    folders = seeds_of(make_run)
    record = folders[0] / "record.jsonl"
    first, *lines = map(json.loads, record.read_text().splitlines())
    lines[-1] |= {"diverged": True, "accuracy": 0.99}
    record.write_text("".join(json.dumps(line) + "\n" for line in [first, *lines]))
    left = [json.loads(one.joinpath("record.jsonl").read_text().splitlines()[-1])["accuracy"] for one in folders[1:3]]
    section, rows = result(*folders)
    name = f"{sum(left) / 2:.4g}"
    assert rows[0][1].startswith(name) and rows[0][1].endswith(" (n=2)") and rows[0][2] == "3"
    assert f"lr=0.1 has the highest accuracy: {name}" in section.lines[0] and "(2 runs)" in section.lines[0]
    assert "Diverged: 1 of 3 runs of lr=0.1." in section.lines
    assert section.folded[0].rows[0][3] == "diverged" and "0.99" in section.folded[0].rows[0]
    section, rows = result(folders[0])
    assert rows[0][1] == "-" and section.lines[0] == "Diverged: 1 of 1 runs of a0."


def test_fields_that_change_no_result_do_not_tell_runs_apart(make_run: Make) -> None:
    """All of them, such as the timeout, and what a run saves."""
    others = {
        "strategy.timeout": 9.0, "run.save_nonfinite": True, "run.keep_last": 7, "run.keep_best": True,
        "data.data_dir": "elsewhere", "run.checkpoint_every": 3, "run.record_steps": True, "data.download": True,
        "strategy.learners_at_once": 1,
    }  # fmt: skip
    assert set(others) == set(BOOKKEEPING)
    folders = [make_run(f"run-{name}") for name in (*others, "other")]
    runs = read_sources(folders).runs
    for run, (field, value) in zip(runs, others.items(), strict=False):
        put(run.header["config"], field, value)
    assert len(grouped(runs)) == 1
    put(runs[-1].header["config"], "data.accumulation", 2)
    assert [group.name for group in grouped(runs)] == ["accumulation=1", "accumulation=2"]


def test_a_run_of_version_0_2_is_in_one_group_with_a_run_of_today(make_run: Make) -> None:
    """It lacks the fields that came later, which have their defaults in the other run, and are no options of a part."""
    folders = [make_run("today"), make_run("before")]
    runs = read_sources(folders).runs
    config = runs[1].header["config"]
    new = [key for key in dotted(config) if key not in KEYS_0_2.values()]
    for key in new:
        section, _, field = key.partition(".")
        del config[section][field]
    assert len(grouped(runs)) == 1
    assert new and not any(key.partition(".")[2] in constants([config_of(run) for run in runs]) for key in new)


def test_groups_by_a_field(make_run: Make) -> None:
    folders = seeds_of(make_run)
    _, rows = result(*folders, by=("strategy",))
    assert [row[0] for row in rows] == ["dpsgd"] and rows[0][2] == "5"
    with pytest.raises(ValueError, match=r"--by nothing: no run has this field: those that differ are optimizer.lr"):
        result(*folders, by=("nothing",))


@pytest.mark.slow
def test_figures(make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        out = ("--out", tmp_path / "r.html", "--figures", tmp_path / f"figures{number}")
        code, text, _ = report(capsys, *(seeds_of(make_run) if not number else [tmp_path / "a0"]), *out)
        assert code == 0 and "charts as PDF, SVG and CSV" in text
    folder = tmp_path / "figures0"
    lines = (folder / "training-loss-over-steps.csv").read_text().splitlines()
    assert lines[0] == "series,x,y,low,high" and lines[1].startswith("lr=0.1,2.0,0.51,0.5,0.52")
    assert (folder / "training-loss-over-steps.pdf").read_bytes().startswith(b"%PDF")
    assert "<svg" in (folder / "training-loss-over-steps.svg").read_text()
    assert {path.suffix for path in folder.iterdir()} == {".pdf", ".svg", ".csv"}


def test_no_waits_of_one_process_and_no_rounding(make_run: Make, recorded_steps: Any) -> None:
    folders = [make_run("alone", steps={0: recorded_steps[0]}), make_run("b", config=config_with("strategy=ssgd"))]
    lines = [json.loads(line) for line in (folders[1] / "record.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(line | {"consensus_distance": 1e-9}) + "\n" for line in lines)
    (folders[1] / "record.jsonl").write_text(text)
    sections = {one.title: one for one in sections_of(read_sources(folders))}
    assert not [title for title in sections if title.startswith("Who waits")]
    consensus = sections["Curves"].charts[-1]
    assert [one.name for one in consensus.series] == ["dpsgd"] and "below 1e-05 of the largest: ssgd" in consensus.note
