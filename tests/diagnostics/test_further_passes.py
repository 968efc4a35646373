"""Further passes leave no trace, and what they find differs from the step's own gradients by the weights alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore.diagnostics import DataLoss, Hessian, HessianStatistics, NoiseStatistics, flatness, landscape, random_plane
from ddpcore.diagnostics.passes import as_it_was
from ddpcore.models import MODELS
from ddpcore.optim import FusedSGD

NUM = 4  # learners


class Restless(nn.Module):
    """Assigns its buffer anew, and draws from every global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x + torch.rand(2) + random.random() + float(np.random.rand())
        self.count += 1
        return self.seen


def draws() -> list[float]:
    return [torch.rand(1).item(), random.random(), float(np.random.rand())]


def test_buffers_and_random_numbers_are_put_back():
    model = nn.Sequential(Restless())
    buffers = dict(model.named_buffers())
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    expected = draws()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    with pytest.raises(RuntimeError, match="on purpose"), as_it_was(model, torch.device("cpu")):
        model(torch.ones(2))
        assert model[0].seen is not buffers["0.seen"] and model[0].count == 1
        raise RuntimeError("on purpose")
    assert draws() == expected
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name] and not buffer.any(), name


class Teacher(nn.Module):
    """Its forward pass writes into a frozen copy, by ``.data`` and in place, and into an embedding by ``max_norm``."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.table, self.own = nn.Embedding(12, 6, max_norm=max_norm), nn.Linear(6, 4)
        self.mean = nn.Linear(6, 4).requires_grad_(False)

    def forward(self, index: Tensor) -> Tensor:
        x = self.table(index).tanh()
        with torch.no_grad():
            self.mean.weight.data = 0.9 * self.mean.weight.data + 0.1 * self.own.weight
            self.mean.bias.mul_(0.9).add_(0.1 * self.own.bias)
        return (self.own(x) - self.mean(x).roll(1, 0)).square().mean()


def taught(strategy: Any, kind: Any) -> list[Tensor]:
    """The parameters after steps of a learner, or of one device, beside statistics of some kind."""
    torch.manual_seed(0)
    model = Teacher(None if strategy else 1.0)  # with learners a trained weight that changes is an error
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = FusedSGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01)
    handle = model if strategy is None else ddpcore.distribute(model, optimizer, strategy(), learners=3)
    index = torch.randint(12, (3, 60))

    def loss(first: int, last: int) -> Tensor:
        models = [model] if strategy is None else handle.models
        return sum(one(own) for one, own in zip(models, index[:, first:last], strict=False))

    if kind is HessianStatistics:
        HessianStatistics(handle, lambda: loss(0, 60), optimizer=None if strategy else optimizer, every=3, top=1)
    elif kind is NoiseStatistics:
        NoiseStatistics(handle, optimizer, 3, loss=lambda: loss(step, step + 4), full_loss=lambda: loss(0, 60))
    for step in range(9):
        optimizer.zero_grad()
        loss(step, step + 4).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", [None, ddpcore.SSGD, lambda: ddpcore.DPSGD(ddpcore.Ring(1))])
def test_parameters_that_a_forward_pass_changes_are_put_back(strategy):
    plain = taught(strategy, None)
    for kind in (HessianStatistics, NoiseStatistics)[: 1 if strategy is None else 2]:
        assert all(map(torch.equal, taught(strategy, kind), plain)), kind
    model, index = Teacher(1.0), torch.randint(12, (60,))
    before = [(parameter.data_ptr(), parameter.detach().clone()) for parameter in model.parameters()]
    hessian = Hessian(model, lambda: model(index))
    for call in (hessian.trace, lambda: flatness(model, lambda: model(index))):
        call()
        for parameter, (address, value) in zip(model.parameters(), before, strict=True):
            assert parameter.data_ptr() == address and torch.equal(parameter, value)
    assert torch.equal(hessian.weights.values_P, nn.utils.parameters_to_vector(hessian.weights.parameters))


def measured(strategy: Any, model: nn.Module, steps: int = 1, lr: float = 1e-9, **options: Any) -> Any:
    """The last record of a few steps, of a loop whose learners' weights differ by next to nothing."""
    torch.manual_seed(2)
    optimizer = FusedSGD(model.parameters(), lr=lr)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=NUM, vectorize=False)
    clip = options.get("max_grad_norm")
    x = torch.randn(NUM, 8, 6)
    held = torch.randn(NUM, 16, 6)
    loss_of = lambda batch: handle.model(batch).square().mean((1, 2)).sum()  # noqa: E731
    statistics = NoiseStatistics(
        handle, optimizer, steps, loss=lambda: loss_of(x), full_loss=lambda: loss_of(held), **options
    )
    for _ in range(steps):
        x = torch.randn(NUM, 8, 6)
        optimizer.zero_grad()
        loss_of(x).backward()
        if clip is not None:
            handle.clip_grad_norm_(clip)
        optimizer.step()
    return statistics.records[-1]


