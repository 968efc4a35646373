"""Ranks of ``tests/integrations/test_accelerate.py``: a loop of Accelerate with its DDP and with ddpcore."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, set_seed
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddpcore
from ddpcore.integrations.accelerate import load_rank_file, prepare, save_rank_file
from ddpcore.optim import FusedSGD
from helpers import ranks


def train(
    epochs: Any,
    strategy: Any,
    *,
    resume: Any = None,
    save: Any = None,
    safe: bool = True,
    alone: Any = None,
    scaler: Any = None,
    **more: Any,
) -> Any:
    """Returns what a loop trained, and its losses. ``alone`` is a folder for the model alone.

    The gradient ``scaler`` of rank 1 meets an overflow in the first epoch.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **more)
    accelerator.scaler = scaler  # Accelerate itself makes one on a GPU only
    set_seed(5)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    inputs = torch.randn(96, 6)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), batch_size=8)
    kind = torch.optim.SGD if strategy is None else FusedSGD
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    set_seed(5 + accelerator.process_index)
    handle = None
    if strategy is None:
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    else:
        handle, model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, strategy, loader, schedule)
    if resume:
        accelerator.load_state(str(resume))
    losses = []
    for epoch in epochs:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                if scaler is not None and epoch == 0 and accelerator.process_index == 1:
                    loss = loss * 1e38
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    if save:
        accelerator.save_state(str(save), safe_serialization=safe)
    if alone:
        accelerator.save_model(model, alone)
        accelerator.wait_for_everyone()
    return handle, accelerator.unwrap_model(model), losses


