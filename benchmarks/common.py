"""The engine of all kernel benchmarks: interleaved timing, bandwidth, and one row a measurement.

A benchmark is a function from (numel, options) to a ``Case``. Ours and the baseline run in turn, A/B/A/B, so that a
noisy machine disturbs both alike; the ratio is the median over pairs. Nothing is asserted about speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ddpcore.bench.timing import copying, interleaved
from ddpcore.flat import ALIGNMENT
from ddpcore.machine import machine
from ddpcore.metrics import quantiles

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NUM_TENSORS = 64  # of the lists that benchmarks of whole lists make
SIZES = [10**6 // 4, 10**7 // 4, 10**8 // 4]  # elements: 1, 10 and 100 MB of fp32


@dataclass(frozen=True)
class Case:
    """One measurement: two functions that do the same work, and the memory traffic that no implementation avoids."""

    name: str
    ours: Callable[[], Any]
    baseline: Callable[[], Any]
    baseline_name: str
    num_bytes: int


MakeCase = Callable[[int, argparse.Namespace], Case]


def randn(numel: int, options: argparse.Namespace, *leading: int) -> torch.Tensor:
    """Normal numbers of the chosen dtype on the chosen device."""
    return torch.randn(*leading, numel, device=options.device).to(DTYPES[options.dtype])


def pieces(numel: int, options: argparse.Namespace) -> list[torch.Tensor]:
    """Views of one buffer of at least ``numel`` elements, every second one some 63 times its neighbour.

    They begin where vectors do, as the parameters of a model and of a flat buffer.
    """
    pair = -(-numel * 2 // NUM_TENSORS)
    sizes = [max(1, -(-part // ALIGNMENT)) * ALIGNMENT for part in (pair // 64, pair - pair // 64)]
    sizes *= NUM_TENSORS // 2
    return list(randn(sum(sizes), options).split(sizes))


def itemsize(options: argparse.Namespace) -> int:
    """Bytes an element."""
    return DTYPES[options.dtype].itemsize


def measure(case: Case, numel: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: times of both, bandwidth of ours, of a copy of as many bytes, and the median of the pairwise ratios."""
    copy_once, copied = copying(case.num_bytes, options.device)
    functions = [case.ours, case.baseline, copy_once]
    ours, baseline, copy = interleaved(functions, options.device, options.repeats, queued=True)
    ratios = [left / right for left, right in zip(ours, baseline, strict=True)]
    bandwidth = case.num_bytes / statistics.median(ours) / 1e9
    copy_bandwidth = copied / statistics.median(copy) / 1e9
    return {
        "case": case.name,
        "numel": numel,
        "dtype": options.dtype,
        "bytes_per_element": case.num_bytes / numel,
        "seconds": quantiles(ours),
        "baseline": case.baseline_name,
        "baseline_seconds": quantiles(baseline),
        "ratio": quantiles(ratios),
        "gb_per_s": bandwidth,
        "copy_gb_per_s": copy_bandwidth,
        "fraction_of_copy": bandwidth / copy_bandwidth,
        "repeats": options.repeats,
    }


def parse(description: str | None) -> argparse.Namespace:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=["float32"], dest="dtypes")
    parser.add_argument("--numel", type=int, nargs="+", default=SIZES, help="elements; default: 1, 10, 100 MB of fp32")
    parser.add_argument("--peers", type=int, default=1, help="neighbours of a mix (where there is one)")
    parser.add_argument("--learners", type=int, default=4, help="rows of sums over learners (where there are any)")
    parser.add_argument("--repeats", type=int, default=21, help="pairs of samples a row")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the rows to this file, one JSON object a line"
    )
    options = parser.parse_args()
    if min(*options.numel, options.learners, options.repeats) < 1 or options.peers < 0:
        parser.error("--numel, --learners and --repeats must be at least 1, and --peers at least 0")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no CUDA device")
    return options


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    """The rows as a table: times in milliseconds."""
    table = Table(title=title, caption="ratio: ours / baseline, median of pairs; p20 to p80 in brackets")
    for name in (
        "case",
        "elements",
        "dtype",
        "B/elem",
        "ms p20",
        "p50",
        "p80",
        "GB/s",
        "of copy",
        "baseline",
        "ms p50",
    ):
        table.add_column(name, justify="left" if name in ("case", "dtype", "baseline") else "right")
    table.add_column("ratio", justify="right")
    for row in rows:
        times, ratio = row["seconds"], row["ratio"]
        table.add_row(
            row["case"],
            f"{row['numel']:,}",
            row["dtype"],
            f"{row['bytes_per_element']:g}",
            *(f"{1e3 * times[p]:.3f}" for p in ("p20", "p50", "p80")),
            f"{row['gb_per_s']:.1f}",
            f"{row['fraction_of_copy']:.0%}",
            row["baseline"],
            f"{1e3 * row['baseline_seconds']['p50']:.3f}",
            f"{ratio['p50']:.2f} [{ratio['p20']:.2f}-{ratio['p80']:.2f}]",
        )
    return table


@torch.no_grad()
def main(description: str | None, cases: list[MakeCase]) -> None:
    """Measure every case at every size, print the table and append the rows to ``--json``."""
    options = parse(description)
    torch.manual_seed(0)
    where, rows = {**machine(options.device), "threads": torch.get_num_threads()}, []
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    for make_case in cases:
        for dtype, numel in product(options.dtypes, options.numel):
            options.dtype = dtype
            rows.append({**measure(make_case(numel, options), numel, options), **where})
            if options.json is not None:  # at once: a run that is cut keeps what it has measured
                with options.json.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    title = f"{where['device']}, {where['threads']} threads, torch {where['torch']}, commit {where['commit']}"
    Console(width=160).print(table_of(rows, title))
