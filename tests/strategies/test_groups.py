"""LocalSGD in groups: SSGD inside a group, local SGD between groups, on virtual learners."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore import ALL, SSGD, LocalSGD
from ddpcore.diagnostics import HessianStatistics, NoiseStatistics
from ddpcore.optim import FusedSGD
from ddpcore.strategies.compression import Int4
from ddpcore.testing import check_strategy
from ddpcore.training import TrainConfig
from ddpcore.training.build import check_connection
from helpers import training
from helpers.connection import connected

K = 2
BUCKETS = {"bucket_bytes": 64, "first_bucket_bytes": 64}


def outer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class Run:
    """Learners of a linear model on least squares: the mean of a batch, so that two batches in one have their mean."""

    def __init__(self, strategy: Any, inputs: torch.Tensor, targets: torch.Tensor, **options: Any) -> None:
        torch.manual_seed(0)
        self.inputs, self.targets = inputs, targets
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        options = {"learners": len(inputs), "vectorize": False, **BUCKETS, **options}
        self.handle = ddpcore.distribute(self.model, self.optimizer, strategy, **connected(**options))

    def weights(self) -> torch.Tensor:
        return training.weights_of_learners(self.handle)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        (self.handle.model(self.inputs) - self.targets).square().mean(dim=(1, 2)).sum().backward()

    def step(self) -> torch.Tensor:
        self.backward()
        self.optimizer.step()
        return self.weights()


def data(num_learners: int, size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_learners, size, 4, generator=generator), torch.randn(
        num_learners, size, 3, generator=generator
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"warmup_steps": 4},
        {"switch_step": 3},
        {"outer": outer},
        {"outer": outer, "fragments": 2, "overlap": 1, "alpha": 0.25},
        {"outer": outer, "switch_step": 2, "fragments": 2},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("k", [2, 3])
def test_a_group_is_one_learner_with_a_larger_batch(k: int, options: dict[str, Any]) -> None:
    """Three groups against three learners that have the samples of a group each. Inside a group all is equal."""
    inputs, targets = data(3 * k)
    grouped = Run(LocalSGD(4, group=k, **options), inputs, targets)
    large = Run(LocalSGD(4, **options), inputs.view(3, -1, 4), targets.view(3, -1, 3))
    apart = 0
    for _ in range(13):
        weights, expected = grouped.step(), large.step()
        groups = weights.view(3, k, -1)
        assert torch.equal(groups, groups[:, :1].expand_as(groups)), "learners of a group have the same bits"
        torch.testing.assert_close(groups[:, 0], expected, rtol=1e-4, atol=1e-5)
        apart += not torch.equal(groups[0], groups[1])
    assert apart >= 5
    momentum = [grouped.optimizer.state[one.weight]["momentum_buffer"] for one in grouped.handle.models]
    assert all(torch.equal(buffer, momentum[row // k * k]) for row, buffer in enumerate(momentum))


def test_the_equation() -> None:
    """w_j <- w_j - a times the mean gradient of the group, and every third step the mean of all: in float64."""
    inputs, targets = data(4)
    run = Run(LocalSGD(3, group=K), inputs, targets)
    x = torch.cat([inputs, torch.ones(4, 6, 1)], dim=2).double()
    w = torch.cat([run.model.weight, run.model.bias[:, None]], dim=1).detach().double().repeat(4, 1, 1)
    momentum = torch.zeros_like(w)
    for step in range(8):
        run.step()
        errors = torch.einsum("jbi,joi->jbo", x, w) - targets.double()
        gradients = torch.einsum("jbo,jbi->joi", errors, x) * 2 / 18
        momentum = 0.9 * momentum + gradients.view(2, K, 3, 5).mean(1).repeat_interleave(K, dim=0)
        w = w - 0.1 * momentum
        if step % 3 == 2:
            w = w.mean(dim=0).expand_as(w).clone()
        torch.testing.assert_close(training.rows_of(run.handle, "weight").double(), w[..., :4], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(training.rows_of(run.handle, "bias").double(), w[..., 4], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("group", "other"), [(4, SSGD), (1, partial(LocalSGD, 100))], ids=["all", "one"])
def test_groups_of_all_and_of_one(group: int, other: Any) -> None:
    """Bit for bit SSGD, until weights are averaged; and bit for bit what it is without groups."""
    runs = [Run(strategy, *data(4)) for strategy in (LocalSGD(100, group=group), other())]
    for _ in range(6):
        first, second = (run.step() for run in runs)
        assert torch.equal(first, second)
    assert runs[0].handle.comm.bytes_sent == runs[1].handle.comm.bytes_sent


def test_messages_of_few_bits_come_from_one_learner_of_each_group() -> None:
    """With the same samples inside a group, it has the bits of one learner a group, and sends as much in an average."""
    inputs, targets = data(3)
    options = {"outer": outer, "compression": Int4(), "fragments": 2, "overlap": 1}
    doubled = [rows.repeat_interleave(K, dim=0) for rows in (inputs, targets)]
    grouped, single = Run(LocalSGD(2, group=K, **options), *doubled), Run(LocalSGD(2, **options), inputs, targets)
    gradients = 4 * grouped.handle.learner.flat.numel  # one row to the other learner
    for _ in range(7):
        before = grouped.handle.comm.bytes_sent, single.handle.comm.bytes_sent
        weights, expected = grouped.step(), single.step()
        assert torch.equal(weights[::K], expected)
        assert torch.equal(weights[1::K], expected)
        sent, messages = grouped.handle.comm.bytes_sent - before[0], single.handle.comm.bytes_sent - before[1]
        assert sent == gradients + messages
        assert messages > 0


def test_what_is_sent_in_a_step() -> None:
    """A row of gradients to the other learner of the group, and every third step a row of weights to all others."""
    run = Run(LocalSGD(3, group=K), *data(6))
    row = 4 * run.handle.learner.flat.numel
    for step in range(1, 8):
        before = run.handle.comm.bytes_sent
        run.step()
        assert run.handle.comm.bytes_sent - before == row + (5 * row if step % 3 == 0 else 0)


def test_policies_act_when_all_meet() -> None:
    """Else each step would send momentum between groups."""
    run = Run(LocalSGD(3, group=K), *data(4), policies=ddpcore.Policies(momentum="average"))
    for step in range(1, 7):
        run.step()
        momentum = [run.optimizer.state[one.weight]["momentum_buffer"] for one in run.handle.models]
        assert torch.equal(momentum[0], momentum[1])
        assert torch.equal(momentum[0], momentum[2]) == (step % 3 == 0)


def test_the_evaluation_model_is_the_mean_of_all() -> None:
    run = Run(LocalSGD(3, group=K), *data(4))
    weights = [run.step() for _ in range(2)][-1].double()
    mean = training.flat_weights(run.handle.evaluation_model()).double()
    torch.testing.assert_close(mean, weights.mean(dim=0), rtol=1e-6, atol=1e-7)
    distance = (weights - weights.mean(dim=0)).square().sum(dim=1).mean().sqrt().item()
    assert run.handle.consensus_distance() == pytest.approx(distance, rel=1e-4)
    assert distance > 0.01


def test_a_checkpoint_continues_bit_for_bit() -> None:
    strategy = partial(LocalSGD, 4, group=K, fragments=2, overlap=2, alpha=0.5, outer=outer)
    run, other = Run(strategy(), *data(4)), Run(strategy(), *data(4))
    for _ in range(5):
        run.step()
    models = copy.deepcopy([one.state_dict() for one in run.handle.models])
    optimizer, state = copy.deepcopy(run.optimizer.state_dict()), copy.deepcopy(run.handle.state_dict())
    for one, saved in zip(other.handle.models, models, strict=True):
        one.load_state_dict(saved)
    other.optimizer.load_state_dict(optimizer)
    other.handle.load_state_dict(state)
    for _ in range(6):
        assert torch.equal(run.step(), other.step())
    with pytest.raises(ValueError, match=r"the state is of LocalSGD\(.*group=2.* and this is LocalSGD\("):
        Run(LocalSGD(4), *data(4)).handle.load_state_dict(state)


def test_closures_and_several_backward_passes() -> None:
    """A closure averages inside of step(), and no_sync() leaves gradients as they are until the last pass."""
    plain, closure, parts = (Run(LocalSGD(3, group=K), *data(4)) for _ in range(3))
    for _ in range(4):
        expected = plain.step()
        closure.optimizer.step(closure.backward)
        assert torch.equal(closure.weights(), expected)
        parts.optimizer.zero_grad()
        for begin in (0, 3):
            inputs, targets = parts.inputs[:, begin : begin + 3], parts.targets[:, begin : begin + 3]
            loss = (parts.handle.model(inputs) - targets).square().mean(dim=(1, 2)).sum() / 2
            if begin == 0:
                with parts.handle.no_sync():
                    loss.backward()
            else:
                loss.backward()
        parts.optimizer.step()
        torch.testing.assert_close(parts.weights(), expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_concerns_its_group() -> None:
    """The other group takes its step. Both learners of the group leave theirs out, and one of them is named."""
    run = Run(LocalSGD(100, group=K), *data(4), on_nonfinite="skip")
    before = run.step()
    run.inputs[3, 1, 2] = torch.nan
    after = run.step()
    assert [torch.equal(*rows) for rows in zip(before, after, strict=True)] == [False, False, True, True]
    assert [(one.step, one.learner) for one in run.handle.nonfinite] == [(2, 3)]
    run.inputs[0, 1, 2] = torch.inf
    assert torch.equal(run.step(), after)
    assert [(one.step, one.learner) for one in run.handle.nonfinite] == [(2, 3), (3, 0), (3, 3)]


def test_which_steps_average_what() -> None:
    strategy = LocalSGD(3, group=K, switch_step=2)
    assert [strategy.plan(step).averages_gradients for step in range(4)] == [True] * 4
    assert [strategy.plan(step).gradients for step in range(4)] == [ALL, ALL, K, K]
    assert [strategy.plan(step).gradients_at_mean for step in range(4)] == [True, True, False, False]
    assert [step for step in range(1, 10) if strategy.plan(step - 1).weights] == [1, 2, 5, 8]
    assert not strategy.traits.stays_identical


def test_a_step_by_hand_beside_an_embedding_that_passes_renormalize_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, LocalSGD(3), learners=2)
    with pytest.raises(RuntimeError, match="weights were changed between several forward passes"):
        for _ in range(5):
            handle.model(torch.randint(9, (2, 5))).square().sum().backward()
            with torch.no_grad():
                for one in handle.models:
                    one[1].weight.sub_(0.1 * one[1].weight.grad)


def test_a_step_by_hand_is_refused() -> None:
    """It is right with SSGD, and here groups would never meet, local steps never begin, and noise be none or one."""
    noises = [ddpcore.NoisySSGD(0.1, where=where) for where in ("shared", "per_learner")]
    for strategy in (LocalSGD(3, group=K), LocalSGD(3, switch_step=2), *noises):
        run = Run(strategy, *data(4))
        with pytest.raises(RuntimeError, match="weights were changed between several forward passes"):
            for _ in range(5):
                run.backward()
                with torch.no_grad():
                    for parameter in (p for one in run.handle.models for p in one.parameters()):
                        parameter -= 0.1 * parameter.grad


def test_gradients_set_without_a_backward_pass_are_refused() -> None:
    run = Run(LocalSGD(3, group=K), *data(4))
    for parameter in (p for one in run.handle.models for p in one.parameters()):
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="local_sgd: gradients were set or changed without a backward pass"):
        run.optimizer.step()


def test_a_step_inside_no_sync_is_refused() -> None:
    """It would leave the learners of a group apart, of which each sends a part of the group's weights."""
    for strategy in (LocalSGD(3, group=K), ddpcore.DPSGD(ddpcore.Complete(), group=K)):
        run = Run(strategy, *data(4))
        with run.handle.no_sync(), pytest.raises(RuntimeError, match=r"inside no_sync.*shorter last window$"):
            run.backward()
            run.optimizer.step()


