"""The table of topologies, from plain records."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from ddpcore.bench.topology import parts
from ddpcore.display.table import print_parts

ROW = {
    "topology": "ring", "period": 1, "num_edges": 2000, "degree_min": 1, "degree_mean": 1.998, "degree_max": 2,
    "messages_per_step": 1998.0, "models_sent_per_step": 1.998, "doubly_stochastic": True, "spectral_gap": 1.25e-5,
    "mixing_time": 75991, "smallest_eigenvalue": -1 / 3,
}  # fmt: skip


def text_of(*rows: dict[str, Any], refused: tuple[dict[str, str], ...] = (), world_size: int = 1000) -> str:
    file = io.StringIO()
    result = {"world_size": world_size, "rows": list(rows), "refused": list(refused)}
    print_parts(Console(file=file, width=400), *parts(result))
    return file.getvalue()


def cells_of(**changes: Any) -> list[str]:
    line = next(line for line in text_of(ROW | changes, ROW).splitlines() if "ring" in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_numbers() -> None:
    assert cells_of() == [
        "ring", "1,998", "1.998", "1.25e-05", "75,991", "yes", "1", "2,000", "1/1.998/2", "-0.333",
    ]  # fmt: skip
    assert "1,000 learners" in text_of(ROW)
    assert "1 learner " in text_of(ROW, world_size=1)


def test_what_is_no_number_is_a_word() -> None:
    cells = cells_of(period=None, mixing_time=None, doubly_stochastic=False, smallest_eigenvalue=None)
    assert (*cells[4:7], cells[-1]) == ("never", "push-sum", "random", "-")
    assert cells_of(smallest_eigenvalue=-1e-17)[-1] == "0.000"


def test_what_does_not_fit_stands_below() -> None:
    assert text_of(refused=({"topology": "torus_2d", "reason": "no [grid]"},)).endswith("torus_2d: no [grid]\n")
