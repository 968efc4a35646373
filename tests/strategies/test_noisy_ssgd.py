"""Weight noise, shared or per learner, against its equations."""

from __future__ import annotations

import copy
import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore import SSGD, NoisySSGD, ops
from ddpcore.ops import Noise
from ddpcore.optim import FusedAdamW, FusedSGD
from ddpcore.strategies.noisy_ssgd import _seed_of
from helpers.training import rows_of

N = 3


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 6, 4, generator=generator), torch.randn(N, 6, 8, generator=generator)


def trained(strategy: Any, kind: Any = torch.optim.SGD, num_steps: int = 4) -> tuple[Any, list[torch.Tensor]]:
    """The handle, and the weights ``[n, 8, 4]`` before the first step and after each."""
    torch.manual_seed(1)
    inputs, targets = problem()
    model = nn.Linear(4, 8, bias=False)
    optimizer = kind(model.parameters(), lr=0.01)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N, vectorize=False)
    seen = [rows_of(handle, "weight")]
    for _ in range(num_steps):
        optimizer.zero_grad()
        (0.5 * (handle.model(inputs) - targets).square()).sum().backward()
        optimizer.step()
        seen.append(rows_of(handle, "weight"))
    return handle, seen


def drawn(std: float, seed: int, step: int) -> torch.Tensor:
    """Of the one parameter, ``[8, 4]``."""
    zeros = torch.zeros(32)
    ops.mix_(zeros, [], 1.0, [], noise=Noise(std, seed, step))
    return zeros.view(8, 4).double()


def gradients(w: torch.Tensor) -> torch.Tensor:
    x, y = (t.double() for t in problem())
    return torch.einsum("jbo,jbi->joi", torch.einsum("jbi,joi->jbo", x, w) - y, x)


@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD])
def test_shared(kind: Any) -> None:
    """w <- w + s x - a mean g(w): one x for all, which stays in the weights."""
    _, seen = trained(NoisySSGD(0.1, seed=4), kind)
    for step, (before, after) in enumerate(pairwise(seen)):
        assert torch.equal(after[0], after[1])
        expected = before.double() + drawn(0.1, 4, step) - 0.01 * gradients(before.double()).mean(0)
        torch.testing.assert_close(after.double(), expected, rtol=1e-5, atol=1e-6)


def test_per_learner() -> None:
    """w <- w - a mean_k g_k(w + s x_k): the noise moves the gradients alone."""
    _, seen = trained(NoisySSGD(0.1, seed=4, where="per_learner"))
    for step, (before, after) in enumerate(pairwise(seen)):
        assert torch.equal(after[0], after[1])
        away = torch.stack([w + drawn(0.1, _seed_of(4, rank), step) for rank, w in enumerate(before.double())])
        expected = before.double() - 0.01 * gradients(away).mean(0)
        torch.testing.assert_close(after.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_learner_keeps_its_noise_when_another_dies() -> None:
    model = nn.Linear(4, 8, bias=False)
    optimizer = FusedSGD(model.parameters(), lr=0.01)
    strategy, shrinks = NoisySSGD(0.1, seed=4, where="per_learner"), ddpcore.Connection(on_failure="shrink")
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N, vectorize=False, connection=shrinks)
    handle.lose(0)
    inputs, _ = problem()
    for step in range(2):
        before = rows_of(handle, "weight")
        outputs = handle.model(inputs)
        noise = handle.learner.flat.param_LP.view(N, 8, 4).double() - before.double()
        for one in range(1, N):
            torch.testing.assert_close(noise[one], drawn(0.1, _seed_of(4, one), step), rtol=1e-5, atol=1e-6)
        outputs.sum().backward()
        optimizer.step()


def test_a_state_read_between_passes_of_learners_leaves_the_noise_of_the_others() -> None:
    handle, _ = trained(NoisySSGD(0.1, seed=4, where="per_learner"), num_steps=0)
    inputs, targets = problem()
    reads = handle.state_dict, handle.consensus_distance, handle.evaluation_model, handle.models[0].state_dict
    for step, read in enumerate(reads):
        before = rows_of(handle, "weight")
        away = torch.stack([w + drawn(0.1, _seed_of(4, rank), step) for rank, w in enumerate(before.double())])
        handle.learner.optimizer.zero_grad()
        for model, x, y in zip(handle.models, inputs, targets, strict=True):
            (0.5 * (model(x) - y).square()).sum().backward()
            read()
            assert torch.equal(rows_of(handle, "weight"), before)
        handle.learner.optimizer.step()
        expected = before.double() - 0.01 * gradients(away).mean(0)
        torch.testing.assert_close(rows_of(handle, "weight").double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["shared", "per_learner"])
def test_no_noise_is_ssgd(where: str) -> None:
    assert torch.equal(trained(NoisySSGD(0.0, where=where))[1][-1], trained(SSGD())[1][-1])
    assert not torch.allclose(trained(NoisySSGD(0.1, where=where))[1][-1], trained(SSGD())[1][-1])


def test_seeds_differ_and_repeat() -> None:
    ends = [trained(NoisySSGD(0.1, seed=seed))[1][-1] for seed in (1, 2, 1)]
    assert torch.equal(ends[0], ends[2])
    assert not torch.allclose(ends[0], ends[1])


def test_streams_of_learners_and_seeds_are_all_different() -> None:
    seeds = {_seed_of(seed, rank) for seed in range(20) for rank in range(20)} | set(range(20))
    assert len(seeds) == 420


