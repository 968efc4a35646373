"""``ddpcore bench topology``: costs and mixing speed of topologies, computed without any learner."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ddpcore.bench.command import Kind, has, publish
from ddpcore.bench.config import Options
from ddpcore.display.chart import Chart, Series, network
from ddpcore.display.table import number, table_of
from ddpcore.options.fields import SEED_RANGE, field
from ddpcore.runtime.launch import World
from ddpcore.runtime.machine import machine
from ddpcore.storage.json_lines import to_json
from ddpcore.topology.base import Topology
from ddpcore.topology.describe import MOST_DRAWN, describe, edges_of
from ddpcore.topology.registry import TOPOLOGIES

ALL = "all"
MANY = 2048  # learners; with more, the eigenvalues of an irregular topology may take minutes: its matrix is dense


@dataclass(frozen=True, kw_only=True)
class TopologyConfig(Options):
    """Costs and mixing speed of topologies: edges, degrees, spectral gap, mixing time."""

    EXAMPLE = "ddpcore bench topology --world-size 64"

    name: str = field(ALL, f"{ALL}, or one of {', '.join(TOPOLOGIES.names())}", metavar="NAME", positional=True)
    world_size: int = field(8, "number of learners", least=1)
    seed: int = field(0, "of random pairs", **SEED_RANGE)
    local_size: int = field(2, "learners on each host, of hierarchical", least=1)

    def topologies(self) -> dict[str, Topology]:
        """The named topology, or all. ValueError: there is no such topology."""
        names = TOPOLOGIES.names() if self.name == ALL else (self.name,)
        sizes = {"local_size": self.local_size}
        return {
            name: TOPOLOGIES.build(name, seed=self.seed, **(sizes if TOPOLOGIES.takes(name, "local_size") else {}))
            for name in names
        }


def prepare(config: TopologyConfig, torchrun: World | None) -> Callable[[], None]:
    """Check that a named topology exists and fits; return a function that describes it, or all."""
    chosen = config.topologies()
    if config.name != ALL:
        chosen[config.name].validate(config.world_size)
    if config.world_size > MANY:
        advice = "name one topology" if config.name == ALL else "take fewer learners"
        print(f"{config.world_size:,} learners may take minutes: {advice} to save time", file=sys.stderr)
    return lambda: publish(measure(config), KIND, config)


def measure(config: TopologyConfig) -> dict[str, Any]:
    """The result as in the JSON file: a row for each topology that fits, and the reason for each that does not."""
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    for name, graph in config.topologies().items():
        try:
            graph.validate(config.world_size)
        except ValueError as error:
            refused.append({"topology": name, "reason": str(error)})
        else:
            edges = edges_of(graph, config.world_size) if config.world_size <= MOST_DRAWN else None
            rows.append({"topology": name, **to_json(describe(graph, config.world_size)), "edges": to_json(edges)})
    settings = {key: getattr(config, key) for key in ("world_size", "seed", "local_size")}
    return {"environment": machine("cpu"), **settings, "rows": rows, "refused": refused}


def parts(result: dict[str, Any]) -> list[Table | str]:
    """What the terminal and the page show of a result, as in the JSON file."""
    title = f"{result['world_size']:,} learner" + ("s" if result["world_size"] != 1 else "")
    refused = (f"{row['topology']}: {row['reason']}" for row in result["refused"])
    asked = ("spectral gap", "smallest eigenvalue")
    return [table_of(_COLUMNS, result["rows"], title=title, left=("topology",), asked=asked), *refused]


_COLUMNS = {
    "topology": lambda row: row["topology"],
    "messages/step": number("messages_per_step", "{:,.6g}"),
    "models sent/step": number("models_sent_per_step", "{:.4g}"),
    "spectral gap": number("spectral_gap", "{:.4g}"),
    "mixing time": number("mixing_time", "{:,.0f}", "never"),
    "doubly stochastic": lambda row: "yes" if row["doubly_stochastic"] else "push-sum",
    "period": number("period", "{}", "random"),
    "edges": number("num_edges", "{:,}"),
    "degree min/mean/max": lambda row: f"{row['degree_min']}/{row['degree_mean']:.4g}/{row['degree_max']}",
    "smallest eigenvalue": lambda row: number("smallest_eigenvalue", "{:.3f}")(row).replace("-0.000", "0.000"),
}


def charts(result: dict[str, Any]) -> list[Chart]:
    """The charts of a result, as in the JSON file."""
    rows = result["rows"]
    names = [row["topology"] for row in rows]
    gaps = Series(name="spectral gap", x=names, y=[row["spectral_gap"] for row in rows])
    drawings = []
    for row in rows:
        if row.get("edges") is not None and row["num_learners"] <= MOST_DRAWN:
            name = row["topology"] + ("" if row["period"] == 1 else " (all rounds)")
            title = f"{name}, spectral gap {row['spectral_gap']:.4g}"
            drawings.append(network(title, row["num_learners"], row["edges"]))
    return [Chart(title="Spectral gap", kind="bars", x_label="spectral gap", series=[gaps]), *drawings]


KIND = Kind(has("spectral_gap"), "Topologies", parts, charts, TopologyConfig, prepare)
