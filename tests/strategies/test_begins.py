"""Learners that begin with different weights, as after a program has loaded a state into each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from helpers import ranks

N = 3


def run(strategy: ddpcore.Strategy, steps: int, *, different: bool = True) -> tuple[Tensor, Tensor]:
    """The weights ``[N, P]`` at the start and at the end, of steps whose gradients are zero."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N)
    with torch.no_grad():
        for parameter in handle.model.parameters() if different else ():
            parameter.normal_()
    start = handle.learner.flat.param_LP.clone()
    for _ in range(steps):
        optimizer.zero_grad()
        (0 * handle.model(torch.ones(N, 2, 5))).sum().backward()
        optimizer.step()
    return start, handle.learner.flat.param_LP


@pytest.mark.parametrize(
    "make",
    [
        lambda: ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Ring()), period=2),
        lambda: ddpcore.LocalSGD(2, outer={"lr": 0.7, "momentum": 0.9}),
        lambda: ddpcore.LocalSGD(2, outer={"lr": 0.7}, fragments=2),
    ],
)
def test_outer_steps_begin_at_the_mean(make: Callable[[], ddpcore.Strategy]) -> None:
    """Each rank would take its own weights for those of all, and virtual learners those of learner 0."""
    for steps in (2, 8):
        start, end = run(make(), steps)
        torch.testing.assert_close(end, start.mean(dim=0).expand_as(end))


