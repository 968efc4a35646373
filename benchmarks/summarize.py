"""Makes ``results.jsonl`` (every row, with its machine) and ``summary.md`` from the files that ``run_gpu.sh`` wrote."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpcore.runtime.machine import machine

Row = dict[str, Any]


def whole_lines(path: Path) -> list[str]:
    """The lines that end with a newline. The last line is incomplete if its writer was stopped."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def json_lines(path: Path) -> list[Row]:
    """All valid rows. A line that was cut is left out, with anything that was appended to it."""
    rows = []
    for line in whole_lines(path):
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def clocks(path: Path) -> Row:
    """The driver, and the lowest, median and highest clocks that nvidia-smi sampled during the run."""
    rows = [row for row in csv.DictReader(whole_lines(path)) if None not in row and None not in row.values()]
    samples = [{key.strip(): value.strip() for key, value in row.items()} for row in rows]
    if not samples:
        return {}
    result: Row = {key: samples[0][key] for key in ("name", "driver_version") if key in samples[0]}
    for key in samples[0]:
        values = [float(row[key]) for row in samples if row[key].replace(".", "", 1).isdigit()]
        if key not in result and values:
            result[key] = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return result


def rows_of(folder: Path) -> list[Row]:
    """Rows of kernels and of training, then the rows of each bench with the environment of its file."""
    rows = json_lines(folder / "kernels.jsonl") + json_lines(folder / "training.jsonl")
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        where = {key: value for key, value in result["environment"].items() if key != "device"}
        where["device_name"], where["bench"] = result["environment"]["device"], path.stem
        rows += [{**row, **where} for row in result["rows"]]
    return rows


def table(heading: list[str], lines: list[list[str]]) -> list[str]:
    rule = ["---"] * len(heading)
    return ["", *("| " + " | ".join(cells) + " |" for cells in [heading, rule, *lines])]


def spread(values: dict[str, float]) -> str:
    return f"{values['p50']:.2f} [{values['p20']:.2f}-{values['p80']:.2f}]"


def kernel_line(row: Row) -> list[str]:
    share, milliseconds = f"{row['fraction_of_copy']:.0%}", f"{1e3 * row['seconds']['p50']:.4f}"
    measured = [milliseconds, f"{row['gb_per_s']:.1f}", share, spread(row["ratio"]), row["baseline"]]
    return [row["case"], f"{row['numel']:,}", row["dtype"], *measured]


def training_line(row: Row) -> list[str]:
    """The line of a training step or of an average between ranks: size, time or rate, and ratio to the baseline."""
    images = row.get("images_per_s")
    speed = f"{row['ms']['p50']:.3f} ms" if images is None else f"{images['p50']:,.0f} images/s"
    size = f"{row['numel']:,} elements" if images is None else f"batch {row['batch_size']}"
    return [row["case"], size, speed, spread(row["ratio"]) if "ratio" in row else ""]


def summary(where: Row, gpu: Row, steps: list[Row], rows: list[Row]) -> str:
    text = [f"# {where['device']}", ""]
    text += [f"torch {where['torch']}, CUDA {where['cuda']}, Python {where['python']}, commit {where['commit']}", ""]
    text += [f"compiled kernels: {', '.join(where['kernels']) or 'none, the reference implementations ran'}", ""]
    text += [f"- {key}: {value}" for key, value in gpu.items()]
    steps_lines = [[s["step"], s["status"], f"{s['seconds']} of {s['limit']}", s["note"]] for s in steps]
    text += table(["step", "", "seconds", ""], steps_lines)
    cut = [s["step"] for s in steps if s["status"] in ("cut", "timeout")]
    text += ["", f"Cut short or not begun: {', '.join(cut) or 'nothing'}."]
    kernels = [row for row in rows if "fraction_of_copy" in row]
    if kernels:
        heading = ["kernel", "elements", "dtype", "ms", "GB/s", "of copy", "ours / baseline", "baseline"]
        text += table(heading, [kernel_line(row) for row in kernels])
    training = [row for row in rows if "case" in row and row not in kernels]
    if training:
        text += table(["training", "size", "speed", "ratio"], [training_line(row) for row in training])
    lefts = [row for row in rows if row.get("comparison", "").startswith(row.get("implementation", "-") + " / ")]
    if lefts:
        text += table(
            ["step", "list", "dtype", "ms of the left", "left / right"],
            [[r["comparison"], r["list"], r["dtype"], f"{r['ms']['p50']:.4f}", spread(r["ratio"])] for r in lefts],
        )
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--commit", default="", help="used if the folder is not a git checkout")
    options = parser.parse_args()
    where, gpu = machine(options.device), clocks(options.folder / "gpu.csv")
    where["commit"] = where["commit"] or options.commit or None
    rows, steps = rows_of(options.folder), json_lines(options.folder / "steps.jsonl")
    with (options.folder / "results.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps({**row, "commit": row.get("commit") or where["commit"], "gpu": gpu or None}) + "\n")
    (options.folder / "summary.md").write_text(summary(where, gpu, steps, rows))


if __name__ == "__main__":
    main()