def triggered(strategy: Any) -> Any:
    """The weights that a loop trains whose last backward pass begins inside ``no_sync``, and asks for the average."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    set_seed(5)
    model: Any = nn.Linear(6, 3)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if strategy is None:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        _, model, optimizer = prepare(accelerator, model, optimizer, strategy)
    set_seed(5 + accelerator.process_index)
    for _ in range(3):
        with accelerator.no_sync(model):
            first, last = (model(torch.randn(4, 6)).square().mean() for _ in range(2))
            accelerator.backward(first)
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(last)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def flat_file(folder: Path) -> torch.Tensor:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return flat(model)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def refused(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def prepared_before() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    prepare(accelerator, model, FusedSGD(model.parameters(), lr=0.1), ddpcore.DPSGD())


def wrapped_by_accelerate() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    accelerator.prepare(model)
    prepare(accelerator, model, optimizer, ddpcore.DPSGD())


def wrapped_before() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    prepare(accelerator, nn.parallel.DistributedDataParallel(model), optimizer, ddpcore.DPSGD())


def sharded() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    accelerator.state.distributed_type = DistributedType.FSDP
    try:
        prepare(accelerator, model, FusedSGD(model.parameters(), lr=0.1), ddpcore.DPSGD())
    finally:
        accelerator.state.distributed_type = DistributedType.MULTI_CPU


def of_a_part() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    group, _ = dist.new_subgroups(1)
    prepare(accelerator, model, FusedSGD(model.parameters(), lr=0.1), ddpcore.DPSGD(), group=group)


def check(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    _, ddp, losses = train(range(3), None)
    _, ssgd, others = train(range(3), ddpcore.SSGD())
    found["ssgd"] = {"weights": (flat(ddp), flat(ssgd)), "losses": (losses, others)}
    for precision in ("no", "bf16"):
        options = {"mixed_precision": precision}
        handle, whole, losses = train(range(4), ddpcore.DPSGD(), **options)
        half_handle, _, first = train(range(2), ddpcore.DPSGD(), save=folder / precision, **options)
        half = flat(half_handle.evaluation_model())
        _, later, second = train(range(2, 4), ddpcore.DPSGD(), resume=folder / precision, **options)
        found[precision] = {
            "weights": (flat(whole), flat(later)),
            "losses": (losses, first + second),
            "file": (half, flat_file(folder / precision)),
            "distance": handle.consensus_distance(),
        }
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in range(3)]
    _, whole, _ = train(range(3), ddpcore.DPSGD(), scaler=scalers[0])
    train(range(2), ddpcore.DPSGD(), save=folder / "scaler", scaler=scalers[1])
    _, later, _ = train(range(2, 3), ddpcore.DPSGD(), resume=folder / "scaler", scaler=scalers[2])
    found["scaler"] = (flat(whole), flat(later), scalers[0].state_dict(), scalers[2].state_dict())
    train(range(1), None, save=folder / "ddp")
    found["moves"] = [
        train(range(1, 3), ddpcore.DPSGD(), resume=folder / "ddp", save=folder / "begun")[2],
        train(range(3, 4), None, resume=folder / "begun")[2],
    ]
    _, plain, _ = train(range(1), None, save=folder / "pickled", safe=False)
    _, loaded, _ = train(range(0), ddpcore.DPSGD(), resume=folder / "pickled")
    found["pickled"] = (flat(plain), flat(loaded))
    found["triggered"] = (triggered(None), triggered(ddpcore.SSGD()))
    handle, _, _ = train(range(1), ddpcore.DPSGD(), alone=folder / "model")
    found["model"] = (flat(handle.evaluation_model()), flat_file(folder / "model"))
    found["refused"] = {
        "prepared": refused(prepared_before),
        "prepared with DDP": refused(wrapped_by_accelerate),
        "wrapped": refused(wrapped_before),
        "fsdp": refused(sharded),
        "another": refused(lambda: train(range(1), ddpcore.SSGD(), resume=folder / "no")),
        "part": refused(of_a_part),
    }
    train(range(1), None, save=folder / "begun")
    found["refused"]["over"] = refused(lambda: train(range(0), ddpcore.DPSGD(), resume=folder / "begun"))
    return found


def check_death(folder: Path, path: Path, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of four ranks, with and without rank 1: what each had when it saved its file, and what it has loaded."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    connection = ddpcore.Connection(on_failure="shrink")
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), connection=connection)
    found = []
    for name in ("whole", "left"):
        for step in range(4):
            if step == 2:
                save_rank_file(handle, folder / name)
                had = flat(model)
            (100.0 * rank * model(torch.ones(1, 4))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.comm.gather(torch.zeros(1, 1))  # all have saved
        load_rank_file(handle, folder / name, None)
        found.append((had, flat(model)))
        if rank == 1:
            torch.save(found, path)
            os._exit(0)
    return found


def check_alone(folder: Path) -> dict[str, Any]:
    """One process goes on with what :func:`check` has saved, and with what it has saved itself."""
    _, begun, _ = train(range(0), ddpcore.DPSGD(), resume=folder / "no")
    handle, _, losses = train(range(2, 4), ddpcore.DPSGD(), resume=folder / "no")
    shutil.copytree(folder / "no", folder / "again")  # files of two ranks
    _, own, _ = train(range(2, 4), ddpcore.DPSGD(), resume=folder / "no", save=folder / "again")
    _, again, _ = train(range(0), ddpcore.DPSGD(), resume=folder / "again")
    _, whole, _ = train(range(3), ddpcore.DPSGD())
    train(range(2), ddpcore.DPSGD(), save=folder / "alone")
    _, later, _ = train(range(2, 3), ddpcore.DPSGD(), resume=folder / "alone")
    return {
        "begun": flat(begun),
        "again": (flat(own), flat(again)),
        "losses": losses,
        "step": handle.learner.step,
        "resumed": (flat(whole), flat(later)),
    }


def main() -> None:
    if sys.argv[5:] == ["alone"]:
        torch.save(check_alone(Path(sys.argv[4])), Path(sys.argv[1]) / "0.pt")
        return
    path, rank, world_size = ranks.join()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    if sys.argv[5:] == ["dies"]:
        torch.save(check_death(Path(sys.argv[4]), path, rank), path)
        time.sleep(0.5)  # a rank that ends must not be taken for a death
        return
    torch.save(check(Path(sys.argv[4])), path)


if __name__ == "__main__":
    main()
