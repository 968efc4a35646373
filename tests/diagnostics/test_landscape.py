"""Landscapes against evaluations one by one, their planes, files and pictures."""

from __future__ import annotations

import copy
import importlib
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpcore.diagnostics import DataLoss, Hessian, Plane, eigenvector_plane, landscape, plane_through, random_plane
from ddpcore.display.picture import plot_surfaces
from ddpcore.distributed.averaging import recalibrate
from ddpcore.records.surface import Surface, read_surface, write_surface

X, Y = np.linspace(-1, 1, 5), np.linspace(-0.5, 1, 4)


def network(seed: int = 0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(6)] if norm else []
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.Tanh(), nn.Linear(6, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(25, 4, generator=generator), torch.randint(3, (25,), generator=generator)
    return list(zip(inputs.split(10), labels.split(10), strict=True))


def data_of(model: nn.Module) -> DataLoss:
    return DataLoss(model, F.cross_entropy, batches())


def one_by_one(model: nn.Module, plane: Plane, batch_norm: str = "eval") -> tuple[np.ndarray, np.ndarray]:
    """Loss and accuracy of copies of the model with the weights of each point."""
    losses, accuracies = np.zeros((len(Y), len(X))), np.zeros((len(Y), len(X)))
    labels = torch.cat([labels for _, labels in batches()])
    for row, y in enumerate(Y):
        for column, x in enumerate(X):
            one = copy.deepcopy(model).eval()
            nn.utils.vector_to_parameters(plane.at(x, y), one.parameters())
            if batch_norm == "recalibrate":
                recalibrate(one, [batch for batch, _ in batches()])
            if batch_norm == "batch":
                one[1].train()
            with torch.no_grad():
                outputs = torch.cat([one(batch) for batch, _ in batches()])
            losses[row, column] = F.cross_entropy(outputs, labels).item()
            accuracies[row, column] = 100 * (outputs.argmax(1) == labels).float().mean().item()
    return losses, accuracies


@pytest.mark.parametrize(
    ("norm", "batch_norm"), [(False, "eval"), (True, "eval"), (True, "batch"), (True, "recalibrate")]
)
def test_every_point(norm: bool, batch_norm: str) -> None:
    """On a grid that is not square, with batches of different sizes; the model stays as it was."""
    model = network(norm=norm).train()
    if norm:
        model(batches()[0][0])  # running statistics that are not the initial ones
    plane, before = random_plane(model, seed=3), copy.deepcopy(model.state_dict())
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    found = landscape(data_of(model), plane, x=X, y=Y, batch_norm=batch_norm)
    losses, accuracies = one_by_one(model, plane, batch_norm)
    assert found.loss == pytest.approx(losses, rel=1e-5)
    assert found.accuracy == pytest.approx(accuracies, abs=1e-4)
    assert found.done.all()
    assert np.ptp(losses) > 0.1, "a flat landscape would compare nothing"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert model.training and model[1].training


def test_parameters_of_two_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3).double()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.body(inputs.to(self.body.weight.dtype)).tanh().double())

    model = Mixed()
    plane = random_plane(model)
    found = landscape(data_of(model), plane, x=X, y=Y)
    assert found.loss == pytest.approx(one_by_one(model, plane)[0], rel=1e-5)
    assert [parameter.dtype for parameter in model.parameters()] == [torch.float32] * 2 + [torch.float64] * 2


def test_random_directions() -> None:
    model = network(norm=True)
    plane = random_plane(model, seed=3)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    parts = dict(zip(sizes, plane.along_x_P.split(list(sizes.values())), strict=True))
    for name, parameter in model.named_parameters():
        part = parts[name].view_as(parameter)
        if parameter.dim() == 1:
            assert not part.any(), name
        else:
            torch.testing.assert_close(part.norm(dim=1), parameter.detach().norm(dim=1))
    assert abs(plane.along_x_P @ plane.along_y_P) < 1e-5 * plane.along_x_P.square().sum()
    assert plane.along_y_P.norm() > 0.5 * plane.along_x_P.norm()
    assert torch.equal(plane.along_x_P, random_plane(model, seed=3).along_x_P)
    assert not torch.equal(plane.along_x_P, random_plane(model, seed=4).along_x_P)


def test_plane_through_three_solutions() -> None:
    models = {name: network(seed) for seed, name in enumerate(("a", "b", "c"))}
    plane = plane_through(models)
    for name, model in models.items():
        torch.testing.assert_close(plane.at(*plane.marks[name]), nn.utils.parameters_to_vector(model.parameters()))
    assert plane.marks["a"] == (0.0, 0.0) and plane.marks["b"] == (1.0, 0.0) and plane.marks["c"][1] == 1.0
    assert abs(plane.along_x_P @ plane.along_y_P) < 1e-4


