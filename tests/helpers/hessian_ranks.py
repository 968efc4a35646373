"""Hessians along a small training run, and of data that ranks share: the same lines for real and virtual learners."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore.diagnostics import DataLoss, Hessian, HessianStatistics, landscape, random_plane
from ddpcore.optim import FusedSGD
from ddpcore.records.surface import read_surface, write_surface
from ddpcore.storage.json_lines import to_json
from helpers import noise_training

NUM_LEARNERS, STEPS = noise_training.NUM_LEARNERS, 6
STRATEGIES = ("ssgd", "local_sgd", "slowmo", "dpsgd", "dpsgd_atc", "dpsgd_stale")
# Statistics ask a connection for averages of all ranks only, so few strategies run over the second transport too.
RUNS = [(strategy, "pg") for strategy in STRATEGIES] + [("ssgd", "shm"), ("dpsgd_stale", "shm")]


def train(
    strategy: str, *, watched: bool, group: dist.ProcessGroup | None = None, transport: str = "auto"
) -> dict[str, Any]:
    """The weights and buffers at the end, ``[L, ...]``, and the records."""
    model = noise_training.model_of()
    model[3] = nn.Identity()  # dropout: ranks draw one by one, virtual learners in turn
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    virtual = group is None
    learners = NUM_LEARNERS if virtual else None
    handle = ddpcore.distribute(
        model,
        optimizer,
        noise_training.STRATEGIES[strategy](),
        learners=learners,
        group=group,
        connection=ddpcore.Connection(transport=transport),
    )
    held = range(NUM_LEARNERS) if virtual else [dist.get_rank(group)]

    def losses(step: int) -> Tensor:
        x, y = noise_training.batch(step)
        outputs = handle.model(x) if virtual else handle.model(x[held[0]])[None]
        return torch.stack([F.cross_entropy(outputs[row], y[j]) for row, j in enumerate(held)]).sum()

    statistics = HessianStatistics(handle, lambda: losses(-1), every=3, top=2, tolerance=1e-4) if watched else None
    for step in range(STEPS):
        optimizer.zero_grad()
        losses(step).backward()
        optimizer.step()
    assert handle.learner is not None
    return {
        "weights": [[p.detach().clone() for p in one.parameters()] for one in handle.models],
        "buffers": [[b.clone() for b in one.buffers()] for one in handle.models],
        "random": torch.rand(3),
        "bytes_sent": handle.learner.comm.bytes_sent,
        "records": [] if statistics is None else to_json(statistics.records),
    }


def of_data(group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """The products and eigenvalues of a mean over 13 samples, which ranks hold in unequal parts.

    ``averaged``: the elements of each all-reduce of a product with three vectors, and of one with one vector.
    """
    model = noise_training.model_of().double().eval()
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(13, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (13,), generator=generator)
    rank, num = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    own = slice(rank, None, num)
    batches = list(zip(inputs[own].split(2), labels[own].split(2), strict=True))
    hessian = Hessian(model, DataLoss(model, F.cross_entropy, batches, group=group), group=group)
    vectors = torch.randn(3, hessian.numel, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ends = hessian.eigenvalues(2, 1, tolerance=1e-8)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as averaged:
        products = hessian.product(vectors)
        hessian.product(vectors[0])
    counted = torch.tensor([call.args[0].numel() for call in averaged.call_args_list])
    return {"products": products, "values": torch.from_numpy(ends.values), "averaged": counted}


def samples(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 5, generator=generator), torch.randint(3, (num,), generator=generator)


def landscape_of(group: dist.ProcessGroup | None = None, out: Path | None = None) -> dict[str, np.ndarray]:
    """Six points with eigenvalues, which ranks share."""
    model = noise_training.model_of().eval()
    data = DataLoss(model, F.cross_entropy, [samples(13)])
    x, y = np.linspace(-1, 1, 3), np.linspace(0, 1, 2)
    plane = random_plane(model)
    return landscape(data, plane, x=x, y=y, curvature=True, group=group, out=out).values


def resumed(rank: int) -> dict[str, np.ndarray]:
    """A landscape of which rank 0 alone has a file, with half of its points."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "file.h5"
        if rank == 0:
            landscape_of(out=out)
            surface = read_surface(out)
            surface.done.reshape(-1)[3:] = False
            write_surface(out, surface)
        return landscape_of(dist.group.WORLD, out)


def of_two(group: dist.ProcessGroup | None = None, *, learners: int | None = None) -> list[float]:
    """The eigenvalues of the mean loss of two batches: of two ranks, of two virtual learners, or of one process."""
    model = noise_training.model_of()
    model[3] = nn.Identity()
    batches = [samples(16, seed) for seed in (0, 1)]
    limits: dict[str, Any] = {"seed": 0, "tolerance": 1e-6}
    if group is None and learners is None:
        ends = Hessian(model, DataLoss(model, F.cross_entropy, batches))
        return ends.eigenvalues(2, 1, **limits).values.tolist()
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    vectorize = None if learners is None else False
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=learners, group=group, vectorize=vectorize)

    def loss() -> Tensor:
        if group is not None:
            inputs, labels = batches[dist.get_rank(group)]
            return F.cross_entropy(handle.model(inputs), labels)
        outputs = handle.model(torch.stack([inputs for inputs, _ in batches]))
        return torch.stack([F.cross_entropy(outputs[j], batches[j][1]) for j in (0, 1)]).sum()

    statistics = HessianStatistics(handle, loss, every=1, top=2, **limits)
    loss().backward()
    optimizer.step()
    (record,) = statistics.records
    return [*record.largest, record.smallest]


def main() -> None:
    """As a script: one rank of three, which trains with the strategies of the further words, over both transports."""
    from helpers.ranks import join

    path, _, _ = join()
    results: dict[Any, Any] = {"data": of_data(dist.group.WORLD)}
    results["landscape"] = landscape_of(dist.group.WORLD)
    results["resumed"] = resumed(dist.get_rank())
    pair = dist.new_group([0, 1])
    results["two"] = of_two(pair) if dist.get_rank() < 2 else None
    for strategy, transport in [run for run in RUNS if run[0] in sys.argv[4:]]:
        results[strategy, transport] = train(strategy, watched=True, group=dist.group.WORLD, transport=transport)
    torch.save(results, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
