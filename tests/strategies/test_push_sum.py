"""Push-sum against its equations, on graphs whose plain averages drift."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ddpcore
from ddpcore import DPSGD, FromMatrix, OnePeerExponential, PushSum, Ring, Round, Topology
from helpers import training

N = 4


class Digraph(Topology):
    """0 -> 1, 2, 3;  1 -> 2;  2 -> 3;  3 -> 0: columns sum to one, rows do not."""

    doubly_stochastic = False
    edges = ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (3, 0))

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        share = {k: 1 / (1 + sum(source == k for source, _ in self.edges)) for k in range(N)}
        sources = tuple(sorted(k for k, reader in self.edges if reader == rank))
        readers = tuple(sorted(reader for k, reader in self.edges if k == rank))
        return Round(share[rank], sources, tuple(share[k] for k in sources), readers)

    def period(self, num_learners: int) -> int:
        return 1


def trained(strategy: Any, num_steps: int, lr: float) -> tuple[Any, Any, list[torch.Tensor]]:
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(N, 6, 4, generator=generator), torch.randn(N, 6, 2, generator=generator)
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N, vectorize=False)
    training.set_rows(handle, "weight", training.rows_of(handle, "weight") + torch.randn(N, 2, 4, generator=generator))
    seen = [training.rows_of(handle, "weight")]
    for _ in range(num_steps):
        optimizer.zero_grad()
        (0.5 * (handle.model(inputs) - targets).square()).sum().backward()
        optimizer.step()
        seen.append(training.rows_of(handle, "weight"))
    return handle, (inputs.double(), targets.double()), seen


@pytest.mark.parametrize("topology", [Digraph(), Ring(), OnePeerExponential()], ids=lambda t: type(t).__name__)
def test_the_equations(topology: Any) -> None:
    _, (x, y), seen = trained(PushSum(topology), 7, 0.01)
    biased, push = seen[0].double(), torch.ones(N, dtype=torch.float64)
    for step in range(7):
        z = biased / push[:, None, None]
        gradients = torch.einsum("jbo,jbi->joi", torch.einsum("jbi,joi->jbo", x, z) - y, x)
        matrix = torch.from_numpy(topology.matrix(step, N))
        biased = torch.einsum("jk,koi->joi", matrix, biased - 0.01 * gradients)
        push = matrix @ push
        expected = biased / push[:, None, None]
        torch.testing.assert_close(seen[step + 1].double(), expected, rtol=1e-5, atol=1e-5)


def test_learners_agree_on_the_true_mean() -> None:
    """Plain averages over the same matrix reach another consensus, or none."""
    handle, _, seen = trained(PushSum(Digraph()), 60, 0.0)
    mean = seen[0].mean(0)
    torch.testing.assert_close(seen[-1], mean.expand(N, -1, -1), rtol=1e-4, atol=1e-5)
    push = handle.state_dict()["strategy"]["push_weights"]
    assert push.sum().item() == pytest.approx(N)
    assert push.max() > 1.2, "the graph is not balanced, or this test compares nothing"
    matrix = torch.from_numpy(Digraph().matrix(0, N))
    plain = torch.einsum("jk,koi->joi", torch.matrix_power(matrix, 60), seen[0].double())
    assert (plain - mean).norm() > 0.1


def test_the_average_counts_by_push_weights() -> None:
    """Mixing moves the plain mean of z, but not the average of x, which evaluation and consensus distance use."""
    handle, _, seen = trained(PushSum(Digraph()), 2, 0.0)
    start, weights = seen[0].double().mean(0), seen[-1].double()
    push = torch.ones(N, dtype=torch.float64)
    for step in range(2):
        push = torch.from_numpy(Digraph().matrix(step, N)) @ push
    average = torch.einsum("j,joi->oi", push, weights) / push.sum()
    assert (weights.mean(0) - average).norm() > 0.05, "the graph is not balanced, or this test compares nothing"
    torch.testing.assert_close(average, start, rtol=1e-5, atol=1e-5)
    for _ in range(2):
        evaluated = handle.evaluation_model().weight.detach().double()
        torch.testing.assert_close(evaluated, average, rtol=1e-5, atol=1e-6)
        distance = (weights - average).square().sum((1, 2)).mean().sqrt().item()
        assert handle.consensus_distance() == pytest.approx(distance, rel=1e-5)
        state = handle.state_dict()
        handle.learner.shares = None  # loading the state sets it again
        handle.load_state_dict(state)


def test_ordinary_gossip_refuses_a_directed_graph() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"push.?sum|row 0 sums"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), DPSGD(Digraph()), learners=N)


def test_a_matrix_whose_columns_alone_sum_to_one() -> None:
    matrix, model = FromMatrix([[0.9, 0.2], [0.1, 0.8]]), nn.Linear(4, 1)
    assert matrix.spectral_gap(2) == pytest.approx(0.3)  # its eigenvalues are 1 and 0.7
    with pytest.raises(ValueError, match=r"row 0 sums to 1\.1, make it sum to 1, or use push-sum: the columns do"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), DPSGD(matrix), learners=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = ddpcore.distribute(model, optimizer, PushSum(matrix), learners=2)
    starts = [torch.full((1, 4), start) for start in (1.0, 3.0)]
    for one, start in zip(handle.models, starts, strict=True):
        one.load_state_dict({"weight": start, "bias": torch.zeros(1)})
    for _ in range(60):
        handle.backward([outputs.sum() for outputs in handle.model(torch.ones(2, 3, 4))])
        optimizer.step()
    assert all(torch.allclose(one.weight, torch.full((1, 4), 2.0)) for one in handle.models)


def test_after_a_step_that_failed_the_weights_are_those_before() -> None:
    """A hook of the program raises, as Ctrl-C does, in the middle of the step."""
    handle, _, _ = trained(PushSum(Digraph()), 3, 0.1)
    optimizer, inputs = handle.learner.optimizer, torch.randn(N, 2, 4)
    before = [one.weight.detach().clone() for one in handle.models]

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    optimizer.register_step_pre_hook(interrupt)
    for is_training in (False, True):
        handle.model(inputs).sum().backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        with torch.set_grad_enabled(is_training):
            handle.model(inputs)
        for one, weight in zip(handle.models, before, strict=True):
            torch.testing.assert_close(one.weight, weight)


def test_columns_that_lose_weight_are_refused() -> None:
    class Leaky(Digraph):
        def round(self, step: int, rank: int, num_learners: int) -> Round:
            plan = super().round(step, rank, num_learners)
            return Round(plan.self_weight * 0.9, plan.sources, plan.weights, plan.destinations)

    assert not np.allclose(Leaky().matrix(0, N).sum(0), 1)
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="column"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), PushSum(Leaky()), learners=N)