@pytest.mark.parametrize("strategy", [lambda: ddpcore.LocalSGD(period=9), lambda: ddpcore.DPSGD(ddpcore.Ring(1))])
def test_dropout_is_no_landscape(strategy):
    """Gradients at the mean see the masks of the step's own forward pass."""
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, 3))
    moves = measured(strategy(), model, steps=3).dynamics
    assert moves.landscape_noise < 1e-6 * moves.noise


def test_clipping_is_no_landscape():
    """The gradients at the mean are clipped as the loop clips, each learner's or their average."""
    for strategy in (ddpcore.LocalSGD(period=9), ddpcore.NoisySSGD(1e-7, where="per_learner")):
        model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
        moves = measured(strategy, model, max_grad_norm=0.01).dynamics
        assert moves.landscape_noise < 1e-6 * moves.noise, strategy
        assert moves.mean_grad_squared < 1e-4, "or nothing was clipped"


def test_gradients_that_a_loop_replaces_are_those_of_the_step():
    """By halves, or by None for the bias: the buffer of averages then holds others."""
    for optimizer_class in (torch.optim.SGD, FusedSGD):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=NUM)
        x, expected = torch.randn(NUM, 8, 6), []
        loss = lambda: handle.model(x).square().mean((1, 2)).sum()  # noqa: B023, E731
        statistics = NoiseStatistics(handle, optimizer, 1, full_loss=loss)
        for way in ("kept", "halved", "left out"):
            optimizer.zero_grad()
            loss().backward()
            weight, bias = (one.grad for one in handle.models[0].parameters())
            factors = {"kept": (1, 1), "halved": (0.25, 0.25), "left out": (1, 0)}[way]
            squares = [one.square().sum().item() for one in (weight, bias)]
            expected.append(sum(factor * square for factor, square in zip(factors, squares, strict=True)))
            for each in handle.models:
                if way == "halved":
                    each.weight.grad, each.bias.grad = each.weight.grad / 2, each.bias.grad / 2
                elif way == "left out":
                    each.bias.grad = None
            optimizer.step()
        assert [one.dynamics.mean_grad_squared for one in statistics.records] == pytest.approx(expected)


def double(grad: Tensor) -> Tensor:
    return 2 * grad


class Doubled(nn.Module):
    """A model in which a hook of some kind doubles every gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.kind = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)), kind
        for one in self.layers.parameters() if kind == "parameter" else ():
            one.register_hook(double)
        if kind == "module":
            self.layers[2].register_full_backward_pre_hook(lambda _, grads: tuple(map(double, grads)))

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layers(x)
        if self.kind == "activation" and outputs.requires_grad:
            outputs.register_hook(double)
        return outputs


@pytest.mark.parametrize("kind", ["parameter", "module", "activation"])
@pytest.mark.parametrize("strategy", [lambda: ddpcore.LocalSGD(period=9), ddpcore.SSGD])
def test_hooks_change_the_gradients_of_steps_and_not_that_of_the_full_loss(strategy, kind):
    moves, plain = (measured(strategy(), Doubled(one)).dynamics for one in (kind, "none"))
    assert moves.grad_squared == pytest.approx(plain.grad_squared)
    assert moves.effective_lr == pytest.approx(2 * plain.effective_lr)
    for name in ("noise", "ssgd_noise", "mean_grad_squared"):
        assert getattr(moves, name) == pytest.approx(4 * getattr(plain, name)), name
    assert moves.landscape_noise < 1e-6 * moves.noise


def test_a_layer_may_be_frozen_on_the_way():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(period=9), learners=NUM)
    x = torch.randn(NUM, 8, 6)
    loss = lambda: handle.model(x).square().mean((1, 2)).sum()  # noqa: E731
    statistics = NoiseStatistics(handle, optimizer, 1, loss=loss, full_loss=loss, hessian=True)
    for step in range(2):
        if step == 1:
            for each in handle.models:
                each[0].requires_grad_(False)
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    first, second = statistics.records
    assert first.valid and second.valid
    frozen, trained = ([record.segments[name].trace for record in (first, second)] for name in ("0.weight", "1.weight"))
    assert frozen[1] == pytest.approx(frozen[0] / 2) and frozen[0] > 0, (
        "the second step adds nothing to the mean of two"
    )
    assert trained[1] > 0.6 * trained[0]


class Half(nn.Linear):
    """In fp16, as under autocast: what flows back through it does so too."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.half(), self.weight.half(), self.bias.half())


