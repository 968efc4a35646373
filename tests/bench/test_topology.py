"""``ddpcore bench topology``: output, errors and its JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpcore import TOPOLOGIES, Hierarchical
from ddpcore.bench import __main__ as bench
from ddpcore.bench.topology import MANY, TopologyConfig, measure
from ddpcore.storage.json_lines import to_json
from ddpcore.topology.describe import describe, edges_of


def run(line: str, folder: Path) -> dict[str, Any]:
    assert bench.main([*line.split(), "--json", str(folder / "out.json")]) == 0
    result = json.loads((folder / "out.json").read_text())
    assert {entry.name for entry in folder.iterdir()} == {"out.json"}
    return result


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert bench.main(["topology", "--world-size", "4", "--plot", str(tmp_path / "out.svg")]) == 0
    assert "<!-- ring, spectral gap 0.6667 -->" in (tmp_path / "out.svg").read_text()


@pytest.mark.parametrize("line", ["topology", "topology all", "topology --world-size 8"])
def test_all_names_at_once(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(line, tmp_path)
    assert set(result) - {"checksum"} == {"environment", "world_size", "seed", "local_size", "rows", "refused"}
    assert [row["topology"] for row in result["rows"]] == list(TOPOLOGIES.names())
    assert result["refused"] == []
    for row in result["rows"]:
        built = TOPOLOGIES.build(row["topology"])
        assert row == to_json({"topology": row["topology"], **to_json(describe(built, 8)), "edges": edges_of(built, 8)})
        assert len(row["edges"]) == row["num_edges"]
    text = capsys.readouterr().out
    assert all(name in text for name in TOPOLOGIES.names())


def test_one_name_and_its_options(tmp_path: Path) -> None:
    result = run("topology hierarchical --world-size 24 --local-size 6 --seed 3", tmp_path)
    (row,) = result["rows"]
    edges = to_json(edges_of(Hierarchical(6), 24))
    assert row == {"topology": "hierarchical", **to_json(describe(Hierarchical(6), 24)), "edges": edges}
    assert (result["world_size"], result["local_size"], result["seed"]) == (24, 6, 3)
    seeds = [measure(TopologyConfig(name="random_pair", world_size=64, seed=seed))["rows"] for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1]
    assert seeds[0][0]["num_edges"] != seeds[2][0]["num_edges"]


def test_a_warning_comes_before_a_long_computation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for num_learners, says in ((MANY, ""), (MANY + 2, "2,050 learners may take minutes: take fewer")):
        (row,) = run(f"topology ring --world-size {num_learners}", tmp_path)["rows"]
        assert row["num_learners"] == num_learners
        errors = capsys.readouterr().err
        assert errors.startswith(says) and errors.count("\n") == bool(says)


def test_topologies_that_do_not_fit_are_listed_below_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run("topology --world-size 7", tmp_path)
    assert [entry["topology"] for entry in result["refused"]] == ["torus_2d", "hypercube", "hierarchical"]
    assert len(result["rows"]) == len(TOPOLOGIES.names()) - 3
    text = capsys.readouterr().out
    for entry in result["refused"]:
        assert f"{entry['topology']}: {entry['reason']}" in text


REFUSED = [
    ("topology rnig", "unknown topology 'rnig': did you mean 'ring'?"),
    ("topology qqq", "unknown topology 'qqq': choose from complete"),
    ("topology hypercube --world-size 12", "Hypercube: 12 learners are no power of two: take 16"),
    ("topology ring star", "unrecognized arguments: star"),
    ("topology ring --world-size 0", "--world-size is 0: it must be at least 1"),
    ("topology ring --local-size 0", "--local-size is 0"),
    ("topology ring --seed -1", "--seed is -1"),
    ("topology ring --json nowhere/out.json", "does not exist"),
    ("topology ring --steps 3", "--steps"),
    ("optim --models lenet5", "optim is a script of the sources now: run python benchmarks/bench_optim.py"),
    ("topologies", "unknown command 'topologies': choose from buckets, comm, demo, doctor, predict"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refused(line: str, says: str, refused: Callable[[str, str], None]) -> None:
    refused(line, says)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(["topology", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for part in ("[NAME]", "one_peer_exponential", "--world-size", "--seed", "--local-size", "--json"):
        assert part in text
