"""Draws pictures of the documentation from committed results: ``python docs/pictures.py`` (needs matplotlib)."""

import json
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
STYLES = {  # row of the study -> its label and a colour that colour-blind people can tell from the other
    "ssgd": ("synchronous SGD\naverages gradients", "#d55e00"),
    "dpsgd": ("DPSGD\naverages weights", "#0072b2"),
}

plt.rcParams |= {"svg.hashsalt": "ddpcore", "svg.fonttype": "path"}
rows = [
    json.loads(line)
    for line in (HERE / "results" / "mnist-effective-lr" / "results.jsonl").open()
]
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
for name, (label, color) in STYLES.items():
    curves = [row["curves"] for row in rows if row["row"] == name]
    losses = np.array([curve["loss"] for curve in curves])
    for loss in losses:
        axes.plot(curves[0]["step"], loss, color=color, alpha=0.25, linewidth=0.7)
    median = np.median(losses, axis=0)
    axes.plot(curves[0]["step"], median, color=color, linewidth=2)
    axes.annotate(
        label,
        (3000, median[-8:].mean()),
        (6, 0),
        textcoords="offset points",
        color=color,
        va="center",
    )
axes.set(
    yscale="log",
    xlim=(0, 3000),
    xlabel="step",
    ylabel="training loss of the average model",
)
axes.set_title(
    "MNIST, 5 learners, learning rate 1: ten seeds and their median",
    loc="left",
    fontsize=11,
)
axes.spines[["top", "right"]].set_visible(False)
figure.savefig(HERE / "mnist-loss.svg", metadata={"Date": None})

runs = json.loads(
    (HERE.parent / "benchmarks" / "results" / "failures_cpu.json").read_text()
)["rows"]
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
for run in runs:
    times, losses = ([at[key] for at in run["curve"]] for key in ("time", "loss"))
    axes.semilogy(times, losses, label=f"{run['mode']}, {run['kills']} killed")
axes.set(xlabel="seconds", ylabel="test loss")
axes.legend()
figure.savefig(HERE / "failures.svg", metadata={"Date": None})

data = json.loads((HERE / "tutorials" / "uneven_data.json").read_text())
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for name, runs in data["rows"].items():
    for axes, key in ((left, "accuracy"), (right, "consensus_distance")):
        values = np.array([run[key] for run in runs])
        (line,) = axes.plot(
            range(1, values.shape[1] + 1), np.median(values, axis=0), label=name
        )
        axes.fill_between(
            range(1, values.shape[1] + 1),
            values.min(axis=0),
            values.max(axis=0),
            color=line.get_color(),
            alpha=0.15,
        )
left.set(xlabel="epoch", ylabel="accuracy of the averaged model", ylim=(0.6, 1))
right.set(xlabel="epoch", ylabel="consensus distance", ylim=(0.03, 1), yscale="log")
left.legend(fontsize=8)
figure.savefig(HERE / "tutorials" / "uneven_data.svg", metadata={"Date": None})
