"""Errors that leave model, optimizer and strategy as they were, and errors after which training goes on."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore.distributed import distribute as module
from ddpcore.optim import FusedAdamW, FusedSGD
from helpers import ranks, training
from helpers.connection import connected

L = 2


@pytest.fixture(scope="module")
def seen() -> list[dict[Any, Any]]:
    return ranks.run("guard_ranks", 2)


@pytest.mark.slow
def test_a_failed_call_on_ranks_changes_nothing(seen: list[dict[Any, Any]]) -> None:
    for rank in seen:
        one = rank["failed call"]
        assert one["error"] == "rank 1 is gone"
        assert one["hooks"] == 0
        for name, value in one["before"][0].items():
            assert torch.equal(one["after"][0][name], value), name
        for before, after in zip(one["before"][1], one["after"][1], strict=True):
            assert torch.equal(before, after)
    assert torch.equal(seen[0]["failed call"]["weights"], seen[1]["failed call"]["weights"])


@pytest.mark.slow
def test_a_rank_without_samples_takes_part_after_a_step_that_was_left_out(seen: list[dict[Any, Any]]) -> None:
    for rank in seen:
        assert max(rank["left out"]) < 1e-6, rank["left out"]


@pytest.mark.slow
def test_ranks_without_a_pass_join_the_averages_that_others_make(seen: list[dict[Any, Any]]) -> None:
    """None is made inside ``no_sync()``, but for ``sync()`` there. A closure makes one, too."""
    for transport in ("shm", "pg"):
        assert max(max(rank["joined", transport]) for rank in seen) < 1e-5, [rank["joined", transport] for rank in seen]


@pytest.mark.slow
def test_a_rank_has_no_pass_in_the_second_step(seen: list[dict[Any, Any]]) -> None:
    assert max(rank["second step"] for rank in seen) < 1e-6


@pytest.mark.parametrize("part", ["_start_alike", "StateSync", "HookedDistributed", "FlatParameters"])
def test_a_failed_call_on_virtual_learners_changes_nothing(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ArithmeticError("boom")

    model = training.mlp()
    model(torch.ones(2, 5)).sum().backward()
    optimizer, strategy = FusedSGD(model.parameters(), lr=0.1), ddpcore.DPSGD(ddpcore.Complete())
    before = [(parameter.detach().clone(), parameter.grad.clone()) for parameter in model.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr(module, part, fail)
        with pytest.raises(ArithmeticError, match="boom"):
            ddpcore.distribute(model, optimizer, strategy, learners=L)
    for parameter, (weight, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, weight)
        assert torch.equal(parameter.grad, gradient)
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    handle = ddpcore.distribute(model, optimizer, strategy, learners=L)
    inputs, labels = training.samples(L, 4)
    training.loss_of(handle.model(inputs), labels).backward()
    optimizer.step()


@pytest.mark.slow
def test_a_run_freed_in_an_exchange_does_not_stop_the_next(seen: list[dict[Any, Any]]) -> None:
    for rank in seen:
        assert torch.equal(*rank["dropped"])


@pytest.mark.slow
def test_checkpointing_loses_no_gradient(seen: list[dict[Any, Any]]) -> None:
    """Its recomputation calls the model in the middle of the backward pass."""
    for rank in seen:
        plain, again = rank["checkpointed"]
        for ours, expected in zip(again, plain, strict=True):
            torch.testing.assert_close(ours, expected)
            assert expected.any()


@pytest.mark.slow
def test_a_layer_that_one_rank_freezes_is_named(seen: list[dict[Any, Any]]) -> None:
    assert seen[0]["frozen"].startswith("parameter 0.bias is frozen here and has a gradient on another learner")


@pytest.mark.slow
def test_samples_that_one_rank_forgets_are_named_on_all(seen: list[dict[Any, Any]]) -> None:
    for error, is_as_before in (one["samples"] for one in seen):
        assert error.startswith("ssgd: num_samples of learner 1 was not set in each step")
        assert is_as_before


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "pg"])
def test_a_model_that_is_frozen_on_one_rank_alone_is_named(transport: str, seen: list[dict[Any, Any]]) -> None:
    """That rank has no backward pass. Its error names the parameter, and the other rank's error names the rank."""
    assert "is frozen here and has a gradient on another learner" in seen[1]["all frozen", transport]
    assert re.search(r"rank (of )?\[?1\]? ", seen[0]["all frozen", transport])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", training.STRATEGIES)
def test_torch_checkpoints_on_ranks(strategy: str, seen: list[dict[Any, Any]]) -> None:
    for rank in seen:
        first, second = rank["checkpoint", strategy]["ends"]
        assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_without_a_gradient_on_one_rank_stops_all(fused: bool, seen: list[dict[Any, Any]]) -> None:
    """An empty batch with a zero loss before it was right."""
    assert "the GradScaler found no gradient on this rank" in seen[1]["scaled", fused][0]
    assert all(rank["scaled", fused][1:] == (True, True) for rank in seen), [rank["scaled", fused] for rank in seen]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["parameters", "gradients"])
