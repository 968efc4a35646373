"""Planes in weight space, over which a landscape is computed.

Shapes: P elements of all parameters that need a gradient, in the order of ``model.parameters()``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ddpcore.diagnostics.spectra import Eigenvalues
from ddpcore.diagnostics.weights import WeightVector
from ddpcore.parameters.normalization import is_normalization

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plane:
    """The weights ``origin + x * along_x + y * along_y`` for numbers x and y.

    Attributes:
        origin_P: the weights at (0, 0).
        along_x_P, along_y_P: the directions, orthogonal to each other.
        about: how the plane was made, as text for people.
        marks: named points (x, y), such as solutions.
    """

    origin_P: Tensor
    along_x_P: Tensor
    along_y_P: Tensor
    about: str
    marks: Mapping[str, Point] = field(default_factory=dict)

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
    The second direction is then made orthogonal to the first.

    Raises:
        ValueError: no parameter with two dimensions needs a gradient.
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

    A point between solutions has no batch statistics of its own: take ``batch_norm="recalibrate"``.

    Args:
        models: three models of one architecture, by name.

    Raises:
        ValueError: there are not three, their parameters differ in shape, or they lie on one line.
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
    return Plane(
        origin_P=origin_P, along_x_P=x_P, along_y_P=y_P, about="the plane through three solutions", marks=marks
    )


def eigenvector_plane(model: nn.Module, found: Eigenvalues) -> Plane:
    """The plane of the first two vectors of ``Hessian.eigenvalues``, of length 1.

    Raises:
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
        drawn = torch.randn(own.shape, generator=generator, device="cpu", dtype=torch.float32).to(
            own
        )  # also for those that do not move
        if own.dim() > 1 and id(parameter) not in still:
            norms = [slices.flatten(1).norm(dim=1) for slices in (own, drawn)]
            factors = norms[0] / norms[1].clamp(min=torch.finfo(own.dtype).tiny)
            view.copy_(drawn * factors.view(-1, *[1] * (own.dim() - 1)))
    return row_P


def _orthogonal(row_P: Tensor, to_P: Tensor) -> Tensor:
    """The part of a row that is orthogonal to another one, which may be zero."""
    square = to_P.double().square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    return row_P - (row_P.double() @ to_P.double() / square).to(row_P) * to_P
