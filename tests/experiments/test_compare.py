"""``compare`` on made-up results, and ``list``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpcore.experiments.compare import compare
from ddpcore.records.study import Folder

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(main: Main, tiny: Path, tmp_path: Path) -> Folder:
    """A manifest of all rows, with made-up results."""
    out = Folder(tmp_path / "out")
    words = ("run", tiny, "--out", out.path, "--seeds", 1, "--set", "run.device=cpu")
    assert main(*words, "--rows", "a")[0] == 0
    assert main(*words, "--resume")[0] == 0
    result = out.results()["a", 0]
    lines = [
        *(made_up(result, "a", seed, loss) for seed, loss in enumerate((1.0, 2.0, 6.0))),
        made_up(result, "b", 0, 2.5),
        made_up(result, "b", 1, None) | {"diverged": True},
        {"row": "b", "seed": 2, "status": "failed", "error": "ValueError: gone", "metrics": {}, "diverged": False},
    ]
    (out.path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def made_up(result: dict[str, Any], row: str, seed: int, loss: float | None) -> dict[str, Any]:
    return {**result, "row": row, "seed": seed, "metrics": {**result["metrics"], "train_loss": loss}}


def test_numbers(folder: Folder) -> None:
    (result,) = compare([folder.path])
    lines = {line["row"]: line for line in result["lines"]}
    assert lines["a"]["published"] == 0.7
    (measured,) = lines["a"]["measured"]
    assert (measured["mean"], measured["min"], measured["max"], measured["num_seeds"]) == (3.0, 1.0, 6.0, 3)
    assert measured["std"] == pytest.approx(7**0.5)
    (measured,) = lines["b"]["measured"]
    assert (measured["mean"], measured["std"]) == (2.5, None)
    assert (measured["num_seeds"], measured["num_diverged"], measured["num_failed"]) == (1, 1, 1)
    assert (lines["ssgd"]["published"], lines["ssgd"]["measured"]) == (None, [None])


def test_folders_of_one_study_and_scale_are_one(folder: Folder, tmp_path: Path) -> None:
    """Verdicts see the rows and seeds of both. A run that both have, or another setting, keeps them apart."""
    other = Folder(tmp_path / "other")
    shutil.copytree(folder.path, other.path)
    result = folder.results()["a", 0]
    lines = [made_up(result, "a", 7, 9.0), made_up(result, "ssgd", 7, 1.0)]
    (other.path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (merged,) = compare([folder.path, other.path])
    assert [run["name"] for run in merged["runs"]] == [f"{folder.path} + {other.path}"]
    rows = {line["row"]: line["measured"] for line in merged["lines"]}
    assert [cell["num_seeds"] for cell in rows["a"]] == [4]
    assert [cell["num_seeds"] for cell in rows["ssgd"]] == [1]
    assert all(len(claim["verdicts"]) == 1 for claim in merged["claims"])

    (other.path / "results.jsonl").write_text(json.dumps(made_up(result, "a", 2, 9.0)) + "\n")
    assert len(compare([folder.path, other.path])[0]["runs"]) == 2
    (other.path / "results.jsonl").write_text(json.dumps(made_up(result, "a", 7, 9.0)) + "\n")
    manifest = json.loads((other.path / "manifest.json").read_text())
    for change in ({"set": {"optimizer.lr": 0.3}}, {"scale": "cpu"}):
        (other.path / "manifest.json").write_text(json.dumps(manifest | change))
        assert len(compare([folder.path, other.path])[0]["runs"]) == 2
    manifest["rows"]["a"]["config"]["optimizer"]["lr"] = 0.3
    (other.path / "manifest.json").write_text(json.dumps(manifest))
    assert len(compare([folder.path, other.path])[0]["runs"]) == 2


def test_verdicts(folder: Folder) -> None:
    """A claim is not judged if a row was not run or a seed diverged. Published numbers are judged separately."""
    (result,) = compare([folder.path])
    first, second = result["claims"]
    assert first["on_published"]["word"] == "holds"
    assert first["verdicts"][0]["word"] == "not run"
    assert "b: it diverged" in first["verdicts"][0]["reason"]
    assert second["on_published"]["word"] == "not run"
    assert second["verdicts"][0] == {"word": "not run", "reason": "no finished run of ssgd"}
    lines = (folder.path / "results.jsonl").read_text().splitlines()
    (folder.path / "results.jsonl").write_text("\n".join([*lines[:4], lines[5]]) + "\n")
    assert compare([folder.path])[0]["claims"][0]["verdicts"][0]["word"] == "holds, within the spread", (
        "a failed seed does not count"
    )


CLAIM = {"text": "b is fast", "source": "us", "predicate": 'min("b") > 0 and min("a") > 0'}


def crowd(folder: Path, claims: list[dict[str, Any]], ranks: int, hosts: int = 1, **line: Any) -> None:
    """Replace the claims, say how many ranks b had, and give the results of seed 0 what a line needs for it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("checksum", None)
    manifest["claims"] = claims
    manifest["rows"]["b"] |= {"ranks": ranks, "hosts": hosts}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    results = [json.loads(text) for text in (folder / "results.jsonl").read_text().splitlines()]
    lines = [{**result, **line} for result in results if result["seed"] == 0]
    (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def verdicts_of(*folders: Path) -> list[list[tuple[str, str]]]:
    (result,) = compare(folders)
    return [[(one["word"], one["reason"]) for one in claim["verdicts"]] for claim in result["claims"]]


def test_speed_of_ranks_that_share_cores_is_void(folder: Folder) -> None:
    """Only of claims that are about it, and only of rows with more ranks than cores."""
    marked = CLAIM | {"a_core_per_rank": True}
    claims = [CLAIM | {"text": "b is"}, marked, marked | {"predicate": 'min("ssgd") > 0'}]
    holds, not_run = [("holds", "n=1")], [("not run", "no finished run of ssgd")]
    crowd(folder.path, claims, ranks=3, cores=3)
    assert verdicts_of(folder.path) == [holds, holds, not_run]
    crowd(folder.path, claims, ranks=3, cores=2)
    assert verdicts_of(folder.path) == [holds, [("void", "3 ranks shared 2 cores")], not_run]
    crowd(folder.path, claims, ranks=2, cores=1)
    assert verdicts_of(folder.path)[1] == [("void", "2 ranks shared 1 core")]


def test_a_rank_in_a_namespace_has_the_cores_of_its_host(folder: Folder) -> None:
    claims = [CLAIM | {"a_core_per_rank": True}]
    namespaces = "4 processes of one machine, in 2 network namespaces that stand for hosts"
    crowd(folder.path, claims, ranks=4, hosts=2, cores=2, place=namespaces)
    assert verdicts_of(folder.path) == [[("holds", "n=1")]]
    crowd(folder.path, claims, ranks=4, hosts=2, cores=1, place=namespaces)
    assert verdicts_of(folder.path) == [[("void", "2 ranks of each host shared 1 core")]]
    crowd(folder.path, claims, ranks=4, hosts=2, cores=1, place="4 processes on 2 hosts")
    assert verdicts_of(folder.path) == [[("void", "2 ranks of each host shared 1 core")]]
    crowd(folder.path, claims, ranks=4, hosts=2, cores=2, place="4 processes on 2 hosts")
    assert verdicts_of(folder.path) == [[("holds", "n=1")]]
    crowd(folder.path, claims, ranks=4, hosts=2, cores=2, place="4 processes of one machine, in 2 groups")
    assert verdicts_of(folder.path) == [[("void", "4 ranks shared 2 cores")]]


def test_each_folder_has_its_own_ranks(folder: Folder, tmp_path: Path) -> None:
    """And a claim that an older folder has without the key is still one claim."""
    crowd(folder.path, [CLAIM], ranks=4, cores=2)
    other = shutil.copytree(folder.path, tmp_path / "other")
    crowd(other, [CLAIM | {"a_core_per_rank": True}], ranks=0, cores=2)
    void, holds = ("void", "4 ranks shared 2 cores"), ("holds", "n=1")
    assert verdicts_of(folder.path, other) == [[void, holds]]
    assert verdicts_of(other, folder.path) == [[holds, void]]


def test_other_ranks_keep_folders_apart(folder: Folder, tmp_path: Path) -> None:
    """Their seeds in one column would have the verdict of the ranks of one of them, whichever is named first."""
    crowd(folder.path, [CLAIM | {"a_core_per_rank": True}], ranks=4, cores=2)
    other = Folder(shutil.copytree(folder.path, tmp_path / "other"))
    manifest = json.loads((other.path / "manifest.json").read_text())
    results = [line | {"seed": 1} for line in other.results().values()]
    (other.path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results))
    void, holds = ("void", "4 ranks shared 2 cores"), ("holds", "n=1")
    assert verdicts_of(folder.path, other.path) == verdicts_of(other.path, folder.path) == [[void]]
    for change, verdict in (({"ranks": 0}, holds), ({"hosts": 2}, holds), ({"kill_rank": 1}, void)):
        rows = manifest["rows"] | {"b": manifest["rows"]["b"] | change}
        (other.path / "manifest.json").write_text(json.dumps(manifest | {"rows": rows}))
        assert verdicts_of(folder.path, other.path) == [[void, verdict]]
        assert verdicts_of(other.path, folder.path) == [[verdict, void]]


