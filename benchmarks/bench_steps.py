"""Whole training steps on one device: LeNet-5 in float32, and ResNet-18 in bfloat16 with channels last, beside torch.

    python benchmarks/bench_steps.py [--model lenet5 resnet18] [--batch-size 128] [--device auto] [--json FILE]

A step is forward pass, backward pass and optimizer, always on the same images of CIFAR-100's shape. Ours uses FusedSGD;
the other uses ``torch.optim.SGD(fused=True)`` with the same model and loop. On CUDA both are also captured as one graph
and replayed, so that only the kernels are timed. All run in turn; ratios are medians over pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import add_options, append, parse
from timing import interleaved

from ddpcore.models import MODELS
from ddpcore.optim import FusedSGD
from ddpcore.runtime.machine import machine
from ddpcore.runtime.timing import quantiles

Step = Callable[[], Any]
NUM_CLASSES, SHAPE = 100, (3, 32, 32)
LAYOUTS = {  # dtype and memory format of each model
    "lenet5": (torch.float32, torch.contiguous_format),
    "resnet18": (torch.bfloat16, torch.channels_last),
}
WARM_UP = 3  # steps before a capture; they allocate state and workspaces
RULE: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}


def training_step(name: str, batch_size: int, device: str, optimizer: Callable[..., torch.optim.Optimizer]) -> Step:
    """A function that trains a new model for one step with a new optimizer."""
    dtype, layout = LAYOUTS[name]
    torch.manual_seed(0)
    model = MODELS.build(name, input_shape=SHAPE, num_classes=NUM_CLASSES).to(device, dtype, memory_format=layout)
    inputs = torch.randn(batch_size, *SHAPE).to(device, dtype, memory_format=layout)
    labels = torch.randint(NUM_CLASSES, (batch_size,)).to(device)
    moved = optimizer(model.parameters(), **RULE)

    def step() -> None:
        moved.zero_grad(set_to_none=True)
        F.cross_entropy(model(inputs).float(), labels).backward()
        moved.step()

    return step


def captured(step: Step) -> Step:
    """A function that replays the step as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_step: Step = step) -> None:  # the default keeps model and inputs alive: the graph reads their memory
        graph.replay()

    return replay


def torch_sgd(parameters: Any, **rule: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, fused=True, **rule)


def measure(name: str, batch_size: int, device: str, repeats: int) -> list[dict[str, Any]]:
    """A row for each contender: images per second, and the ratio of its step to torch's of the same kind."""
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
    add_options(parser, repeats=15)
    options = parse(parser)
    for name in options.model:
        for row in measure(name, options.batch_size, options.device, options.repeats):
            ms, ratio = row["step_ms"], row["ratio"]
            print(
                f"{row['case']:<34}{row['images_per_s']['p50']:>12.0f} images/s{ms['p50']:>10.3f} ms"
                f"   ours / torch {ratio['p50']:.3f} ({ratio['p20']:.3f}-{ratio['p80']:.3f})"
            )
            append(options.json, row)


if __name__ == "__main__":
    main()
