"""``GossipTrainer`` with the real transformers: BERT and GPT-2, on two gloo ranks and in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both ranks save."""
    return tmp_path_factory.mktemp("transformers")


@pytest.fixture(scope="module")
def both(folder: Path) -> list[dict[str, Any]]:
    return ranks.run("transformers_ranks", 2, more=[[folder]] * 2)


@pytest.fixture(scope="module")
def alone(both: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What one process finds, which also goes on with what the ranks have saved."""
    return ranks.run("transformers_ranks", 1, more=[[folder, "alone"]])[0]


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_ssgd_is_their_ddp_with_accumulation_and_clipping(both: list[dict[str, Any]], name: str) -> None:
    """They add gradients in another order, and AdamW divides by their size: 1e-3 of a loss of 0.7 to 3.5, 8 steps."""
    for found in both:
        losses, others = found[name]["losses"]
        assert len(losses) == (8 if losses else 0) and losses[:1] == others[:1]
        assert torch.allclose(torch.tensor(losses), torch.tensor(others), rtol=0, atol=1e-3)
        assert torch.allclose(*found[name]["weights"], rtol=0, atol=1e-3)
    assert both[0][name]["losses"][0], "rank 0 logs"
    assert torch.equal(*(found[name]["weights"][1] for found in both))


def test_a_resumed_run_has_the_same_bits(both: list[dict[str, Any]]) -> None:
    for found in both:
        run = found["dpsgd"]
        assert torch.equal(*run["weights"])
        assert run["losses"][0][4:] == run["losses"][1]
    assert not torch.equal(both[0]["dpsgd"]["weights"][0], both[1]["dpsgd"]["weights"][0])


def test_a_run_resumed_in_an_epoch_takes_its_samples(both: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Also where a sampler draws from torch's own generator, which Trainer sets only when the samples are drawn."""
    for found in both:
        assert torch.equal(*found["grouped"])
    assert torch.equal(*alone["unseeded"])


def test_a_resumed_run_has_the_gradient_scaler_of_each_rank(both: list[dict[str, Any]]) -> None:
    for (whole, scaler), (later, other) in (found["scaled"] for found in both):
        assert torch.equal(whole, later) and scaler == other
    assert both[1]["scaled"][0][1]["scale"] < both[0]["scaled"][0][1]["scale"] == 256


def test_the_averaged_model_is_evaluated_and_saved(both: list[dict[str, Any]]) -> None:
    for found in both:
        run = found["dpsgd"]
        assert torch.equal(*run["saved"]) and run["unchanged"] and run["distance"] > 1e-4
        assert run["evaluated"][0] == run["evaluated"][1] and run["counted"] == 32, "of 64 samples on two ranks"
    assert both[0]["dpsgd"]["evaluated"] == both[1]["dpsgd"]["evaluated"]


def test_a_checkpoint_of_ddp_begins_a_gossip_run_and_back(both: list[dict[str, Any]]) -> None:
    onward, begun = both[0]["moves"]
    assert len(onward) == len(begun) == 4
    assert sum(onward) / 4 < both[0]["bert"]["losses"][0][0]  # the loss of a new model
    assert sum(begun) / 4 < both[0]["dpsgd"]["losses"][0][0]


def test_the_best_model_is_evaluated_and_saved_also_without_waiting(both: list[dict[str, Any]]) -> None:
    for found in both:
        assert found["best"]["checkpoint"] == "checkpoint-4", "of 8 steps, since the loss falls"
        assert torch.equal(*found["best"]["weights"])


def test_refusals_are_one_line(both: list[dict[str, Any]]) -> None:
    expected = {
        "strategy": "GossipTrainer got strategy='dpsgd': pass a strategy of ddpcore",
        "another": "use the same strategy",
        "again": "a GossipTrainer trains once: make a new one with model=trainer.handle.evaluation_model()",
        "batch size": "auto_find_batch_size trains anew, and GossipTrainer only once: find it by a Trainer",
        "wrapped": "wrapped by DistributedDataParallel",
        "fsdp": "Accelerate runs FSDP, which averages or shards by itself",
        "deepspeed": "Accelerate runs DEEPSPEED, which averages or shards by itself",
        "over": "another run has saved its weights over those of ddpcore_rank_*.pt: remove these to go on",
    }
    assert set(expected) == set(both[0]["refused"])
    for name, words in expected.items():
        message = both[0]["refused"][name]
        assert words in message and "\n" not in message, (name, message)


def test_an_earlier_trainer_leaves_nothing_on_the_model(both: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Not the autocast of another precision either. One process has the bits of a plain Trainer with a new model."""
    for found in (*both, alone):
        for case, weights in found["earlier"].items():
            assert torch.equal(*weights), case
    assert not torch.equal(both[0]["earlier"][False, False][0], both[0]["earlier"][True, True][0])


def test_the_average_of_a_run_goes_on_in_another_trainer(both: list[dict[str, Any]]) -> None:
    """As a model that loads its state. A plain Trainer trains it with DDP, as any model."""
    for found in both:
        for own, other in found["onward"]:
            assert torch.equal(own, other)
    assert torch.equal(*(found["onward"][0][0] for found in both))


def test_one_process_goes_on_with_the_average_of_two_ranks(both: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert torch.allclose(*alone["begun"], rtol=0, atol=1e-7)
    assert len(alone["losses"]) == 4 and alone["step"] == 8
    assert sum(alone["losses"]) / 4 < both[0]["dpsgd"]["losses"][0][0]


def test_one_process_saves_into_the_folder_of_two_ranks(alone: dict[str, Any]) -> None:
    assert torch.equal(*alone["again"])


def test_one_process(alone: dict[str, Any]) -> None:
    assert torch.equal(*alone["resumed"])
