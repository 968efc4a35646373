"""``ddpcore bench buckets``: sizes, rows, recommendations, errors and its JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from ddpcore.bench import __main__ as bench
from ddpcore.bench import buckets
from ddpcore.bench.buckets import BucketsConfig, overlap_pct, recommend, row_of
from ddpcore.bench.contender import Contender, parse_sizes
from ddpcore.display import chart
from ddpcore.models import MODELS
from ddpcore.runtime import launch, machine
from helpers import ranks
from helpers.drawn import words_drawn

MiB = 2**20
ROW = {
    "strategy", "bucket_mb", "same_buckets_mb", "num_buckets", "bucket_bytes", "num_sent", "sent_bytes", "step_ms",
    "comm_ms", "exposed_comm_ms", "overlap_pct",
}  # fmt: skip


def seen(bucket_mb: float, seconds: list[float], *, strategy: str = "ssgd", also: tuple[float, ...] = ()) -> dict:
    return {
        "strategy": strategy,
        "bucket_mb": bucket_mb,
        "same_buckets_mb": list(also),
        "num_buckets": 2,
        "bucket_bytes": [MiB, 2 * MiB],
        "num_sent": 1,
        "sent_bytes": [3 * MiB],
        "step_ms": {"p20": 1.0, "p50": 2.0, "p80": 3.0},
        "comm_ms": 4.0,
        "round_seconds": seconds,
    }


def test_sizes() -> None:
    assert parse_sizes(["0.25", "25", "one"]) == [0.25, 25.0, math.inf]
    assert BucketsConfig(bucket_mb=("one", "5", "1")).all_sizes() == [1, 5, 25, math.inf], "the default takes part"
    assert BucketsConfig().all_sizes() == [0.25, 1, 5, 10, 25, 50, 100, math.inf]
    for name in ("0", "-1", "inf", "nan", "all", ""):
        with pytest.raises(ValueError, match="--bucket-mb"):
            parse_sizes([name])


def test_a_margin_beyond_noise_is_recommended() -> None:
    """The machine slows down from round to round, which does not affect paired differences."""
    default = [1.0, 1.5, 2.0, 2.5, 3.0]
    fast = [second - 0.5 for second in default]
    found = recommend("ssgd", [seen(1, fast), seen(25, default), seen(5, [0.0] * 5, strategy="ddp")])
    assert found == {
        "strategy": "ssgd",
        "bucket_mb": 1,
        "fastest_mb": 1,
        "default_mb": 25.0,
        "margin_pct": 25.0,
        "noise_pct": 0.0,
        "beyond_noise": True,
        "rounds": 5,
    }


def test_a_margin_within_noise_is_not() -> None:
    """Faster by 10 % in the median, but slower by 10 % in some rounds."""
    default = [1.0] * 5
    found = recommend("ssgd", [seen(1, [0.9, 1.1, 0.9, 1.1, 0.8]), seen(25, default)])
    assert found["margin_pct"] == pytest.approx(10)
    assert found["noise_pct"] == pytest.approx(22), "linear between 10 and 20 %, and -10 %"
    assert (found["bucket_mb"], found["fastest_mb"], found["beyond_noise"]) == (25.0, 1, False)


def test_the_default_can_be_the_fastest_under_another_name() -> None:
    """A small model: 25 MiB builds the same buckets as 5 MiB."""
    found = recommend("ssgd", [seen(1, [2.0] * 3), seen(5, [1.0] * 3, also=(10, 25))])
    assert (found["bucket_mb"], found["fastest_mb"], found["margin_pct"]) == (25.0, 25.0, 0.0)
    assert not found["beyond_noise"]


def test_rows() -> None:
    """Two steps per turn: 1, 2 and 4 ms of communication per step are exposed; the median is 2 of 4 ms."""
    row = row_of(seen(5, [0.012, 0.014, 0.018], also=(10, math.inf)), [0.010, 0.010, 0.010], 2)
    assert set(row) == ROW
    assert row["exposed_comm_ms"] == pytest.approx(2)
    assert row["overlap_pct"] == pytest.approx(50)
    assert row_of(seen(5, [0.008]), [0.010], 2)["exposed_comm_ms"] == 0.0, "never negative"


def test_overlap() -> None:
    assert [overlap_pct(4, exposed) for exposed in (0, 1, 4, 9)] == [100, 75, 0, 0]
    assert overlap_pct(0, 0) == 100, "one rank does not communicate"


REFUSED = [
    ("--strategies dpsgd", "--strategies: dpsgd averages no gradients, so it has no buckets: leave it out"),
    ("--strategies helpers.own_parts:Quiet", "Quiet has no option bucket_cap_mb: leave it out"),
    ("--strategies ssgd,ssgd", "--strategies names one twice"),
    ("--bucket-mb 0", "'0' is not a size"),
    ("--bucket-mb 1,x", "'x' is not a size"),
    ("--bucket-mb 1,1.0", "--bucket-mb has a size twice"),
    ("--rounds 0", "--rounds is 0"),
    ("--steps 0", "--steps is 0"),
    ("--world-size 0", "--world-size is 0"),
    ("--world-size 1", "communication needs two ranks"),
    ("data.batch_size=3", "batch size 3"),
    ("model=vgg", "model: unknown model 'vgg'"),
    ("model=mlp model.width=3", "model mlp has no option 'width'"),
    ("model=mlp model.hidden", "model.hidden: write KEY=VALUE, such as"),
    ("strategy.transport=tcp", "strategy.transport is 'tcp'"),
    ("strategy.transport=ipc", "transport ipc is for cuda"),
    ("run.device=cuda", "run.device=cuda"),
    ("--json nowhere/out.json", "--json: the folder"),
    ("--plot nowhere/out.png", "--plot: the folder"),
    ("--plot out.jpg", "ends in neither .png nor .svg"),
    ("--topology ring", "--topology"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refused(line: str, says: str, refused: Callable[[str, str], None]) -> None:
    refused(f"buckets {line}", says)


@pytest.mark.usefixtures("no_launch")
def test_missing_packages_and_memory_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chart, "find_spec", lambda name: None)
    assert bench.main(["buckets", "--plot", "out.png"]) == 2
    assert "pip install 'ddpcore[report]'" in capsys.readouterr().err
    monkeypatch.setattr(machine, "free_memory", lambda device: 1e6)
    assert bench.main(["buckets"]) == 2
    assert "name fewer sizes with --bucket-mb" in capsys.readouterr().err
    assert bench.main(["predict"]) == 2
    assert "name fewer --topology or --bucket-mb" in capsys.readouterr().err


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("command", ["buckets", "comm", "predict"])
@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (launch.RankFailed("rank 1 failed"), 1)])
def test_exit_codes(command: str, error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(launch, "run", fail)
    monkeypatch.setattr(machine, "free_memory", lambda device: math.inf)  # whatever else runs on this machine
    assert bench.main([command]) == code


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("command", ["buckets", "comm", "predict"])
def test_a_rank_of_torchrun_names_itself(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench.main([command, "--world-size", "0"]) == 2
    assert capsys.readouterr().err == f"ddpcore bench {command}, rank 1: --world-size is 0: it must be at least 1\n"


def test_warm_ups_report_their_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large model they take minutes. Each size counts, also one whose buckets exist already."""
    monkeypatch.setattr(Contender, "build", Mock())
    monkeypatch.setattr(buckets, "bucket_bytes", lambda contender: [MiB])
    config, progress = BucketsConfig(bucket_mb=("1", "5", "one")), Mock()
    (candidate,) = buckets._candidates("ssgd", config, Mock(), Mock(), Mock(), progress)
    assert candidate.same_mb == [5, 25, math.inf]
    assert progress.advance.call_args_list == [call(1, "ssgd")] * 4


