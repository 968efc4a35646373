"""``GossipStrategy`` with the real Lightning, on two gloo ranks and in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import ranks

pytestmark = pytest.mark.slow

SAME = ("ddpcore-dpsgd", "ddpcore-ssgd", "local")  # whose runs are repeated bit for bit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both ranks save."""
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def both(folder: Path) -> list[dict[str, Any]]:
    return ranks.run("lightning_ranks", 2, more=[[folder]] * 2)


@pytest.fixture(scope="module")
def alone(both: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What one process finds, which also goes on with what the ranks have saved."""
    return ranks.run("lightning_ranks", 1, more=[[folder, "alone"]])[0]


def test_ssgd_is_their_ddp_with_accumulation_and_clipping(both: list[dict[str, Any]]) -> None:
    """They add gradients in another order: rounding errors of float32, over 12 steps."""
    for found in both:
        (losses, weights), (others, own) = found["ddp"], found["ssgd"]
        assert len(losses) == 12 and losses[0] == others[0]
        assert torch.allclose(torch.tensor(losses), torch.tensor(others), rtol=0, atol=1e-5)
        assert torch.allclose(weights, own, rtol=0, atol=1e-5)
    assert torch.equal(both[0]["ssgd"][1], both[1]["ssgd"][1])


@pytest.mark.parametrize("name", SAME)
def test_a_resumed_run_has_the_same_bits(both: list[dict[str, Any]], name: str) -> None:
    for found in both:
        run = found[name]
        assert torch.equal(run["whole"], run["resumed"])
        assert run["losses"][0] == run["losses"][1] and len(run["losses"][0]) == 24
        assert run["unchanged"]


@pytest.mark.parametrize("name", ["scaler", "scheduler", "callback"])
def test_a_resumed_run_has_the_state_of_each_ranks_trainer(both: list[dict[str, Any]], name: str) -> None:
    runs = [found["trainers"][name] for found in both]
    for run in runs:
        assert torch.equal(*run["weights"]) and run["states"][0] == run["states"][1]
    if name != "callback":
        assert runs[0]["states"][0] != runs[1]["states"][0], "else rank 0's state is as good"


def test_the_averaged_model_is_validated_tested_and_saved(both: list[dict[str, Any]]) -> None:
    for name in (*SAME, "ddpcore-adpsgd"):
        first, second = (found[name] for found in both)
        assert torch.equal(first["average"], second["average"])
        for run in (first, second):
            assert torch.equal(run["validated"], run["average"])
            assert torch.equal(run["tested"], run["average"])
            assert torch.equal(run["file"], run["half_average"])
    gossip = [found["ddpcore-dpsgd"] for found in both]
    assert gossip[0]["distance"] > 1e-4 and not torch.equal(gossip[0]["whole"], gossip[1]["whole"])
    assert torch.allclose((gossip[0]["whole"] + gossip[1]["whole"]) / 2, gossip[0]["average"], atol=1e-7)


def test_hooks_lists_and_buffers_of_an_evaluation_have_the_average(both: list[dict[str, Any]]) -> None:
    """A checkpoint in the evaluation and an error in it leave each learner its own weights."""
    for found in (one["evaluations"] for one in both):
        weights, means = found["averages"]
        assert torch.equal(found["found"]["list"], weights) and torch.equal(found["found"]["hook"], weights)
        assert torch.equal(found["found"]["buffer"], means) and torch.equal(found["file"], weights)
        assert found["counts"] == [48, 48], "of 96 samples on two ranks, and a hook resets it"
        assert found["distances"][0] == found["distances"][1] > 1e-4
        assert found["unchanged"]
        assert found["error"] == "a failing validation" and not torch.equal(*found["failed"])
        assert found["state"].endswith("while it is evaluated: save the state after the evaluation")


def test_another_module_is_evaluated_and_saved_as_it_is(both: list[dict[str, Any]]) -> None:
    for found in (one["evaluations"] for one in both):
        assert all(torch.equal(found["other"][0], one) for one in found["other"][1:])
        assert torch.equal(found["again"], found["averages"][0])


def test_a_checkpoint_of_ddp_begins_a_gossip_run_and_back(both: list[dict[str, Any]]) -> None:
    for found in both:
        gossip, back = found["moves"]["losses"]
        assert len(gossip) == len(back) == 6  # one epoch each
        assert max(sum(gossip), sum(back)) / 6 < 0.9  # a new model has 1.1 and more
    assert torch.equal(both[0]["moves"]["back"], both[1]["moves"]["back"])


def test_mixed_precision(both: list[dict[str, Any]]) -> None:
    for found in both:
        mixed, plain = found["bf16-mixed"], found["ddpcore-dpsgd"]["losses"][0]
        assert len(mixed) == 6 and mixed[0] != plain[0] and abs(mixed[0] - plain[0]) < 0.02


def test_refusals_are_one_line(both: list[dict[str, Any]]) -> None:
    expected = {
        "find_unused": "wraps no model in DistributedDataParallel: leave find_unused_parameters out",
        "baseline": "GossipStrategy got 'ddp': pass a strategy of ddpcore",
        "unknown": "did you mean 'dpsgd'",
        "two optimizers": "the module has 2 optimizers: ddpcore trains with one",
        "closure": "LBFGS needs a closure in each step, and GossipStrategy steps without one: take another",
        "closure by hand": "LBFGS needs a closure in each step",
        "passes": "noisy_ssgd adds its noise once a training_step, and a second backward pass would have none",
        "ema": "EMAWeightAveraging averages one learner's weights over steps, and validation takes the mean",
        "again": "already serves a distribute() call",
        "shared": "the module shares parameters with the one that learners train",
        "another": "use the same strategy",
    }
    assert set(expected) == set(both[0]["refused"])
    for name, words in expected.items():
        message = both[0]["refused"][name]
        assert words in message and "\n" not in message and len(message) < 300, (name, message)
    for found in both:
        assert len(found["noises"]) == 6 and all(0.08 < noise < 0.12 for noise in found["noises"])


def test_one_process_goes_on_with_the_average_of_two_ranks(both: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    run = both[0]["ddpcore-dpsgd"]
    assert not alone["begun_losses"] and torch.allclose(alone["begun"], run["half_average"], rtol=0, atol=1e-7)
    assert len(alone["losses"]) == 12 and sum(alone["losses"]) / 12 < run["losses"][0][0]
    assert alone["step"] == 12 + 12  # two epochs of two ranks, one of one rank


def test_one_process(alone: dict[str, Any]) -> None:
    """One learner is plain training, and the checkpoint goes on."""
    assert alone["num_losses"] == 24
    assert torch.equal(*alone["validated"])
    assert torch.equal(*alone["resumed"])
