"""State between steps: checkpoints, averages over learners, and the baselines."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore.optim import FusedSGD
from ddpcore.parameters.learner_models import LearnerModels
from ddpcore.storage.serialization import tensors_of
from ddpcore.strategies.compression import Int4, Int8, TopK
from helpers import training
from helpers.connection import connected

STATEFUL = {
    **training.STRATEGIES,
    "stale": lambda: ddpcore.DPSGD(ddpcore.Ring(), staleness=1),
    "stale int8": lambda: ddpcore.DPSGD(ddpcore.RandomPair(), staleness=1, compression=Int8()),
    "topk": lambda: ddpcore.DPSGD(ddpcore.Ring(), compression=TopK(ratio=0.2)),
    "diloco": lambda: ddpcore.LocalSGD(2, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)),
    "post-local": lambda: ddpcore.LocalSGD(2, switch_step=2, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9)),
    "streaming": lambda: ddpcore.LocalSGD(
        4, fragments=2, overlap=2, alpha=0.5, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9)
    ),
    "outer int4": lambda: ddpcore.LocalSGD(2, outer=lambda p: torch.optim.SGD(p, lr=0.7), compression=Int4()),
    "noloco": lambda: ddpcore.NoLoCo(period=2),
    "gasloc": lambda: ddpcore.GASLoC(period=2),
    "slowmo": lambda: ddpcore.SlowMo(ddpcore.DPSGD(), period=2),
    "push_sum": lambda: ddpcore.PushSum(ddpcore.FromGraph(nx.DiGraph([(0, 1), (0, 2), (1, 2), (2, 0)]))),
    "noisy": lambda: ddpcore.NoisySSGD(0.1, seed=2),
    "noisy apart": lambda: ddpcore.NoisySSGD(0.1, seed=2, where="per_learner"),
}

MIDWAY = {
    **STATEFUL,
    "combine": lambda: ddpcore.DPSGD(ddpcore.Ring(), order="combine_then_adapt"),
    "combine topk": lambda: ddpcore.DPSGD(ddpcore.Ring(), order="combine_then_adapt", compression=TopK(ratio=0.2)),
    "slow combine": lambda: ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Ring(), order="combine_then_adapt"), period=2),
}


@pytest.mark.parametrize("optimizer_name", ["fused", "sgd", "adam"])
@pytest.mark.parametrize("strategy_name", STATEFUL)
@pytest.mark.parametrize("fresh", [False, True], ids=["same process", "new process"])
def test_a_saved_run_continues(strategy_name: str, optimizer_name: str, fresh: bool) -> None:
    """State dicts of step 3, loaded into the same run or into a new one, give steps 4 to 6 bit for bit."""

    def make() -> tuple[Any, Any, Any]:
        model = training.mlp()
        optimizer = training.OPTIMIZERS[optimizer_name](model.parameters())
        strategy = STATEFUL[strategy_name]()
        handle = ddpcore.distribute(
            model, optimizer, strategy, learners=training.L, vectorize=False, **connected(**training.SMALL)
        )
        return model, optimizer, handle

    def train(steps: range) -> None:
        for step in steps:
            inputs, labels = training.samples(training.L, 4, seed=step)
            optimizer.zero_grad()
            training.loss_of(handle.model(inputs), labels).backward()
            optimizer.step()

    model, optimizer, handle = make()
    train(range(3))
    given = handle.state_dict()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), given))
    train(range(3, 6))
    for mine, then in zip(tensors_of(given), tensors_of(saved[2]), strict=True):
        assert torch.equal(mine, then), "later steps change a state that the program keeps"
    end = training.weights_of_learners(handle).clone()
    train(range(50, 53))
    assert not torch.equal(training.weights_of_learners(handle), end)
    if fresh:
        model, optimizer, handle = make()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    assert handle.learner.step == 3
    for tensor in tensors_of(saved[2]):
        tensor.fill_(1)  # the program's own memory, and not that of the run
    train(range(3, 6))
    assert torch.equal(training.weights_of_learners(handle), end)


@pytest.mark.parametrize("strategy_name", STATEFUL)
def test_loading_discards_an_unfinished_step(strategy_name: str) -> None:
    """A forward pass, or a forward and a backward pass, before the load has no effect on the run."""
    ends = []
    for begun in ("nothing", "forward", "backward"):
        model = training.mlp()
        optimizer = training.OPTIMIZERS["sgd"](model.parameters())
        handle = ddpcore.distribute(
            model,
            optimizer,
            STATEFUL[strategy_name](),
            learners=training.L,
            vectorize=False,
            **connected(**training.SMALL),
        )

        def forward(step: int, handle: Any = handle) -> Tensor:
            inputs, labels = training.samples(training.L, 4, seed=step)
            return training.loss_of(handle.model(inputs), labels)

        saved = None
        for step in range(6):
            if step == 3:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
                if begun != "nothing":
                    loss = forward(77)
                    if begun == "backward":
                        loss.backward()
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                handle.load_state_dict(saved[2])
            optimizer.zero_grad()
            forward(step).backward()
            optimizer.step()
        ends.append(training.weights_of_learners(handle))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("strategy_name", [name for name in MIDWAY if name != "noisy apart"])
def test_a_state_from_the_middle_of_a_step(strategy_name: str) -> None:
    """Saved between the forward pass and the step, which the resumed run begins anew with the same result."""

    def make() -> tuple[Any, Any, Any]:
        model = training.mlp()
        optimizer = training.OPTIMIZERS["sgd"](model.parameters())
        strategy = MIDWAY[strategy_name]()
        handle = ddpcore.distribute(model, optimizer, strategy, learners=training.L, **connected(**training.SMALL))
        return model, optimizer, handle

    def states() -> Any:
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))

    model, optimizer, handle = make()
    saved = []
    for step in range(6):
        inputs, labels = training.samples(training.L, 4, seed=step)
        optimizer.zero_grad()
        loss = training.loss_of(handle.model(inputs), labels)
        saved += [states()] if step == 3 else []
        loss.backward()
        saved += [states()] if step == 3 else []
        optimizer.step()
    end = training.weights_of_learners(handle).clone()
    for state in saved:
        model, optimizer, handle = make()
        for part, own in zip((model, optimizer, handle), state, strict=True):
            part.load_state_dict(own)
        for step in range(3, 6):
            inputs, labels = training.samples(training.L, 4, seed=step)
            optimizer.zero_grad()
            training.loss_of(handle.model(inputs), labels).backward()
            optimizer.step()
        assert torch.equal(training.weights_of_learners(handle), end)


def test_a_parameter_that_rests_after_a_restart_is_stepped_as_before() -> None:
    """After a restart, too, a parameter that nobody uses has no gradient."""
    ends = []
    for restart in (False, True):
        torch.manual_seed(0)
        model = training.Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, vectorize=False)
        for step in range(4):
            if step == 2 and restart:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
                model = training.Branches()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, vectorize=False)
                for target, state in zip((model, optimizer, handle), saved, strict=True):
                    target.load_state_dict(state)
            for one in handle.models:
                one.branch = "first"
                if step >= 2:
                    one.first.weight.grad = None
            inputs, labels = training.samples(2, 4, seed=step)
            optimizer.zero_grad()
            training.loss_of(handle.model(inputs), labels).backward()
            optimizer.step()
        ends.append(training.weights_of_learners(handle))
    assert torch.equal(*ends)


def test_the_state_of_another_run_is_refused() -> None:
    made = []
    for strategy, n in ((ddpcore.DPSGD(ddpcore.Ring()), 3), (ddpcore.DPSGD(ddpcore.Ring(), staleness=1), 3)):
        model = training.mlp()
        made.append(ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, learners=n))
    with pytest.raises(ValueError, match=r"the state is of DPSGD\(Ring.*staleness=0.*and this is DPSGD.*staleness=1"):
        made[1].load_state_dict(made[0].state_dict())


def sgd(lr: float) -> partial[torch.optim.SGD]:
    return partial(torch.optim.SGD, lr=lr)


def pair(own: float) -> ddpcore.FromMatrix:
    return ddpcore.FromMatrix([[own, 1 - own], [1 - own, own]])


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (ddpcore.DPSGD(ddpcore.FromGraph(nx.cycle_graph(4))), ddpcore.DPSGD(ddpcore.FromGraph(nx.star_graph(3)))),
        (ddpcore.DPSGD(pair(0.5)), ddpcore.DPSGD(pair(0.4))),
        (ddpcore.LocalSGD(2, outer=sgd(0.7)), ddpcore.LocalSGD(2, outer=sgd(0.5))),
    ],
)  # fmt: skip
def test_the_state_of_other_settings_is_refused(mine: ddpcore.Strategy, other: ddpcore.Strategy) -> None:
    """Although the names of the strategies are equal."""
    handles = []
    for strategy in (mine, other, mine):
        model = training.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        num = 2 if "Graph" not in repr(strategy) else 4
        handles.append(ddpcore.distribute(model, optimizer, copy.deepcopy(strategy), learners=num))
    with pytest.raises(ValueError, match=r"the state is of .*, settings .* and this is .*, settings"):
        handles[1].load_state_dict(handles[0].state_dict())
    handles[2].load_state_dict(handles[0].state_dict())


def test_the_state_of_another_model_is_refused() -> None:
    states = []
    for model in (training.mlp(), nn.Linear(5, 3)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        states.append(ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2))
    with pytest.raises(ValueError, match="other parameters"):
        states[0].load_state_dict(states[1].state_dict())


def test_state_goes_to_and_from_torch() -> None:
    """Two steps of FusedSGD, then torch.optim.SGD with its state, and the reverse."""
    ends = []
    for first, second in ((FusedSGD, torch.optim.SGD), (torch.optim.SGD, FusedSGD), (torch.optim.SGD, torch.optim.SGD)):
        model = training.mlp()
        strategy = ddpcore.LocalSGD(2)
        optimizer = first(model.parameters(), lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(model, optimizer, strategy, learners=2, vectorize=False)
        for half in range(2):
            for step in range(2):
                inputs, labels = training.samples(2, 4, seed=step + 10 * half)
                optimizer.zero_grad()
                training.loss_of(handle.model(inputs), labels).backward()
                optimizer.step()
            if half == 0:
                state = copy.deepcopy(optimizer.state_dict())
                values = [p.detach()[0].clone() for p in model.parameters()]
                model = training.mlp()
                for parameter, value in zip(model.parameters(), values, strict=True):
                    parameter.data.copy_(value)
                optimizer = second(model.parameters(), lr=0.1, momentum=0.9)
                handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(2), learners=2, vectorize=False)
                optimizer.load_state_dict(state)
        ends.append(training.weights_of_learners(handle))
    training.assert_near(ends[0], ends[2])
    training.assert_near(ends[1], ends[2])


@pytest.mark.parametrize("learners", [1, 2])
def test_a_state_of_version_0_1_is_refused(learners: int) -> None:
    """It has no ``learners``, and its strategies lack keys."""
    model = training.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.PushSum(ddpcore.Ring()), learners=learners)
    state = handle.state_dict()
    handle.load_state_dict(state)
    old = {key: value for key, value in state.items() if key not in ("format", "learners", "policies")}
    with pytest.raises(ValueError, match=r"^the state was saved by ddpcore 0\.1: resume with .*, or begin anew$"):
        handle.load_state_dict(old)


def test_forward_without_gradient_changes_nothing() -> None:
    """Evaluation between forward passes of training starts no exchange."""
    model = training.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(), learners=2)
    with torch.no_grad():
        handle.model(training.samples(2, 4)[0])
    assert handle.learner.comm.bytes_sent == 0


def test_parameters_stay_views_of_the_flat_buffer() -> None:
    model = training.mlp()
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    identities = [id(p) for p in model.parameters()]
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, **connected(**training.SMALL))
    for step in range(3):
        inputs, labels = training.samples(2, 4, seed=step)
        optimizer.zero_grad()
        training.loss_of(handle.model(inputs), labels).backward()
        optimizer.step()
        storage = handle.learner.flat.param_LP.untyped_storage().data_ptr()
        everyone = [p for one in handle.models for p in one.parameters()]
        assert all(p.untyped_storage().data_ptr() == storage for p in everyone)
        gradients = handle.learner.flat.grad_LP.untyped_storage().data_ptr()
        assert all(p.grad.untyped_storage().data_ptr() == gradients for p in everyone)
    assert [id(p) for p in model.parameters()] == identities
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in everyone]


def test_consensus_distance_of_known_weights() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(8), learners=2)
    assert handle.consensus_distance() == 0.0
    for one, values in zip(handle.models, ([[3.0, 0.0]], [[-3.0, 8.0]]), strict=True):
        one.weight.data.copy_(torch.tensor(values))
    # The mean is (0, 4), at distance sqrt(9 + 16) from both.
    assert handle.consensus_distance() == pytest.approx(5.0)
    for one in handle.models:
        one.weight.data.fill_(1.0)
    assert handle.consensus_distance() == 0.0


def test_consensus_distance_weights_learners_equally() -> None:
    model = nn.Linear(1, 1, bias=False)
    handle = ddpcore.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.LocalSGD(8), learners=4, vectorize=False
    )
    for one, value in zip(handle.models, (0.0, 0.0, 0.0, 4.0), strict=True):
        one.weight.data.fill_(value)
    assert handle.consensus_distance() == pytest.approx(math.sqrt((1 + 1 + 1 + 9) / 4))


def test_evaluation_model_of_virtual_learners() -> None:
    """The mean of weights and floating-point buffers. The model in training and its hooks do not change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), learners=training.L)
    assert isinstance(handle.model, LearnerModels)
    for step in range(3):
        inputs, labels = training.samples(training.L, 8, seed=step)
        optimizer.zero_grad()
        training.loss_of(handle.model(inputs), labels).backward()
        optimizer.step()
    states = [one.state_dict() for one in handle.models]
    before = {name: torch.stack([state[name] for state in states]).clone() for name in states[0]}
    assert not torch.allclose(before["1.running_mean"][0], before["1.running_mean"][1])
    evaluation = handle.evaluation_model()
    assert set(evaluation.state_dict()) == set(before)
    for name, value in evaluation.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, before[name].mean(dim=0), rtol=1e-6, atol=1e-7)
        else:
            assert value.item() == 3
    assert all(parameter.grad is None for parameter in evaluation.parameters())
    outputs = evaluation.eval()(inputs[0])  # one sample batch, no rows of learners
    assert outputs.shape == (8, 3)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in evaluation.modules())
    for tensor in (*evaluation.parameters(), *evaluation.buffers()):
        tensor.data.fill_(7)
    assert all(torch.equal(value, before[name][0]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    training.loss_of(handle.model(inputs), labels).backward()
    optimizer.step()


def test_evaluation_model_keeps_buffers_out_of_the_state_that_were_out_of_it() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)
            self.register_buffer("mask", torch.ones(3), persistent=False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.linear(inputs) * self.mask

    plain, model = Masked(), Masked()
    handle = ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.SSGD(), learners=2)
    assert list(handle.evaluation_model().state_dict()) == list(plain.state_dict())


def test_single_changes_nothing() -> None:
    model = training.mlp()
    pointers = [p.data_ptr() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.Single())
    assert handle.model is model
    assert handle.learner is None
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert not model._forward_pre_hooks
    with handle.no_sync():
        pass
    assert handle.consensus_distance() == 0.0
    copied = handle.evaluation_model()
    assert copied is not model
    assert torch.equal(training.flat_weights(copied), training.flat_weights(model))


@pytest.mark.parametrize("baseline", [ddpcore.Single, ddpcore.DDP])
def test_baselines_take_no_virtual_learners(baseline: Any) -> None:
    """learners= is not ignored silently."""
    model = training.mlp()
    with pytest.raises(ValueError, match=r"learners|real ranks"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), baseline(), learners=4)


def test_a_pass_before_a_checkpoint_does_not_make_exchanges_older() -> None:
    """DPSGD(staleness=1): a forward pass with gradients, as of an evaluation, begins the exchange of the next step."""
    handles = []
    for evaluates in (False, True):
        model = training.mlp()
        optimizer = training.OPTIMIZERS["sgd"](model.parameters())
        handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Complete(), staleness=1), learners=2)
        for step in range(3):
            train_step(handle, optimizer, step)
        if evaluates:
            handle.model(training.samples(2, 6, seed=9)[0])
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
        model = training.mlp()
        optimizer = training.OPTIMIZERS["sgd"](model.parameters())
        handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Complete(), staleness=1), learners=2)
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        handle.load_state_dict(state[2])
        for step in range(3, 6):
            train_step(handle, optimizer, step)
        handles.append(handle)
    for ours, expected in zip(*map(training.weights_of_learners, handles), strict=True):
        assert torch.equal(ours, expected)


def train_step(handle: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    inputs, labels = training.samples(2, 6, seed=step)
    training.loss_of(handle.model(inputs), labels).backward()
    optimizer.step()
