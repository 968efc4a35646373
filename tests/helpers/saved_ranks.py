"""Ranks of ``tests/distributed/test_saved.py``: a run saved by torch.distributed.checkpoint, and one that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import ddpcore
from ddpcore import RunState
from ddpcore.optim import FusedAdamW
from helpers import ranks


class _Versioned(nn.Linear):
    """It doubles the weights of a state without its version, as modules do that convert older states."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def begin(learners: int | None, strategy: Any = None, *, named: bool = False, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(_Versioned(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = FusedAdamW(model.named_parameters() if named else model.parameters(), lr=0.01)
    strategy = strategy or ddpcore.DPSGD(ddpcore.Ring())
    return ddpcore.distribute(model, optimizer, strategy, learners=learners, **options), optimizer


def train(handle: Any, optimizer: Any, first: int, until: int) -> None:
    for step in range(first, until):
        total = torch.zeros(())
        for learner, model in zip(handle.comm.learners, handle.models, strict=True):
            generator = torch.Generator().manual_seed(1000 * step + learner)
            x, y = torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator)
            loss = nn.functional.cross_entropy(model(x), y)
            total = total + loss
        optimizer.zero_grad()
        total.backward()
        optimizer.step()


def flat(handle: Any) -> list[torch.Tensor]:
    return [torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone() for model in handle.models]


def halves(folder: Path, learners: int | None, **options: Any) -> dict[str, Any]:
    """Six steps at once, and three and three."""
    handle, optimizer = begin(learners, **options)
    train(handle, optimizer, 0, 6)
    half, optimizer = begin(learners, **options)
    train(half, optimizer, 0, 3)
    dcp.save({"run": RunState(half), "more": {"epoch": 3}}, checkpoint_id=folder)
    saved, average = flat(half), torch.cat([p.detach().reshape(-1) for p in half.evaluation_model().parameters()])
    later, optimizer = begin(learners, **options)
    train(later, optimizer, 0, 1)  # what is loaded replaces what is there
    more = {"epoch": 0}
    dcp.load({"run": RunState(later, saved=folder), "more": more}, checkpoint_id=folder)
    assert more["epoch"] == 3
    train(later, optimizer, 3, 6)
    return {"whole": flat(handle), "resumed": flat(later), "saved": saved, "average": average}


def main() -> None:
    path, _, world_size = ranks.join()
    connection = ddpcore.Connection(on_failure="raise" if world_size == 2 else "shrink")
    found = halves(path.parent / "saved", None, connection=connection)
    if world_size == 2:
        of_three = path.parent.parent / f"{path.parent.name}-three"
        other, optimizer = begin(None)
        alone, _ = begin(3) if dist.get_rank() == 0 else (None, None)
        if alone is not None:
            train(alone, alone.learner.optimizer, 0, 3)
            dcp.save({"run": RunState(alone)}, checkpoint_id=of_three, no_dist=True)
            found["three"] = flat(alone)
        dist.barrier()
        dcp.load({"run": RunState(other, saved=of_three)}, checkpoint_id=of_three)
        found["moved"], found["step"] = flat(other), other.learner.step
        train(other, optimizer, 3, 5)
    torch.save(found, path)


if __name__ == "__main__":
    main()