@pytest.mark.parametrize("strategy", training.STRATEGIES)
def test_memory_that_moves_on_one_rank(strategy: str, what: str, seen: list[dict[Any, Any]]) -> None:
    """The rank names the cause before its next step. The other rank stops too if that step needs both."""
    first, second = (rank["moved", strategy, what] for rank in seen)
    if first["error"] == "no error":  # gradients that nobody else reads
        assert what == "gradients" and strategy != "ssgd"
        return
    assert f"the memory of the {what} has moved" in first["error"]
    assert torch.equal(first["before"], first["after"])
    assert second["error"] != "no error"
    if strategy != "local_sgd":
        assert torch.equal(second["before"], second["after"])


class FailsOnce(torch.optim.SGD):
    """Its second step raises an error."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.count == 2:
            raise ArithmeticError("boom")
        return super().step(closure)


@pytest.mark.parametrize("strategy", training.STRATEGIES)
def test_steps_average_after_one_that_raised(strategy: str) -> None:
    """As if the step had not been taken, except for the average that came before it."""
    model = training.mlp()
    optimizer = FailsOnce(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, training.STRATEGIES[strategy](), learners=L)
    distances = []
    for step in range(5):
        inputs, labels = training.samples(L, 4, seed=step)
        optimizer.zero_grad()
        training.loss_of(handle.model(inputs), labels).backward()
        if step == 1:
            with pytest.raises(ArithmeticError, match="boom"):
                optimizer.step()
        else:
            optimizer.step()
        distances.append(handle.consensus_distance())
    assert handle.learner is not None
    assert handle.learner.step == 4
    if strategy == "ssgd":
        assert distances == [0.0] * 5
    elif strategy == "local_sgd":
        assert distances[2] == distances[4] == 0.0 < min(distances[0], distances[3])


def test_hooks_registered_later_still_overlap() -> None:
    """The first backward pass after it sends at its end; later passes send each bucket when it is complete."""
    model = training.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(
        model, optimizer, ddpcore.SSGD(), learners=L, vectorize=False, **connected(**training.SMALL)
    )
    handle._buckets.waits = False  # as on real ranks
    events: list[str] = []

    def hook(parameter: Tensor) -> None:
        events.append("gradient")

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    assert handle.learner is not None
    average = handle.learner.comm.average_
    handle.learner.comm.average_ = lambda *args: (events.append("average"), average(*args))[1]
    orders = []
    for step in range(3):
        inputs, labels = training.samples(L, 4, seed=step)
        events.clear()
        training.loss_of(handle.model(inputs), labels).backward()
        optimizer.step()
        orders.append(list(events))
    assert orders[0].index("average") == 4
    assert orders[2].index("average") < 3


def test_another_optimizer_is_looked_up_once() -> None:
    """Also one that gets a parameter of the model after its first step."""
    model, other = training.mlp(), nn.Linear(2, 2)
    optimizer, second = FusedSGD(model.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=L)
    second.step()
    second.step()
    second.add_param_group({"params": [model[0].weight]})
    with pytest.raises(RuntimeError, match=r"that distribute\(\) did not get steps its parameters"):
        second.step()
    assert handle.learner is not None


def test_states_without_what_their_models_leave_out() -> None:
    """A hook of the model takes the frozen layer from its states, as for adapters. Other gaps are errors."""
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))

    def leave_out(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        del state["0.weight"], state["0.bias"]

    model.register_state_dict_post_hook(leave_out)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(2), learners=2)
    handle.models[1][0].weight.data.fill_(3)
    saved, state = handle.models[1][1].weight.detach().clone(), copy.deepcopy(handle.state_dict())
    handle.models[1][1].weight.data.fill_(0)
    handle.load_state_dict(state)
    assert torch.equal(handle.models[1][1].weight, saved)
    assert bool((handle.models[1][0].weight == 3).all())
    del state["learners"][0]["1.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.* \"1\.bias\""):
        handle.load_state_dict(state)


@pytest.mark.parametrize("make", [torch.optim.AdamW, FusedAdamW])
def test_the_state_of_one_model_is_loaded_before_there_are_learners(make: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = make(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    ddpcore.distribute(model, optimizer, ddpcore.DPSGD(), learners=2)
    own = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"has 2 parameters, .* of 2 learners, 4: load .* before distribute\(\)"):
        optimizer.load_state_dict(state)
    optimizer.load_state_dict(own)
    assert len(optimizer.state_dict()["state"]) == 4
