"""Drawn training runs: families of models, strategies and optimizers, with random shapes.

As a script: one rank of four, which trains drawn runs; the further word says how many.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddpcore
from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD, Muon, param_groups

L, STEPS, BATCH, CLASSES = 4, 5, 3, 4
NUM_FAST = 12  # runs of a property in ``make test``: one of each strategy


class Recurrent(nn.Module):
    """Sums the outputs of a recurrent layer over time."""

    def __init__(self, kind: Any, inputs: int, hidden: int) -> None:
        super().__init__()
        self.layer, self.head = kind(inputs, hidden, batch_first=True), nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layer(x)[0].sum(1))
        return result


class Attention(nn.Module):
    """A joint projection of queries, keys and values, and positions that are a parameter of the model itself."""

    def __init__(self, heads: int, width: int, length: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.1 * torch.randn(1, length, width))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        result: Tensor = self.head(self.norm(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))
        return result


class Tied(nn.Module):
    """One weight in two layers, a frozen layer, a layer that is not used, and a scalar."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden).requires_grad_(False)
        self.second, self.third = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.third.weight = self.second.weight
        self.unused, self.head = nn.Linear(3, 2), nn.Linear(hidden, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(torch.tanh(self.second(self.frozen(self.first(x)))))
        return self.scale * self.head(x)  # type: ignore[no-any-return]


def _mlp(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    widths = [draw.randint(1, 40) for _ in range(draw.randint(1, 3))]
    layers: list[nn.Module] = []
    for before, after in zip(widths, [*widths[1:], draw.randint(2, 30)], strict=True):
        layers += [nn.Linear(before, after, bias=draw.random() < 0.7), draw.choice([nn.Tanh, nn.ReLU, nn.GELU])()]
        layers += [draw.choice([nn.BatchNorm1d, nn.LayerNorm])(after)] if draw.random() < 0.5 else []
    return nn.Sequential(*layers, nn.LazyLinear(CLASSES)), (widths[0],)


def _convolutions(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    channels, width, side = draw.randint(1, 4), 2 * draw.randint(1, 6), draw.randint(5, 9)
    net = nn.Sequential(
        nn.Conv2d(channels, width, draw.choice([1, 3]), padding=1), draw.choice([nn.BatchNorm2d(width), nn.Identity()]),
        nn.ReLU(), nn.Conv2d(width, width, 3, groups=draw.choice([1, 2, width])),
        draw.choice([nn.AdaptiveAvgPool2d(1), nn.MaxPool2d(2)]), nn.Flatten(),
    )  # fmt: skip
    net.to(memory_format=draw.choice([torch.channels_last, torch.contiguous_format]))
    return net.append(nn.LazyLinear(CLASSES)), (channels, side, side)


def _recurrent(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    inputs = draw.randint(1, 9)
    return Recurrent(draw.choice([nn.LSTM, nn.GRU, nn.RNN]), inputs, draw.randint(1, 20)), (draw.randint(1, 6), inputs)


def _attention(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    heads, length = draw.randint(1, 3), draw.randint(1, 7)
    width = heads * draw.randint(1, 6)
    return Attention(heads, width, length), (length, width)


def _tied(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    inputs = draw.randint(1, 20)
    return Tied(inputs, draw.randint(1, 30)), (inputs,)


def _embedding(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    words, width = draw.randint(3, 30), draw.randint(1, 9)
    net = nn.Sequential(nn.Embedding(words, width, padding_idx=draw.choice([None, 0])), nn.Flatten())
    return net.append(nn.LazyLinear(CLASSES)), (draw.randint(1, 5), -words)


def _parametrized(draw: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    inputs, hidden = draw.randint(1, 20), draw.randint(1, 20)
    norm = draw.choice([nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
    return nn.Sequential(norm(nn.Linear(inputs, hidden)), nn.Tanh(), nn.Linear(hidden, CLASSES)), (inputs,)


MODELS = (_mlp, _convolutions, _recurrent, _attention, _tied, _embedding, _parametrized)
OPTIMIZERS: tuple[Callable[[nn.Module, bool], torch.optim.Optimizer], ...] = (
    lambda model, clip: FusedSGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, **_clip(clip)),
    lambda model, clip: FusedSGD(param_groups(model, 0.1), lr=0.1, state_dtype="bfloat16", momentum=0.8, **_clip(clip)),
    lambda model, clip: FusedAdamW(param_groups(model, 0.1), lr=0.01, **_clip(clip)),
    lambda model, clip: FusedLARS(param_groups(model, 0.1), lr=0.3, trust_coefficient=0.1, **_clip(clip)),
    lambda model, clip: FusedLAMB(model.named_parameters(), lr=0.02, weight_decay=0.1, **_clip(clip)),
    lambda model, clip: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    lambda model, clip: torch.optim.AdamW(model.parameters(), lr=0.01),
    lambda model, clip: Muon(param_groups(model, 0.1, rule="muon"), lr=0.02),
)
STRATEGIES: dict[str, Callable[[random.Random], ddpcore.Strategy]] = {
    "ssgd": lambda draw: ddpcore.SSGD(),
    "noisy": lambda draw: ddpcore.NoisySSGD(0.02, seed=3, where=draw.choice(["shared", "per_learner"])),
    "local": lambda draw: ddpcore.LocalSGD(draw.randint(1, 3), switch_step=draw.choice([0, 2])),
    "grouped": lambda draw: ddpcore.LocalSGD(3, group=2),
    "outer": lambda draw: ddpcore.LocalSGD(2, outer=_outer, fragments=draw.randint(1, 2)),
    "dpsgd": lambda draw: ddpcore.DPSGD(
        _topology(draw),
        order=draw.choice(["average_while_computing", "adapt_then_combine", "combine_then_adapt"]),
    ),
    "stale": lambda draw: ddpcore.DPSGD(_topology(draw), staleness=1),
    "push": lambda draw: ddpcore.PushSum(_topology(draw)),
    "slowmo": lambda draw: ddpcore.SlowMo(ddpcore.DPSGD(_topology(draw)), period=2),
    "tracking": lambda draw: ddpcore.GradientTracking(_topology(draw)),
    "diffusion": lambda draw: ddpcore.ExactDiffusion(ddpcore.Ring(1)),
    "never": lambda draw: ddpcore.LocalSGD(10**6),
}

SEEDS = range(2 * len(STRATEGIES))  # of the runs that ranks train: each strategy over each transport
WIDE = ("ssgd", "local", "grouped", "outer", "never")  # of any dtype


def transport_of(seed: int) -> str:
    """Of the ranks that train the run of a seed."""
    return ("pg", "shm")[(seed + seed // len(STRATEGIES)) % 2]


def _clip(clip: bool) -> dict[str, Any]:
    return {"max_grad_norm": 0.5} if clip else {}


def _outer(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.7, momentum=0.9, nesterov=True)


def _topology(draw: random.Random) -> Any:
    return draw.choice([ddpcore.Ring(1), ddpcore.Complete(), ddpcore.RandomPair(seed=5), ddpcore.OnePeerExponential()])


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """The learners' losses, added up."""
    pairs = zip(outputs, labels, strict=True)
    return torch.stack([nn.functional.cross_entropy(output, label) for output, label in pairs]).sum()


class Drawn:
    """The run of a seed.

    Args:
        seed: of its model, optimizer and strategy.
        group: of real ranks; None makes all learners virtual.
        strategy: a name of ``STRATEGIES``; None takes them in turn, by the seed.
        connection: of the ranks.
    """

    def __init__(
        self, seed: int, *, group: dist.ProcessGroup | None = None, strategy: str | None = None, **connection: Any
    ) -> None:
        self.seed, self.rank, self.strategy = seed, None if group is None else dist.get_rank(group), strategy
        self.options: dict[str, Any] = {"group": group, "learners": L if group is None else None}
        self.options["connection"] = ddpcore.Connection(**connection, bucket_bytes=2**10, first_bucket_bytes=2**9)
        self.splits = False  # whether learners run one after the other, forward and backward
        self.start(0)

    def start(self, init: int) -> None:
        """A model with the weights of ``init``, its optimizer and its handle."""
        draw = random.Random(self.seed)
        torch.manual_seed(1000 + init)
        self.model, self.shape = MODELS[self.seed % len(MODELS)](draw)
        self.make, self.clips = draw.choice(OPTIMIZERS), draw.random() < 0.3
        self.name = self.strategy or [*STRATEGIES][self.seed % len(STRATEGIES)]
        self.dtype = torch.float64 if self.name in WIDE and draw.random() < 0.3 else torch.float32
        self.model.to(self.dtype)
        with torch.no_grad():
            self.model(self.inputs(0)[0])  # lazy layers
        self.accumulation = draw.choice([1, 1, 2])
        self.optimizer = self.make(self.model, self.clips)
        strategy = STRATEGIES[self.name](draw)
        self.handle = ddpcore.distribute(self.model, self.optimizer, strategy, **self.options)

    def inputs(self, step: int) -> Tensor:
        """``[L, BATCH, ...]``: words or numbers."""
        generator = torch.Generator().manual_seed(50 + step)
        if self.shape[-1] < 0:
            return torch.randint(-self.shape[-1], (L, BATCH, *self.shape[:-1]), generator=generator)
        return torch.randn(L, BATCH, *self.shape, generator=generator).to(self.dtype)

    def backward(self, number: int) -> None:
        """One pass of all learners here."""
        self.number = number
        x, y = self.inputs(number), self.labels(number)
        if self.rank is not None:
            (
                loss_of(self.handle.model(x[self.rank])[None], y[self.rank : self.rank + 1]) / self.accumulation
            ).backward()
            return
        for some, labels in self.handle.split(x, y) if self.splits else [(x, y)]:
            (loss_of(self.handle.model(some), labels) / self.accumulation).backward()

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        for part in range(self.accumulation - 1):
            with self.handle.no_sync():
                self.backward(2 * step + part)
        self.backward(2 * step + 1)
        self.optimizer.step()

    def resume(self) -> None:
        """Make everything again, and load all states into it."""
        parts = self.model, self.optimizer, self.handle
        saved = copy.deepcopy([part.state_dict() for part in parts])
        self.start(7)
        for part, state in zip((self.model, self.optimizer, self.handle), saved, strict=True):
            part.load_state_dict(state)

    def labels(self, number: int) -> Tensor:
        return torch.randint(CLASSES, (L, BATCH), generator=torch.Generator().manual_seed(number))

    def loss(self, number: int) -> Tensor:
        """Of a pass of all virtual learners."""
        return loss_of(self.handle.model(self.inputs(number)), self.labels(number))

    def state(self) -> list[list[Tensor]]:
        """Of each learner here: weights, buffers and gradients."""
        found = []
        for model in self.handle.models:
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            found.append([*(value.clone() for value in model.state_dict().values()), *grads])
        return found


def main() -> None:
    from helpers.ranks import join

    path, _, _ = join()
    results = {}
    for seed in SEEDS[: int(sys.argv[4])]:
        run = Drawn(seed, group=dist.group.WORLD, transport=transport_of(seed))
        for step in range(STEPS):
            run.step(step)
        results[seed] = run.state()[0]
        run.handle.consensus_distance()  # all have read the weights
    torch.save(results, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
