"""``python -m ddpcore.bench topology``: what topologies cost and how fast they average, without running anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpcore import topology
from ddpcore.bench import command_line
from ddpcore.bench.command_line import check_writable, flag, option, write_json
from ddpcore.bench.environment import machine
from ddpcore.metrics import to_json
from ddpcore.report.topology import print_topologies

ALL = "all"
MANY = 8192  # learners: beyond, a topology without symmetry takes minutes, for its edges are visited one by one


@dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """Which topologies are described. Constructing one checks all that can be known before.

    Raises:
        ValueError: one line that says what is wrong and what to do.
    """

    name: str = option(ALL, f"{ALL}, or one of {', '.join(topology.names())}", metavar="NAME", positional=True)
    world_size: int = option(8, "number of learners", type=int)
    seed: int = option(0, "of random pairs", type=int)
    local_size: int = option(2, "learners a host, of hierarchical", type=int)
    json: Path | None = option(None, "write the result to this file", type=Path, metavar="FILE")

    def __post_init__(self) -> None:
        for name in ("world_size", "local_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} is {getattr(self, name)}: it must be at least 1")
        if not 0 <= self.seed < 2**62:
            raise ValueError(f"--seed is {self.seed}: it must be at least 0 and below 2^62")
        if self.name != ALL:
            topology.build(self.name, self.seed, self.local_size)
        if self.json is not None:
            check_writable(self.json.resolve())


def main(argv: Sequence[str]) -> int:
    """Describe one topology or all; returns 0.

    Raises:
        ValueError: the command cannot be run as it stands; one line.
    """
    config = command_line.parse(
        TopologyConfig,
        argv,
        prog="python -m ddpcore.bench topology",
        description="What topologies cost and how fast they average: edges, degrees, spectral gap, mixing time.",
    )
    if config.world_size > MANY:
        advice = "name the one that is wanted" if config.name == ALL else "take fewer learners"
        print(f"{config.world_size:,} learners may take minutes: or {advice}", file=sys.stderr)
    result = to_json(measure(config))
    print_topologies(result)
    if config.json is not None:
        write_json(config.json, result)
    return 0


def measure(config: TopologyConfig) -> dict[str, Any]:
    """What the JSON file holds: a row a topology, and of all those that do not fit the world, why.

    Raises:
        ValueError: the one topology that was asked for does not fit.
    """
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    for name in topology.names() if config.name == ALL else (config.name,):
        chosen = topology.build(name, config.seed, config.local_size)
        try:
            chosen.validate(config.world_size)
        except ValueError as error:
            if config.name != ALL:
                raise
            refused.append({"topology": name, "reason": str(error)})
        else:
            rows.append({"topology": name, **to_json(topology.describe(chosen, config.world_size))})
    settings = {key: getattr(config, key) for key in ("world_size", "seed", "local_size")}
    return {"environment": machine("cpu"), **settings, "rows": rows, "refused": refused}
