"""``train`` on real ranks: one file per rank, and the same bits after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpcore.training import train
from helpers import images as helper
from helpers import ranks

TIMES = ("seconds", "samples_per_s", "evaluation_seconds", "total_seconds")


FAST = ("ssgd", "stale", "process group", "plain", "watched")


def runs(*names: str) -> list[Any]:
    """Those that ``make test`` leaves out are slow."""
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Of all runs, or of the fast ones, as they are selected."""
    names = () if ranks.has_slow_items(request) else FAST
    return ranks.run("train_ranks", 2, timeout=900, more=[names] * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", runs(*helper.STRATEGIES, "ddp", "process group", "two each", "watched", *helper.GROWTHS)
)
def test_the_same_bits(name: str, seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        through, resumed = rank[name]["contents"]
        assert sorted(through) == ["model.safetensors", "rank-0.safetensors", "rank-1.safetensors"]
        assert [file for file in through if through[file] != resumed[file]] == []
        assert through["rank-0.safetensors"] != through["rank-1.safetensors"]
        rows = [
            [{key: value for key, value in row.items() if key not in TIMES} for row in [*record.epochs, record.final]]
            for record in (rank[name]["through"], rank[name]["resumed"])
        ]
        assert rows[0] == rows[1]
        assert rank[name]["through"] == seen[0][name]["through"], "every rank returns the record"
        assert rank[name]["through"].header["ranks"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", runs(*helper.STRATEGIES, "ddp", "two each", "plain"))
def test_ranks_score_the_whole_split(name: str, seen: list[dict[str, Any]]) -> None:
    """Each rank evaluates a part of it. One process gets the same accuracy with the model that the run has written."""
    assert seen[0][name]["through"].final["accuracy"] == pytest.approx(seen[0][name]["accuracy"])


@pytest.mark.slow
def test_ddp_on_three_ranks() -> None:
    """With three ranks the order of the sum changes its bits; DDP changes the order after its first backward pass."""
    for rank in ranks.run("train_ranks", 3):
        through, resumed = rank["ddp"]["contents"]
        assert sorted(through) == ["model.safetensors", *(f"rank-{number}.safetensors" for number in range(3))]
        assert [file for file in through if through[file] != resumed[file]] == []


@pytest.mark.slow
def test_statistics_beside_training(seen: list[dict[str, Any]], tmp_path: Path) -> None:
    """They change no weight. Those of virtual learners differ by rounding only; those of a resumed run are equal."""
    virtual = train(helper.config(helper.WATCHED), out=tmp_path, dataset=helper.images())
    for rank in seen:
        contents = [rank[name]["contents"][0]["model.safetensors"] for name in ("plain", "watched")]
        assert contents[0] == contents[1]
        through, resumed = (
            [{key: value for key, value in line.items() if key not in ("seconds", "share")} for line in one.statistics]
            for one in (rank["watched"]["through"], rank["watched"]["resumed"])
        )
        assert through == resumed
        assert [line["step"] for line in through] == [2, 4, 6]
        for ours, theirs in zip(through, virtual.statistics, strict=True):
            for name in ("full_loss", "effective_lr", "noise", "grad_squared"):
                assert ours["dynamics"][name] == pytest.approx(theirs["dynamics"][name], rel=1e-3), name
        through, resumed = (
            [{**line, "seconds": 0} for line in one.hessian]
            for one in (rank["watched"]["through"], rank["watched"]["resumed"])
        )
        assert through == resumed
        assert [line["step"] for line in through] == [3, 6]
        for ours, theirs in zip(through, virtual.hessian, strict=True):
            for name in ("largest", "disagreement", "noise_shares", "noise"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-2), name
        flat = rank["watched"]["through"].final["flatness"]
        assert flat["relative_trace"] == pytest.approx(virtual.final["flatness"]["relative_trace"], rel=1e-3)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all(seen: list[dict[str, Any]]) -> None:
    """At the first check of the loss, after step 1. The resumed run ends like a run that was not stopped."""
    for rank in seen:
        assert "after step 1 of 6 and saved" in rank["interrupted"]["message"]
        assert rank["interrupted"]["record"].final["step"] == 6
        assert rank["interrupted"]["model"] == rank["ssgd"]["contents"][0]["model.safetensors"]


@pytest.mark.slow
def test_statistics_of_several_learners_on_each_rank(seen: list[dict[str, Any]]) -> None:
    assert [rank["statistics"] for rank in seen] == [[1.5]] * 2
