"""Blocks of steps, and rows from measurements."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpcore.bench import contender, run
from ddpcore.bench.config import BenchConfig, ResolvedConfig, resolve
from ddpcore.bench.contender import Contender
from ddpcore.runtime.launch import World
from ddpcore.storage.json_lines import to_json
from helpers.own_parts import Lone, Quiet, Unknown


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 6, 10, 11, 12, 99, 100, 300, 1234])
def test_blocks(num_steps: int) -> None:
    """Every step is in a block. A warm-up comes first, and only the warm-up is not timed."""
    blocks = run._blocks(num_steps)
    assert sum(length for length, _ in blocks) == num_steps
    assert all(length > 0 for length, _ in blocks)
    timed = [length for length, is_timed in blocks if is_timed]
    assert 1 <= len(timed) <= run.NUM_BLOCKS
    assert max(timed) - min(timed) <= 1
    assert [is_timed for _, is_timed in blocks] == [False] * (len(blocks) - len(timed)) + [True] * len(timed)
    if num_steps > 1:
        assert not blocks[0][1]
    if num_steps >= 20:
        assert len(timed) == run.NUM_BLOCKS
        assert blocks[0][0] == pytest.approx(num_steps / 10, abs=1)


def test_the_curve_leaves_the_warm_up_out() -> None:
    """Seven steps: one to warm up, six blocks of one step; 21 steps: two, then a block of one and nine of two."""
    losses = torch.arange(7.0)
    curve = run._curve(losses, [0.5, 0.25, 1.0, 1.0, 1.0, 1.0], 7)
    assert curve == {
        "steps": [1, 2, 3, 4, 5, 6],
        "seconds": [0.5, 0.75, 1.75, 2.75, 3.75, 4.75],
        "loss": losses[1:].tolist(),
    }
    curve = run._curve(torch.arange(21.0), [1.0] * 10, 21)
    assert curve["steps"][-1] == 19 and curve["loss"][0] == 2.5 and curve["loss"][-1] == 20.0
    assert run._curve(torch.tensor([3.0]), [2.0], 1) == {"steps": [1], "seconds": [2.0], "loss": [3.0]}


def result(name: str, seconds: float, num_blocks: int, **more: Any) -> dict[str, Any]:
    step_ms = {"p20": 900 * seconds, "p50": 1000 * seconds, "p80": 1100 * seconds}
    seen = {
        "name": name,
        "step_ms": step_ms,
        "block_seconds": [seconds] * num_blocks,
        "block_samples": [100] * num_blocks,
        "bytes_per_step": 8.0,
        "curve": {"steps": [], "seconds": [], "loss": []},
        "loss_first": 2.0,
        "loss_last": 1.0,
        "test_error_pct": None,
        "consensus_distance": 0.0,
        "num_nonfinite": 0,
    }
    return seen | more


def resolved_of(*settings: str, **values: Any) -> ResolvedConfig:
    settings = ("data.batch_size=100", "run.steps=11", "run.device=cpu", *settings)
    return resolve(BenchConfig(settings=settings, **values), world_size=2, num_gpus=0)


def test_rows() -> None:
    """Eleven steps: one to warm up and ten blocks of one step."""
    results = [
        result("ddp", 0.5, 10),
        result("dpsgd", 0.25, 10, loss_last=float("nan")),
        result("local_sgd", 0.125, 10),
        result("single", 1.0, 10),
        result("compute", 0.2, 10),
        result("own_compute", 0.1875, 10),
    ]
    rows = {row["strategy"]: row for row in to_json(run._rows(resolved_of("strategy.topology=ring"), results))}
    assert list(rows) == ["ddp", "dpsgd", "local_sgd", "single"], "hidden contenders have no row"
    assert rows["ddp"]["samples_per_s"] == pytest.approx(200)
    assert rows["dpsgd"]["samples_per_s"] == pytest.approx(400)
    assert rows["dpsgd"]["ratio_to_ddp"] == pytest.approx(2.0), "above 1 is faster than ddp"
    assert rows["ddp"]["ratio_to_ddp"] == 1.0
    assert rows["ddp"]["exposed_comm_ms"] == pytest.approx(300)
    assert rows["dpsgd"]["exposed_comm_ms"] == pytest.approx(62.5), "beside the same work, with the same optimizer"
    assert rows["local_sgd"]["exposed_comm_ms"] == 0.0, "never negative"
    assert rows["single"]["exposed_comm_ms"] is None
    assert rows["dpsgd"]["topology"] == "ring"
    assert rows["ddp"]["topology"] is None
    assert (rows["single"]["world_size"], rows["ddp"]["world_size"]) == (1, 2)
    assert rows["dpsgd"]["loss_last"] is None


def test_a_users_baseline_of_one_learner_is_treated_as_single() -> None:
    """Its traits say so: other ranks are idle, and nothing is exposed. Its work is that of torch's optimizer."""
    lone, quiet = "helpers.own_parts:Lone", "helpers.own_parts:Quiet"
    resolved = resolved_of(strategies=("ssgd", lone))
    results = [result("ssgd", 0.25, 10), result(lone, 1.0, 10), result("compute", 0.1, 10)]
    rows = {row["strategy"]: row for row in run._rows(resolved, results)}
    assert (rows[lone]["world_size"], rows[lone]["exposed_comm_ms"], rows["ssgd"]["world_size"]) == (1, None, 2)
    assert resolved.train_config(lone).strategy.learners == 1
    idle = [contender.is_idle(name, resolved, World(rank=1, world_size=2)) for name in (lone, "ssgd", "compute")]
    assert idle == [True, False, False]
    assert [contender.compute_of(name) for name in (quiet, "ddp", "ssgd")] == ["compute", "compute", "own_compute"]


