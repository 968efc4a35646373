"""The engine of all kernel benchmarks: interleaved timing, bandwidth, and one row a measurement.

A benchmark is a function from (numel, options) to a ``Case``. Ours and the baseline run in turn, A/B/A/B, so that a
noisy machine disturbs both alike; the ratio is the median over pairs. Nothing is asserted about speed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ddpcore.metrics import quantiles

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = [10**6 // 4, 10**7 // 4, 10**8 // 4]  # elements: 1, 10 and 100 MB of fp32
SHORTEST_SAMPLE = 2e-3  # seconds: short calls are repeated until a sample lasts as long


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


def itemsize(options: argparse.Namespace) -> int:
    """Bytes an element."""
    return DTYPES[options.dtype].itemsize


def seconds_of(function: Callable[[], Any], num_calls: int, device: str) -> float:
    """Mean time of a call, over one sample; on CUDA between two events of the stream."""
    if device == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(num_calls):
            function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / num_calls
    start = time.perf_counter()
    for _ in range(num_calls):
        function()
    return (time.perf_counter() - start) / num_calls


def interleaved(functions: list[Callable[[], Any]], repeats: int, device: str) -> list[list[float]]:
    """``repeats`` samples of each function, taken in turn after a warm-up."""
    num_calls = []
    for function in functions:
        seconds_of(function, 2, device)
        once = seconds_of(function, 1, device)
        num_calls.append(max(1, round(SHORTEST_SAMPLE / max(once, 1e-9))))
    samples: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for index, function in enumerate(functions):
            samples[index].append(seconds_of(function, num_calls[index], device))
    return samples


def measure(case: Case, numel: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: times of both, bandwidth of ours, of a copy of as many bytes, and the median of the pairwise ratios."""
    source = torch.zeros(max(1, case.num_bytes // 2), dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    functions = [case.ours, case.baseline, lambda: target.copy_(source)]
    ours, baseline, copy = interleaved(functions, options.repeats, options.device)
    ratios = [left / right for left, right in zip(ours, baseline, strict=True)]
    bandwidth = case.num_bytes / statistics.median(ours) / 1e9
    copy_bandwidth = 2 * source.numel() / statistics.median(copy) / 1e9
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


def environment(device: str) -> dict[str, Any]:
    """What a row was measured on."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "device_type": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def processor() -> str:
    """The name of the CPU, as the system gives it."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of this checkout, with a + where tracked files are changed; None outside of one."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def parse(description: str | None) -> argparse.Namespace:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--numel", type=int, nargs="+", default=SIZES, help="elements; default: 1, 10, 100 MB of fp32")
    parser.add_argument("--peers", type=int, default=1, help="neighbours of a mix (where there is one)")
    parser.add_argument("--repeats", type=int, default=21, help="pairs of samples a row")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the rows to this file, one JSON object a line"
    )
    options = parser.parse_args()
    if min(options.numel) < 1 or options.repeats < 1 or options.peers < 0:
        parser.error("--numel and --repeats must be at least 1, and --peers at least 0")
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
    where, rows = environment(options.device), []
    for make_case in cases:
        for numel in options.numel:
            rows.append({**measure(make_case(numel, options), numel, options), **where})
    title = f"{where['device']}, {where['threads']} threads, torch {where['torch']}, commit {where['commit']}"
    Console(width=160).print(table_of(rows, title))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        with options.json.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