def test_two_runs_of_one_study_are_compared(main: Main, tiny: Path, folder: Folder, tmp_path: Path) -> None:
    other, picture = tmp_path / "other", tmp_path / "other.svg"
    assert main("run", tiny, "--out", other, "--rows", "ssgd", "--scale", "smoke", "--plot", picture)[0] == 0
    assert "<!-- ssgd" in picture.read_text()
    (result,) = compare([folder.path, other])
    lines = {line["row"]: line for line in result["lines"]}
    assert lines["a"]["measured"][1] is None
    assert lines["ssgd"]["measured"][0] is None
    assert lines["ssgd"]["measured"][1]["num_seeds"] == 1
    assert [verdict["word"] for verdict in result["claims"][1]["verdicts"]] == ["not run", "holds"]


def test_each_folder_has_its_own_configs(folder: Folder, tmp_path: Path) -> None:
    """A published number has that of the scale full without --set, wherever it is named; rows keep their order."""
    paths = []
    for place, (scale, settings) in enumerate([("smoke", {}), ("full", {"optimizer.lr": 1.0}), ("full", {})]):
        paths.append(shutil.copytree(folder.path, tmp_path / str(place)))
        manifest = json.loads((paths[-1] / "manifest.json").read_text()) | {"scale": scale, "set": settings}
        manifest.pop("checksum", None)
        manifest["rows"]["b"]["config"]["optimizer"]["lr"] = 1.0 * place
        if place:
            manifest["rows"]["extra"] = manifest["rows"].pop("a")
        (paths[-1] / "manifest.json").write_text(json.dumps(manifest))
    for order, nearest in (([0, 1, 2], 2), ([2, 1, 0], 2), ([0, 1], 1), ([0], 0)):
        (result,) = compare([paths[place] for place in order])
        assert [configs["b"]["optimizer"]["lr"] for configs in result["configs"]] == order
        (line,) = [line for line in result["lines"] if line["row"] == "b"]
        assert line["config"]["optimizer"]["lr"] == nearest
    (result,) = compare(paths)
    assert [line["row"] for line in result["lines"]] == ["a", "b", "ssgd", "extra"]


