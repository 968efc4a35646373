"""DTensors: a step on shards is the step on whole tensors, and checkpoints of 4 ranks load on 2 and on 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import ranks, shard_checkpoint_ranks
from helpers.shard_ranks import BLOCK_LR, OPTIMIZERS, PERIOD, STEPS, drawn

LAYOUTS = [
    *((size, layout) for size in ("2", "4") for layout in ("fsdp", "mixed")),
    *(("2x2", layout) for layout in ("hsdp", "both", "mixed")),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("checkpoints")
        patch.setenv("DDPCORE_TEST_CHECKPOINTS", str(folder))
        yield folder


@pytest.fixture(scope="module")
def seen(checkpoints) -> list[dict[str, Any]]:
    return ranks.run("shard_ranks", 4)


@pytest.fixture(scope="module")
def steps(seen) -> dict[Any, Any]:
    return seen[0]["steps"]


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_shards_is_that_on_whole_tensors(name, size, layout, steps, assert_same_bits):
    """The sums of squares differ in the last bits of float64. After rounding to fp32 the factors are the same here."""
    for dtype in ("torch.float32", "torch.bfloat16"):
        if (name, dtype, size, layout) not in steps:
            continue
        got, want = steps[name, dtype, size, layout], steps[name, dtype]
        for key, weight in want["weights"].items():
            assert_same_bits(got["weights"][key], weight, key)
            for state, value in want["states"][key].items():
                assert_same_bits(got["states"][key][state], value, f"{state} of {key}")
        for key, ratio in want["ratios"].items():
            assert got["ratios"][key] == pytest.approx(ratio, rel=1e-14)


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rounded_states_of_shards(name, size, layout, steps, assert_same_bits):
    """Shards of a multiple of 4 elements along the first dimension have the bits of the whole tensor.

    The others draw other random bits: a state of bfloat16 may differ by a unit in each of three steps.
    """
    got, want, exact = (steps[name, "rounded", size, layout], steps[name, "rounded"], steps[name, "torch.float32"])
    for key, weight in want["weights"].items():
        for state, value in want["states"][key].items():
            assert (
                got["states"][key][state].dtype == value.dtype == (torch.float32 if state == "step" else torch.bfloat16)
            )
        if key in ("blocks", "square", "one"):
            assert_same_bits(got["weights"][key], weight, key)
            for state, value in want["states"][key].items():
                assert_same_bits(got["states"][key][state], value, f"{state} of {key}")
        else:
            for state, value in exact["states"][key].items():
                torch.testing.assert_close(got["states"][key][state].float(), value, rtol=0.03, atol=1e-3)
            torch.testing.assert_close(got["weights"][key], exact["weights"][key], rtol=0.03, atol=0.03)


def test_shards_draw_random_bits_of_their_own(seen):
    """Of a tensor with equal rows and gradients, they would have equal states if they drew the same bits."""
    sharded, one_process = seen[0]["equal rows"]
    parts = sharded.chunk(4)
    assert all(not torch.equal(parts[0], part) for part in parts[1:])
    assert torch.equal(sharded, one_process)


def test_half_precision_has_been_seen(steps):
    assert ("lamb", "torch.bfloat16", "2x2", "mixed") in steps


def test_ranks_have_the_same_bits(seen, assert_same_bits):
    for other in seen[1:]:
        for key, result in other["steps"].items():
            for name, weight in result["weights"].items():
                assert_same_bits(weight, seen[0]["steps"][key]["weights"][name], f"{key} {name}")


def test_one_all_reduce_for_each_sharded_dimension(seen):
    """Clipping needs the norm of all gradients before the first pass of LAMB: one more."""
    for rank in seen:
        assert rank["reductions"] == {
            ("sgd", 1): 1, ("sgd", 2): 2, ("adamw", 1): 1, ("adamw", 2): 2,
            ("lars", 1): 1, ("lars", 2): 2, ("lamb", 1): 2, ("lamb", 2): 4,
        }  # fmt: skip


def test_an_overflow_on_one_rank_skips_the_step_on_all(seen):
    for rank in seen:
        found = rank["overflow"]
        assert torch.equal(found["skipped"], torch.ones(8, 4))
        assert found["step"] == 0.0
        assert found["scale"] == 2.0
        torch.testing.assert_close(found["stepped"], torch.full((8, 4), 0.9))


LAYOUTS_OF_MUON = [
    "rows",
    "columns",
    "hsdp",
    "replicas",
    "both",
    "rows and columns",
    "columns and rows",
    "fsdp and tensor",
]


@pytest.mark.parametrize("layout", LAYOUTS_OF_MUON)
def test_muon_on_shards_is_muon_on_whole_matrices(layout, seen):
    """Products of a batch of another size may be added in another order. The update is rounded to bfloat16.

    Each matrix is orthogonalized once, and by one rank of those that divide it.
    """
    counts = []
    for rank in seen:
        if layout not in rank["muon"]:
            continue
        found, wanted = dict(rank["muon"][layout]), rank["muon"]["whole"]
        counts.append(found.pop("count"))
        del found["events"]
        for key, value in found.items():
            atol = 1e-6 if key.startswith("momentum") else 3 * 0.1 * 2 / 256  # steps x lr x scale x half a unit
            torch.testing.assert_close(value, wanted[key], rtol=0, atol=atol, msg=key)
    num = seen[0]["muon"]["whole"]["count"]
    assert sum(counts) == {"hsdp": 2 * num, "replicas": 4 * num}.get(layout, num)
    assert max(counts) < num or layout == "replicas", "one rank did all the work"


def test_the_next_matrix_travels_while_one_is_orthogonalized(seen):
    """With a round for each matrix: two are sent before the first is computed, and then the next before a result."""
    for rank in seen:
        events = rank["muon"]["rows"]["events"]
        num = events.count("compute") // STEPS
        assert num > 1, "one round"
        of_round = ["compute", "send", "send"]  # the result, and the matrix after the next
        of_step = ["send", "send", *of_round * (num - 2), "compute", "send", "compute", "send"]
        assert events == of_step * STEPS


def orthogonal(u: Tensor) -> Tensor:
    """Five Newton-Schulz steps by the equations."""
    x = u / u.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def blocks_of(layout: str, whole: Tensor) -> list[Tensor]:
    """What each rank has, as views."""
    if layout == "replicas":
        return [whole]
    if layout == "rows":
        return list(whole.chunk(4))
    return [part for rows in whole.chunk(2) for part in rows.chunk(2, dim=1)]


@pytest.mark.parametrize("layout", ["rows", "rows and columns", "replicas"])
def test_blockwise_muon_is_its_equations_on_the_whole_matrix(layout, seen):
    """Every third step is whole, the others are of the shards alone, with their own scale and rate."""
    for key in ("wide", "tall", "uneven", "few", "experts"):
        weight, *grads = drawn(key)
        momentum = torch.zeros_like(weight)
        for step, grad in enumerate(grads):
            momentum = 0.95 * momentum + 0.05 * grad
            u = 0.05 * grad + 0.95 * momentum
            weight *= 1 - 0.1 * 0.1
            is_whole = step % PERIOD == 0 or layout == "replicas"
            pairs = [(weight, u)] if is_whole else zip(blocks_of(layout, weight), blocks_of(layout, u), strict=True)
            for target, part in pairs:
                for row, one in zip(target, part, strict=True) if key == "experts" else [(target, part)]:
                    rate = 0.1 * (1.0 if is_whole else BLOCK_LR)
                    if one.numel():
                        row -= rate * max(1.0, len(one) / one.shape[1]) ** 0.5 * orthogonal(one)
        for rank in seen:
            torch.testing.assert_close(rank["blocks"][layout, key], weight, rtol=0, atol=1e-12, msg=key)


@pytest.mark.parametrize("way", ["fsdp", "hsdp", "fsdp and tensor", "tensor"])
def test_models_of_torch(way, seen):
    """The gradients are sums over ranks in another order, so weights differ by some roundings."""
    plain = seen[0]["models"]["plain"]
    for name, weight in seen[0]["models"][way].items():
        torch.testing.assert_close(weight, plain[name], rtol=1e-5, atol=1e-6)


def test_a_partial_gradient_is_reduced(seen, assert_same_bits):
    for rank in seen:
        assert_same_bits(rank["partial"]["fused"], rank["partial"]["torch"])
        torch.testing.assert_close(rank["partial"]["fused"].detach(), torch.full((6,), 0.4))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("mesh of the gradient", r"the gradient of parameter first is on DeviceMesh\(\(replicas=2.*distribute_tensor$"),
        ("mesh of the gradient of a matrix", r"the gradient of parameter first is on DeviceMesh.*distribute_tensor$"),
        ("tied", "parameter out is a shard of the same memory as parameter in: tie them as one parameter"),
        ("tied groups", "parameter out is a shard of the same memory as parameter in"),
        ("muon", "parameter first is laid out as .* and Muon takes what torch.chunk divides"),
        ("partial", "parameter sum is a DTensor with partial sums"),
        ("whole state", "exp_avg of parameter 0 is a whole tensor and the parameter a DTensor: load it with"),
        ("other layout", r"exp_avg of parameter 0 is laid out as \(Replicate\(\),\)"),
        ("shards of a plain parameter", "exp_avg of parameter 0 is a DTensor and the parameter not"),
    ],
)
def test_refusals(what, message, seen):
    for rank in seen:
        with pytest.raises(ValueError, match=message):
            raise ValueError(rank["refused"][what])
        assert rank["refused"]["unchanged"]
        assert rank["refused"]["states kept"]


@pytest.fixture(scope="module")
def worlds(checkpoints, seen) -> dict[int, dict[Any, Any]]:
    """What four, two and one rank saw of the checkpoint that the four saved."""
    two = ranks.run("shard_checkpoint_ranks", 2)[0]
    return {4: seen[0]["checkpoint"], 2: two, 1: shard_checkpoint_ranks.run(0, 1)}


@pytest.mark.parametrize("name", shard_checkpoint_ranks.BUILDERS)
def test_a_checkpoint_of_four_ranks_on_two_and_on_one(name, worlds, assert_same_bits):
    saved = worlds[4]
    assert set(saved[name, "kinds"]) == {"DTensor"}
    dtypes = {
        value.dtype for states in saved[name, "states"].values() for key, value in states.items() if key != "step"
    }
    assert dtypes == {torch.bfloat16 if name == "rounded" else torch.float32}
    for loaded in (worlds[2], worlds[1]):
        for key, weight in saved[name, "before"].items():
            assert_same_bits(loaded[name, "before"][key], weight, key)
            for state, value in saved[name, "states"][key].items():
                assert_same_bits(loaded[name, "states"][key][state], value, f"{state} of {key}")
        # Gradients are summed in another order, and other random bits round a state by a unit of bfloat16.
        tolerance = 0.05 * 2 * 2**-7 if name == "rounded" else 1e-6
        for key, weight in saved[name, "after"].items():
            torch.testing.assert_close(loaded[name, "after"][key], weight, rtol=1e-5, atol=tolerance)
        assert loaded[name, "steps"] == saved[name, "steps"] == [5.0] * 4


@pytest.mark.parametrize("name", shard_checkpoint_ranks.BUILDERS)
def test_a_full_state_dict_is_sharded_again(name, worlds, assert_same_bits):
    saved = worlds[4]
    for key, states in saved[name, "states"].items():
        for state, value in states.items():
            assert_same_bits(saved[name, "from full"][key][state], value, f"{state} of {key}")