def half_precision(scaled: bool, lowering: float) -> Any:
    """The record of a step of local_sgd, of a loss so small that its gradients vanish in fp16 unless it is scaled."""
    torch.manual_seed(0)
    kind = Half if lowering < 1 else nn.Linear
    model = nn.Sequential(kind(6, 16), nn.Tanh(), kind(16, 3))
    optimizer = FusedSGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, enabled=scaled)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(period=9), learners=NUM, scaler=scaler)
    x, held = torch.randn(NUM, 8, 6), torch.randn(NUM, 8, 6)

    def loss(batch: Tensor) -> Tensor:
        return lowering * handle.model(batch).float().square().mean((1, 2)).sum()

    statistics = NoiseStatistics(
        handle, optimizer, 1, loss=lambda: loss(x), full_loss=lambda: loss(held), scaler=scaler
    )
    scaler.scale(loss(x)).backward()
    scaler.step(optimizer)
    return statistics.records[0]


def test_further_passes_are_scaled_as_the_step_is():
    whole, low = half_precision(False, 1.0), half_precision(True, 1e-7)
    assert low.valid and low.at_mean
    assert low.dynamics.landscape_noise < 1e-4 * low.dynamics.noise, "weights agree, and so must gradients"
    assert low.dynamics.effective_lr == pytest.approx(whole.dynamics.effective_lr, rel=0.02)
    assert low.dynamics.grad_squared == pytest.approx(1e-14 * whole.dynamics.grad_squared, rel=0.02)
    assert low.whole.trace == pytest.approx(1e-14 * whole.whole.trace, rel=0.02)


def test_a_full_gradient_that_has_vanished_is_said():
    record = half_precision(False, 1e-9)
    assert not record.valid
    assert record.reason.startswith("the full gradient is zero")


def test_a_compiled_model_has_no_second_derivatives():
    torch.compiler.reset()  # other tests compile nn.Linear, and above a number of times torch runs it uncompiled
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager")
    handle = ddpcore.distribute(compiled, optimizer, ddpcore.LocalSGD(period=9), learners=2)
    x = torch.randn(2, 8, 6)
    loss = lambda: handle.model(x).tanh().square().mean((1, 2)).sum()  # noqa: E731
    NoiseStatistics(handle, optimizer, 1, loss=loss, full_loss=loss, hessian=True)
    loss().backward()
    with pytest.raises(ValueError, match="let the loss call the model uncompiled"):
        optimizer.step()


def test_attention_has_second_derivatives():
    """torch's fused kernels have none; and training, which goes by them, keeps its bits."""
    records, weights = [], []
    for hessian in (True, False):
        torch.manual_seed(0)
        model = MODELS.build("vit", patch_size=16, width=8, depth=1, num_heads=2, mlp_width=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(period=9), learners=2)
        x = torch.randn(2, 4, 3, 32, 32)
        loss = lambda: handle.model(x).square().mean((1, 2)).sum()  # noqa: B023, E731
        statistics = NoiseStatistics(handle, optimizer, 1, loss=loss, full_loss=loss, hessian=hessian)
        for _ in range(2):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        records.append(statistics.records[-1])
        weights.append(handle.learner.flat.param_LP.clone())
    assert records[0].valid and records[0].dynamics.hessian_noise > 0
    assert torch.equal(*weights)


def test_a_measured_step_that_fails_may_be_taken_again():
    """The loop catches what its full_loss raised: the step is counted once, and nothing as sent."""
    torch.manual_seed(1)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=NUM)
    x = torch.randn(NUM, 8, 6)
    fails = True

    def full_loss() -> Tensor:
        if fails:
            raise MemoryError("out of memory")
        return handle.model(x).square().mean((1, 2)).sum()

    statistics = NoiseStatistics(handle, optimizer, 1, full_loss=full_loss)
    for fails in (True, False):
        optimizer.zero_grad()
        handle.model(x).square().mean((1, 2)).sum().backward()
        sent = handle.learner.comm.bytes_sent
        if fails:
            with pytest.raises(MemoryError):
                optimizer.step()
        else:
            optimizer.step()
        assert handle.learner.comm.bytes_sent == sent
    (record,) = statistics.records
    assert (record.step, record.num_steps, record.num_skipped, record.valid) == (1, 1, 0, True)


