"""Policies for momentum, batch normalisation and random numbers when learners average."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ddpcore
from ddpcore import DPSGD, SSGD, LocalSGD, OnePeerExponential, Policies, PushSum, Ring
from ddpcore.comm.membership import Change
from ddpcore.distributed.state_sync import scales_inside
from ddpcore.optim import FusedAdamW, FusedSGD
from helpers import training

N = 4


def make(strategy: Any, policies: Policies, kind: Any = torch.optim.SGD, **rule: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    rule = rule or {"lr": 0.1, "momentum": 0.9}
    optimizer = kind(model.parameters(), **rule)
    return model, optimizer, ddpcore.distribute(model, optimizer, strategy, learners=N, policies=policies)


def step(handle: Any, optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    handle.model(torch.randn(N, 8, 5, generator=generator)).square().sum().backward()
    optimizer.step()


def states(handle: Any, optimizer: Any, name: str) -> torch.Tensor:
    """``[N, elements]``: a state of all learners. One that an optimizer has not created yet is zero here."""

    def state_of(parameter: torch.Tensor) -> torch.Tensor:
        return optimizer.state[parameter].get(name, torch.zeros_like(parameter)).flatten()

    return torch.stack([torch.cat([*map(state_of, model.parameters())]) for model in handle.models])


@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD])
def test_momentum(kind: Any) -> None:
    """Against learners that keep their momentum: it is averaged, mixed with the matrix of the ring, or zeroed."""
    seen = {}
    for policy in ("keep", "average", "gossip", "reset"):
        _, optimizer, handle = make(DPSGD(Ring()), Policies(momentum=policy), kind)
        step(handle, optimizer, 0)
        seen[policy] = states(handle, optimizer, "momentum_buffer")
    kept = seen["keep"]
    assert not torch.allclose(kept[0], kept[1])
    torch.testing.assert_close(seen["average"], kept.mean(0).expand_as(kept), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        seen["gossip"].double(), torch.from_numpy(Ring().matrix(0, N)) @ kept.double(), rtol=1e-5, atol=1e-7
    )
    assert not seen["reset"].any()


SHARES = (1.0, 2.0, 3.0, 6.0)
RING, PAIRS = Ring().matrix(0, N), OnePeerExponential().matrix(0, N)
MIXED: list[tuple[Any, str, Any]] = [  # the policy, and the matrix by which the strategy mixes weights in that step
    (lambda: DPSGD(Ring(), consensus=lambda step: 0.25), "gossip", 0.75 * np.eye(N) + 0.25 * RING),
    (lambda: DPSGD(Ring(), consensus={"least": 0.5}, order="adapt_then_combine"), "gossip", RING),
    (lambda: ddpcore.SlowMo(DPSGD(Ring(), consensus=lambda step: 0.25)), "gossip", 0.75 * np.eye(N) + 0.25 * RING),
    (lambda: LocalSGD(2, topology=OnePeerExponential()), "gossip", PAIRS),
    (lambda: ddpcore.GASLoC(OnePeerExponential(), period=2), "gossip", PAIRS),
    (lambda: ddpcore.ExactDiffusion(Ring()), "gossip", 0.5 * np.eye(N) + 0.5 * RING),
    (lambda: LocalSGD(1, weights=SHARES), "average", np.tile(SHARES, (N, 1)) / 12),
    (lambda: DPSGD(ddpcore.Weighted(Ring(), SHARES)), "average", np.tile(SHARES, (N, 1)) / 12),
    (lambda: PushSum(Ring()), "average", np.full((N, N), 0.25)),
]


@pytest.mark.parametrize(("strategy", "policy", "matrix"), MIXED)
def test_momentum_is_mixed_as_the_weights_are(strategy: Any, policy: str, matrix: Any) -> None:
    """By the same part of W, of the same round, and with the weights of learners."""
    seen = {}
    for chosen in ("keep", policy):
        _, optimizer, handle = make(made := strategy(), Policies(momentum=chosen))
        for seed in range(1 if made.plan(0).weights else 2):
            step(handle, optimizer, seed)
        seen[chosen] = states(handle, optimizer, "momentum_buffer").double()
    torch.testing.assert_close(seen[policy], torch.from_numpy(matrix) @ seen["keep"], rtol=1e-5, atol=1e-6)


def test_momentum_of_adam() -> None:
    """Policies change all states of the parameter's shape, but not the step count. A reset zeroes that too."""
    seen = {}
    for policy in ("keep", "average", "reset"):
        _, optimizer, handle = make(LocalSGD(2), Policies(momentum=policy), torch.optim.Adam, lr=0.01)
        step(handle, optimizer, 0)
        step(handle, optimizer, 1)
        seen[policy] = [states(handle, optimizer, name) for name in ("exp_avg", "exp_avg_sq")]
        counts = {int(state.get("step", 0)) for state in optimizer.state.values()}
        assert counts == ({0} if policy == "reset" else {2})
    for kept, averaged, forgotten in zip(*seen.values(), strict=True):
        torch.testing.assert_close(averaged, kept.mean(0).expand_as(kept), rtol=1e-5, atol=1e-9)
        assert not forgotten.any()


