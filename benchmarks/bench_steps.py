"""Whole training steps on one device: LeNet-5 in float32, and ResNet-18 in bfloat16 with channels last, beside torch.

    python benchmarks/bench_steps.py [--model lenet5 resnet18] [--batch-size 128] [--device auto] [--json FILE]

A step is forward pass, backward pass and optimizer, on images of CIFAR-100's shape that stay where they are. Ours is
FusedSGD, the other ``torch.optim.SGD(fused=True)`` with the same model and loop. On CUDA both are also captured, whole,
in a graph, and replayed: what is left then is what the kernels take. All take turns; ratios are medians over pairs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ddpcore import models
from ddpcore.bench.timing import interleaved
from ddpcore.machine import machine
from ddpcore.metrics import quantiles
from ddpcore.optim import FusedSGD

Step = Callable[[], Any]
NUM_CLASSES, SHAPE = 100, (3, 32, 32)
LAYOUTS = {  # of a model: dtype, memory format
    "lenet5": (torch.float32, torch.contiguous_format),
    "resnet18": (torch.bfloat16, torch.channels_last),
}
WARM_UP = 3  # steps before a capture: state and workspaces are made in them
RULE: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}


def training_step(name: str, batch_size: int, device: str, optimizer: Callable[..., torch.optim.Optimizer]) -> Step:
    """One step of a model and an optimizer of its own."""
    dtype, layout = LAYOUTS[name]
    torch.manual_seed(0)
    model = models.build(name, input_shape=SHAPE, num_classes=NUM_CLASSES).to(device, dtype, memory_format=layout)
    inputs = torch.randn(batch_size, *SHAPE).to(device, dtype, memory_format=layout)
    labels = torch.randint(NUM_CLASSES, (batch_size,)).to(device)
    moved = optimizer(model.parameters(), **RULE)

    def step() -> None:
        moved.zero_grad(set_to_none=True)
        F.cross_entropy(model(inputs).float(), labels).backward()
        moved.step()

    return step


def captured(step: Step) -> Step:
    """The same as a replay of one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_step: Step = step) -> None:  # keeps model and inputs: the graph reads them where they lie
        graph.replay()

    return replay


def torch_sgd(parameters: Any, **rule: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, fused=True, **rule)


def measure(name: str, batch_size: int, device: str, repeats: int) -> list[dict[str, Any]]:
    """A row a contender: images a second, and its step beside torch's of the same kind."""
    kinds = {"ours": FusedSGD, "torch": torch_sgd}
    steps = {kind: training_step(name, batch_size, device, optimizer) for kind, optimizer in kinds.items()}
    if device == "cuda":
        for kind, optimizer in kinds.items():
            steps[f"{kind}, captured"] = captured(training_step(name, batch_size, device, optimizer))
    seconds = dict(zip(steps, interleaved(list(steps.values()), device, repeats), strict=True))
    rows = []
    for contender, ours in seconds.items():
        theirs = seconds[contender.replace("ours", "torch")]
        rows.append(
            {
                "case": f"step of {name}, {contender}",
                "batch_size": batch_size,
                "dtype": str(LAYOUTS[name][0]).removeprefix("torch."),
                "step_ms": quantiles([1e3 * one for one in ours]),
                "images_per_s": quantiles([batch_size / one for one in ours]),
                "ratio": quantiles([a / b for a, b in zip(ours, theirs, strict=True)]),
                "threads": torch.get_num_threads(),
                "repeats": repeats,
                **machine(device),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to this file")
    options = parser.parse_args()
    device = "cuda" if options.device == "auto" and torch.cuda.is_available() else options.device.replace("auto", "cpu")
    for name in options.model:
        for row in measure(name, options.batch_size, device, options.repeats):
            ms, ratio = row["step_ms"], row["ratio"]
            print(
                f"{row['case']:<34}{row['images_per_s']['p50']:>12.0f} images/s{ms['p50']:>10.3f} ms"
                f"   ours / torch {ratio['p50']:.3f} ({ratio['p20']:.3f}-{ratio['p80']:.3f})"
            )
            if options.json is not None:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
