"""Landscapes: losses over a plane in weight space, and their files.

The HDF5 file has the layout of the loss-landscape project (Li et al. 2018): ``xcoordinates``, ``ycoordinates``,
``train_loss``, ``train_acc`` (percent) and, with curvature, ``max_eig`` and ``min_eig``. Here rows are y and columns
are x. ``done`` says which points are computed.

Shapes: X and Y coordinates.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpcore.options.extras import extra
from ddpcore.storage.files import SURFACE_BYTES, plain, read_file, replace_file, shown

Array = npt.NDArray[np.float64]
SUFFIX = ".h5"  # of the file
METRICS = ("train_loss", "train_acc", "max_eig", "min_eig")
_COORDINATES = ("xcoordinates", "ycoordinates")
_MISSING = -1.0  # a point that the loss-landscape project has not computed
_FINE = 16  # linear steps between two points for areas


@dataclass(kw_only=True, eq=False)
class Surface:
    """Values over a plane.

    Attributes:
        x, y: coordinates, ``[X]`` and ``[Y]``.
        values: by metric, ``[Y, X]``: ``train_loss``, ``train_acc`` in percent, ``max_eig``, ``min_eig``. NaN is a
            value too.
        done: ``[Y, X]``, which points are computed.
        about: the plane, as text.
        settings: what else identifies the landscape. A file with other settings is not continued.
        marks: named points.
    """

    x: Array
    y: Array
    values: dict[str, Array]
    done: npt.NDArray[np.bool_]
    about: str
    settings: str
    marks: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def empty(cls, x: Array, y: Array, metrics: Sequence[str], about: str, settings: str) -> "Surface":
        """A surface without values."""
        shape = len(y), len(x)
        values = {name: np.full(shape, np.nan) for name in metrics}
        return cls(x=x, y=y, values=values, done=np.zeros(shape, dtype=bool), about=about, settings=settings)

    @property
    def loss(self) -> Array:
        """The mean loss, ``[Y, X]``."""
        return self.values["train_loss"]

    @property
    def accuracy(self) -> Array:
        """The accuracy in percent, ``[Y, X]``."""
        return self.values["train_acc"]

    def point(self, index: int) -> tuple[float, float]:
        """The coordinates of a point by its number, row by row."""
        row, column = divmod(int(index), len(self.x))
        return float(self.x[column]), float(self.y[row])

    def store(self, indices: Sequence[int], values: Mapping[str, Sequence[float]]) -> None:
        """Store the values of some points."""
        for name, found in values.items():
            self.values[name].reshape(-1)[list(indices)] = found
        self.done.reshape(-1)[list(indices)] = True

    def resume(self, saved: "Surface", path: Path) -> None:
        """Take the points of a file. ValueError if it is another landscape."""
        same = saved.settings == self.settings and list(saved.values) == list(self.values)
        if not (same and np.array_equal(saved.x, self.x) and np.array_equal(saved.y, self.y)):
            other = "another landscape (plane, coordinates or settings)"
            raise ValueError(f"{shown(path)} holds {other}: take another file or folder")
        self.values, self.done = saved.values, saved.done

    def level_radius(self, rise: float) -> float:
        """The radius of a circle with the area in which the loss is at most ``rise`` above the lowest one.

        Between the points the loss is linear. An area that reaches the border is cut off there, and NaN counts as high.
        ValueError: points are missing, or no point has a finite loss.
        """
        if not self.done.all():
            raise ValueError(f"{int((~self.done).sum())} points of the landscape are missing: compute them first")
        loss = np.where(np.isfinite(self.loss), self.loss, np.inf)
        if not np.isfinite(loss).any():
            raise ValueError("no point of the landscape has a finite loss")
        high, area, weights = loss.min() + rise, 0.0, (np.arange(_FINE) + 0.5) / _FINE
        for row, height in enumerate(np.diff(self.y)):
            with np.errstate(invalid="ignore"):
                edges = loss[row][None] * (1 - weights)[:, None] + loss[row + 1][None] * weights[:, None]
                inner = edges[:, :-1, None] * (1 - weights) + edges[:, 1:, None] * weights
            area += float(((inner <= high).mean(axis=(0, 2)) * np.diff(self.x)).sum() * height)
        return math.sqrt(area / math.pi)

    def sharpness(self, radius: float, center: tuple[float, float] = (0.0, 0.0)) -> float:
        """``100 (max L - L(center)) / (1 + L(center))`` over the points within ``radius`` (Keskar et al. 2016).

        The ball is a disc in the plane. NaN if a point in it has no finite loss. ValueError: the center is no point.
        """
        apart = np.hypot(self.x[None, :] - center[0], self.y[:, None] - center[1])
        if apart.min() > 1e-6 * (np.ptp(self.x) + np.ptp(self.y)):
            raise ValueError(f"the landscape has no point at {center}: compute it with an odd number of points")
        own = float(self.loss.reshape(-1)[int(apart.argmin())])
        return float(100 * (self.loss[apart <= max(radius, float(apart.min()))].max() - own) / (1 + own))

    def ratio(self) -> Array:
        """``|min_eig / max_eig|``, ``[Y, X]``: near 0 where the loss is convex. ValueError without curvature."""
        if "min_eig" not in self.values:
            raise ValueError("the landscape has no eigenvalues: compute it with curvature=True")
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.abs(self.values["min_eig"] / self.values["max_eig"]))

    def csv(self) -> str:
        """One line a point: x, y and each metric. Points that are missing are left out."""
        out = io.StringIO()
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(["x", "y", *self.values])
        for index in np.flatnonzero(self.done.reshape(-1)).tolist():
            lines.writerow([*self.point(index), *(float(found.reshape(-1)[index]) for found in self.values.values())])
        return out.getvalue()


def write_surface(path: Path, surface: Surface) -> None:
    """Write an HDF5 file atomically."""
    with extra("train"):
        import h5py  # noqa: PLC0415
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file.update({"xcoordinates": surface.x, "ycoordinates": surface.y, "done": surface.done, **surface.values})
        file.attrs.update({"about": surface.about, "settings": surface.settings})
        file.attrs.update({f"mark {name}": point for name, point in surface.marks.items()})
    replace_file(path, content.getvalue())


def read_surface(path: Path) -> Surface:
    """Read an HDF5 file. ValueError if it is no landscape, or a damaged one."""
    with extra("train"):
        import h5py  # noqa: PLC0415
    content = read_file(path, SURFACE_BYTES, "ddpcore.storage.files.SURFACE_BYTES")
    try:
        with h5py.File(io.BytesIO(content), "r") as file:
            return _surface_of(file)
    except Exception as error:  # damaged bytes can cause any error
        reason = plain((str(error).splitlines() or [""])[0]) or type(error).__name__
        raise ValueError(f"{shown(path)} is not a landscape, or it is damaged: {reason}") from error


def _surface_of(file: Any) -> Surface:
    arrays = {name: _array(file, name) for name in (*_COORDINATES, *METRICS, "done") if name in file}
    if not {*_COORDINATES, "train_loss"} <= set(arrays):
        raise ValueError("xcoordinates, ycoordinates and train_loss must be in it")
    x, y = (arrays[name].astype(np.float64) for name in _COORDINATES)
    if x.ndim != 1 or y.ndim != 1 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("its coordinates are no rows of numbers")
    values = {name: arrays[name].astype(np.float64) for name in METRICS if name in arrays}
    done = arrays["done"].astype(bool) if "done" in arrays else values["train_loss"] != _MISSING
    if any(found.shape != (len(y), len(x)) for found in (*values.values(), done)):
        raise ValueError(f"its arrays do not have the shape {[len(y), len(x)]}")
    marks = {name[5:]: file.attrs[name] for name in file.attrs if name.startswith("mark ")}
    about, settings = (str(file.attrs.get(name, "")) for name in ("about", "settings"))
    points = {plain(name): (float(point[0]), float(point[1])) for name, point in marks.items()}
    return Surface(x=x, y=y, values=values, done=done, about=plain(about), settings=settings, marks=points)


def _array(file: Any, name: str) -> npt.NDArray[Any]:
    """An array that lies in the file itself, as it says, without compression: so it takes no more than the file."""
    import h5py  # noqa: PLC0415  :func:`read_surface` has checked that it is there

    array = file[name] if isinstance(file.get(name, getlink=True), h5py.HardLink) else None
    if not isinstance(array, h5py.Dataset) or array.external is not None or array.is_virtual or array.chunks:
        raise ValueError(f"{name} is no plain array of this file")
    if array.id.get_storage_size() < array.nbytes or array.dtype.kind not in "fiub":
        raise ValueError(f"{name} is cut, or holds no numbers")
    return np.asarray(array[()])