def test_statistics() -> None:
    """Without a learner's own gradient there is no noise to measure."""
    run = Run(LocalSGD(3, group=K), *data(4))
    with pytest.raises(ValueError, match="local_sgd averages gradients in groups of 2, which leaves no learner's own"):
        NoiseStatistics(run.handle, run.optimizer)

    def loss() -> torch.Tensor:
        return (run.handle.model(run.inputs) - run.targets).square().mean(dim=(1, 2)).sum()

    statistics = HessianStatistics(run.handle, loss, every=2)
    for _ in range(2):
        run.step()
    (record,) = statistics.records
    assert (record.noise, record.noise_shares) == (None, None)
    assert record.distance > 0


@pytest.mark.usefixtures("forked_ranks")
def test_real_ranks_in_other_loops() -> None:
    """That accumulate, freeze a parameter, have running statistics, or are resumed: the bits of virtual learners."""
    check_strategy(partial(LocalSGD, 2, group=K), num_learners=(2, 4))


def test_ranks_that_hold_parts_of_groups_are_not_started() -> None:
    shared = {
        "strategy": {"name": "local_sgd", "group": 2, "learners": 12},
        "run": {"steps": 3},
        "data": {"batch_size": 24},
    }
    for num_ranks in (0, 1, 2, 3, 6, 12):
        check_connection(TrainConfig.from_dict(shared), num_ranks)
    with pytest.raises(ValueError, match="group is 2 and a rank holds 3 learners: take a divisor or a multiple of"):
        check_connection(TrainConfig.from_dict(shared), 4)
    shared["strategy"]["group"] = 4
    for num_ranks in (3, 6, 12):
        check_connection(TrainConfig.from_dict(shared), num_ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 0}, "local_sgd: group is 0: it must be at least 1"),
        ({"group": -2}, "local_sgd: group is -2: it must be at least 1"),
        ({"group": 2.0}, "local_sgd: group is 2.0: it must be a whole number"),
        ({"group": True}, "local_sgd: group is True: it must be a whole number"),
        ({"group": None}, "local_sgd: group is None: it must be a whole number"),
    ],
)
def test_groups_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        LocalSGD(4, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        (4, {"learners": 6}, "local_sgd: group is 4 of 6 learners: take a divisor of 6"),
        (8, {"learners": 4}, "local_sgd: group is 8 of 4 learners: take a divisor of 4"),
        (2, {"learners": 1}, "local_sgd: group is 2 of 1 learners: take a divisor of 1"),
        (2, {"on_failure": "shrink"}, "on_failure='shrink' leaves a group with fewer learners .*: leave group out"),
        (2, {"policies": ddpcore.Policies(momentum="gossip")}, "local_sgd has none: take average"),
        (2, {"on_nonfinite": "quarantine"}, "local_sgd has no neighbours: take 'skip'"),
        (2, {"scaler": torch.amp.GradScaler("cpu")}, "SGD skips a step on one learner while the others wait"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(group: int, options: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 1)
    before, strategy = model.weight.data_ptr(), LocalSGD(4, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message) as error:
        ddpcore.distribute(model, optimizer, strategy, **connected(**{"learners": 4, **options}))
    assert "\n" not in str(error.value)
    assert model.weight.data_ptr() == before
    ddpcore.distribute(model, FusedSGD(model.parameters()), strategy, learners=group)
