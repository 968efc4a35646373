"""Learners of several ranks: FSDP2, HSDP, replicate and tensor parallelism inside ``distribute``."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import ranks
from helpers.each import each

pytestmark = pytest.mark.slow

# FSDP2 adds the gradients of the samples of two ranks in another order than one backward pass of a whole batch does.
# Six steps of lr 0.01 to 0.1 carry that rounding, of 2^-24 of a number near 1, into a weight; see EPS, too.
TOLERANCE = 2e-6


def started(what: str, world_size: int = 4) -> list[dict[str, Any]]:
    return ranks.run("sharded_ranks", world_size, 900, more=[[what, "sharded.md"]] * world_size)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return started("four")


def check_virtual(seen: list[dict[str, Any]]) -> None:
    for of_rank in seen:
        for case, differences in of_rank["virtual"].items():
            assert max(differences.values()) <= TOLERANCE, (case, differences)
            assert differences.get("resumed", 0) == 0, (case, differences)


def check_all(seen: list[dict[str, Any]], what: str) -> None:
    for of_rank in seen:
        assert of_rank[what]
        assert all(of_rank[what].values()), of_rank[what]


def check_resharded(seen: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(seen):
        for case, differences in of_rank["resharded"].items():
            loaded = ("shards, loaded", "plain, loaded", "shards, trained", "plain, trained") if rank < 2 else ()
            assert set(differences) == {*loaded, *(("one process",) if rank == 0 else ()), "four learners"}
            assert max(differences.values()) <= TOLERANCE, (case, differences)
            assert all(differences[name] == 0 for name in loaded[:2]), (case, differences)


def test_learners_of_two_ranks_are_virtual_learners_with_whole_batches(four):
    check_virtual(four)


def test_learners_of_one_rank_have_the_bits_of_plain_ranks(four):
    check_all(four, "plain")


def test_micro_batches_have_the_bits_of_averages_by_hand(four):
    check_all(four, "accumulated")


def test_features_of_fsdp_have_the_bits_of_averages_by_hand(four):
    check_all(four, "features")


def test_a_run_goes_on_to_the_bit(four):
    check_all(four, "resumed")
    for of_rank in four:
        assert sum("resumed" in differences for differences in of_rank["virtual"].values()) > 30


def test_a_saved_run_loads_on_other_shards_in_plain_ranks_and_its_average_in_one_process(four):
    check_resharded(four)


def test_the_average_is_sharded_and_loads_into_a_whole_model(four):
    for of_rank in four:
        assert of_rank["saved"]["outputs"] <= TOLERANCE
        assert of_rank["saved"]["own"] > 1e-4, "the average is the learner's own model"
        assert of_rank["saved"]["training"], "an evaluation has changed the mode of the training model"


def test_the_average_has_tied_and_frozen_parameters(four):
    for of_rank in four:
        assert of_rank["average"]["state"] <= TOLERANCE
        assert of_rank["average"]["outputs"] <= TOLERANCE
        assert of_rank["average"]["kept"], "an evaluation has changed the training model"


def test_the_average_is_a_module_that_can_be_read_only(four):
    """Names, full state and modes are those of the model. A block keeps a mode of its own, as in a copy."""
    for of_rank in four:
        found = of_rank["average"]
        names, others = found["names"]
        assert names == others and len(names) > 8
        assert max(found["parameters"], found["full"], found["renamed"]) <= TOLERANCE
        assert found["modes"] == [False, True, True, True, False, False], "of the block and the average, three times"
        assert found["moved"], "it was there already"
        assert found["recalibrate"] == "a sharded learner has no batch_norm='recalibrate': take 'average' or 'local'"
        for text in found["refused"]:
            assert text.startswith("the average of a sharded learner is read-only: load its state_dict() into")
            assert "\n" not in text


def test_a_learner_raises_or_skips_as_a_whole(four):
    raised = [of_rank["nonfinite"]["raise", "local_sgd"] for of_rank in four]
    assert ["error" in one for one in raised] == [False, False, True, True]
    assert "learner 1" in raised[2]["error"]
    for strategy in ("local_sgd", "dpsgd"):
        skipped = [of_rank["nonfinite"]["skip", strategy] for of_rank in four]
        assert [one["found"] for one in skipped] == [[], [], [(1, 2)], [(1, 2)]]


def test_memory_beyond_that_of_fsdp(four):
    """At most one copy of the shards, of 4 bytes a parameter, for gossip and for the anchor of an outer step."""
    wanted = {"ssgd": 0, "dpsgd": 4, "dpsgd_atc": 4, "local_sgd": 0, "outer": 4, "outer_momentum": 8}
    for of_rank in four:
        for name, num_bytes in wanted.items():
            assert of_rank["memory"][name] == pytest.approx(num_bytes, abs=0.2), name  # counters, masks and such


def test_noise_statistics_are_of_whole_learners(four):
    """The effective rate, too, whose passes change no bit of the training."""
    for of_rank in four:
        for case, found in of_rank["noise"].items():
            kinds = {"sharded", "virtual", "weights of sharded", "weights of virtual"}
            assert set(found) == kinds, "an option that needs whole models was not refused"
            assert len(found["sharded"]) == 3
            for ours, theirs in zip(found["sharded"], found["virtual"], strict=True):
                assert len(ours) == (5 if case.endswith("True") else 2)
                assert ours == pytest.approx(theirs, rel=1e-4, nan_ok=True), case
        for name in ("ssgd", "dpsgd"):
            with_passes, without = (of_rank["noise"][f"{name} {dynamic}"] for dynamic in (True, False))
            assert with_passes["weights of sharded"] == without["weights of sharded"]


REFUSED = {
    "all ranks": "blocks.0.scale is sharded or replicated over rank {other} of another learner: shard it over",
    "without mesh": "blocks.0.scale is sharded or replicated over rank {beside} of another learner: shard it over",
    "rows": "blocks.0.scale is a DTensor, and virtual learners are whole: leave learners= out",
    "two dimensions": "pass that of the learners, mesh['learners']",
    "virtual": "blocks.0.scale is a DTensor, and virtual learners are whole: leave learners= out",
    "baseline": "ddp trains whole models, and parameter blocks.0.scale is a DTensor",
    "partly": "blocks.1.scale is whole and blocks.0.scale a DTensor: call fully_shard on the whole model",
    "partly parallel": "blocks.0.scale is whole and head.weight a DTensor: lay it out, too, by SequenceParallel()",
    "fsdp1": "module blocks.0 is wrapped by FullyShardedDataParallel, which averages or shards too: pass",
    "ddp": "module blocks.0 is wrapped by DistributedDataParallel, which averages or shards too: pass",
    "other ranks": "parameter norm.weight lies on other ranks than blocks.0.scale: a learner is one mesh",
    "hessian": "parameters are DTensors, such as shards: load their full state dict into a whole model",
    "average": "parameters are DTensors, such as shards: load their full state dict into a whole model",
    "join": "layout of parameter blocks.0.scale is of a sharded learner, and learners of one rank join",
    "shrink": "on_failure is 'shrink': a learner is several ranks, and the learner of a dead rank cannot go on",
    "scaler": "without scaler=",
    "quarantine": "take 'skip'",
    "adpsgd": "adpsgd: the ranks of a learner",
    "noisy_ssgd": "noisy_ssgd: the noise of a weight",
    "offload": "leave offload_policy out",
    "other placements": "ranks do not train the same: layout of parameter blocks.0.scale",
    "whole state": "holds whole learners and this model is sharded: load it into a whole model",
    "other parameters": "holds a model with other parameters, as other.weight: load it into that model",
    "compressed": "holds compressed weights of 2 shards under way: load it on as many",
    "other options": "ranks do not train the same: strategy",
    "int8": "compression int8 encodes chunks of a rank's row, so the replicas of a parameter",
    "bf16": "nothing was refused",
    "samples": "num_samples of learner 0 was not set in each step, is negative, or differs between the learner's ranks",
}


@each("name", REFUSED)
def test_refused_on_all_ranks(name, four):
    for rank, of_rank in enumerate(four):
        text = REFUSED[name].format(other=(2, 3, 0, 1)[rank], beside=(1, 0, 3, 2)[rank])
        assert text in of_rank["refused"][name]
        assert "weights were changed" not in of_rank["refused"][name]


def test_policies_average_the_momentum_of_shards(four):
    assert max(of_rank["momentum"] for of_rank in four) <= TOLERANCE


def test_evaluations_and_changes_of_gradients_have_the_bits_of_plain_loops(four):
    check_all(four, "around")


def test_buffers_that_are_dtensors(four):
    for rank, of_rank in enumerate(four):
        found = of_rank["buffers"]
        assert max(one["average"] for one in found.values()) <= TOLERANCE
        assert found["policy"]["apart"] == 0
        assert found["skip"].get("restored", 0) == 0
        assert ("restored" in found["skip"]) == (rank >= 2)


def test_partial_sums_of_tensor_parallelism_are_gradients_of_whole_learners():
    """Also where ranks of a learner hold replicas, which stay equal, in clipping and in statistics."""
    for rank, of_rank in enumerate(started("sums")):
        for case, found in of_rank["virtual"].items():
            ours, theirs, learner = found["sharded"], found["virtual"], rank // 2
            assert max(ours["given"], theirs["given"]) <= TOLERANCE, case
            assert ours["weights"][0] == pytest.approx(theirs["weights"][learner], rel=0, abs=TOLERANCE), case
            assert ours["norms"][0] == pytest.approx(theirs["norms"][learner], rel=1e-5), case
            assert ours["apart"] == pytest.approx(theirs["apart"], rel=1e-4, abs=TOLERANCE), case
            assert len(ours["records"]) == (0 if case[-1] == "accumulated" else 4)
            for record, other in zip(ours["records"], theirs["records"], strict=True):
                assert record == pytest.approx(other, rel=1e-4), case


def test_learners_of_three_ranks():
    check_virtual(started("six", 6))
