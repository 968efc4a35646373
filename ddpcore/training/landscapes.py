"""Landscapes around the final models of runs, as the command ``landscape`` computes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpcore.diagnostics import (
    DataLoss,
    Hessian,
    Plane,
    Surface,
    eigenvector_plane,
    landscape,
    plane_through,
    random_plane,
)
from ddpcore.diagnostics.landscape import BATCH_NORM as BATCH_NORM
from ddpcore.options.typed import check_choice, check_range
from ddpcore.training.finished import FinishedRun

# Each plane, and its default span.
PLANES = {"random": 1.0, "eigenvectors": 1.0, "solutions": 0.25}
NUM_SAMPLES = 1000  # unless more or fewer are asked for


def landscape_of(
    runs: Mapping[str, FinishedRun],
    *,
    plane: str = "random",
    points: int = 25,
    span: float | None = None,
    seed: int = 0,
    batch_norm: str | None = None,
    split: str = "train",
    samples: int | None = None,
    ratio: bool = False,
    out: str | Path | None = None,
    group: dist.ProcessGroup | None = None,
) -> Surface:
    """The loss over a plane around the final model of a run, or through the models of three runs.

    Args:
        runs: one run by name; three for the plane ``solutions``.
        plane: ``random`` directions, the two top ``eigenvectors`` of the Hessian, or through three ``solutions``.
        points: K, for a grid of K x K points.
        span: from the model to the border, in units of the directions, which have the length of the weights
            (``random``) or 1 (``eigenvectors``). Of ``solutions``: the margin around them, as a share of their extent.
        seed: of random directions.
        batch_norm: as for :func:`ddpcore.diagnostics.landscape`. None: ``eval``; between solutions ``recalibrate``,
            if the model has batch normalization.
        split, samples: the data, see :meth:`FinishedRun.data`. None: 1000 samples, or all if there are fewer.
        ratio: also the largest and the smallest eigenvalue at each point, for ``|min / max|``.
        out: the HDF5 file. If it exists, its finished points are kept.
        group: ranks that share the points.

    Raises:
        ValueError: the arguments do not fit together, or the file holds another landscape.
    """
    check_choice("plane", plane, tuple(PLANES))
    check_range("points", points, least=2)
    span = PLANES[plane] if span is None else span
    check_range("span", span, above=0)
    if len(runs) != (3 if plane == "solutions" else 1):
        wanted = "solutions goes through three runs" if plane == "solutions" else f"{plane} is around one run"
        raise ValueError(f"the plane {wanted}, and there are {len(runs)}: name as many")
    _check_alike(runs)
    first = next(iter(runs.values()))
    if samples is None and split in first.dataset.splits():
        samples = min(NUM_SAMPLES, len(first.dataset.splits()[split]))
    data = first.data(split, samples)
    found = _plane(plane, runs, data, seed)
    has_norm = any(isinstance(module, _BatchNorm) for module in first.model.modules())
    default = "recalibrate" if plane == "solutions" and has_norm else "eval"
    x, y = _grid(found, points, span, plane == "solutions")
    return landscape(data, found, x=x, y=y, batch_norm=batch_norm or default, curvature=ratio, out=out, group=group)


def _check_alike(runs: Mapping[str, FinishedRun]) -> None:
    (first, one), *others = runs.items()
    for name, other in others:
        if one.dataset.digest() != other.dataset.digest():
            raise ValueError(f"{first} and {name} have other samples: take runs on the same data")


def _plane(kind: str, runs: Mapping[str, FinishedRun], data: DataLoss, seed: int) -> Plane:
    models: dict[str, nn.Module] = {name: run.model for name, run in runs.items()}
    if kind == "solutions":
        return plane_through(models)
    if kind == "random":
        return random_plane(data.model, seed=seed)
    return eigenvector_plane(data.model, Hessian(data.model, data).eigenvalues(largest=2, smallest=0))


def _grid(plane: Plane, points: int, span: float, around_marks: bool) -> list[npt.NDArray[np.float64]]:
    """The coordinates x and y."""
    if not around_marks:
        return [np.linspace(-span, span, points)] * 2
    ends = [(min(values), max(values)) for values in zip(*plane.marks.values(), strict=True)]
    return [np.linspace(low - span * (high - low), high + span * (high - low), points) for low, high in ends]
