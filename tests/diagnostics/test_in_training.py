"""Measurements of the models of a run, in its middle: they see the weights as they are, and the run never knows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore.diagnostics import DataLoss, Hessian, HessianStatistics, NoiseStatistics, flatness

NUM, STEPS = 3, 2  # learners, steps
STRATEGIES = {
    "combine_then_adapt": lambda: ddpcore.DPSGD(ddpcore.Ring(), order="combine_then_adapt"),
    "noisy_ssgd": lambda: ddpcore.NoisySSGD(0.1, seed=1, where="per_learner"),
    "dpsgd": lambda: ddpcore.DPSGD(ddpcore.Ring()),
}


def run_of(strategy: Any, learners: int = NUM, **options: Any) -> tuple[Any, torch.optim.Optimizer, Tensor, Tensor]:
    """A handle and its optimizer, and inputs ``[STEPS, learners, 6, 4]`` with their labels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=learners, **options)
    return handle, optimizer, torch.randn(STEPS, learners, 6, 4), torch.randint(3, (STEPS, learners, 6))


def losses(handle: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(one, target) for one, target in zip(handle.model(x), y, strict=True)])


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy that no strategy trains."""
    copied = copy.deepcopy(model)
    copied._forward_pre_hooks.clear()
    return copied


def measured(model: nn.Module) -> Tensor:
    """Two products of a Hessian of fixed samples, with one mask of dropout: a first pass may change what follows."""
    generator = torch.Generator().manual_seed(9)
    data = [(torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)) for n in (7, 4)]
    hessian = Hessian(model, DataLoss(model, F.cross_entropy, data))
    return torch.stack([hessian.product(torch.ones(hessian.numel)) for _ in range(2)])


def state_of(handle: Any) -> list[Tensor]:
    """Weights, gradients and buffers of all learners, and the random numbers to come."""
    parameters = [one for model in handle.models for one in model.parameters()]
    grads = [one.grad.clone() for one in parameters if one.grad is not None]
    buffers = [one.clone() for model in handle.models for one in model.buffers()]
    return [*(one.detach().clone() for one in parameters), *grads, *buffers, torch.get_rng_state()]


@pytest.mark.parametrize("place", ["between two steps", "before the step", "before the backward pass"])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_a_model_in_training_is_measured_as_it_is(strategy: str, place: str) -> None:
    """Some strategies change weights in a forward pass of training, which a pass of a measurement is not."""
    ends = []
    for watched in (False, True):
        handle, optimizer, x, y = run_of(STRATEGIES[strategy]())

        def measure(here: str, handle: Any = handle, watched: bool = watched) -> None:
            if watched and here == place:
                before, seen = state_of(handle), [measured(model) for model in handle.models]
                assert all(map(torch.equal, before, state_of(handle)))
                assert all(map(torch.equal, seen, map(measured, map(plain_copy, handle.models))))

        for step in range(STEPS):
            optimizer.zero_grad()
            total = losses(handle, x[step], y[step])
            measure("before the backward pass")
            handle.backward(total)
            measure("before the step")
            optimizer.step()
            measure("between two steps")
        ends.append(state_of(handle))
    assert all(map(torch.equal, *ends))


def test_statistics_have_the_random_numbers_of_the_step_beside_other_measurements() -> None:
    """The passes at the mean weights draw the masks of the step, not those of a Hessian before it."""
    found = []
    for beside in (False, True):
        handle, optimizer, x, y = run_of(ddpcore.DPSGD(ddpcore.Ring()), vectorize=False)
        now = [0]

        def loss(handle: Any = handle, x: Tensor = x, y: Tensor = y, now: list[int] = now) -> Tensor:
            return losses(handle, x[now[0]], y[now[0]]).sum()

        statistics = NoiseStatistics(handle, optimizer, every=STEPS, loss=loss)
        for now[0] in range(STEPS):
            optimizer.zero_grad()
            if beside:
                measured(handle.models[0])
            torch.rand(1)  # random numbers of the loop, such as an augmentation, after the measurement
            loss().backward()
            optimizer.step()
        found.append(statistics.records[0].whole)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["hessian", "noise", "noise_full"])
def test_a_loss_that_leaves_out_learners_is_refused(kind: str) -> None:
    """It had the mean over all learners, of which the others counted as zero."""
    handle, optimizer, x, y = run_of(ddpcore.DPSGD(ddpcore.Ring()))

    def whole() -> Tensor:
        return losses(handle, x[0], y[0]).sum()

    def first() -> Tensor:
        return F.cross_entropy(handle.models[0](x[0, 0]), y[0, 0])

    if kind == "hessian":
        HessianStatistics(handle, first, every=1, top=1)
    else:
        both = {"loss": first} if kind == "noise" else {"loss": whole, "full_loss": first}
        NoiseStatistics(handle, optimizer, every=1, **both)
    whole().backward()
    before = state_of(handle)
    with pytest.raises(ValueError, match=r"uses no weight of learner 1, 2: call handle\.model"):
        optimizer.step()
    assert all(map(torch.equal, before, state_of(handle)))


def test_the_loss_of_a_copy_is_refused() -> None:
    """Its Hessian with respect to the model was taken for zero."""
    handle, _, x, y = run_of(ddpcore.SSGD(), learners=1)
    other, inputs = handle.models[0], x[0, 0]
    model = handle.evaluation_model()
    data = DataLoss(other, F.cross_entropy, [(inputs, y[0, 0])])
    for loss in (data, lambda: F.cross_entropy(other(inputs), y[0, 0])):
        for call in (lambda loss=loss: Hessian(model, loss).trace(), lambda loss=loss: flatness(model, loss)):
            with pytest.raises(ValueError, match="the loss uses no weight of the model"):
                call()
    with pytest.raises(ValueError, match="the loss uses no weight of the model"):
        Hessian(model, data, gauss_newton=True).trace()


def test_refused_in_training() -> None:
    handle, _, x, y = run_of(ddpcore.DPSGD(ddpcore.Ring()))
    with pytest.raises(ValueError, match=r"pass handle\.evaluation_model\(\)"):  # each batch counted as three samples
        DataLoss(handle.model, lambda *pair: losses(handle, *pair).mean(), [(x[0], y[0])])
    data = DataLoss(handle.models[0], F.cross_entropy, [(x[0, 0], y[0, 0])])
    data.group = object()  # type: ignore[assignment]  # of ranks, whose sum is a mean already
    for make in (
        lambda: HessianStatistics(handle, data),
        lambda: NoiseStatistics(handle, handle.learner.optimizer, loss=data, full_loss=data),
    ):
        with pytest.raises(ValueError, match="make DataLoss without group="):
            make()


@pytest.mark.parametrize("gauss_newton", [False, True])
def test_inference_mode_has_no_derivatives(gauss_newton: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    data = DataLoss(model, F.cross_entropy, [(torch.randn(6, 4), torch.randint(3, (6,)))])
    hessian = Hessian(model, data, gauss_newton=gauss_newton)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"inside torch.inference_mode\(\)"):
        hessian.product(torch.ones(hessian.numel))
    with torch.inference_mode(), pytest.raises(ValueError, match=r"inside torch.inference_mode\(\)"):
        flatness(model, data)


def test_noise_of_hessian_statistics_is_that_of_clipped_gradients() -> None:
    """As the docstring says: of the gradients that the step gets. A quarter of it if all are clipped to a half."""
    noise = []
    for share in (1.0, 0.5):
        handle, optimizer, x, y = run_of(ddpcore.DPSGD(ddpcore.Ring()))
        statistics = HessianStatistics(handle, lambda h=handle, x=x, y=y: losses(h, x[0], y[0]).sum(), every=1, top=1)
        losses(handle, x[0], y[0]).sum().backward()
        for model in handle.models:
            norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
            torch.nn.utils.clip_grad_norm_(model.parameters(), share * float(norm))
        optimizer.step()
        noise.append(statistics.records[0].noise)
    assert noise[0] and noise[1] == pytest.approx(noise[0] / 4, rel=1e-4)
