"""Shared by all benchmarks: command-line options, interleaved timing, bandwidth, and a row for each measurement.

A kernel benchmark is a function from (numel, options) to a ``Case``. Ours and the baseline run in turn, A/B/A/B, so
that noise of the machine affects both equally; the ratio is the median over pairs. No speed is asserted.
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
from timing import copying, interleaved

from ddpcore.ops.steps import RULES
from ddpcore.parameters.flat import ALIGNMENT
from ddpcore.runtime.machine import machine
from ddpcore.runtime.timing import quantiles

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS = "append the rows to this file, one JSON object a line"
NUM_TENSORS = 64  # in the lists of tensors
SIZES = [10**6 // 4, 10**7 // 4, 10**8 // 4]  # elements: 1, 10 and 100 MB of fp32


@dataclass(frozen=True)
class Case:
    """One measurement: two functions that do the same work, and the least memory traffic of any implementation."""

    name: str
    ours: Callable[[], Any]
    baseline: Callable[[], Any]
    baseline_name: str
    num_bytes: int


MakeCase = Callable[[int, argparse.Namespace], Case]


def add_options(parser: argparse.ArgumentParser, *, repeats: int, to_file: str = ROWS) -> None:
    """The options of all benchmarks: device, number of repeats, and a file, whose help is ``to_file``."""
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--repeats", type=int, default=repeats, help="samples of each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help=to_file)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of the command line, with ``auto`` replaced by a device of this machine."""
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} sees no CUDA device")
    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        parser.error(f"--json: {options.json} is a folder, or lies in none: name a file in a folder that exists")
    return options


def append(path: Path | None, *rows: dict[str, Any]) -> None:
    """Append rows to the file, if there is one. An interrupted run keeps the rows that it has appended."""
    if path is not None:
        with path.open("a") as file:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result to the file, if there is one, whole or not at all."""
    if path is not None:
        beside = path.with_name(f"{path.name}.part")
        beside.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
        beside.replace(path)


def randn(numel: int, options: argparse.Namespace, *leading: int) -> torch.Tensor:
    """Normally distributed numbers of the chosen dtype on the chosen device."""
    return torch.randn(*leading, numel, device=options.device).to(DTYPES[options.dtype])


def pieces(numel: int, options: argparse.Namespace) -> list[torch.Tensor]:
    """Views of one buffer of at least ``numel`` elements; every second view is about 63 times as long as the others.

    Each begins at an aligned address, like the parameters in a flat buffer.
    """
    pair = -(-numel * 2 // NUM_TENSORS)
    sizes = [max(1, -(-part // ALIGNMENT)) * ALIGNMENT for part in (pair // 64, pair - pair // 64)]
    sizes *= NUM_TENSORS // 2
    return list(randn(sum(sizes), options).split(sizes))


def itemsize(options: argparse.Namespace) -> int:
    """Bytes of one element."""
    return DTYPES[options.dtype].itemsize


def bytes_per_param(optimizer: str, itemsize: int, rounded_states: bool = False) -> tuple[int, int]:
    """The smallest and the largest number of bytes that our kernel of an optimizer moves per element.

    A step reads weight, gradient and states, and writes weight and states: with momentum five elements, the least that
    it can move. LARS needs two norms before its first store, and LAMB one, so they read a tensor twice. The smallest
    number assumes that the second pass finds the tensor in cache: LARS then moves as much as SGD, and LAMB as AdamW.
    The largest number assumes no cache hit: LARS reads weight and gradient again, and LAMB weight and moments.
    ``itemsize`` is the size of a weight and of a gradient; with ``rounded_states`` momentum and moments are bfloat16.
    """
    rule = RULES[optimizer]
    states = len(rule.buffers) * (2 if rounded_states else 4 if rule.wide_states else itemsize)
    least = 3 * itemsize + 2 * states
    again = itemsize + (states if rule.wide_states else itemsize)
    return least, least + again if rule.uses_norms else least


def torch_step(
    make: type[torch.optim.Optimizer], numel: int, options: argparse.Namespace, **rule: float
) -> Callable[[], Any]:
    """The step of a fused torch optimizer on one parameter of ``numel`` elements."""
    weight = torch.nn.Parameter(randn(numel, options))
    weight.grad = randn(numel, options)
    return make([weight], fused=True, **rule).step


def measure(case: Case, numel: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: times of both, bandwidth of ours and of a copy of the same size, and the ratio over pairs."""
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


def parse_kernel_options(description: str | None, names: list[str]) -> argparse.Namespace:
    """The options of the kernel benchmarks; ``--rules`` only if the cases have names."""
    parser = argparse.ArgumentParser(description=description)
    if names:
        parser.add_argument("--rules", choices=names, nargs="+", default=names, help="default: all")
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=["float32"], dest="dtypes")
    parser.add_argument("--numel", type=int, nargs="+", default=SIZES, help="elements; default: 1, 10, 100 MB of fp32")
    parser.add_argument("--peers", type=int, default=1, help="neighbours in kernels that mix")
    parser.add_argument("--learners", type=int, default=4, help="rows in kernels that sum over learners")
    add_options(parser, repeats=21)
    options = parse(parser)
    if min(*options.numel, options.learners, options.repeats) < 1 or options.peers < 0:
        parser.error("--numel, --learners and --repeats must be at least 1, and --peers at least 0")
    return options


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    """The rows as a table: times in milliseconds."""
    table = Table(title=title, caption="ratio: ours / baseline, median of pairs; p20 to p80 in brackets")
    names = "case,elements,dtype,B/elem,ms p20,p50,p80,GB/s,of copy,baseline,ms p50,ratio"
    for name in names.split(","):
        table.add_column(name, justify="left" if name in ("case", "dtype", "baseline") else "right")
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
def main(description: str | None, cases: list[MakeCase] | dict[str, MakeCase]) -> None:
    """Measure every case (of a dict those of ``--rules``) at every size, print the table, and append to ``--json``."""
    options = parse_kernel_options(description, list(cases) if isinstance(cases, dict) else [])
    chosen = [cases[name] for name in options.rules] if isinstance(cases, dict) else cases
    torch.manual_seed(0)
    where, rows = {**machine(options.device), "threads": torch.get_num_threads()}, []
    for make_case in chosen:
        for dtype, numel in product(options.dtypes, options.numel):
            options.dtype = dtype
            rows.append({**measure(make_case(numel, options), numel, options), **where})
            append(options.json, rows[-1])
    title = f"{where['device']}, {where['threads']} threads, torch {where['torch']}, commit {where['commit']}"
    Console(width=160).print(table_of(rows, title))
