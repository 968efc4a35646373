"""``python -m ddpcore.bench predict``: transfers to predictions, refusals, and a small run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpcore.bench.predict import PredictConfig, predict
from ddpcore.bench.step_model import Compute, Machine, Transfer
from helpers import ranks
from helpers.drawn import words_drawn

COMPUTE = Compute(forward=2.0, backward=4.0, update=1.0, cpu=0.0, arrivals=((300, 0.5), (100, 1.0)))
MACHINE = Machine(cores=2, background=True)
ROW = {
    "strategy", "topology", "bucket_mb", "num_buckets", "transport", "comm_ms", "predicted_ms", "measured_ms",
    "error_pct",
}  # fmt: skip


def parts(*seconds: float) -> list[Transfer]:
    return [Transfer(seconds=one) for one in seconds]


def test_simultaneous_averages_share_their_time() -> None:
    """3 s and 1 s alone, 2 s together: 1.5 s start at half of the backward pass, 0.5 s at its end."""
    assert predict("ssgd", COMPUTE, parts(3, 1, 2), [300, 100], 4, MACHINE) == pytest.approx(7.5)
    assert predict("ssgd", COMPUTE, parts(0, 0, 0), [300, 100], 4, MACHINE) == pytest.approx(7)


def test_the_mix_is_what_it_adds_to_the_exchange() -> None:
    assert predict("dpsgd", COMPUTE, parts(5, 5.5), [], 4, MACHINE) == pytest.approx(7.5)
    assert predict("dpsgd", COMPUTE, parts(5, 4.5), [], 4, MACHINE) == pytest.approx(7), (
        "a mix never takes negative time"
    )


def test_local_sgd_pays_once_a_period() -> None:
    assert predict("local_sgd", COMPUTE, parts(2), [], 4, MACHINE) == pytest.approx(7.5)


def test_one_bench_a_topology_and_transport() -> None:
    benches = PredictConfig(topology=("ring", "star"), transport=("shm", "pg")).benches()
    assert [(one.value("strategy.transport"), one.value("strategy.topology")) for one in benches] == [
        ("shm", "ring"), ("shm", "star"), ("pg", "ring"), ("pg", "star"),
    ]  # fmt: skip


REFUSED = [
    ("--strategies ddp", "--strategies is 'ddp'"),
    ("--topology moebius", "--topology: unknown topology 'moebius'"),
    ("--topology hypercube --world-size 6 data.batch_size=12", "6 learners are no power of two"),
    ("--transport ipc", "--transport ipc is for ranks on cuda"),
    ("--transport tcp", "--transport is 'tcp'"),
    ("--bucket-mb x", "'x' is not a size"),
    ("--bucket-mb 1,1", "names one twice"),
    ("--rounds 0", "--rounds is 0"),
    ("--period 0", "--period is 0"),
    ("data.batch_size=3", "batch size 3"),
    ("--world-size 0", "--world-size is 0"),
    ("--world-size 1", "communication needs two ranks"),
    ("--json nowhere/out.json", "does not exist"),
    ("--steps 3", "--steps"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refused(line: str, says: str, refused: Callable[[str, str], None]) -> None:
    refused(f"predict {line}", says)


def test_two_ranks(tmp_path: Path) -> None:
    """A row per strategy, bucket size, topology and transport; strategies without topology have one per transport."""
    line = "predict --world-size 2 model=lenet5 data.batch_size=8 --rounds 2 --period 2 --transport shm,pg"
    line += " --bucket-mb 0.05,25 --topology ring,random_pair"
    words = ("-m", "ddpcore.bench", *line.split(), "--json", "out.json")
    done = ranks.python(*words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    expected = {"environment", "model", "world_size", "batch_size", "period", "compute_ms", "rows"}
    assert set(result) - {"checksum"} == expected
    cases = [(row["transport"], row["strategy"], row["topology"], row["bucket_mb"]) for row in result["rows"]]
    assert sorted(cases, key=str) == sorted(
        [
            (transport, *case)
            for transport in ("shm", "pg")
            for case in (
                ("ssgd", None, 0.05), ("ssgd", None, 25), ("dpsgd", "ring", None), ("dpsgd", "random_pair", None),
                ("local_sgd", None, None),
            )
        ],
        key=str,
    )  # fmt: skip
    for row in result["rows"]:
        assert set(row) == ROW
        assert row["predicted_ms"] > 0
        assert row["measured_ms"]["p50"] > 0
    lines = done.stdout.splitlines()
    assert lines[-2].startswith("prediction error: median ")
    assert lines[-1].startswith("will it pay: a step of ")
    assert all(part > 0 for part in result["compute_ms"].values())
    assert words_drawn(result, tmp_path) >= {"Time of a step", "predicted", "measured", "dpsgd ring shm"}
