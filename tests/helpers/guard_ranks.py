"""One of two real ranks: an error on one rank alone, a distribute call that fails, and a checkpoint of torch."""

from __future__ import annotations

import copy
import gc
import sys
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint as checkpoint_of

import ddpcore
from ddpcore.distributed import distribute as module
from ddpcore.optim import FusedSGD
from helpers.idioms.run import STRATEGIES, Run, net, one_step, sgd
from helpers.ranks import join


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def moved_on_rank_0(rank: int, strategy: str, what: str) -> dict[str, Any]:
    """Rank 0 alone moves its weights or gradients to other memory. No rank may take a further step."""
    run = Run(strategy, "ranks")
    model = net()
    run.distribute(model, sgd(model), transport="shm", timeout=3.0)
    one_step(run, 0)
    before = weights(model)
    if rank == 0:
        (model[0].weight if what == "parameters" else model[0].weight.grad).share_memory_()
    try:
        for step in range(1, 3):
            one_step(run, step)
        error = "no error"
    except Exception as raised:
        error = str(raised)
    return {"error": error, "before": before, "after": weights(model)}


def failed_call(rank: int) -> dict[str, Any]:
    """The connection fails while the weights are sent; a second call succeeds with the same objects."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model(torch.ones(2, 5)).sum().backward()
    optimizer, strategy = FusedSGD(model.parameters(), lr=0.1), ddpcore.SSGD()
    before = copy.deepcopy((model.state_dict(), [parameter.grad for parameter in model.parameters()]))
    send, module._start_alike = module._start_alike, broken
    try:
        ddpcore.distribute(model, optimizer, strategy)
        error = "no error"
    except Exception as raised:
        error = str(raised)
    finally:
        module._start_alike = send
    after = copy.deepcopy((model.state_dict(), [parameter.grad for parameter in model.parameters()]))
    hooks = (
        len(model._forward_pre_hooks)
        + len(optimizer._optimizer_step_pre_hooks)
        + sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())
    )
    optimizer.step()  # alone
    ddpcore.distribute(model, optimizer, strategy)
    optimizer.zero_grad()
    model(torch.full((2, 5), float(rank))).sum().backward()
    optimizer.step()
    return {"error": error, "before": before, "after": after, "hooks": hooks, "weights": weights(model)}


def broken(*_: Any) -> None:
    raise ConnectionError("rank 1 is gone")


def checkpoint(folder: str, strategy: str) -> dict[str, Any]:
    """Two steps, a checkpoint of torch in files, two steps; a new run loads it and takes the same two steps."""
    ends = []
    for is_first in (True, False):
        run = Run(strategy, "ranks")
        model = net() if is_first else nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        run.distribute(model, sgd(model))
        if is_first:
            for step in range(2):
                one_step(run, step)
        states = get_state_dict(model, run.optimizer)
        names = ("model", "optimizer")
        mine = {f"{name} of rank {run.rank}": state for name, state in zip(names, states, strict=True)}
        if is_first:
            dcp.save(mine, checkpoint_id=f"{folder}/{strategy}")
        else:
            dcp.load(mine, checkpoint_id=f"{folder}/{strategy}")
            loaded = [mine[f"{name} of rank {run.rank}"] for name in names]
            set_state_dict(model, run.optimizer, model_state_dict=loaded[0], optim_state_dict=loaded[1])
        for step in range(2, 4):
            one_step(run, step)
        ends.append(weights(model))
    return {"ends": ends}


def dropped_in_an_exchange(rank: int) -> list[Tensor]:
    """Rank 0 frees a run before rank 1 has sent its part of the last exchange; the next run has the same weights."""
    ends = []
    for _ in range(2):
        model = net()
        optimizer = sgd(model)
        strategy = ddpcore.DPSGD(ddpcore.Complete(), staleness=1)
        handle = ddpcore.distribute(model, optimizer, strategy, connection=ddpcore.Connection(transport="pg"))
        for step in range(3):
            time.sleep(0.5 if rank == 1 and step == 2 else 0)
            handle.model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        ends.append(weights(model))
        del model, optimizer, strategy, handle
        gc.collect()
        dist.barrier()
    return ends


def checkpointed(rank: int, is_checkpointed: bool) -> list[Tensor]:
    """Gradients of a model that is checkpointed as a whole, with a layer of it behind: two buckets."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(5, 40), nn.Linear(40, 40)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.body(inputs).tanh()

    torch.manual_seed(0)
    model = Two()
    optimizer = sgd(model)  # it holds the handle, which would be freed in the middle of the pass
    ddpcore.distribute(
        model,
        optimizer,
        ddpcore.SSGD(),
        connection=ddpcore.Connection(transport="pg", bucket_bytes=1024, first_bucket_bytes=64),
    )
    inputs = torch.ones(2, 5) * (rank + 1)
    hidden = checkpoint_of(model, inputs, use_reentrant=False) if is_checkpointed else model(inputs)
    model.head(hidden).square().mean().backward()
    return [parameter.grad.clone() for group in optimizer.param_groups for parameter in group["params"]]


