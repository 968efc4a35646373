"""The command ``landscape``: contours of the loss around the final models of runs, their files and their pictures."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch.distributed as dist

from ddpcore.display.chart import SUFFIXES
from ddpcore.display.surfaces import plot_surfaces
from ddpcore.experiments.command_line import LandscapeOptions
from ddpcore.options.extras import extra
from ddpcore.records.run import LANDSCAPES
from ddpcore.records.surface import SUFFIX, Surface, read_surface
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.storage.files import replace_file
from ddpcore.storage.limits import shown
from ddpcore.training import FinishedRun
from ddpcore.training.landscapes import landscape_of


def landscapes(options: LandscapeOptions) -> int:
    """Compute what is missing, and draw. Returns 0.

    Raises:
        ValueError: a run cannot be loaded, the options do not fit, or a file holds another landscape.
        launch.Stopped: Ctrl-C; the finished points are saved.
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
        print(f"{name}: {_about(surface)}: {shown(path)}")
    folder = next(iter(_files(options).values())).parent
    for word, metric in (("contour", "train_loss"), *([("ratio", "ratio")] if options.ratio else [])):
        for suffix in SUFFIXES:
            path = folder / f"{_stem(options)}-{word}{suffix}"
            plot_surfaces(surfaces, path, metric=metric)
        print(f"picture: {shown(path)}")
    return 0


def _compute(world: World, options: LandscapeOptions) -> None:
    runs = {name: FinishedRun.load(path, data_dir=options.data_dir) for name, path in _names(options.runs).items()}
    parts: Mapping[str, Mapping[str, FinishedRun]] = {name: {name: run} for name, run in runs.items()}
    if options.plane == "solutions":
        parts = {"solutions": runs}
    group = dist.group.WORLD if world.world_size > 1 else None
    if group is not None:
        signal.signal(signal.SIGTERM, _interrupt)  # what the parent makes of Ctrl-C
    for name, path in _files(options).items():
        landscape_of(parts[name], **options.arguments(), out=path, group=group)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End a rank by an exception, so that it saves the finished points. A second signal does not end the save."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _about(surface: Surface) -> str:
    loss = surface.loss[np.isfinite(surface.loss)]
    span = f"loss {loss.min():.4g} to {loss.max():.4g}" if loss.size else "no finite loss"
    return f"{surface.about}; {span}"


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
    words: list[Any] = [options.plane, *([options.seed] if options.plane == "random" else [])]
    words += [options.split] if options.split != "train" else []
    return "-".join(map(str, [*words, *(["ratio"] if options.ratio else [])]))