def test_notes_and_claims_of_all_folders_appear_once(main: Main, tiny: Path, folder: Folder, tmp_path: Path) -> None:
    """A folder of an older version of the study keeps the notes and claims of that version."""
    other = tmp_path / "other"
    assert main("run", tiny, "--out", other, "--rows", "a", "--seeds", 1)[0] == 0
    manifest = json.loads((other / "manifest.json").read_text())
    more = {"text": "a is small", "source": "us", "predicate": 'mean("a") < 1'}
    manifest |= {"notes": ["older"], "claims": [*manifest["claims"][1:], more]}
    (other / "manifest.json").write_text(json.dumps(manifest))
    (result,) = compare([folder.path, other])
    assert result["notes"] == ["older"]
    assert [claim["text"] for claim in result["claims"]] == ["a is above b", "ssgd does not diverge", "a is small"]
    for name, value in (("question", "What?"), ("metrics", ["accuracy_pct"])):
        (other / "manifest.json").write_text(json.dumps(manifest | {name: value}))
        code, _, error = main("compare", folder.path, other)
        assert code == 2 and f"its {name} differs from the {name} of" in error


def test_published_numbers_that_were_corrected(main: Main, tiny: Path, tmp_path: Path) -> None:
    """A resumed folder has the corrected numbers of all rows; folders with different numbers are not compared."""
    out, old = tmp_path / "out", tmp_path / "old"
    assert main("run", tiny, "--out", out, "--rows", "a", "--seeds", 1)[0] == 0
    assert main("run", tiny, "--out", old, "--rows", "b", "--seeds", 1)[0] == 0
    tiny.write_text(tiny.read_text().replace("train_loss = 0.7", "train_loss = 0.5"))
    assert main("run", tiny, "--out", out, "--rows", "b", "--seeds", 1, "--resume")[0] == 0
    (result,) = compare([out])
    assert {line["row"]: line["published"] for line in result["lines"]} == {"a": 0.5, "b": 0.6}
    assert result["claims"][0]["on_published"]["word"] == "does not hold"
    code, _, error = main("compare", out, old)
    assert code == 2 and "row a has other published numbers than in" in error


