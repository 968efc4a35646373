"""distribute() on two real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import ranks, training


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return ranks.run("parallel_ranks", 2)


@pytest.mark.parametrize("how", ["no_sync", "backwards"])
def test_real_accumulation_is_one_big_batch(how: str, seen: list[dict[str, Any]]) -> None:
    plain = training.mlp()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    for step in range(3):
        inputs, labels = training.samples(24, seed=step)
        optimizer.zero_grad()
        F.cross_entropy(plain(inputs), labels).backward()
        optimizer.step()
    for rank in seen:
        training.assert_near(rank[f"accumulation_{how}"], training.flat_weights(plain))
    assert torch.equal(seen[0][f"accumulation_{how}"], seen[1][f"accumulation_{how}"])


def test_real_clipping_after_backward(seen: list[dict[str, Any]]) -> None:
    plain = training.mlp()
    inputs, labels = training.samples(8)
    F.cross_entropy(plain(inputs), labels).backward()
    grads = torch.cat([p.grad.flatten() for p in plain.parameters()])
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for rank in seen:
        training.assert_near(rank["clipping"]["grads"], grads)
        assert rank["clipping"]["norm"].item() == pytest.approx(norm.item(), rel=1e-5)
        training.assert_near(rank["clipping"]["weights"], training.flat_weights(plain))


@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
def test_real_unused_parameters(fused: bool, seen: list[dict[str, Any]]) -> None:
    """A layer that only rank 0 uses, and a layer that no rank uses."""
    ssgd = [rank[f"unused_ssgd_{fused}"] for rank in seen]
    for name, value in ssgd[0]["end"].items():
        assert torch.equal(value, ssgd[1]["end"][name]), f"{name} differs between the ranks of ssgd"
    dpsgd = [rank[f"unused_dpsgd_{fused}"] for rank in seen]
    for one in (*ssgd, *dpsgd):
        assert not torch.equal(one["end"]["sometimes.weight"], one["start"]["sometimes.weight"])
        assert not torch.equal(one["end"]["always.weight"], one["start"]["always.weight"])
        assert torch.equal(one["end"]["never.weight"], one["start"]["never.weight"])
        assert one["never_grad"] is None
    # Rank 1 never stepped on that layer, but its weights are averaged with those of rank 0 that did.
    assert not torch.equal(dpsgd[0]["end"]["sometimes.weight"], dpsgd[1]["end"]["sometimes.weight"])


def test_real_evaluation_model(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["batch_norm"] for rank in seen)
    for rank in (first, second):
        assert torch.equal(rank["first_mean"], torch.ones(4)), "buffers start from rank 0's"
        assert rank["untouched"]
        assert rank["still_untouched"]
        assert rank["hooks"] == 0
        assert not rank["shared"]
        assert not rank["exchanging"]
        for name, value in rank["average"].items():
            if value.is_floating_point():
                mean = (first["mine"][name] + second["mine"][name]) / 2
                torch.testing.assert_close(value, mean, rtol=1e-6, atol=1e-7)
                assert torch.equal(value, first["average"][name])
            else:
                assert value.item() == 3
    for name in ("0.weight", "1.running_mean"):
        assert not torch.equal(first["mine"][name], second["mine"][name])


def test_real_evaluation_model_of_ddp(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["ddp_batch_norm"] for rank in seen)
    assert first["sync"] == "DDP averages where the forward pass ran outside no_sync(): run both passes there"
    assert not torch.equal(first["mine"]["1.running_mean"], second["mine"]["1.running_mean"])
    for rank in (first, second):
        for name, value in rank["average"].items():
            mean = (first["mine"][name] + second["mine"][name]) / 2 if value.is_floating_point() else value
            torch.testing.assert_close(value, mean, rtol=1e-6, atol=1e-7)
            assert torch.equal(value, first["average"][name])
            assert torch.equal(rank["local"][name], rank["mine"][name])


@pytest.mark.parametrize("name", ["ssgd", "ddp", "grid"])
def test_real_recalibrated_statistics_are_those_of_all_batches(name: str, seen: list[dict[str, Any]]) -> None:
    """They equal those of one rank on the union of all batches."""
    ranks_seen = [rank[f"recalibrated_{name}"] for rank in seen]
    batches = torch.cat([batch for rank in ranks_seen for batch in rank["batches"]])
    for rank in ranks_seen:
        state = rank["state"]
        hidden = F.linear(batches, state["0.weight"], state["0.bias"])
        torch.testing.assert_close(state["1.running_mean"], hidden.mean(0))
        torch.testing.assert_close(state["1.running_var"], hidden.var(0))
        assert torch.equal(state["1.running_var"], ranks_seen[0]["state"]["1.running_var"])


def test_real_ssgd_is_torch_ddp(seen: list[dict[str, Any]]) -> None:
    """Two ranks give the bits of DistributedDataParallel, except for the place of the division."""
    for rank in seen:
        training.assert_near(rank["ddp_twin"]["ssgd"], rank["ddp_twin"]["ddp"], ulps=4)
        assert torch.equal(rank["ddp_twin"]["ddp"], seen[0]["ddp_twin"]["ddp"])


@pytest.mark.parametrize("make", ["fused", "torch"])
def test_real_frozen_parameters(make: str, seen: list[dict[str, Any]]) -> None:
    """A frozen layer in the optimizer: DPSGD over all ranks still averages the other layers in each step."""
    start = training.mlp()
    ends, gradients = [rank["frozen"][make] for rank in seen], [rank["frozen"][f"{make}_grads"] for rank in seen]
    rows = [training.flat_weights(start[2])] * 2
    for step in range(2):
        mean = (rows[0] + rows[1]) / 2
        rows = [mean - 0.1 * gradients[rank][step] for rank in range(2)]
    for rank in range(2):
        assert torch.equal(ends[rank]["0.weight"], start[0].weight)
        got = torch.cat([ends[rank]["2.weight"].flatten(), ends[rank]["2.bias"]])
        training.assert_near(got, rows[rank])


@pytest.mark.parametrize("how", ["shm", "pg", "grid"])
def test_frozen_parameters_start_alike(how: str, seen: list[dict[str, Any]]) -> None:
    """All ranks get those of rank 0 and keep the memory format, also in the evaluation model."""
    first = seen[0][f"frozen_start_{how}"]
    assert not torch.equal(first["own"]["0.weight"], seen[1][f"frozen_start_{how}"]["own"]["0.weight"])
    for rank in seen:
        one = rank[f"frozen_start_{how}"]
        for name in ("0.weight", "0.bias"):
            assert torch.equal(one["given"][name], first["own"][name]), name
            assert torch.equal(one["average"][name], first["own"][name]), name
        assert one["strides"][0] == one["strides"][1]


@pytest.mark.parametrize("make", ["fused", "torch"])
def test_real_ranks_still_average_after_a_state_was_loaded(make: str, seen: list[dict[str, Any]]) -> None:
    """Weights 0 and 1 become one half, at the first step and at a step with loaded momentum."""
    for rank in seen:
        for step in range(2):
            got = rank["reloaded"][f"{make}_{step}"]
            assert torch.equal(got, torch.full_like(got, 0.5)), f"step {step}: DPSGD no longer averages"


def test_buffers_of_any_shape_and_strides(seen: list[dict[str, Any]]) -> None:
    """All start with learner 0's buffers, and the evaluation model holds their mean."""
    first, second = (rank["odd_buffers"] for rank in seen)
    for name, expected in first["own"].items():
        mean = (expected + second["own"][name]) / 2
        for one in (first, second):
            assert torch.equal(one["given"][name], expected), name
            if expected.dtype == torch.int16:  # codes have no mean: each learner keeps its own
                assert torch.equal(one["average"][name], one["own"][name])
            else:
                torch.testing.assert_close(one["average"][name], mean, rtol=1e-6, atol=1e-7)


def test_buffers_of_several_learners_a_rank(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        for name, expected in seen[0]["grid_buffers"]["own"].items():
            assert torch.equal(rank["grid_buffers"]["given"][name], expected.expand(2, *expected.shape)), name
