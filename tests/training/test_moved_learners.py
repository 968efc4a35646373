"""A run goes on with another number of learners, in the middle of an epoch: 4, then 3, then 5."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcore.training import RunRecord, TrainConfig, train
from ddpcore.training.config import merged
from ddpcore.training.trainer import Trainer
from helpers.resumed import back_to

NUM_TRAIN, BATCH, STEPS = 500, 60, 16  # 8 steps to an epoch, and 20 samples of an incomplete batch


def config(learners: int, **sections: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model": "mlp",
        "data": {"name": "digits", "batch_size": BATCH, "num_train": NUM_TRAIN},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "strategy": {"name": "dpsgd", "learners": learners},
        "run": {"steps": STEPS, "checkpoint_every": 2, "keep_last": 20, "keep_best": False, "device": "cpu"},
    }
    return TrainConfig.from_dict(merged(values, sections))


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.Tensor]]:
    """(step, samples [L, B]) of each step that was taken."""
    taken: list[tuple[int, torch.Tensor]] = []
    indices = Trainer.indices

    def noted(trainer: Trainer) -> torch.Tensor:
        found = indices(trainer)
        taken.append((trainer.num_steps, found))
        return found

    monkeypatch.setattr(Trainer, "indices", noted)
    return taken


def moved(folder: Path, *parts: tuple[int, int], **sections: Any) -> RunRecord:
    """The record of a run of so many learners up to a step, then of so many up to another one, ..."""
    for learners, until in parts:
        record = train(config(learners, **sections), out=folder, resume=True)
        if until < STEPS:
            back_to(until, folder)
    return record


def test_no_sample_is_seen_twice_and_none_is_lost(tmp_path: Path, ledger: list[tuple[int, torch.Tensor]]) -> None:
    record = moved(tmp_path / "run", (4, 2), (3, 6), (5, STEPS))
    last = dict(ledger)  # of the steps that a crash undid, what was taken in their place
    assert sorted(last) == list(range(STEPS))
    assert [len(last[step]) for step in range(8)] == [4, 4, 3, 3, 3, 3, 5, 5]
    for epoch in range(2):
        seen = torch.cat([last[step].flatten() for step in range(8 * epoch, 8 * epoch + 8)])
        assert len(seen) == 8 * BATCH and len(seen.unique()) == len(seen)
    assert [(row["step"], row["learners"]) for row in record.resumed] == [(2, 3), (6, 5)]
    assert record.final["step"] == STEPS and not record.final["diverged"]


@pytest.mark.parametrize("momentum", ["keep", "reset"])
def test_all_begin_from_the_averages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, momentum: str) -> None:
    out, policies = tmp_path / "run", {"strategy": {"policies": {"momentum": momentum}}}
    train(config(4, **policies), out=out)
    back_to(6, out)
    begun: list[Any] = []
    load = Trainer.load_moved

    def noted(trainer: Trainer, states: list[Any], moments: str) -> None:
        load(trainer, states, moments)
        optimizer, models = (
            trainer.optimizer.state_dict(),
            [dict(model.state_dict()) for model in trainer.handle.models],
        )
        begun.append(copy.deepcopy((states, optimizer, models)))

    monkeypatch.setattr(Trainer, "load_moved", noted)
    train(config(3, **policies), out=out, resume=True)
    ((state,), optimizer, models) = begun[0]
    old = [state["model"], *state["handle"]["learners"]]
    for name in old[0]:
        expected = torch.stack([one[name].double() for one in old]).mean(dim=0).float()
        assert len(old) == 4 and not torch.equal(old[0][name], old[1][name])
        assert all(torch.equal(model[name], expected) for model in models), name
    momenta = [value["momentum_buffer"] for value in state["optimizer"]["state"].values()]
    num = len(momenta) // 4
    for place in range(num):
        mean = torch.stack([momenta[place + num * learner].double() for learner in range(4)]).mean(dim=0).float()
        for learner in range(3):
            found = optimizer["state"].get(place + num * learner, {}).get("momentum_buffer")
            assert found is None or not found.any() if momentum == "reset" else torch.equal(found, mean)


def test_the_outer_optimizer_keeps_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = {"strategy": {"name": "local_sgd", "period": 2, "outer": {"lr": 0.7, "momentum": 0.9}}}
    train(config(4, **outer), out=tmp_path / "run")
    back_to(6, tmp_path / "run")
    begun: list[Any] = []
    load = Trainer.load_moved

    def noted(trainer: Trainer, states: list[Any], moments: str) -> None:
        load(trainer, states, moments)
        anchors = [one["strategy"]["anchor"] for one in (states[0]["handle"], trainer.handle.state_dict())]
        begun.append(copy.deepcopy(anchors))

    monkeypatch.setattr(Trainer, "load_moved", noted)
    record = train(config(2, **outer), out=tmp_path / "run", resume=True)
    ((saved, here),) = begun
    assert all(torch.equal(a, b) for a, b in zip(saved["parts"], here["parts"], strict=True))
    saved_state, state = saved["optimizer"]["state"], here["optimizer"]["state"]
    assert saved_state and all(
        torch.equal(saved_state[k]["momentum_buffer"], state[k]["momentum_buffer"]) for k in state
    )
    assert record.final["step"] == STEPS and not record.final["diverged"]


def test_refusals(tmp_path: Path) -> None:
    train(config(4), out=tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run already"):
        train(config(3), out=tmp_path / "run")
    back_to(6, tmp_path / "run")
    with pytest.raises(ValueError, match=r"holds another run: strategy is 'ssgd', not 'dpsgd'"):
        train(config(3, strategy={"name": "ssgd"}), out=tmp_path / "run", resume=True)
    fixed = {"data": {"sampler": "fixed"}}
    train(config(4, **fixed), out=tmp_path / "fixed")
    back_to(6, tmp_path / "fixed")
    with pytest.raises(ValueError, match="each learner has samples of its own: resume with 4 learners"):
        train(config(3, **fixed), out=tmp_path / "fixed", resume=True)
    push = {"strategy": {"name": "push_sum", "topology": "one_peer_exponential"}}
    train(config(4, **push), out=tmp_path / "push")
    back_to(6, tmp_path / "push")
    shutil.copytree(tmp_path / "push", tmp_path / "again")
    with pytest.raises(ValueError, match="learners of push_sum have no plain average here: resume with as many"):
        train(config(2, **push), out=tmp_path / "push", resume=True)
    assert train(config(4, **push), out=tmp_path / "again", resume=True).final["step"] == STEPS
