"""A user's program, for mypy --strict; it is not run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import assert_type, override

import ddpcore
from ddpcore.diagnostics import NoiseStatistics
from ddpcore.optim import FusedLAMB, FusedLARS, FusedSGD, param_groups
from ddpcore.training import DataConfig, ModelConfig, RunConfig, RunRecord, TrainConfig, train


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        FusedSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4),
        FusedLARS(param_groups(model, weight_decay=1e-4), lr=1.0, momentum=0.9),
        FusedLAMB(param_groups(model, weight_decay=0.01), lr=2e-3, max_grad_norm=1.0),
    ]


class OwnRing(ddpcore.Topology):
    @override
    def round(self, step: int, rank: int, num_learners: int) -> ddpcore.Round:
        before, after = (rank - 1) % num_learners, (rank + 1) % num_learners
        return ddpcore.Round(0.5, (before,), (0.5,), (after,))

    @override
    def period(self, num_learners: int) -> int:
        return 1


class OwnStrategy(ddpcore.SSGD):
    name = "own"


def loop(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    strategy: ddpcore.Strategy = ddpcore.DPSGD(topology=ddpcore.RandomPair(seed=0))
    handle = ddpcore.distribute(model, optimizer, strategy, learners=8)
    assert_type(handle, ddpcore.Distributed)
    statistics = NoiseStatistics(handle, optimizer, every=50)
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(handle.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        optimizer.step()
    print(assert_type(handle.consensus_distance(), float), len(statistics.records), OwnRing().spectral_gap(8))
    outputs: Tensor = handle.evaluation_model()(batches[0][0])
    return outputs


def whole_run(folder: Path) -> float:
    config = TrainConfig(model=ModelConfig(name="mlp"), data=DataConfig(name="synthetic"), run=RunConfig(steps=10))
    record = train(config, out=folder)
    assert_type(record, RunRecord)
    return float(record.final["best_accuracy"])
