"""The sweep of bucket sizes as a table, and the sizes that it recommends."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ddpcore.report.table import environment_lines, number, print_parts, size_name, spread, table_of


def print_buckets(result: dict[str, Any], console: Console | None = None) -> None:
    """Print a result (as in the JSON file): the environment, a line for each strategy and size, the recommendation."""
    print_parts(console, *bucket_parts(result))


def bucket_parts(result: dict[str, Any]) -> list[Table | str]:
    """What :func:`print_buckets` prints."""
    title = (
        f"{result['model']}, {result['world_size']} ranks, global batch {result['batch_size']}, "
        f"{result['rounds']} interleaved rounds"
    )
    table = table_of(_COLUMNS, result["rows"], title=title, left=("strategy",))
    return [*environment_lines(result["environment"]), table, recommendation(result["recommended"])]


def recommendation(recommended: list[dict[str, Any]]) -> str:
    """One line with the size for each strategy, and how it compares with the default."""
    return "recommended: " + "; ".join(_advice(one) for one in recommended)


def _advice(one: dict[str, Any]) -> str:
    default, noise = size_name(one["default_mb"]), f"the noise of {one['noise_pct']:.1f} %"
    if one["beyond_noise"]:
        faster = f"{one['margin_pct']:.1f} % faster than the default {default}, beyond {noise}"
        return f"{one['strategy']} {size_name(one['bucket_mb'])} ({faster})"
    if one["fastest_mb"] == one["default_mb"]:
        return f"{one['strategy']} {default} (the default, and the fastest)"
    margin = f"{size_name(one['fastest_mb'])} was {one['margin_pct']:.1f} % faster, within {noise}"
    return f"{one['strategy']} {default} (the default; {margin})"


def _sizes(num_bytes: list[int]) -> str:
    return f"{len(num_bytes)} up to {max(num_bytes) / 2**20:.3g}"


_COLUMNS = {
    "strategy": lambda row: row["strategy"],
    "largest bucket": lambda row: size_name(row["bucket_mb"]),
    "built, MiB": lambda row: _sizes(row["bucket_bytes"]),
    "sent, MiB": lambda row: _sizes(row["sent_bytes"]),
    "step ms p20/p50/p80": lambda row: spread(row["step_ms"]),
    "comm alone ms": number("comm_ms"),
    "exposed ms": number("exposed_comm_ms"),
    "hidden": number("overlap_pct", "{:.0f} %"),
    "peak MB": number("peak_memory_mb", "{:.0f}"),
}