def test_bytes_of_baselines_follow_from_their_traits() -> None:
    trainer = SimpleNamespace(handle=SimpleNamespace(learner=None, model=nn.Linear(3, 1, bias=False)))
    sent = [Contender("x", trainer, one()).bytes_per_step(2) for one in (Lone, Quiet, Unknown)]
    assert sent == [0.0, 12.0, None]


def test_the_samples_of_a_block_are_those_of_its_steps() -> None:
    """Also of batches that grow, and of smaller ones at the end of an epoch."""
    small = ("model.hidden=[4]", "data.batch_size=100", "run.steps=20")
    for settings, expected in (
        (("data.batch_growth=[[3,200],[5,400]]",), [3 * 100, 2 * 200 + 2 * 400]),
        (("data.num_train=238", "data.drop_last=false"), [238, 238 + 100]),
    ):
        resolved = resolved_of(*small, *settings, backend="virtual", strategies=("ssgd",))
        one = Contender.build("ssgd", resolved, World(), contender.build_dataset(resolved, first=False))
        one.run(3, timed=True)
        one.run(4, timed=True)
        assert one.block_samples == expected
    resolved = resolved_of("data.batch_growth=[[3,200],[5,400]]")
    of_one = resolved.train_config("single", batch_size=50).data
    assert (of_one.batch_size, of_one.batch_growth) == (50, ((3, 100), (5, 200))), "as each learner of the others has"


def test_losses_of_uneven_batches_are_those_of_the_whole_batch() -> None:
    """One step with all samples, of one learner and of two with 97 and 3 of them: the same loss, also in the curve."""
    losses = []
    for settings in ((), ("data.learners_batch=[97,3]",)):
        resolved = resolved_of("run.steps=1", "model.hidden=[4]", *settings, backend="virtual", strategies=("ssgd",))
        one = Contender.build("ssgd", resolved, World(), contender.build_dataset(resolved, first=False))
        one.run(1, timed=True)
        found = run._gather(one, resolved)
        losses.append([found["loss_first"], *found["curve"]["loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_exposed_communication_is_the_median_of_pairs() -> None:
    """Every second round is five times faster. Only paired differences show the 50 ms."""
    slow = [1.0, 0.2] * 5
    results = [
        result("ssgd", 1.0, 10, block_seconds=[seconds + 0.05 for seconds in slow[:-1]] + [9.0]),
        result("own_compute", 0.1, 10, block_seconds=slow),
    ]
    (row,) = run._rows(resolved_of(strategies=("ssgd",)), results)
    assert row["exposed_comm_ms"] == pytest.approx(50)


def test_rows_without_ddp_have_no_ratio() -> None:
    rows = run._rows(resolved_of(backend="virtual"), [result("ssgd", 0.5, 10)])
    assert rows[0]["ratio_to_ddp"] is None
    assert rows[0]["exposed_comm_ms"] is None


@pytest.mark.parametrize(("slowest", "warns"), [(2.9, False), (3.1, True)])
def test_a_table_of_a_busy_machine_says_so(slowest: float, warns: bool) -> None:
    row: dict[str, Any] = {"world_size": 4, "topology": None, "test_error_pct": None, "loss_last": 1.0}
    row["step_ms"] = {"p20": 1.0, "p50": 1.5, "p80": slowest}
    lines = run.seen([row | {"strategy": name, "ratio_to_ddp": 1.0} for name in ("ddp", "ssgd")])
    assert any(line.startswith("too noisy: ") for line in lines) == warns


def test_a_bench_of_ranks_that_may_die_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"strategy\.on_failure is set: a bench compares ranks that stay, leave it out"
    ):
        BenchConfig(settings=("strategy.on_failure=shrink",))
