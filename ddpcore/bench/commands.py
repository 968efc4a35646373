"""The commands of the bench by name."""

from typing import Any

from ddpcore.bench import buckets, comm, demo, doctor, predict, run, step_times, topology
from ddpcore.bench.command import Results

COMMANDS = {
    "": run.KIND, "buckets": buckets.KIND, "comm": comm.KIND, "demo": demo.KIND, "doctor": doctor.KIND,
    "predict": predict.KIND, "topology": topology.KIND,
}  # fmt: skip


def kind_of(result: dict[str, Any]) -> Results | None:
    """The kind of a result with rows, such as a JSON file has; None: no bench writes such a result."""
    return next((kind for kind in (*COMMANDS.values(), step_times.RESULTS) if kind.knows(result)), None)
