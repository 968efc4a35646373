"""One of two real ranks that try what a user's loop may do; what they saw is saved under the name of each trial."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore.optim import FusedSGD
from helpers.connection import connected
from helpers.ranks import join
from helpers.training import rows_of

RECALIBRATED = (("ssgd", ddpcore.SSGD, None), ("ddp", ddpcore.DDP, None), ("grid", ddpcore.SSGD, 2))
SMALL = {"bucket_bytes": 128, "first_bucket_bytes": 64}


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def grads(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def mlp(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def samples(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 5, generator=generator), torch.randint(3, (num,), generator=generator)


def accumulation(rank: int, world_size: int, how: str) -> Tensor:
    """Three steps on 24 samples a step; each rank takes its share in three micro-batches."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), **connected(**SMALL))
    for step in range(3):
        inputs, labels = samples(24, step)
        mine = [part.chunk(3) for part in (inputs.chunk(world_size)[rank], labels.chunk(world_size)[rank])]
        optimizer.zero_grad(set_to_none=step != 1)
        for micro, (x, y) in enumerate(zip(*mine, strict=True)):
            loss = F.cross_entropy(model(x), y) / 3
            if how == "no_sync" and micro < 2:
                with handle.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
    return weights(model)


def clipping(rank: int, world_size: int) -> dict[str, Any]:
    """The gradient that a user sees right after backward, whole and clipped."""
    model = mlp()
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    ddpcore.distribute(model, optimizer, ddpcore.SSGD(), **connected(**SMALL))
    inputs, labels = samples(8)
    F.cross_entropy(model(inputs.chunk(world_size)[rank]), labels.chunk(world_size)[rank]).backward()
    seen = grads(model).clone()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return {"grads": seen, "norm": norm, "weights": weights(model)}


class Branches(nn.Module):
    """Three layers of which a forward pass takes one or two."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs: Tensor, sometimes: bool) -> Tensor:
        hidden = self.always(inputs)
        return self.sometimes(hidden) if sometimes else hidden


def unused(rank: int, strategy: Any, fused: bool) -> dict[str, Any]:
    """Rank 0 alone uses the second layer, no rank the third."""
    torch.manual_seed(5)
    model = Branches()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = (FusedSGD if fused else torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9)
    ddpcore.distribute(model, optimizer, strategy, **connected(**SMALL))
    for step in range(4):
        torch.manual_seed(100 + 10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(6, 4), sometimes=rank == 0).square().mean().backward()
        optimizer.step()
    return {"start": start, "end": dict(model.state_dict()), "never_grad": model.never.weight.grad}


def batch_norm(rank: int, world_size: int) -> dict[str, Any]:
    """The averaged copy of a model with buffers, between two steps."""
    torch.manual_seed(rank)  # rank 0's weights and buffers count
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[1].running_mean.fill_(float(rank + 1))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()))
    seen: dict[str, Any] = {"first_mean": model[1].running_mean.clone()}
    for step in range(3):
        inputs, labels = samples(16, step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.chunk(world_size)[rank]), labels.chunk(world_size)[rank]).backward()
        optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluation = handle.evaluation_model()
    seen["mine"] = before
    seen["average"] = {name: value.clone() for name, value in evaluation.state_dict().items()}
    seen["untouched"] = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    seen["hooks"] = len(evaluation._forward_pre_hooks) + len(evaluation._forward_hooks)
    seen["shared"] = {p.data_ptr() for p in evaluation.parameters()} & {p.data_ptr() for p in model.parameters()}
    evaluation(torch.randn(4, 5)).sum().backward()  # a hook that were left would start an exchange here
    for parameter in evaluation.parameters():
        parameter.data.fill_(1e9)
    seen["still_untouched"] = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    seen["exchanging"] = bool(handle.strategy._under_way)
    return seen


def ddp_batch_norm(rank: int, world_size: int) -> dict[str, Any]:
    """What DDP has trained after a step, and the copies of it to evaluate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DDP())
    inputs, labels = samples(16)
    F.cross_entropy(handle.model(inputs.chunk(world_size)[rank]), labels.chunk(world_size)[rank]).backward()
    optimizer.step()
    names = ("average", "local")
    seen: dict[str, Any] = {name: dict(handle.evaluation_model(name).state_dict()) for name in names}
    try:
        handle.sync()
    except RuntimeError as error:
        seen["sync"] = str(error)
    return {**seen, "mine": dict(model.state_dict())}


