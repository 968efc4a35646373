"""``DataLoss`` and ``landscape`` around ordinary models and loaders: the right numbers, or one error."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ddpcore.diagnostics import DataLoss, Hessian, landscape, plane_through, random_plane
from ddpcore.distributed.averaging import recalibrate

GRID = np.linspace(-1, 1, 3)
WIDTH = 2  # with so few weights a Hessian is computed whole, in few passes


def samples(num: int = 25) -> list[tuple[Tensor, Tensor]]:
    """Batches of 10, the last one smaller."""
    inputs, targets = torch.randn(num, 6), torch.randint(3, (num,))
    return list(zip(inputs.split(10), targets.split(10), strict=True))


def network(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, WIDTH), *more, nn.Tanh(), nn.Linear(WIDTH, 3))


class OfDict(nn.Module):
    """Takes its inputs as one dict."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.inner(batch["x"])


def test_batches_of_dicts_have_the_weight_of_their_samples() -> None:
    model, batches = network(), samples()
    plain = DataLoss(model, F.cross_entropy, batches)
    named = DataLoss(OfDict(model), F.cross_entropy, [({"x": inputs}, targets) for inputs, targets in batches])
    assert named.total == plain.total == 25
    assert sum(map(float, named())) == pytest.approx(sum(map(float, plain())))
    with pytest.raises(ValueError, match="the inputs of a batch hold no tensor of samples"):
        DataLoss(model, F.cross_entropy, [(["text"], torch.zeros(1))])


def test_inputs_with_time_before_samples_are_refused() -> None:
    """The length of time is no number of samples, so a smaller last batch would count as much as the others."""
    model = nn.Linear(6, 3)
    batches = [(torch.randn(7, num, 6), torch.randint(3, (num,))) for num in (4, 2)]
    last = lambda outputs, targets: F.cross_entropy(outputs[-1], targets)  # noqa: E731
    with pytest.raises(ValueError, match="the inputs of a batch have 7 rows and its targets 4: pass inputs"):
        DataLoss(model, last, batches)
    for time, shape in ((2, (6,)), (4, (8,)), (2, ())):  # time divides the number of targets
        with pytest.raises(ValueError, match=f"the inputs of a batch have {time} rows and its targets 8: pass inputs"):
            DataLoss(model, last, [(torch.randn(time, 8, *shape), torch.randint(3, (8,)))])
    tokens = [(torch.randn(num, 5, 6), torch.randint(3, (5 * num,))) for num in (4, 2)]
    every = lambda outputs, targets: F.cross_entropy(outputs.flatten(0, 1), targets)  # noqa: E731
    assert DataLoss(model, every, tokens).total == 6
    pixels = [(torch.randn(num, 3, 4, 6), torch.randint(3, (24 * num,))) for num in (4, 2)]
    assert DataLoss(model, every, pixels).total == 6
    pairs = [({"a": torch.randn(num, 6), "b": torch.randn(num, 2, 6)}, torch.zeros(2 * num)) for num in (4, 2)]
    assert DataLoss(model, every, pairs).total == 6
    assert DataLoss(model, lambda outputs, _: outputs.square().mean(), [(torch.ones(4, 6), torch.zeros(1))]).total == 4