def test_eigenvector_plane_and_curvature() -> None:
    """At the origin the eigenvalues are those of the model, and the loss bends by them."""
    model = network().double()
    data = DataLoss(model, F.cross_entropy, [(x.double(), y) for x, y in batches()])
    ends = Hessian(model, data).eigenvalues(2, 1, tolerance=1e-8)
    plane = eigenvector_plane(model, ends)
    step = 1e-3
    found = landscape(data, plane, x=[-step, 0, step], y=[-step, 0, step], curvature=True)
    assert found.values["max_eig"][1, 1] == pytest.approx(ends.values[0], rel=1e-2)
    assert found.values["min_eig"][1, 1] == pytest.approx(ends.values[-1], abs=1e-2 * ends.values[0])
    assert found.ratio()[1, 1] == pytest.approx(abs(ends.values[-1] / ends.values[0]), abs=1e-2)
    bends = [found.loss[1], found.loss[:, 1]]
    for bend, value in zip(bends, ends.values, strict=False):
        assert (bend[0] - 2 * bend[1] + bend[2]) / step**2 == pytest.approx(value, rel=1e-3)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("stop", [1, 7, 16])
def test_resume_at_any_point(stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by an error after some points, also with values of 0 and NaN; no point is computed twice."""
    monkeypatch.setattr(importlib.import_module("ddpcore.diagnostics.landscape"), "CHUNK", 1)
    model = network()
    plane, path = random_plane(model), tmp_path / "surface.h5"
    expected = landscape(data_of(model), plane, x=X, y=Y)
    num_calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal num_calls
        if num_calls == 3 * stop:
            num_calls += 1
            raise Stopped
        num_calls += 1
        return F.cross_entropy(outputs, targets) * (0.0 if num_calls <= 3 else float("nan") if num_calls <= 6 else 1.0)

    before = [parameter.clone() for parameter in model.parameters()]
    data = DataLoss(model, loss, batches())
    with pytest.raises(Stopped):
        landscape(data, plane, x=X, y=Y, out=path)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert read_surface(path).done.sum() == stop
    found = landscape(data, plane, x=X, y=Y, out=path)
    assert num_calls == 3 * X.size * Y.size + 1
    losses, wanted = found.loss.reshape(-1), expected.loss.reshape(-1).copy()
    wanted[:2] = 0.0, np.nan
    assert np.array_equal(losses, wanted, equal_nan=True)
    assert np.array_equal(read_surface(path).loss, found.loss, equal_nan=True)


def test_another_landscape_in_the_file_is_refused(tmp_path: Path) -> None:
    model, path = network(), tmp_path / "surface.h5"
    landscape(data_of(model), random_plane(model), x=X, y=Y, out=path)
    content = path.read_bytes()
    for plane, x in ((random_plane(model, seed=1), X), (random_plane(model), X * 2)):
        with pytest.raises(ValueError, match="holds another landscape"):
            landscape(data_of(model), plane, x=x, y=Y, out=path)
    assert path.read_bytes() == content


def test_other_data_or_running_statistics_are_another_landscape(tmp_path: Path) -> None:
    model, path = network(norm=True), tmp_path / "surface.h5"
    landscape(data_of(model), random_plane(model), x=X, y=Y, out=path)
    other = DataLoss(model, F.cross_entropy, [(inputs, (labels + 1) % 3) for inputs, labels in batches()])
    with pytest.raises(ValueError, match="holds another landscape"):
        landscape(other, random_plane(model), x=X, y=Y, out=path)
    model.train()(batches()[0][0])
    with pytest.raises(ValueError, match="holds another landscape"):
        landscape(data_of(model), random_plane(model), x=X, y=Y, out=path)


def test_file_has_the_layout_of_loss_landscape(tmp_path: Path) -> None:
    model, path = network(), tmp_path / "surface.h5"
    found = landscape(data_of(model), random_plane(model), x=X, y=Y, out=path)
    with h5py.File(path) as file:
        assert np.array_equal(file["xcoordinates"], X) and np.array_equal(file["ycoordinates"], Y)
        assert file["train_loss"].shape == np.meshgrid(X, Y)[0].shape
        assert np.array_equal(file["train_loss"], found.loss) and np.array_equal(file["train_acc"], found.accuracy)


def test_a_file_of_the_loss_landscape_project(tmp_path: Path) -> None:
    """It has the name of another file, and -1 where no loss is computed yet."""
    path = tmp_path / "surface.h5"
    with h5py.File(path, "w") as file:
        file["dir_file"] = "directions.h5"
        file["xcoordinates"], file["ycoordinates"] = X, Y
        file["train_loss"], file["train_acc"] = -np.ones((len(Y), len(X))), -np.ones((len(Y), len(X)))
        file["train_loss"][1, 2] = 0.5
    found = read_surface(path)
    assert found.done.sum() == 1 and found.done[1, 2] and found.loss[1, 2] == 0.5


def bowl(num: int = 41) -> Surface:
    """``x^2 + 4 y^2`` on [-1, 1]^2."""
    x = np.linspace(-1, 1, num)
    surface = Surface.empty(x, x, ("train_loss",), "a bowl", "")
    surface.values["train_loss"][:] = x[None] ** 2 + 4 * x[:, None] ** 2
    surface.done[:] = True
    return surface


def test_widths_and_sharpness_of_a_bowl() -> None:
    """The level set of 0.25 is an ellipse with half axes 0.5 and 0.25."""
    assert bowl().level_radius(0.25) == pytest.approx(math.sqrt(0.5 * 0.25), rel=0.01)
    assert bowl().sharpness(0.5) == pytest.approx(100 * 4 * 0.25)
    one = bowl()
    one.values["train_loss"][20, 20] = np.nan
    assert one.level_radius(0.25) < bowl().level_radius(0.25)
    assert math.isnan(one.sharpness(0.1, center=(float(one.x[21]), float(one.y[20]))))
    with pytest.raises(ValueError, match=r"the landscape has no point at \(0.0, 0.0\): compute it with an odd number"):
        bowl(10).sharpness(0.5)
    one.done[3, 4] = False
    with pytest.raises(ValueError, match="1 points of the landscape are missing: compute them first"):
        one.level_radius(0.25)
    one.done[:] = True
    one.values["train_loss"][:] = np.nan
    with pytest.raises(ValueError, match="no point"):
        one.level_radius(1.0)


def test_csv() -> None:
    surface = bowl(3)
    surface.done[0, 0] = False
    lines = surface.csv().splitlines()
    assert lines[0] == "x,y,train_loss"
    assert lines[1:3] == ["0.0,-1.0,4.0", "1.0,-1.0,5.0"]
    assert len(lines) == 9


def test_pictures(tmp_path: Path) -> None:
    """The same surfaces give the same file; NaN is left white; constants are drawn."""
    one, flat = bowl(), bowl()
    one.values["train_loss"][3, 4] = np.nan
    flat.values["train_loss"][:] = 1.0
    for name in ("a.svg", "b.svg"):
        plot_surfaces({"bowl <1>": one, "flat": flat}, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()[:600]
    plot_surfaces({"flat": flat}, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


def test_pictures_that_are_impossible(tmp_path: Path) -> None:
    empty = bowl()
    empty.values["train_loss"][:] = np.nan
    for arguments, text in (
        (({"a": bowl()}, tmp_path / "a.txt"), "ends in neither"),
        (({"a": empty}, tmp_path / "a.png"), "nothing to draw"),
    ):
        with pytest.raises(ValueError, match=text):
            plot_surfaces(*arguments)
    with pytest.raises(ValueError, match="no eigenvalues"):
        plot_surfaces({"a": bowl()}, tmp_path / "a.png", metric="ratio")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["text", "cut", "shape", "missing"])
def test_damaged_file(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "surface.h5"
    write_surface(path, bowl())
    if damage == "text":
        path.write_text("no landscape")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:1500])
    else:
        with h5py.File(path, "a") as file:
            del file["train_loss"]
            if damage == "shape":
                file["train_loss"] = np.zeros((2, 3))
    with pytest.raises(ValueError, match=r"surface\.h5 is") as error:
        read_surface(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"x": [0.0]}, "x must be at least 2 ascending numbers"),
        ({"y": [0.0, 0.0]}, "y must be"),
        ({"x": [0.0, float("nan")]}, "x must be"),
        ({"batch_norm": "training"}, "batch_norm is 'training'"),
        ({"plane": random_plane(nn.Linear(2, 2))}, "the plane is of a model with 6 parameters"),
    ],
)  # fmt: skip
def test_refused(options: dict[str, Any], text: str) -> None:
    model = network()
    arguments: dict[str, Any] = {"plane": random_plane(model), "x": X, "y": Y, **options}
    with pytest.raises(ValueError, match=text):
        landscape(data_of(model), **arguments)


def test_planes_that_are_impossible() -> None:
    models = {name: network(seed) for seed, name in enumerate(("a", "b", "c"))}
    ends = Hessian(models["a"], data_of(models["a"])).eigenvalues(1, 0)
    for make, text in (
        (lambda: random_plane(nn.BatchNorm1d(3)), "no parameter of two dimensions"),
        (lambda: plane_through({"a": models["a"]}), "there are 1 models"),
        (lambda: plane_through({**models, "c": nn.Linear(2, 2)}), "different shapes"),
        (lambda: plane_through({**models, "c": models["b"]}), "on one line"),
        (lambda: eigenvector_plane(models["a"], ends), "takes two eigenvectors"),
    ):
        with pytest.raises(ValueError, match=text):
            make()