def rule(kind: Any, **options: Any) -> Any:
    return lambda parameters: kind(parameters, lr=0.05, **options)


RULES = {
    "Rprop": rule(torch.optim.Rprop),
    "Adagrad": rule(torch.optim.Adagrad, initial_accumulator_value=1.0, lr_decay=0.5),
    "NAdam": rule(torch.optim.NAdam),
    "SGD": rule(torch.optim.SGD, momentum=0.9, dampening=0.5),
    "Adam": rule(torch.optim.Adam, amsgrad=True),
    "FusedSGD": rule(FusedSGD, momentum=0.9, dampening=0.5),
    "FusedAdamW": rule(FusedAdamW),
}


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_reset_is_a_new_optimizer(make: Any) -> None:
    """Against two plain models that get one after each average: the first state is not zero in all rules of torch."""
    model = nn.Linear(3, 1)
    alone = [copy.deepcopy(model) for _ in range(2)]
    optimizer = make(model.parameters())
    handle = ddpcore.distribute(model, optimizer, LocalSGD(2), learners=2, policies=Policies(momentum="reset"))
    inputs = torch.randn(6, 2, 4, 3)
    for step, both in enumerate(inputs):
        optimizer.zero_grad()
        handle.model(both).square().mean(dim=(1, 2)).sum().backward()
        optimizer.step()
        if step % 2 == 0:
            own = [make(one.parameters()) for one in alone]
        for one, plain, batch in zip(alone, own, both, strict=True):
            plain.zero_grad()
            one(batch).square().mean().backward()
            plain.step()
        for pair in zip(*(one.parameters() for one in alone), strict=True) if step % 2 else ():
            mean = torch.stack([*pair]).mean(0).detach()
            for parameter in pair:
                parameter.data.copy_(mean)
    for found, expected in zip(handle.models[1].parameters(), alone[1].parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def joined(make: Any, strategy: Any, policies: Policies, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Three steps of three virtual learners, of which the last one is gone at first and joins after the second step."""
    model = nn.Linear(3, 1).to(dtype)
    optimizer = make(model.parameters())
    connection = ddpcore.Connection(on_failure="shrink")
    handle = ddpcore.distribute(model, optimizer, strategy, learners=3, connection=connection, policies=policies)
    handle.lose(2)
    comm: Any = handle.comm
    for number in range(3):
        optimizer.zero_grad()
        handle.model(torch.randn(3, 4, 3, dtype=dtype)).square().sum().backward()
        if number == 1:
            handle.play([Change(operation=comm.num_operations, step=None, members=(0, 1, 2), joined=(2,))])
        optimizer.step()
        assert comm.membership.members == ((0, 1, 2) if number else (0, 1))
        if number == 1 and not strategy.traits.stays_identical:
            assert not optimizer.state.get(handle.models[2].weight)
    return handle, optimizer


def test_a_virtual_learner_that_joins_begins_as_a_new_optimizer() -> None:
    """As a rank that joins. A step size of zero, which Rprop had, is not its first one, and it counts its own steps."""
    handle, optimizer = joined(partial(torch.optim.Rprop, lr=0.05), DPSGD(Ring()), Policies())
    assert torch.equal(optimizer.state[handle.models[2].weight]["step_size"], torch.full((1, 3), 0.05))
    for make in (ddpcore.optim.FusedAdamW, ddpcore.optim.FusedLAMB, partial(ddpcore.optim.FusedSGD, momentum=0.9)):
        rule = partial(make, lr=0.05, master_weights=True)
        handle, optimizer = joined(rule, DPSGD(Ring()), Policies(), torch.bfloat16)
        for parameters in zip(*(model.parameters() for model in handle.models), strict=True):
            states = [optimizer.state[parameter] for parameter in parameters]
            assert [float(state["step"]) for state in states] == [3, 3, 1]
            assert all(torch.equal(s["master"].bfloat16(), p) for s, p in zip(states, parameters, strict=True))


def test_a_learner_that_joins_stays_equal() -> None:
    """Where no step averages weights, it takes the moments and counts of a neighbour, whatever the policies say."""
    makes = [partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW, ddpcore.optim.FusedAdamW]
    for make, policy in itertools.product(makes, ["keep", "reset"]):
        handle, optimizer = joined(partial(make, lr=0.05), ddpcore.SSGD(), Policies(momentum=policy))
        for parameters in zip(*(model.parameters() for model in handle.models), strict=True):
            states = [optimizer.state[parameter] for parameter in parameters]
            for parameter, state in zip(parameters, states, strict=True):
                torch.testing.assert_close([parameter, dict(state)], [parameters[0], dict(states[0])], rtol=0, atol=0)


class Phases(nn.Module):
    """A linear layer with a complex buffer, which each learner rotates by its own input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("phases", torch.tensor([1 + 2j, 3 - 1j], dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("policy", ["average", "gossip", "reset"])
def test_complex_buffers(policy: str, dtype: torch.dtype) -> None:
    """They are averaged, mixed and reset as the others are, real and imaginary part, also in float64."""
    torch.manual_seed(3)
    model = Phases(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, DPSGD(Ring()), learners=N, policies=Policies(batch_norm=policy))
    first = model.phases.clone()
    own = torch.randn(N, 2, dtype=dtype)
    for one, phases in zip(handle.models, own, strict=True):
        one.phases.copy_(phases)
    mean = handle.evaluation_model().phases
    torch.testing.assert_close(mean, own.mean(0))
    step(handle, optimizer, 0)
    mixed = (torch.from_numpy(Ring().matrix(0, N)).to(dtype) @ own) if policy == "gossip" else None
    expected = {"average": own.mean(0).expand(N, 2), "reset": first.expand(N, 2)}.get(policy, mixed)
    torch.testing.assert_close(training.rows_of(handle, "phases"), expected)


@pytest.mark.parametrize("policies", [Policies(momentum="average"), Policies(moments={"momentum_buffer": 1})])
def test_frozen_parameters_in_the_optimizer(policies: Policies) -> None:
    """Learner 0 alone has them there. Its momentum was averaged with that of other weights."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, LocalSGD(1), learners=2, policies=policies)
    inputs = torch.randn(2, 4, 3)
    handle.model(inputs).square().sum().backward()
    mean = torch.stack([one[1].weight.grad for one in handle.models]).mean(0)
    optimizer.step()
    for one in handle.models:
        torch.testing.assert_close(optimizer.state[one[1].weight]["momentum_buffer"], mean)


def test_policies_act_only_in_steps_that_average() -> None:
    _, optimizer, handle = make(LocalSGD(3), Policies(momentum="average"))
    for count in range(1, 7):
        step(handle, optimizer, count)
        buffers = states(handle, optimizer, "momentum_buffer")
        assert torch.allclose(buffers[0], buffers[1]) == (count % 3 == 0)


def test_policies_act_while_post_local_sgd_is_synchronous() -> None:
    """Gradients are averaged in the first three steps, weights then every second one."""
    _, optimizer, handle = make(LocalSGD(2, switch_step=3), Policies(momentum="average", batch_norm="average"))
    for count in range(1, 8):
        step(handle, optimizer, count)
        mean = training.rows_of(handle, "1.running_mean")
        assert torch.allclose(mean[0], mean[1]) == (count <= 3 or count in (5, 7)), count


@pytest.mark.parametrize("name", ["momentum", "batch_norm", "rng"])
def test_a_resumed_run_resets_to_the_beginning_of_the_first(name: str) -> None:
    """Bit for bit, although the second process has another model and seed."""

    def begin(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
        model[1].running_mean.fill_(float(seed))
        optimizer = FusedSGD(model.parameters(), lr=0.01, momentum=0.9)
        policies = Policies(**{name: "reset"})
        handle = ddpcore.distribute(model, optimizer, LocalSGD(2), learners=2, vectorize=False, policies=policies)
        return model, optimizer, handle

    def train(steps: range) -> None:
        for seed in steps:
            optimizer.zero_grad()
            inputs = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(seed))
            handle.model(inputs).square().sum().backward()
            optimizer.step()

    model, optimizer, handle = begin(3)
    train(range(3))
    saved = copy.deepcopy([one.state_dict() for one in (model, optimizer, handle)])
    rng = torch.get_rng_state()
    train(range(3, 7))
    ends = [*map(torch.clone, handle.model.state_dict().values()), torch.rand(1)]
    model, optimizer, handle = begin(4)
    for one, state in zip((model, optimizer, handle), saved, strict=True):
        one.load_state_dict(state)
    torch.set_rng_state(rng)
    train(range(3, 7))
    found = [*handle.model.state_dict().values(), torch.rand(1)]
    assert all(map(torch.equal, found, ends))


def test_batch_norm() -> None:
    seen = {}
    for policy in ("keep", "average", "gossip", "reset"):
        _, optimizer, handle = make(DPSGD(Ring()), Policies(batch_norm=policy))
        step(handle, optimizer, 0)
        seen[policy] = training.rows_of(handle, "1.running_mean")
        assert training.rows_of(handle, "1.num_batches_tracked").tolist() == [1] * N
    kept = seen["keep"]
    torch.testing.assert_close(seen["average"], kept.mean(0).expand_as(kept))
    mixed = torch.from_numpy(Ring().matrix(0, N)) @ kept.double()
    torch.testing.assert_close(seen["gossip"].double(), mixed, rtol=1e-5, atol=1e-7)
    assert not seen["reset"].any()


@pytest.mark.parametrize(
    ("strategy", "shares"), [(lambda: SSGD(weights=SHARES), (1.0,) * N), (lambda: LocalSGD(1, weights=SHARES), SHARES)]
)
def test_averages_of_buffers_have_the_weights_of_local_sgd_alone(strategy: Any, shares: Any) -> None:
    seen = {}
    for policy in ("keep", "average"):
        _, optimizer, handle = make(strategy(), Policies(batch_norm=policy))
        step(handle, optimizer, 0)
        seen[policy] = training.rows_of(handle, "1.running_mean")
    mean = (torch.tensor(shares)[:, None] * seen["keep"]).sum(0) / sum(shares)
    torch.testing.assert_close(seen["average"], mean.expand_as(seen["keep"]))


class Late(nn.Module):
    """A layer that has a buffer after it saw a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.max() > 0 and not hasattr(self, "seen"):
            self.register_buffer("seen", inputs.mean(0))
        return self.linear(inputs)


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize(
    ("policy", "inputs", "message"),
    [
        ("average", (1.0, -1.0), "buffers differ in names, sizes or dtypes between"),
        ("gossip", (1.0, -1.0), "buffers differ"),
        ("average", (1.0, 3.0), None),
        ("reset", (1.0, 1.0), "or from those at distribute"),
        ("keep", (1.0, -1.0), None),
    ],
)
def test_buffers_that_come_late(policy: str, inputs: Any, message: str | None, *, with_closure: bool) -> None:
    """Those of all learners are averaged. Other lists are refused: elements of two learners' buffers were mixed."""
    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = LocalSGD(1, topology=Ring()) if with_closure else DPSGD(Ring())
    handle = ddpcore.distribute(model, optimizer, strategy, learners=2, policies=Policies(batch_norm=policy))
    before = model.linear.weight.detach().clone()

    def closure() -> torch.Tensor:
        losses = [one(torch.full((2, 5), value)).mean() for one, value in zip(handle.models, inputs, strict=True)]
        handle.backward(losses)
        return losses[0]

    def train() -> None:
        if not with_closure:
            closure()
        optimizer.step(closure if with_closure else None)

    if message is None:
        train()
        assert policy == "keep" or all(torch.equal(one.seen, torch.full((5,), 2.0)) for one in handle.models)
        return
    with pytest.raises(RuntimeError, match=message) as raised:
        train()
    assert len(str(raised.value)) < 300
    assert with_closure or torch.equal(before, model.linear.weight)


def test_an_average_of_buffers_that_differ_is_refused() -> None:
    handle = ddpcore.distribute(model := Late(), torch.optim.SGD(model.parameters(), lr=0.1), SSGD(), learners=2)
    handle.models[1](torch.ones(2, 5))
    with pytest.raises(RuntimeError, match="buffers differ"):
        handle.evaluation_model()
    handle.evaluation_model(batch_norm="local")


def test_rng() -> None:
    draws = {}
    for policy in ("keep", "reset"):
        _, optimizer, handle = make(SSGD(), Policies(rng=policy))
        for seed in (1, 2):
            torch.manual_seed(seed)
            handle.learner.step = 0
            step(handle, optimizer, 0)
            draws[policy, seed] = torch.rand(1).item()
    assert draws["keep", 1] != draws["keep", 2]
    assert draws["reset", 1] == draws["reset", 2]  # both runs were made with seed 3


def test_resetting_nothing_is_no_error() -> None:
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policies = Policies(momentum="reset", batch_norm="reset")
    handle = ddpcore.distribute(model, optimizer, DPSGD(Ring()), learners=2, policies=policies)
    handle.model(torch.ones(2, 4, 5)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": "mean"}, r"policy momentum is 'mean': choose from keep, gossip, average, reset"),
        ({"rng": "average"}, r"policy rng is 'average': choose from keep, reset"),
    ],
)
def test_policies_that_make_no_sense(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policies(**options)


def test_what_a_policy_needs() -> None:
    with pytest.raises(ValueError, match="local_sgd has none: take average"):
        make(LocalSGD(2), Policies(momentum="gossip"))
    for kind in ("momentum", "batch_norm"):
        with pytest.raises(ValueError, match="push_sum does not train the mean of its weights: take average"):
            make(PushSum(Ring()), Policies(**{kind: "gossip"}))
    with pytest.raises(ValueError, match="where local_sgd has not counted samples: give numbers"):
        make(LocalSGD(4, weights="samples"), Policies(moments={"exp_avg": 2}), torch.optim.Adam, lr=0.1)
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="single does not use these options: leave policies= out"):
        ddpcore.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            ddpcore.Single(),
            policies=Policies(momentum="average"),
        )


def test_a_scaler_needs_steps_that_all_learners_take() -> None:
    """A learner that skips its step would let its neighbours wait."""
    model = nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not scales_inside(plain)
    assert scales_inside(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    assert scales_inside(FusedSGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="SGD skips a step on one learner"):
        ddpcore.distribute(model, plain, DPSGD(), learners=2, scaler=scaler)
    for strategy, is_enabled in ((SSGD(), True), (DPSGD(), False)):
        model = nn.Linear(2, 2)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)
        handle = ddpcore.distribute(model, plain, strategy, learners=2, scaler=scaler)
        before = model.weight.detach().clone()
        scaler.scale(handle.model(torch.ones(2, 3, 2)).sum()).backward()
        scaler.step(plain)
        assert not torch.equal(model.weight, before)
