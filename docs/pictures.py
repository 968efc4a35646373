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
rows = [json.loads(line) for line in (HERE / "results" / "mnist-effective-lr" / "results.jsonl").open()]
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
for name, (label, color) in STYLES.items():
    curves = [row["curves"] for row in rows if row["row"] == name]
    losses = np.array([curve["loss"] for curve in curves])
    for loss in losses:
        axes.plot(curves[0]["step"], loss, color=color, alpha=0.25, linewidth=0.7)
    median = np.median(losses, axis=0)
    axes.plot(curves[0]["step"], median, color=color, linewidth=2)
    axes.annotate(label, (3000, median[-8:].mean()), (6, 0), textcoords="offset points", color=color, va="center")
axes.set(yscale="log", xlim=(0, 3000), xlabel="step", ylabel="training loss of the average model")
axes.set_title("MNIST, 5 learners, learning rate 1: ten seeds and their median", loc="left", fontsize=11)
axes.spines[["top", "right"]].set_visible(False)
figure.savefig(HERE / "mnist-loss.svg", metadata={"Date": None})

runs = json.loads((HERE.parent / "benchmarks" / "results" / "failures_cpu.json").read_text())["rows"]
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
for run in runs:
    times, losses = ([at[key] for at in run["curve"]] for key in ("time", "loss"))
    axes.semilogy(times, losses, label=f"{run['mode']}, {run['kills']} killed")
axes.set(xlabel="seconds", ylabel="test loss")
axes.legend()
figure.savefig(HERE / "failures.svg", metadata={"Date": None})
