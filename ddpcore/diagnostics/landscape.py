"""Planes in weight space, and the loss over them.

Shapes: P elements of all parameters that need a gradient, in the order of ``model.parameters()``; X and Y points along
the two directions of a plane, K points at a time.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpcore.comm.groups import gather_objects
from ddpcore.diagnostics.hessian import Hessian
from ddpcore.diagnostics.passes import as_it_was
from ddpcore.diagnostics.spectra import Eigenvalues, NotConverged, NotFinite
from ddpcore.diagnostics.weights import DataLoss, WeightVector
from ddpcore.distributed.averaging import modes_kept, recalibrate
from ddpcore.optim.groups import is_normalization
from ddpcore.options.typed import check_choice
from ddpcore.records.surface import METRICS, Surface, read_surface, write_surface
from ddpcore.runtime.progress import ProgressReport

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plane:
    """The weights ``origin + x * along_x + y * along_y`` for numbers x and y."""

    origin_P: Tensor  #: the weights at (0, 0)
    along_x_P: Tensor  #: a direction
    along_y_P: Tensor  #: one that is orthogonal to it
    about: str  #: how the plane was made, as text for people
    marks: Mapping[str, Point] = field(default_factory=dict)  #: named points (x, y), such as solutions

    def at(self, x: float, y: float) -> Tensor:
        """The weights ``[P]`` at a point."""
        return self.origin_P + x * self.along_x_P + y * self.along_y_P

    def digest(self) -> str:
        """A hash of the three vectors, which tells planes apart."""
        found = hashlib.sha256()
        for part in (self.origin_P, self.along_x_P, self.along_y_P):
            found.update(part.detach().double().cpu().numpy().tobytes())
        return found.hexdigest()[:16]


def random_plane(model: nn.Module, *, seed: int = 0) -> Plane:
    """The plane of two random directions, normalized filter by filter (Li et al. 2018, section 4).

    Each slice of a direction along the first dimension of a parameter (a filter, or the weights of one neuron) gets the
    norm of the model's slice. Parameters of one dimension, such as biases, and parameters of normalization do not move.
    The second direction is then made orthogonal to the first. ValueError: no parameter of two dimensions is trained.
    """
    weights = WeightVector(model)
    generator = torch.Generator().manual_seed(seed)
    still = {id(own) for module in model.modules() if is_normalization(module) for own in module.parameters()}
    x_P, y_P = (_filter_normalized(weights, still, generator) for _ in range(2))
    if not x_P.any():
        raise ValueError("the model has no parameter of two dimensions that needs a gradient: there is no direction")
    return _plane_at(weights.values_P, x_P, y_P, f"two random directions, normalized by filters, seed {seed}")


def plane_through(models: Mapping[str, nn.Module]) -> Plane:
    """The plane through three solutions: the first is (0, 0), the second (1, 0), and the third has y = 1.

    ``models`` are three of one architecture, by name. A point between solutions has no batch statistics of its own:
    take ``batch_norm="recalibrate"``. ValueError: they are not three, or differ in shape, or lie on one line.
    """
    if len(models) != 3:
        raise ValueError(f"there are {len(models)} models: a plane goes through three")
    rows = [WeightVector(model) for model in models.values()]
    shapes = [[parameter.shape for parameter in row.parameters] for row in rows]
    if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        raise ValueError("the models have parameters of different shapes: take three of one architecture")
    first, *others = ([own for own in model.parameters() if not own.requires_grad] for model in models.values())
    if any(len(frozen) != len(first) or not all(map(torch.equal, first, frozen)) for frozen in others):
        raise ValueError("the models have other values in parameters that need no gradient: the plane has no such axis")
    origin_P, x_P, third_P = rows[0].values_P, *(row.values_P - rows[0].values_P for row in rows[1:])
    y_P = _orthogonal(third_P, x_P)
    if not x_P.any() or y_P.norm() <= 1e-6 * third_P.norm():
        raise ValueError("the three models lie on one line: take other solutions")
    slope = float((third_P.double() @ x_P.double()) / x_P.double().square().sum())
    marks = dict(zip(models, [(0.0, 0.0), (1.0, 0.0), (slope, 1.0)], strict=True))
    return Plane(origin_P=origin_P, along_x_P=x_P, along_y_P=y_P, about="plane through three solutions", marks=marks)


def eigenvector_plane(model: nn.Module, found: Eigenvalues) -> Plane:
    """The plane of the first two vectors of ``Hessian.eigenvalues``, of length 1.

    ValueError: there are fewer than two vectors, or they are of another model.
    """
    weights = WeightVector(model)
    if len(found.vectors) < 2:
        raise ValueError("a plane takes two eigenvectors: call eigenvalues(largest=2)")
    if found.vectors.shape[1] != weights.numel:
        raise ValueError("the eigenvectors are of a model with another number of parameters")
    x_P, y_P = found.vectors[:2].to(weights.values_P)
    about = f"the eigenvectors of the eigenvalues {found.values[0]:.4g} and {found.values[1]:.4g}"
    return _plane_at(weights.values_P, x_P, y_P, about)


def _plane_at(origin_P: Tensor, x_P: Tensor, y_P: Tensor, about: str) -> Plane:
    marks = {"model": (0.0, 0.0)}
    return Plane(origin_P=origin_P, along_x_P=x_P, along_y_P=_orthogonal(y_P, x_P), about=about, marks=marks)


def _filter_normalized(weights: WeightVector, still: AbstractSet[int], generator: torch.Generator) -> Tensor:
    row_P = torch.zeros_like(weights.values_P)
    views = zip(weights.parameters, weights.views(row_P), weights.views(weights.values_P), strict=True)
    for parameter, view, own in views:
        drawn = torch.randn(own.shape, generator=generator, device="cpu", dtype=torch.float32).to(own)
        if own.dim() > 1 and id(parameter) not in still:  # all are drawn, also those that do not move
            norms = [slices.flatten(1).norm(dim=1) for slices in (own, drawn)]
            factors = norms[0] / norms[1].clamp(min=torch.finfo(own.dtype).tiny)
            view.copy_(drawn * factors.view(-1, *[1] * (own.dim() - 1)))
    return row_P


def _orthogonal(row_P: Tensor, to_P: Tensor) -> Tensor:
    """The part of a row that is orthogonal to another one, which may be zero."""
    square = to_P.double().square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    return row_P - (row_P.double() @ to_P.double() / square).to(row_P) * to_P


BATCH_NORM = ("eval", "batch", "recalibrate")
CHUNK = 8  # points that a rank computes before it sends them
SAVE_SECONDS = 10.0  # from one save of an unfinished landscape to the next
ValuesAt = Callable[[Sequence[Point]], dict[str, list[float]]]
Coordinates = Sequence[float] | npt.NDArray[np.float64]


def landscape(
    data: DataLoss,
    plane: Plane,
    *,
    x: Coordinates,
    y: Coordinates,
    batch_norm: str = "eval",
    curvature: bool = False,
    out: str | Path | None = None,
    group: dist.ProcessGroup | None = None,
) -> Surface:
    """Compute loss and accuracy at each point (x, y) of a plane (Li et al. 2018).

    The model is as before after the call, also after an exception or Ctrl-C. Memory holds a constant number of points.

    Args:
        data: model, loss and samples. Accuracy is the percentage of samples whose largest output has the index of the
            target. It is NaN if the targets are no class numbers.
        plane: of the same model.
        x, y: coordinates, ascending, at least two each.
        batch_norm: ``eval`` takes the model's running statistics at each point, ``batch`` the statistics of each batch,
            and ``recalibrate`` computes them again at each point from all batches.
        curvature: also the largest and the smallest eigenvalue of the Hessian at each point, for the map of
            ``|min / max|``; some tens of products a point.
        out: an HDF5 file (extra ``train``), saved every ten seconds. If it exists, its finished points are kept. It has
            a hash of the samples, the buffers and the plane, but not of the loss function.
        group: ranks that share the points. Each of them must hold all samples.

    Returns the surface, on every rank. ValueError: the arguments do not fit together, or ``out`` holds another one.
    """
    check_choice("batch_norm", batch_norm, BATCH_NORM)
    if data.group is not None:
        raise ValueError("the ranks of a landscape share its points, not its samples: make DataLoss without group=")
    weights = WeightVector(data.model)
    if plane.origin_P.shape != weights.values_P.shape:
        sizes = f"{plane.origin_P.numel()} parameters, and this one has {weights.numel}"
        raise ValueError(f"the plane is of a model with {sizes}: make it of the same model")
    settings = f"{plane.digest()} batch_norm={batch_norm} curvature={curvature} samples={data.total}"
    settings += "" if out is None else f" data={data.digest()}"
    surface = Surface.empty(_checked("x", x), _checked("y", y), METRICS[: 4 if curvature else 2], plane.about, settings)
    surface.marks.update(plane.marks)
    everyone = gather_objects(group, (surface.settings, surface.x.tolist(), surface.y.tolist()), "a landscape")
    if any(one != everyone[0] for one in everyone):  # otherwise they would mix their points
        raise ValueError("the ranks have another plane, data or coordinates: give all of them the same")
    path = None if out is None else Path(out)
    if path is not None:
        _resume(surface, path, group)
        path.parent.mkdir(parents=True, exist_ok=True)
    with as_it_was(data.model, weights.values_P.device):  # a DataLoader draws numbers
        _fill(surface, partial(_values_at, data, plane, weights, batch_norm, curvature), path, group)
    return surface


def _resume(surface: Surface, path: Path, group: dist.ProcessGroup | None) -> None:
    """Take the points of the file of rank 0: other ranks may have none."""
    state: Any = None
    if group is None or dist.get_rank(group) == 0:
        try:
            if path.exists():
                surface.resume(read_surface(path), path)
            state = surface.values, surface.done
        except (ValueError, OSError) as error:
            state = error
    state = gather_objects(group, state, "the points of a landscape")[0]
    if isinstance(state, Exception):
        raise state
    surface.values, surface.done = state


def _checked(name: str, values: Coordinates) -> npt.NDArray[np.float64]:
    row = np.asarray(values, dtype=np.float64)
    if row.ndim != 1 or len(row) < 2 or not np.isfinite(row).all() or (np.diff(row) <= 0).any():
        raise ValueError(f"{name} must be at least 2 ascending numbers, such as numpy.linspace(-1, 1, 25)")
    return row


def _fill(surface: Surface, values_at: ValuesAt, path: Path | None, group: dist.ProcessGroup | None) -> None:
    """Compute the points that are missing. Rank r takes every n-th chunk of them."""
    rank, num_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    missing = np.flatnonzero(~surface.done.reshape(-1))
    chunks = [missing[begin : begin + CHUNK] for begin in range(0, len(missing), CHUNK)]
    saved, total = time.monotonic(), surface.done.size
    with ProgressReport("landscape", total, completed=total - len(missing), shown=rank == 0) as progress:
        try:
            for first in range(0, len(chunks), num_ranks):
                own = chunks[first + rank] if first + rank < len(chunks) else missing[:0]
                found = values_at([surface.point(index) for index in own])
                for indices, values in gather_objects(group, (own.tolist(), found), "a landscape"):
                    surface.store(indices, values)
                    progress.advance(len(indices), "")
                if path is not None and rank == 0 and time.monotonic() - saved > SAVE_SECONDS:
                    write_surface(path, surface)
                    saved = time.monotonic()
        finally:
            if path is not None and rank == 0:
                write_surface(path, surface)


def _values_at(
    data: DataLoss, plane: Plane, weights: WeightVector, batch_norm: str, curvature: bool, points: Sequence[Point]
) -> dict[str, list[float]]:
    """The metrics of each point, by name."""
    rows = []
    with modes_kept(data.model):
        data.model.eval()
        for module in data.model.modules():
            if batch_norm == "batch" and isinstance(module, _BatchNorm):
                module.train()
        for point in points:
            with weights.at(plane.at(*point)), as_it_was(data.model, weights.values_P.device):
                if batch_norm == "recalibrate":
                    recalibrate(data.model, (inputs for _, inputs, _ in data.weighted()))
                rows.append([*_loss_of(data), *(_ends_of(data) if curvature else ())])
    return dict(zip(METRICS, map(list, zip(*rows, strict=True)), strict=False))


@torch.no_grad()
def _loss_of(data: DataLoss) -> list[float]:
    """Loss and accuracy at the model's weights."""
    sums = torch.zeros(2, dtype=torch.float64, device="cpu")
    for share, inputs, targets in data.weighted():
        outputs = data.outputs(inputs)
        loss = data.loss_fn(outputs, targets).double()
        sums += share * torch.stack([loss.cpu(), _accuracy(outputs, targets).cpu()])
    return sums.tolist()


def _ends_of(data: DataLoss) -> tuple[float, float]:
    """The largest and the smallest eigenvalue of the Hessian; NaN where a product is not finite."""
    try:
        values = Hessian(data.model, data).eigenvalues().values
    except (NotFinite, NotConverged):
        return float("nan"), float("nan")
    return float(values[0]), float(values[-1])


def _accuracy(outputs: Any, targets: Any) -> Tensor:
    """The percentage of samples with the right class, float64; NaN if these are no classes.

    Classes are along dimension 1, as in ``torch.nn.functional.cross_entropy``.
    """
    are_tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.dim() > 1
    if not are_tensors or targets.is_floating_point() or outputs.shape[1] < 2 or targets.shape != outputs[:, 0].shape:
        return torch.tensor(float("nan"), dtype=torch.float64, device="cpu")
    return 100 * (outputs.argmax(dim=1) == targets).double().mean()