@pytest.mark.parametrize("mode", [True, False])
def test_a_forward_pass_without_a_backward_pass_leaves_no_noise(mode: bool) -> None:
    """Not when the weights are read, not in the next step, and not in loaded weights."""
    handle, seen = trained(NoisySSGD(0.1, where="per_learner"), num_steps=2)
    inputs, targets = problem()
    handle.model.train(mode)
    handle.model(inputs)
    noisy = torch.stack([model.weight.detach().clone() for model in handle.models])
    assert not torch.equal(noisy, seen[-1]), "in both modes a forward pass that records gradients adds noise"
    assert handle.consensus_distance() < 1e-6
    assert torch.equal(rows_of(handle, "weight"), seen[-1])
    for model in handle.models:
        handle.model(inputs)
        assert torch.equal(model.state_dict()["weight"], seen[-1][0])
    handle.model(inputs)
    state = handle.state_dict()
    assert all(torch.equal(weights["weight"], seen[-1][0]) for weights in state["learners"])
    sevens = torch.full_like(seen[-1][0], 7.0)
    for weights in state["learners"]:
        weights["weight"].copy_(sevens)
    handle.model(inputs)
    handle.models[0].load_state_dict({"weight": sevens})
    handle.load_state_dict(state)
    (0.5 * (handle.model(inputs) - targets).square()).sum().backward()
    assert (rows_of(handle, "weight") == 7.0).all()


def test_a_change_of_weights_that_hold_noise_is_not_undone_in_silence() -> None:
    """A state that is loaded after a forward pass stays, and any other change is an error."""
    handle, _ = trained(NoisySSGD(0.1, where="per_learner"), num_steps=2)
    inputs, _ = problem()
    handle.model(inputs)
    sevens = {"weight": torch.full((8, 4), 7.0)}
    for model in handle.models:
        model.load_state_dict(sevens)
    handle.model(inputs).sum().backward()
    assert (rows_of(handle, "weight") == 7.0).all()
    handle.model(inputs)
    with torch.no_grad():
        for model in handle.models:
            model.weight.clamp_(-1.0, 1.0)
    with pytest.raises(RuntimeError, match="weights were changed after a forward pass and before its backward pass"):
        handle.model(inputs).sum().backward()


@pytest.mark.parametrize("how", ["compiled", "parts"])
def test_states_of_parts_hold_no_noise_either(how: str) -> None:
    """And what a part of the model loads between two passes stays. A model may be inside of a compiled one."""
    raw = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = torch.compile(raw, backend="eager") if how == "compiled" else raw
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, NoisySSGD(0.1, where="per_learner"), learners=2)
    inner = [getattr(one, "_orig_mod", one) for one in handle.models]
    clean = copy.deepcopy(raw.state_dict())
    for one in inner:
        for part, prefix in ((one, ""),) if how == "compiled" else ((one[0], "0."), (one[1], "1.")):
            handle.model(torch.randn(2, 3, 4))
            assert not torch.equal(one[0].weight, clean["0.weight"]), "a forward pass that records gradients adds noise"
            for name, value in part.state_dict().items():
                assert torch.equal(value, clean[prefix + name]), prefix + name
            handle.model(torch.randn(2, 3, 4))
            part.load_state_dict({name: torch.full_like(value, 7.0) for name, value in part.state_dict().items()})
    handle.model(torch.randn(2, 3, 4)).sum().backward()
    assert all((weight == 7.0).all() for one in handle.models for weight in one.parameters())


class _Followed(nn.Module):
    """A forward pass moves a teacher to the layer, as momentum encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.teacher, self.moves = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.moves:
            self.teacher.load_state_dict(self.layer.state_dict())
        return self.layer(x)


def test_states_in_the_middle_of_a_forward_pass_are_refused() -> None:
    """Its weights hold the noise, which the state must not have and the rest of the pass must."""
    for num in (1, 2):
        model = _Followed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, NoisySSGD(0.1, where="per_learner"), learners=num)
        clean = model.layer.weight.detach().clone()
        for called, shape in ((handle.model, (num, 3, 4)), (handle.models[-1], (3, 4))):
            with pytest.raises(RuntimeError, match="saves or loads a state in its forward pass, where noisy_ssgd"):
                called(torch.randn(shape))
            with torch.no_grad():
                called(torch.randn(shape))  # without noise
            for one in handle.models:
                assert torch.equal(one.layer.weight, clean)
        for one in handle.models:
            one.moves = False
        state = handle.state_dict()
        handle.model(torch.randn(num, 3, 4))
        handle.load_state_dict(state)  # also alone, it leaves no noise
        assert torch.equal(model.layer.weight, clean)


def test_padding_stays_zero() -> None:
    """Also where no kernel of the optimizer adds the noise: a rank that joins has zeros there."""
    for kind, where in product((torch.optim.SGD, FusedSGD, FusedAdamW), ("shared", "per_learner")):
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
        optimizer = kind(model.parameters(), lr=0.01)
        handle = ddpcore.distribute(model, optimizer, NoisySSGD(0.1, where=where), learners=2)
        for _ in range(2):
            handle.model(torch.randn(2, 4, 5)).sum().backward()
            optimizer.step()
        padded_LP = handle.learner.flat.param_LP.clone()
        for view in handle.learner.flat.views_of(padded_LP):
            assert view.all()
            view.zero_()
        assert not padded_LP.any()


def test_nothing_is_sent_for_the_noise() -> None:
    sent = [trained(strategy)[0].learner.comm.bytes_sent for strategy in (NoisySSGD(0.1), SSGD())]
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": -0.1}, "std is -0.1"),
        ({"std": math.nan}, "std is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"where": "gradient"}, "where is 'gradient': choose from shared, per_learner"),
    ],
)
def test_impossible_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoisySSGD(**options)