def test_eigenvalues_with_recalibrated_statistics_are_those_of_the_loss() -> None:
    model, batches = network(nn.BatchNorm1d(WIDTH)), samples()
    data, plane = DataLoss(model, F.cross_entropy, batches), random_plane(network(nn.BatchNorm1d(WIDTH)))
    surface = landscape(data, plane, x=GRID, y=GRID, batch_norm="recalibrate", curvature=True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(plane.at(float(GRID[0]), float(GRID[2])), other.parameters())
    recalibrate(other, [inputs for inputs, _ in batches])
    other.eval()
    values = Hessian(other, DataLoss(other, F.cross_entropy, batches)).eigenvalues().values
    assert surface.values["max_eig"][2, 0] == pytest.approx(float(values[0]), rel=1e-3)
    assert surface.values["min_eig"][2, 0] == pytest.approx(float(values[-1]), rel=1e-3, abs=1e-3)


def test_a_loss_function_that_reads_the_weights() -> None:
    """It sees those of each point."""
    model, batches = network(), samples()

    def loss(outputs: Any, targets: Any) -> Tensor:
        return F.cross_entropy(outputs, targets) + 0.1 * sum(own.square().sum() for own in model.parameters())

    data, plane, grid = DataLoss(model, loss, batches), random_plane(model), np.linspace(-1, 1, 5)
    found = landscape(data, plane, x=grid, y=grid).loss
    plain = landscape(DataLoss(model, F.cross_entropy, batches), plane, x=grid, y=grid).loss
    penalties = [[0.1 * float(plane.at(x, y).square().sum()) for x in grid] for y in grid]
    np.testing.assert_allclose(found, plain + penalties, rtol=1e-5)


def test_a_loader_draws_nothing_from_the_generator(tmp_path: Any) -> None:
    model = network()
    loader = DataLoader(TensorDataset(torch.randn(25, 6), torch.randint(3, (25,))), batch_size=10)
    before = torch.get_rng_state()
    data = DataLoss(model, F.cross_entropy, loader)
    landscape(data, random_plane(model), x=GRID, y=GRID, out=tmp_path / "surface.h5")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("raised", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("batch_norm", ["eval", "batch", "recalibrate"])
@pytest.mark.parametrize("curvature", [False, True])
def test_everything_is_as_before_a_landscape(
    batch_norm: str, curvature: bool, raised: type[BaseException] | None
) -> None:
    """Weights and their memory, modes, buffers and random generators, after a call and after an error in its middle."""
    model = network(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    model[1].eval()
    calls = []

    def loss(outputs: Any, targets: Any) -> Tensor:
        calls.append(1)
        if raised is not None and len(calls) == 20:
            raise raised("in the middle")
        return F.cross_entropy(outputs, targets)

    data, plane = DataLoss(model, loss, samples()), random_plane(model)
    before = copy.deepcopy(model.state_dict())
    places, modes = [own.data_ptr() for own in model.parameters()], [module.training for module in model.modules()]
    random = torch.get_rng_state()
    with contextlib.nullcontext() if raised is None else pytest.raises(raised, match="in the middle"):
        landscape(data, plane, x=GRID, y=GRID, batch_norm=batch_norm, curvature=curvature)
    assert len(calls) >= 20
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [own.data_ptr() for own in model.parameters()] == places
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)


def test_frozen_parameters_are_part_of_a_landscape(tmp_path: Any) -> None:
    model = network()
    model[0].requires_grad_(False)
    data, plane, out = DataLoss(model, F.cross_entropy, samples()), random_plane(model), tmp_path / "file.h5"
    landscape(data, plane, x=GRID, y=GRID, out=out)
    landscape(data, plane, x=GRID, y=GRID, out=out)
    with torch.no_grad():
        model[0].weight.mul_(3)
    with pytest.raises(ValueError, match="holds another landscape"):
        landscape(data, plane, x=GRID, y=GRID, out=out)
    models = {name: network() for name in "abc"}
    for one in models.values():
        one[0].requires_grad_(False)
    with pytest.raises(ValueError, match="other values in parameters that need no gradient"):
        plane_through(models)


@pytest.mark.parametrize("norm", [nn.LayerNorm((3, 4)), nn.RMSNorm((3, 4))], ids=lambda norm: type(norm).__name__)
def test_normalization_of_several_dimensions_does_not_move(norm: nn.Module) -> None:
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(12, 2))
    direction = random_plane(model).along_x_P
    size = sum(parameter.numel() for parameter in norm.parameters())
    assert not direction[:size].any()
    assert direction[size : size + 24].all()


def test_batches_that_can_be_read_once_are_an_error() -> None:
    """Also for ranks, where another number of samples would not show in the total."""
    data = DataLoss(network(), F.cross_entropy, iter(samples()))
    with pytest.raises(ValueError, match="batches held 25 samples, and now 0: pass a list"):
        list(data())


@pytest.mark.parametrize(
    ("outputs", "targets", "percent"),
    [
        (torch.eye(3), torch.arange(3), 100.0),
        (torch.eye(3).expand(4, 3, 3), torch.arange(3).expand(4, 3), 100.0),
        (torch.ones(4, 1), torch.zeros(4, dtype=torch.int64), None),
        (torch.randn(4, 5, 7), torch.zeros(4, 5, dtype=torch.int64), None),
        (torch.randn(4), torch.zeros(4), None),
    ],
)
def test_accuracy_of_classes_along_dimension_1(outputs: Tensor, targets: Tensor, percent: float | None) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, inputs: Tensor) -> Tensor:
            return outputs + 0 * self.weight.sum()

    model = Fixed()
    batches = [(torch.zeros(len(targets), 1), targets)]
    data = DataLoss(model, lambda outputs, targets: outputs.float().square().mean(), batches)
    found = landscape(data, random_plane(model), x=GRID, y=GRID).accuracy
    assert np.isnan(found).all() if percent is None else (found == percent).all()
