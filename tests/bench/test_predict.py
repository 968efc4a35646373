"""``ddpcore bench predict``: transfers to predictions, refusals, and a small run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpcore import ALL, LocalSGD, Plan
from ddpcore.bench.predict import KINDS, PredictConfig, steps_of
from ddpcore.bench.step_model import Compute, Transfer, predict
from helpers import ranks
from helpers.drawn import words_drawn

COMPUTE = Compute(forward=2.0, backward=4.0, update=1.0, cpu=0.0, arrivals=((300, 0.5), (100, 1.0)))
ROW = {
    "strategy", "topology", "bucket_mb", "num_buckets", "transport", "comm_ms", "predicted_ms", "measured_ms",
    "error_pct",
}  # fmt: skip


def predicted(*plans: Plan, overlaps: bool = False, **seconds: list[float]) -> float:
    """From the seconds of each kind of part. Messages have the sizes of the parameters."""
    parts = {kind: [Transfer(seconds=one) for one in seconds.get(kind, [])] for kind in KINDS}
    return predict(COMPUTE, steps_of(plans, parts, [300, 100], overlaps), cores=2, background=True)


def test_simultaneous_averages_share_their_time() -> None:
    """3 s and 1 s alone, 2 s together: 1.5 s start at half of the backward pass, 0.5 s at its end."""
    assert predicted(Plan(ALL), messages=[3, 1], together=[2]) == pytest.approx(7.5)
    assert predicted(Plan(ALL), messages=[0, 0], together=[0]) == pytest.approx(7)


def test_the_mix_is_what_it_adds_to_the_exchange() -> None:
    assert predicted(Plan(), overlaps=True, exchange=[5], average=[5.5]) == pytest.approx(7.5)
    assert predicted(Plan(), overlaps=True, exchange=[5], average=[4.5]) == pytest.approx(7), "never negative"


def test_weights_that_are_sent_after_the_step_are_not_hidden() -> None:
    assert predicted(Plan(), exchange=[5], average=[5.5]) == pytest.approx(12.5)
    assert predicted(Plan(), overlaps=True, average=[9]) == pytest.approx(10), "all with all, during the computation"


def test_an_average_is_paid_in_its_step() -> None:
    plans = [LocalSGD(4).plan(step) for step in range(4)]
    assert predicted(*plans, average=[2]) == pytest.approx(7.5)
    switch = [LocalSGD(2, switch_step=2).plan(step) for step in range(4)]
    assert predicted(*switch, messages=[3, 1], together=[2], average=[2]) == pytest.approx((2 * 7.5 + 7 + 9) / 4)


def test_one_bench_a_topology_and_transport() -> None:
    benches = PredictConfig(topology=("ring", "star"), transport=("shm", "pg")).benches()
    assert [(one.value("strategy.transport"), one.value("strategy.topology")) for one in benches] == [
        ("shm", "ring"), ("shm", "star"), ("pg", "ring"), ("pg", "star"),
    ]  # fmt: skip


REFUSED = [
    ("--strategies ddp", "--strategies: no part of ddp can be measured alone, leave it out: take ssgd"),
    ("--strategies adpsgd", "--strategies: learners of adpsgd wait for nobody, so no step ends: leave it out"),
    ("--strategies sgd", "--strategies: unknown strategy 'sgd'"),
    ("--topology moebius", "--topology: unknown topology 'moebius'"),
    ("--topology hypercube --world-size 6 data.batch_size=12", "6 learners are no power of two"),
    ("--transport ipc", "--transport ipc is for cuda"),
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


def test_the_parts_of_a_users_strategy(tmp_path: Path) -> None:
    """Its plan says what is measured: gradients of all in even steps, weights of neighbours in odd steps."""
    line = "predict --world-size 2 model=lenet5 data.batch_size=8 --rounds 2 --period 2 --topology ring,complete"
    words = ("-m", "ddpcore.bench", *line.split(), "--strategies", "helpers.own_parts:Alternating,noloco")
    done = ranks.python(*words, "--bucket-mb", "25", "--json", "out.json", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    own, name = "helpers.own_parts:Alternating", "strategy"
    assert [(row[name], row["topology"], row["bucket_mb"], row["num_buckets"]) for row in rows] == [
        (own, "ring", 25, 1), ("noloco", "ring", None, None), (own, "complete", 25, 1),
        ("noloco", "complete", None, None),
    ]  # fmt: skip
    assert all(row["comm_ms"] > 0 and row["predicted_ms"] > 0 for row in rows)


@pytest.mark.slow
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
    *lines, last = done.stdout.splitlines()
    assert last == "wrote out.json"
    assert lines[-2].startswith("prediction error: median ")
    assert re.match("will it pay: (yes|no|not clear): a step of ", lines[-1])
    assert all(part > 0 for part in result["compute_ms"].values())
    assert words_drawn(result, tmp_path) >= {"Time of a step", "predicted", "measured", "dpsgd ring shm"}
