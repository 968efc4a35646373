"""The command ``landscape``: contours of the loss around the final models of runs, their files and their pictures."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from ddpcore.diagnostics import Hessian, eigenvector_plane, landscape, plane_through, random_plane
from ddpcore.diagnostics.landscape import BATCH_NORM
from ddpcore.display.chart import SUFFIXES
from ddpcore.display.picture import plot_surfaces
from ddpcore.options.command_line import RUNS
from ddpcore.options.extras import extra
from ddpcore.options.fields import SEED_RANGE, check, field
from ddpcore.records.run import LANDSCAPES
from ddpcore.records.surface import SUFFIX, read_surface
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.storage.files import replace_file, shown
from ddpcore.training import FinishedRun

# Each plane, and its default span: of the directions, or of the margin around solutions.
PLANES = {"random": 1.0, "eigenvectors": 1.0, "solutions": 0.25}
NUM_SAMPLES = 1000  # unless more or fewer are asked for


@dataclass(frozen=True, kw_only=True)
class LandscapeOptions:
    """Draw the loss around the final models of runs of `ddpcore train`, over planes in weight space."""

    EXAMPLE = "ddpcore experiments landscape runs/ssgd runs/dpsgd --points 25"

    runs: Sequence[Path] = field(MISSING, "a folder that `ddpcore train` wrote", **RUNS)
    plane: str = field("random", "directions; solutions goes through three runs", choices=tuple(PLANES))
    points: int = field(25, "K, for K x K points", least=2, metavar="K")
    span: float | None = field(
        None, "to the border, in lengths of the directions (1); margin around solutions (0.25)", above=0, metavar="S"
    )
    seed: int = field(0, "of random directions", metavar="N", **SEED_RANGE)
    batch_norm: str | None = field(None, "of points (default: eval, between solutions recalibrate)", choices=BATCH_NORM)
    split: str = field("train", "of the data", choices=("train", "validation", "test"))
    samples: int | None = field(None, f"random images of it (default: {NUM_SAMPLES}, or all)", least=1, metavar="N")
    ratio: bool = field(False, "also map |smallest / largest eigenvalue|, tens of products each", action="store_true")
    out: Path | None = field(None, "folder of all files (default: RUN/landscape)", metavar="DIR")
    data_dir: Path | None = field(None, "folder of the data set's files, if it has moved", metavar="DIR")
    world_size: int = field(1, "share the points among N processes", least=1, metavar="N")

    def __post_init__(self) -> None:
        check(self)
        if self.plane == "solutions" and len(self.runs) != 3:
            raise ValueError(f"--plane solutions goes through three runs, and {len(self.runs)} are named: name three")


def landscapes(options: LandscapeOptions) -> int:
    """Compute what is missing, and draw. Returns 0.

    ValueError: a run cannot be loaded, the options do not fit, or a file holds another landscape. launch.Stopped:
    Ctrl-C; the finished points are saved.
    """
    with extra("report"):
        import matplotlib  # noqa: F401, PLC0415  before an hour of work, not after it
    if launch.torchrun_world() is not None:
        raise ValueError("landscape starts its processes itself: run it without torchrun, with --world-size")
    backend = "virtual" if options.world_size == 1 else "gloo"
    try:
        launch.run(_compute, (options,), world_size=options.world_size, backend=backend)
    except KeyboardInterrupt:
        raise launch.Stopped("stopped: finished points are saved, and the same command goes on") from None
    except launch.RankFailed as error:
        line = str(error).splitlines()[-1]
        reason = line.removeprefix("ValueError: ")
        again = "" if reason != line else ": finished points are saved, and the same command goes on"
        raise ValueError(f"{reason}{again}") from None
    surfaces = {}
    for name, path in _files(options).items():
        surfaces[name] = surface = read_surface(path)
        replace_file(path.with_suffix(".csv"), surface.csv().encode())
        loss = surface.loss[np.isfinite(surface.loss)]
        span = f"loss {loss.min():.4g} to {loss.max():.4g}" if loss.size else "no finite loss"
        print(f"{name}: {surface.about}; {span}: {shown(path)}")
    folder = next(iter(_files(options).values())).parent
    for word, metric in (("contour", "train_loss"), *([("ratio", "ratio")] if options.ratio else [])):
        for suffix in SUFFIXES:
            path = folder / f"{_stem(options)}-{word}{suffix}"
            plot_surfaces(surfaces, path, metric=metric)
        print(f"picture: {shown(path)}")
    return 0


def _compute(world: World, options: LandscapeOptions) -> None:
    runs = {name: FinishedRun.load(path, data_dir=options.data_dir) for name, path in _names(options.runs).items()}
    group = dist.group.WORLD if world.world_size > 1 else None
    if group is not None:
        signal.signal(signal.SIGTERM, _interrupt)  # what the parent makes of Ctrl-C
    for name, path in _files(options).items():
        _compute_one(options, runs if options.plane == "solutions" else {name: runs[name]}, path, group)


def _compute_one(
    options: LandscapeOptions, runs: Mapping[str, FinishedRun], path: Path, group: dist.ProcessGroup | None
) -> None:
    """The landscape around one run, or through three. Its finished points in the file are kept."""
    (first, run), *others = runs.items()
    for name, other in others:
        if run.dataset.digest() != other.dataset.digest():
            raise ValueError(f"{first} and {name} have other samples: take runs on the same data")
    samples, split = options.samples, run.dataset.splits().get(options.split)
    if samples is None and split is not None:
        samples = min(NUM_SAMPLES, len(split))
    data, span = run.data(options.split, samples), options.span or PLANES[options.plane]
    batch_norm, low_high = "eval", [(-span, span)] * 2
    if options.plane == "solutions":
        plane = plane_through({name: run.model for name, run in runs.items()})
        ends = [(min(values), max(values)) for values in zip(*plane.marks.values(), strict=True)]
        low_high = [(low - span * (high - low), high + span * (high - low)) for low, high in ends]
        if any(isinstance(module, _BatchNorm) for module in run.model.modules()):
            batch_norm = "recalibrate"
    elif options.plane == "random":
        plane = random_plane(run.model, seed=options.seed)
    else:  # one vector after the other has the same bits in each run, so that the file can be continued
        plane = eigenvector_plane(run.model, Hessian(run.model, data).eigenvalues(largest=2, smallest=0))
    x, y = (np.linspace(low, high, options.points) for low, high in low_high)
    batch_norm = options.batch_norm or batch_norm
    landscape(data, plane, x=x, y=y, batch_norm=batch_norm, curvature=options.ratio, out=path, group=group)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End a rank by an exception, so that it saves the finished points. A second signal does not end the save."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _names(paths: Sequence[Path]) -> dict[str, Path]:
    """The runs by as many last parts of their paths as tell them apart: ssgd/seed-0 and dpsgd/seed-0."""
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise ValueError("a run is named twice: name each once")
    count = 1
    while len({found[-count:] for found in parts}) < len(parts):
        count += 1
    return {"/".join(found[-count:]): path for found, path in zip(parts, paths, strict=True)}


def _files(options: LandscapeOptions) -> dict[str, Path]:
    """The HDF5 file of each landscape, by title."""
    names, stem = _names(options.runs), _stem(options)
    if options.plane == "solutions":
        return {"solutions": (options.out or options.runs[0] / LANDSCAPES) / f"{stem}{SUFFIX}"}
    if options.out is None:
        return {name: path / LANDSCAPES / f"{stem}{SUFFIX}" for name, path in names.items()}
    return {name: options.out / f"{name.replace('/', '-')}-{stem}{SUFFIX}" for name in names}


def _stem(options: LandscapeOptions) -> str:
    words = [options.plane, *([str(options.seed)] if options.plane == "random" else [])]
    words += [options.split] if options.split != "train" else []
    return "-".join([*words, *(["ratio"] if options.ratio else [])])