def test_the_command(main: Main, folder: Folder) -> None:
    page = folder.path / "page.md"
    code, out, error = main("compare", folder.path, "--markdown", page)
    assert (code, error) == (0, "")
    assert "not run" in out
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.read_text().splitlines()]
    assert ["a", "train_loss", "0.7", "3 ± 2.6 [1, 6] n=3"] in cells
    assert ["b", "train_loss", "0.6", "2.5 n=1 1 diverged 1 failed"] in cells
    assert ["ssgd", "train_loss", "-", "not run"] in cells
    assert "row b, seed 2 failed: ValueError: gone" in page.read_text()
    assert "Nobody, Table 1" in page.read_text()


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plots(suffix: str, magic: bytes, main: Main, folder: Folder) -> None:
    pytest.importorskip("matplotlib")
    plot, page = folder.path / f"plot.{suffix}", folder.path / "page.md"
    code, out, _ = main("compare", folder.path, "--plot", plot, "--markdown", page)
    assert code == 0 and out.endswith(f"wrote {plot}\nwrote {page}\n")
    assert plot.read_bytes().startswith(magic)
    assert f"(plot.{suffix})" in page.read_text()


def watched(seed: int, steps: list[int]) -> dict[str, list[float]]:
    numbers = [float(seed + step) for step in steps]
    return {"step": list(map(float, steps)), "effective_lr": numbers, "loss": numbers, "noise": numbers}


def test_curves_of_some_rows(main: Main, folder: Folder) -> None:
    """One of two rows has curves, and one of its seeds ended earlier."""
    results = folder.results()
    lines = [
        results["a", 0] | {"curves": watched(0, [5, 10])},
        results["a", 1] | {"curves": watched(1, [5])},
        results["b", 0] | {"curves": {}},
    ]
    (folder.path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (result,) = compare([folder.path])
    assert result["curves"] == [{"a": [watched(0, [5, 10]), watched(1, [5])]}]
    pytest.importorskip("matplotlib")
    plots = [folder.path / "curves.svg", folder.path / "none.svg"]
    assert main("compare", folder.path, "--plot", plots[0])[0] == 0
    (folder.path / "results.jsonl").write_text(json.dumps(lines[2]) + "\n")
    assert main("compare", folder.path, "--plot", plots[1])[0] == 0
    axes = [plot.read_text().count('<g id="axes_') for plot in plots]
    assert axes == [4, 1], "three panels below the rows, or none"


def test_lists(main: Main, tiny: Path) -> None:
    code, out, _ = main("list")
    assert code == 0 and "lr-sweep-synthetic" in out and "large-batch-cifar100" in out
    code, out, _ = main("list", tiny)
    assert code == 0 and "train_loss 0.6" in out and "ssgd" in out