def frozen_on_rank_0(rank: int) -> str:
    """Rank 0 freezes a layer alone."""
    model = net()
    optimizer = sgd(model)
    ddpcore.distribute(model, optimizer, ddpcore.SSGD(), connection=ddpcore.Connection(transport="pg"))
    try:
        for step in range(2):
            if step == 1 and rank == 0:
                model[0].requires_grad_(False)
            optimizer.zero_grad()
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def all_frozen_on_rank_1(transport: str, rank: int) -> str:
    """Rank 1 freezes its whole model in one step, so it has no backward pass there."""
    model = net()
    optimizer = sgd(model)
    connection = ddpcore.Connection(transport=transport, timeout=3.0)
    group = dist.new_group()  # the error of rank 1 leaves it with a message that nobody reads
    ddpcore.distribute(model, optimizer, ddpcore.SSGD(), group=group, connection=connection)
    try:
        for step in range(4):
            model.requires_grad_(rank == 0 or step != 2)
            optimizer.zero_grad()
            loss = model(torch.ones(2, 5)).square().sum()
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def samples_set_once(rank: int) -> tuple[str, bool]:
    """Rank 1 has no samples and no pass, and sets that only before the first step."""
    model = net()
    optimizer, error = sgd(model), "no error"
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD("samples"))
    for step in range(2):
        before = weights(model)
        optimizer.zero_grad()
        if rank == 0 or step == 0:
            handle.num_samples = 2 * (1 - rank)
        try:
            if rank == 0:
                model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        except ValueError as raised:
            error = str(raised)
    return error, torch.equal(weights(model), before)