def recalibrated(rank: int, world_size: int, strategy: Any, learners: int | None) -> dict[str, Any]:
    """Statistics of batches that lie far apart, of several sizes: three on rank 0 and one on rank 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    group = None if learners is None else dist.group.WORLD
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=learners, group=group)
    batches = [samples(4 + number, 10 * rank + number)[0] + 3 * rank + number for number in range(1 if rank else 3)]
    evaluation = handle.evaluation_model("recalibrate", batches)
    return {"batches": batches, "state": dict(evaluation.state_dict())}


def frozen(rank: int, world_size: int) -> dict[str, Any]:
    """A frozen first layer that is in the optimizer all the same; the gradients of the last layer are kept."""
    seen: dict[str, Any] = {}
    for name, make in (("fused", FusedSGD), ("torch", torch.optim.SGD)):
        model = mlp()
        model[0].requires_grad_(False)
        optimizer = make(model.parameters(), lr=0.1)
        ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Complete()))
        seen[f"{name}_grads"] = []
        for step in range(2):
            inputs, labels = samples(16, step)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.chunk(world_size)[rank]), labels.chunk(world_size)[rank]).backward()
            seen[f"{name}_grads"].append(grads(model[2]).clone())
            optimizer.step()
        seen[name] = {key: value.clone() for key, value in model.state_dict().items()}
    return seen


def reloaded(rank: int, world_size: int) -> dict[str, Any]:
    """A state dict is loaded before each step of the optimizer; learning rate 0 leaves the average alone to be seen."""
    seen: dict[str, Any] = {}
    for name, make in (("fused", FusedSGD), ("torch", torch.optim.SGD)):
        model = mlp()
        optimizer = make(model.parameters(), lr=0.0, momentum=0.9)
        ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Complete()))
        for step in range(2):
            inputs, labels = samples(16, step)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(rank))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.chunk(world_size)[rank]), labels.chunk(world_size)[rank]).backward()
            optimizer.step()
            seen[f"{name}_{step}"] = weights(model)
    return seen


def ddp_twin(rank: int, world_size: int) -> dict[str, Tensor]:
    """SSGD beside torch's DistributedDataParallel."""
    ends = {}
    for name, strategy in (("ddp", ddpcore.DDP()), ("ssgd", ddpcore.SSGD())):
        model = mlp(seed=3 + rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
        handle = ddpcore.distribute(model, optimizer, strategy)
        for step in range(4):
            inputs, labels = samples(16, step)
            optimizer.zero_grad()
            F.cross_entropy(handle.model(inputs.chunk(world_size)[rank]), labels.chunk(world_size)[rank]).backward()
            optimizer.step()
        ends[name] = weights(model)
        copied = handle.evaluation_model()
        assert not isinstance(copied, nn.parallel.DistributedDataParallel)
        assert torch.equal(weights(copied), ends[name])
    return ends


class OddBuffers(nn.Module):
    """Buffers that are no contiguous row: expanded, transposed, of two dimensions, of none; and of rare dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(5, 3)
        self.register_buffer("ids", torch.randn(1, 4, generator=generator).expand(3, -1))
        self.register_buffer("turned", torch.randn(2, 3, generator=generator).t())
        self.register_buffer("table", torch.randn(3, 5, generator=generator))
        self.register_buffer("scale", torch.randn((), generator=generator))
        self.register_buffer("phases", torch.randn(2, 3, dtype=torch.complex64, generator=generator))
        self.register_buffer("codes", torch.randint(900, (4,), dtype=torch.int16, generator=generator))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs)


def odd_buffers(rank: int, world_size: int) -> dict[str, Any]:
    model = OddBuffers(seed=rank)
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    handle = ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.SSGD())
    given = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(own[name])
    return {"own": own, "given": given, "average": dict(handle.evaluation_model().named_buffers())}


def frozen_start(rank: int, world_size: int, **options: Any) -> dict[str, Any]:
    """Ranks that were made from other seeds, with a frozen layer whose weights are channels_last."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(3, 2, 2), nn.Conv2d(2, 2, 1)).to(memory_format=torch.channels_last)
    model[0].requires_grad_(False)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    strides = model[0].weight.stride()
    handle = ddpcore.distribute(
        model, torch.optim.SGD(model[1].parameters(), lr=0.1), ddpcore.SSGD(), **connected(**options)
    )
    given = {name: value.clone() for name, value in model[0].named_parameters(prefix="0")}
    return {
        "own": own,
        "given": given,
        "strides": (strides, model[0].weight.stride()),
        "average": dict(handle.evaluation_model().state_dict()),
    }


def grid_buffers(rank: int, world_size: int) -> dict[str, Any]:
    model = OddBuffers(seed=rank)
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, group=dist.group.WORLD)
    return {"own": own, "given": {name: rows_of(handle, name) for name in own}}


def main() -> None:
    path, rank, world_size = join()
    seen: dict[str, Any] = {}
    for how in ("no_sync", "backwards"):
        seen[f"accumulation_{how}"] = accumulation(rank, world_size, how)
    seen["clipping"] = clipping(rank, world_size)
    for fused in (False, True):
        seen[f"unused_ssgd_{fused}"] = unused(rank, ddpcore.SSGD(), fused)
        seen[f"unused_dpsgd_{fused}"] = unused(rank, ddpcore.DPSGD(ddpcore.Complete()), fused)
    seen["batch_norm"] = batch_norm(rank, world_size)
    seen["ddp_batch_norm"] = ddp_batch_norm(rank, world_size)
    for name, strategy, learners in RECALIBRATED:
        seen[f"recalibrated_{name}"] = recalibrated(rank, world_size, strategy(), learners)
    seen["frozen"] = frozen(rank, world_size)
    seen["reloaded"] = reloaded(rank, world_size)
    for transport in ("shm", "pg"):
        seen[f"frozen_start_{transport}"] = frozen_start(rank, world_size, transport=transport)
    seen["frozen_start_grid"] = frozen_start(rank, world_size, learners=2, group=dist.group.WORLD)
    seen["grid_buffers"] = grid_buffers(rank, world_size)
    seen["odd_buffers"] = odd_buffers(rank, world_size)
    seen["ddp_twin"] = ddp_twin(rank, world_size)
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