def test_gradients_that_were_taken_off_the_mean_are_no_synchronous_ones():
    """NoisySSGD per learner: k is taken at the weights themselves, and its difference is what the noise adds."""
    torch.manual_seed(4)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = ddpcore.NoisySSGD(0.3, where="per_learner")
    handle = ddpcore.distribute(model, optimizer, strategy, learners=NUM, vectorize=False)
    x = torch.randn(NUM, 8, 6)
    loss = lambda: handle.model(x).square().mean((1, 2)).sum()  # noqa: E731
    statistics = NoiseStatistics(handle, optimizer, 1, loss=loss, full_loss=loss)
    models = [list(model.parameters()) for model in handle.models]
    clean = [torch.stack(rows).detach().requires_grad_() for rows in zip(*models, strict=True)]
    outputs = torch.einsum("nbi,noi->nbo", x, clean[0]) + clean[1][:, None]
    k = torch.autograd.grad(outputs.square().mean((1, 2)).sum(), clean)
    loss().backward()
    taken = [torch.stack([p.grad for p in rows]) for rows in zip(*models, strict=True)]
    optimizer.step()
    (record,) = statistics.records
    expected = sum((g[0] - at_mean.mean(0)).double().square().sum().item() for g, at_mean in zip(taken, k, strict=True))
    assert not record.at_mean and record.valid
    assert record.dynamics.landscape_noise == pytest.approx(0.01 * expected, rel=1e-4)
    assert record.dynamics.landscape_noise > 0.01 * record.dynamics.noise, "or the test says nothing of it"
    with pytest.raises(ValueError, match="learners of noisy_ssgd differ: pass loss="):
        NoiseStatistics(handle, optimizer, full_loss=loss)


def small() -> tuple[nn.Module, DataLoss]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, DataLoss(model, nn.functional.cross_entropy, [(torch.randn(20, 5), torch.randint(3, (20,)))])


def test_other_weights_under_autocast():
    """Autocast keeps the weights that it has cast, also where a pass takes other weights."""
    model, data = small()
    x, inputs = [1.0, 2.0], torch.randn(20, 5)
    expected = flatness(model, data).loss_increase, landscape(data, random_plane(model), x=x, y=x).values["train_loss"]
    with torch.autocast("cpu", torch.bfloat16):
        before = model(inputs)
        found = flatness(model, data).loss_increase, landscape(data, random_plane(model), x=x, y=x).values["train_loss"]
        assert torch.equal(model(inputs), before)
    assert expected[1].max() - expected[1].min() > 0.03
    np.testing.assert_allclose(found[1], expected[1], atol=4e-3)
    np.testing.assert_allclose(found[0], expected[0], atol=4e-3)
    assert found[0] != 0


def test_a_whole_step_under_autocast():
    def measure(inside: bool) -> Any:
        model = small()[0]
        optimizer = FusedSGD(model.parameters(), lr=0.5)
        handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), learners=NUM)
        inputs = torch.randn(NUM, 20, 5) * torch.arange(1, NUM + 1).view(-1, 1, 1)
        targets = torch.randint(3, (NUM, 20))

        def loss() -> Tensor:
            return sum(map(nn.functional.cross_entropy, handle.model(inputs), targets), torch.zeros(()))

        statistics = NoiseStatistics(handle, optimizer, every=5, batch_size=20, loss=loss, full_loss=loss)
        for _ in range(5):
            with torch.autocast("cpu", torch.bfloat16):
                optimizer.zero_grad()
                total = loss()
                if inside:
                    total.backward()
                    optimizer.step()
            if not inside:
                total.backward()
                optimizer.step()
        return statistics.records[-1].dynamics

    found, expected = measure(inside=True), measure(inside=False)
    assert expected.effective_lr < 0.45
    assert found.effective_lr == pytest.approx(expected.effective_lr, abs=2e-3)
    assert found.landscape_noise == pytest.approx(expected.landscape_noise, rel=0.02)


class DrawingSet(torch.utils.data.Dataset[Any]):
    """Augments its samples by the generators of NumPy and Python."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((5,), random.random() + float(np.random.rand())), index % 3


def test_a_loss_over_data_that_draw_numbers_leaves_the_generators():
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    expected = draws()
    random.seed(3)
    np.random.seed(3)
    model = nn.Linear(5, 3)
    torch.manual_seed(3)
    DataLoss(model, nn.functional.cross_entropy, torch.utils.data.DataLoader(DrawingSet(), batch_size=2)).digest()
    assert draws() == expected