def samples_after_a_step_left_out(rank: int, order: str) -> float:
    """A step is left out, and in the next one rank 1 has no samples and no pass. How far weights are from the mean.

    If ``order`` sets no numbers, it is the mean over learners.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    connection = ddpcore.Connection(timeout=5.0)
    strategy, share = (ddpcore.SSGD("samples"), 1) if "set" in order else (ddpcore.SSGD(), 2)
    handle = ddpcore.distribute(model, optimizer, strategy, connection=connection)
    expected = weights(model)
    for counts in ([4, 1], [4, 0]):
        inputs = [torch.randn(num, 3) for num in counts]
        for part in order.split(", "):
            if part == "set":
                handle.num_samples = counts[rank]
            else:
                optimizer.zero_grad(set_to_none=part == "None")
        if counts[rank]:
            model(inputs[rank]).mean().backward()
    optimizer.step()
    return float((weights(model) - expected + inputs[0].mean(0) / share).abs().max())


class _HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(8, 2), nn.Linear(5, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs).relu())


def second_step_without_a_pass(rank: int) -> float:
    """Rank 1 has none, just after the layout has changed. How far weights are from plain ones."""
    torch.manual_seed(0)
    model, expected = _HeadFirst(), _HeadFirst()
    expected.load_state_dict(model.state_dict())
    optimizers = sgd(model), sgd(expected)
    ddpcore.distribute(model, optimizers[0], ddpcore.SSGD())
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        inputs = torch.randn(2, 4, 5)
        for other in range(1 if step == 1 else 2):
            (expected(inputs[other]).square().mean() / 2).backward()
            if other == rank:
                model(inputs[rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return float((weights(model) - weights(expected)).abs().max())


def joined_averages(rank: int, transport: str, *, samples: bool) -> float:
    """Steps inside ``no_sync()`` and others; rank 1 has no pass in some. How far weights are from plain ones."""
    torch.manual_seed(0)
    model, off = nn.Linear(4, 1, bias=False), [0.0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = ddpcore.SSGD("samples" if samples else None)
    connection = ddpcore.Connection(transport=transport, timeout=5.0)
    handle = ddpcore.distribute(model, optimizer, strategy, connection=connection)
    expected = weights(model)
    steps = [
        "all 4 4",
        "local 4 0",
        "all 4 4",
        "sync 4 0",
        "closure 4 0",
        "all 2 4",
        "leave 2 4",
        "local 3 4",
        "all 2 4",
    ]
    for how, *counts in map(str.split, steps):
        inputs = [torch.randn(int(count), 4) for count in counts]
        optimizer.zero_grad()
        handle.num_samples = len(inputs[rank]) if samples else None

        def passes(own: Tensor = inputs[rank]) -> None:
            if len(own):
                model(own).mean().backward()

        with handle.no_sync() if how in ("local", "sync") else nullcontext():
            with handle.sync() if how == "sync" else nullcontext():
                if how != "closure":
                    passes()
            if how == "leave":
                handle.num_samples = None
                continue
            optimizer.step(*[passes] if how == "closure" else [])
        shares = [int(count) / sum(map(int, counts)) if samples else 0.5 for count in counts]
        means = [own.sum(0) / max(1, len(own)) for own in inputs]
        change = means[rank] if how == "local" else means[0] * shares[0] + means[1] * shares[1]
        expected = expected - change
        off.append(float((weights(model) - expected).abs().max()))
    return max(off)


def scaled_without_a_pass(rank: int, make_optimizer: Any) -> tuple[str, bool, bool]:
    """Rank 1 has no pass in the second step, whose gradients a scaler divides. Whether a pass of a zero loss helps."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    optimizer, scaler = make_optimizer(model.parameters()), torch.amp.GradScaler("cpu")
    connection = ddpcore.Connection(transport="shm", timeout=2.0)
    ddpcore.distribute(model, optimizer, ddpcore.SSGD(), scaler=scaler, connection=connection)
    error = "no error"
    try:
        for step in range(3):
            before = weights(model)
            optimizer.zero_grad()
            if rank == 0 or step != 2:
                scaler.scale((rank == 0 or step != 1) * model(torch.ones(2, 5)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    except Exception as raised:
        error = str(raised)
    kept = rank == 1 and not vars(optimizer).keys().isdisjoint(("grad_scale", "found_inf"))  # a next step takes them
    return error, step == 2, torch.equal(weights(model), before) and not kept


def main() -> None:
    path, rank, _ = join()
    seen: dict[Any, Any] = {"failed call": failed_call(rank), "dropped": dropped_in_an_exchange(rank)}
    seen["checkpointed"] = [checkpointed(rank, again) for again in (False, True)]
    seen["frozen"] = frozen_on_rank_0(rank)
    seen["samples"] = samples_set_once(rank)
    seen["left out"] = [
        samples_after_a_step_left_out(rank, order) for order in ("None, set", "set, None", "zeros, set", "None")
    ]
    seen["second step"] = second_step_without_a_pass(rank)
    for transport in ("shm", "pg"):
        seen["joined", transport] = [joined_averages(rank, transport, samples=samples) for samples in (True, False)]
        dist.barrier()
        seen["all frozen", transport] = all_frozen_on_rank_1(transport, rank)
        dist.barrier()
    for fused, make_optimizer in ((True, FusedSGD), (False, partial(torch.optim.SGD, fused=True))):
        seen["scaled", fused] = scaled_without_a_pass(rank, partial(make_optimizer, lr=0.1))
        dist.barrier()
    for strategy in STRATEGIES:
        seen["checkpoint", strategy] = checkpoint(f"{sys.argv[1]}/dcp", strategy)
    for strategy in STRATEGIES:
        for what in ("parameters", "gradients"):
            seen["moved", strategy, what] = moved_on_rank_0(rank, strategy, what)
            dist.barrier()
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