def test_outer_steps_do_not_begin_at_a_learner_that_is_gone() -> None:
    """It died, and then the program gave all others equal weights, as of a pretrained model."""
    for strategy in (ddpcore.LocalSGD(2, outer={"lr": 0.7}), ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Ring()), period=2)):
        model = nn.Linear(5, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        connection = ddpcore.Connection(on_failure="shrink")
        handle = ddpcore.distribute(model, optimizer, strategy, learners=4, connection=connection)
        handle.lose(0)
        for parameter in (one for model in handle.models[1:] for one in model.parameters()):
            nn.init.constant_(parameter, 7.0)
        for _ in range(4):
            optimizer.zero_grad()
            (0 * handle.model(torch.ones(4, 2, 5))).sum().backward()
            optimizer.step()
        for parameter in (one for model in handle.models[1:] for one in model.parameters()):
            torch.testing.assert_close(parameter, torch.full_like(parameter, 7.0))


def test_ranks_agree() -> None:
    """A neighbour would take its own weights for those of a rank, and the difference would stay for ever.

    Where rank 0 halves its weights before the first step, the change of the first round has that.
    """
    seen = ranks.run("begin_ranks", 2)
    for name in seen[0]:
        starts = [rank[name][0] for rank in seen]
        ends = anchors = [sum(starts) / 2] * 2
        if name.startswith("decayed"):
            anchors = starts if name == "decayed noloco" else anchors  # and the mean over ranks for GASLoC
            ends = [(anchor + (starts[0] / 2 + starts[1]) / 2) / 2 for anchor in anchors]
        for rank, end in zip(seen, ends, strict=True):
            torch.testing.assert_close(rank[name][1], end, atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.parametrize("make", [lambda: ddpcore.SlowMo(period=2), lambda: ddpcore.LocalSGD(2, outer={"lr": 1.0})])
def test_equal_weights_keep_their_bits(make: Callable[[], ddpcore.Strategy]) -> None:
    """The mean of three equal numbers may be another one."""
    strategy = make()
    start, _ = run(strategy, 1, different=False)
    assert torch.equal(torch.cat(strategy.state_dict()["anchor"]["parts"]), start[0])
    assert not torch.equal(start.sum(dim=0) / 3, start[0])


class Swapped(nn.Module):
    """Registers its layers in another order than it runs them. ``max_norm`` changes weights in a forward pass.

    With ``has_two`` it returns an output before the one in the loss.
    """

    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        self.last, self.first, self.has_two = nn.Linear(12, 3), nn.Embedding(10, 6, max_norm=max_norm), False

    def forward(self, inputs: Tensor) -> Any:
        output = self.last(self.first(inputs).flatten(1)).square()
        return (output.mean(dim=1), output) if self.has_two else output


def _backward(handle: Any, inputs: Tensor, call: str) -> None:
    """The passes of a step."""
    pairs = list(zip(handle.models, inputs, strict=True))
    if call in ("each", "in turn"):
        losses = (one(own).sum() for one, own in pairs)
        for loss in losses if call == "in turn" else list(losses):
            loss.backward()
    elif call == "two calls":
        sum(handle.model(part).sum() for part in inputs.split(3, dim=1)).backward()
    elif call == "two calls of each":
        sum(one(part).sum() for one, own in pairs for part in own.split(3)).backward()
    elif call == "two passes of each":
        for one, own in pairs * 2:
            (one(own).sum() / 2).backward()
    else:
        for (part,) in handle.split(inputs) if call == "split" else [(inputs,)]:
            output = handle.model(part)
            (output[1] if call == "second output" else output).sum().backward()


def _samples(step: int) -> Tensor:
    return torch.randint(10, (4, 5, 2), generator=torch.Generator().manual_seed(step))


def _plain(models: list[nn.Module], way: str, group: int, switch: int) -> Tensor:
    """The weights of a plain loop of six steps, after rounds of two steps with an outer rate of 0.5."""
    rows = list(zip(*(model.parameters() for model in models), strict=True))
    for step in range(6):
        if step == switch:
            anchor = [own[0].detach().clone() for own in rows]
            if way == "left out":
                torch._foreach_mul_([one.detach() for own in rows for one in own], 0.9)
        for model, inputs in zip(models, _samples(step), strict=True):
            model.zero_grad()
            model(inputs).sum().backward()
        size = group if step >= switch else len(models)
        with torch.no_grad():
            for own in rows:
                means = [torch.stack([one.grad for one in own[i : i + size]]).mean(0) for i in range(0, 4, size)]
                for place, one in enumerate(own):
                    one.mul_(0.9 if way == "decay" else 1.0).sub_(means[place // size], alpha=0.1)
            if step >= switch and (step - switch) % 2:
                for phi, own in zip(anchor, rows, strict=True):
                    phi.lerp_(torch.stack(own).mean(0), 0.5)
                    for one in own:
                        one.copy_(phi)
    return nn.utils.parameters_to_vector(models[0].parameters()).detach()


def _ours(model: nn.Module, make: Callable[[], Any], way: str, call: str = "") -> tuple[Any, Any]:
    model.has_two = call == "second output"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, make(), learners=4)
    if way in ("loaded", "set", "set table"):  # after a pass that tries the model out
        table = model.first.weight.detach().flip(0)
        state = {name: value * 0.5 for name, value in model.state_dict().items()}
        handle.model(_samples(9))
        for one in handle.models:
            if way == "loaded":
                one.load_state_dict(state)
            elif way == "set table":
                one.first.weight.detach().copy_(table)
            else:
                torch._foreach_mul_([parameter.detach() for parameter in one.parameters()], 0.5)
    for step in range(6):
        optimizer.zero_grad()
        if way == "resumed" and step == 0:
            handle.model(_samples(step))
            state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
            model = Swapped(1.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            handle = ddpcore.distribute(model, optimizer, make(), learners=4)
            handle.load_state_dict(state[2])
            model.load_state_dict(state[0])
        if way == "left out" and step == 0:
            _backward(handle, _samples(step), call)
            optimizer.zero_grad()
            torch._foreach_mul_([parameter.detach() for parameter in handle.model.parameters()], 0.9)
        _backward(handle, _samples(step), call)
        if way == "decay":
            with torch.no_grad():
                for parameter in handle.model.parameters():
                    parameter.mul_(0.9)
        optimizer.step()
    return model, handle


def test_the_first_round_begins_before_the_passes_of_its_step() -> None:
    """Not where a loop, or an embedding in its forward pass, has changed the weights before the step."""
    full, half = ddpcore.Complete(), {"lr": 0.5}
    gossip = {"period": 2, "outer_lr": 0.5, "outer_momentum": 0.0}
    cases: dict[str, tuple[Callable[[], Any], int, int]] = {
        "diloco": (lambda: ddpcore.LocalSGD(2, outer=half), 1, 0),
        "fragments": (lambda: ddpcore.LocalSGD(2, outer=half, fragments=[["first", "last"]]), 1, 0),
        "group": (lambda: ddpcore.LocalSGD(2, outer=half, group=2), 2, 0),
        "switch": (lambda: ddpcore.LocalSGD(2, outer=half, switch_step=2), 1, 2),
        "group and switch": (lambda: ddpcore.LocalSGD(2, outer=half, switch_step=2, group=2), 2, 2),
        "noloco": (lambda: ddpcore.NoLoCo(full, **gossip), 1, 0),
        "noloco of groups": (lambda: ddpcore.NoLoCo(full, **gossip, group=2), 2, 0),
        "gasloc": (lambda: ddpcore.GASLoC(full, **gossip), 1, 0),
        "gasloc of groups": (lambda: ddpcore.GASLoC(full, **gossip, group=2), 2, 0),
        "slowmo": (lambda: ddpcore.SlowMo(None, period=2, slow_momentum=0.0, slow_lr=0.5), 1, 0),
    }
    ways = [(way, "") for way in ("plain", "decay", "max_norm", "resumed", "loaded", "set", "left out", "set table")]
    calls = ["each", "in turn", "split", "second output", "two calls", "two calls of each", "two passes of each"]
    ways += [(way, call) for call in calls for way in ("decay", "max_norm", "left out")]
    for name, (make, group, switch) in cases.items():
        for way, call in ways:
            renormalizes = way in ("max_norm", "resumed", "set table")
            if renormalizes and (group > 1 or switch):
                continue  # learners that average gradients would differ
            if call and name not in ("diloco", "group", "switch", "gasloc", "slowmo"):
                continue
            if (way == "left out" and switch) or (call == "two passes of each" and (group > 1 or switch)):
                continue  # a pass that is not the last one would need no_sync()
            torch.manual_seed(0)
            model = Swapped(1.0 if renormalizes else None)
            alone = [copy.deepcopy(model) for _ in range(4)]
            for one in alone if way in ("loaded", "set") else ():
                one.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
            for one in alone if way == "set table" else ():
                one.first.load_state_dict({"weight": model.first.weight.flip(0)})
            expected = _plain(alone, way, group, switch)
            trained, _ = _ours(model, make, way, call)
            found = nn.utils.parameters_to_vector(trained.parameters()).detach()
            torch.testing.assert_close(found, expected, msg=lambda text, case=(name, way, call): f"{case}: {text}")
