"""The commands of the bench by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpcore.bench import buckets, comm, demo, doctor, optim, predict, run, stats, topology
from ddpcore.bench.command import Kind
from ddpcore.bench.config import BenchConfig, Options
from ddpcore.runtime.launch import World

# prepare(options, torchrun's world or None) checks both on this machine and returns a function that runs the command.
# It raises ValueError, in one line, before any process starts.
Prepare = Callable[[Any, World | None], Callable[[], None]]
COMMANDS: dict[str, tuple[type[Options], Prepare]] = {
    "": (BenchConfig, run.prepare),
    "buckets": (buckets.BucketsConfig, buckets.prepare),
    "comm": (comm.CommConfig, comm.prepare),
    "demo": (demo.DemoConfig, demo.prepare),
    "doctor": (doctor.DoctorConfig, doctor.prepare),
    "optim": (optim.OptimConfig, optim.prepare),
    "predict": (predict.PredictConfig, predict.prepare),
    "stats": (stats.StatsConfig, stats.prepare),
    "topology": (topology.TopologyConfig, topology.prepare),
}
_KINDS = (
    doctor.KIND,
    buckets.KIND,
    optim.KIND,
    predict.KIND,
    demo.KIND,
    comm.KIND,
    stats.KIND,
    topology.KIND,
    run.KIND,
)


def kind_of(result: dict[str, Any]) -> Kind | None:
    """The kind of a result with rows, such as a JSON file has; None: no bench writes such a result."""
    return next((kind for kind in _KINDS if kind.knows(result)), None)