def test_two_ranks(tmp_path: Path) -> None:
    """The buckets of each size are reported; sizes that build the same buckets are measured once."""
    line = "buckets --world-size 2 model=mlp model.hidden=[160,100,20] --bucket-mb 0.05,10,one"
    line += " data.batch_size=8 --rounds 2 --steps 1"
    words = ("-m", "ddpcore.bench", *line.split(), "--json", "out.json")
    done = ranks.python(*words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert set(result) - {"checksum"} == {
        "environment", "model", "world_size", "batch_size", "rounds", "rows", "recommended",
    }  # fmt: skip
    numel = sum(parameter.numel() for parameter in MODELS.build("mlp", hidden=(160, 100, 20)).parameters())
    rows: dict[str, list[dict[str, Any]]] = {"ddp": [], "ssgd": []}
    for row in result["rows"]:
        assert set(row) == ROW
        assert len(row["bucket_bytes"]) == row["num_buckets"]
        assert len(row["sent_bytes"]) == row["num_sent"] <= row["num_buckets"]
        assert sum(row["sent_bytes"]) == sum(row["bucket_bytes"])
        assert row["comm_ms"] > 0
        assert row["exposed_comm_ms"] >= 0
        assert 0 <= row["overlap_pct"] <= 100
        rows[row["strategy"]].append(row)
    for row in rows["ddp"]:
        assert sum(row["bucket_bytes"]) == 4 * numel
        assert row["sent_bytes"] == row["bucket_bytes"]
    assert rows["ssgd"][0]["num_sent"] < rows["ssgd"][0]["num_buckets"], "the first matrix is larger than a bucket"
    for row in rows["ssgd"]:
        assert 4 * numel <= sum(row["bucket_bytes"]) < 4 * (numel + 16 * 20), "with padding"
        assert all(size % 64 == 0 for size in row["bucket_bytes"])
    for found in rows.values():
        small, *large = found
        assert small["bucket_mb"] == 0.05
        assert small["num_buckets"] > 1
        assert max(small["bucket_bytes"]) <= 0.05 * MiB or small["strategy"] == "ddp", "DDP splits no parameter"
        assert [(row["bucket_mb"], row["same_buckets_mb"], row["num_buckets"]) for row in large] == [
            (10, [25, None], 1)
        ], "beyond the model all sizes are one bucket"
    lines = done.stdout.splitlines()
    assert lines[-2].startswith("recommended: ddp ") and lines[-1] == "wrote out.json"
    assert len(result["environment"]["notes"]) == 2
    assert result["environment"]["notes"][0] in done.stdout
    assert [one["strategy"] for one in result["recommended"]] == ["ddp", "ssgd"]
    assert {entry.name for entry in tmp_path.iterdir()} == {"out.json"}
    assert words_drawn(result, tmp_path) >= {"Time of a step by bucket size", "0.05 MiB", "ssgd, exposed"}
