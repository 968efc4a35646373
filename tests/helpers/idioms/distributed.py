"""Wrappers of torch, memory that is shared, and what ``distribute`` cannot serve."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from helpers.idioms.run import Run, add, idiom, net, one_step, sgd, start, train

RANKS = ("ranks",)


def _wrapped(run: Run, make: Callable[[], nn.Module]) -> None:
    start(run, make())
    train(run)


class Scripted(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


class Sharing(nn.Linear):
    """Tensors that are views of a parameter."""

    def __init__(self, how: str) -> None:
        super().__init__(5, 3)
        if how == "attribute":
            self.row = self.weight[0].detach()
        elif how == "list":
            self.rows = {"rows": [self.weight.data[:2]]}
        elif how == "buffer":
            self.register_buffer("copied", self.weight.detach())
        elif how == "frozen":
            self.first = nn.Parameter(self.weight.data[0], requires_grad=False)
        else:
            self.storage = torch.zeros(15)
            self.weight = nn.Parameter(self.storage.view(3, 5))


class Buffered(nn.Linear):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__(5, 3)
        self.register_buffer("odd", buffer)


def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", list(range(dist.get_world_size())))


WRAPPED = "the model is wrapped by {}, which averages or shards too: pass the model without it"
OVER = r"parameter 0.weight is sharded or replicated over rank [01] of another learner"
SHARES = "{} shares memory with a trained parameter"
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "ddp": (lambda: DistributedDataParallel(net()), WRAPPED.format("DistributedDataParallel")),
    "ddp_inside": (
        lambda: nn.Sequential(DistributedDataParallel(net())),
        "module 0 is wrapped by DistributedDataParallel",
    ),
    "replicate": (lambda: replicate(net(), device_mesh=mesh()), f"is wrapped by DDP|{OVER}"),
    "fsdp": (
        lambda: FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu")),
        WRAPPED.format("FullyShardedDataParallel"),
    ),
    "fully_shard": (lambda: fully_shard(net(), mesh=mesh()), OVER),
    "jit_script": (lambda: torch.jit.script(net()), "a torch.jit model cannot call a strategy"),
    "jit_trace": (lambda: torch.jit.trace(net(), torch.zeros(1, 5)), "a torch.jit model cannot call a strategy"),
    "meta": (lambda: net().to("meta"), "parameter 0.weight is on the meta device"),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(3)),
        r"parameter 0.weight has no shape yet \(lazy module\): run one forward pass",
    ),
    "view_as_attribute": (lambda: Sharing("attribute"), SHARES.format("row")),
    "view_in_a_list": (lambda: Sharing("list"), SHARES.format("rows")),
    "view_as_buffer": (lambda: nn.Sequential(Sharing("buffer")), SHARES.format("0.copied")),
    "view_as_frozen_parameter": (lambda: Sharing("frozen"), SHARES.format("first")),
    "parameters_of_one_storage": (lambda: Sharing("storage"), SHARES.format("storage")),
    "sparse_buffer": (lambda: Buffered(torch.eye(3).to_sparse()), "buffer odd is sparse coo and cannot be sent"),
    "quantized_buffer": (
        lambda: Buffered(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
        "buffer odd is quantized and cannot be sent",
    ),
    "meta_buffer": (lambda: Buffered(torch.ones(3, device="meta")), "buffer odd is on the meta device"),
    "two_dtypes": (lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3).double()), "parameters have two dtypes"),
    "nothing_to_train": (lambda: net().requires_grad_(False), "the model has no parameter that needs a gradient"),
    "shared_memory_of_two_parameters": (
        lambda: nn.ParameterList([w := torch.zeros(3, 5), w[:1]]),
        "share memory: tie weights by sharing one Parameter",
    ),
}
for name, (make, message) in MODELS.items():
    worlds = RANKS if name in ("ddp", "ddp_inside", "replicate", "fsdp", "fully_shard") else ("ranks", "virtual")
    add(f"refused_{name}", partial(_wrapped, make=make), refused=message, worlds=worlds)


def _optimizer(run: Run, make: Callable[[nn.Module], Any]) -> None:
    model = net()
    run.distribute(model, make(model))
    train(run)


def zero(model: nn.Module) -> Any:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


def post_local(model: nn.Module) -> Any:
    return PostLocalSGDOptimizer(sgd(model), None)


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "zero": (zero, "ZeroRedundancyOptimizer shards the optimizer and sends weights itself"),
    "post_local_sgd": (post_local, "PostLocalSGDOptimizer wraps another optimizer and has no step hooks"),
    "half_of_the_parameters": (lambda m: sgd(m[0]), "parameter 2.weight is not in the optimizer"),
    "foreign_parameters": (
        lambda m: torch.optim.SGD([*m.parameters(), torch.zeros(1, requires_grad=True)], lr=0.1),
        "the optimizer holds parameters that are not in the model",
    ),
    "a_function": (lambda m: lambda: None, "optimizer is a function: pass a torch.optim.Optimizer"),
}
for name, (make_optimizer, message) in OPTIMIZERS.items():
    add(f"refused_optimizer_{name}", partial(_optimizer, make=make_optimizer), refused=message, worlds=RANKS)


@idiom(worlds=RANKS, refused="DistributedDataParallel wraps a model that distribute.. trains")
def ddp_around_the_model_later(run: Run) -> None:
    start(run)
    one_step(run, 0)
    run.model = DistributedDataParallel(run.model)
    train(run, first=1)


@idiom(worlds=RANKS, refused="was added or replaced after distribute")
def fully_shard_later(run: Run) -> None:
    start(run)
    one_step(run, 0)
    fully_shard(run.inner, mesh=mesh())
    train(run, first=1)


@idiom(
    worlds=RANKS, refused="was wrapped by FullyShardedDataParallel|was added or replaced|was replaced after distribute"
)
def fsdp_later(run: Run) -> None:
    start(run)
    one_step(run, 0)
    run.model = FullyShardedDataParallel(run.inner, device_id=torch.device("cpu"))
    train(run, first=1)


@idiom(worlds=RANKS)
def a_ddp_model_that_was_unwrapped(run: Run) -> None:
    wrapped = DistributedDataParallel(net())
    start(run, wrapped.module)
    train(run)


@idiom(worlds=RANKS)
def collectives_of_the_program(run: Run) -> None:
    """The program averages its losses itself."""
    start(run)
    for step in range(4):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        loss = run.loss(run.model(inputs), labels)
        run.backward(loss)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        run.step()
        run.tensors.append(mean)


@idiom(worlds=RANKS)
def shared_memory_before(run: Run) -> None:
    start(run, net().share_memory())
    train(run)


@idiom(worlds=RANKS, refused="the memory of the parameters has moved")
def a_parameter_sent_to_a_process(run: Run) -> None:
    start(run)
    one_step(run, 0)
    ForkingPickler.dumps(next(run.inner.parameters()))  # as a queue of torch.multiprocessing does it
    train(run, first=1)


@idiom(
    worlds=RANKS,
    refused={"ssgd": "the memory of the gradients has moved"},
)
def a_gradient_sent_to_a_process(run: Run) -> None:
    start(run)
    one_step(run, 0)
    next(run.inner.parameters()).grad.share_memory_()  # type: ignore[union-attr]
    train(run, first=1)


@idiom(worlds=RANKS)
def data_loader_with_a_worker(run: Run) -> None:
    """A forked process that inherits the model."""
    start(run)
    inputs, labels = zip(*(run.batch(step) for step in range(4)), strict=True)
    data = TensorDataset(torch.cat(inputs), torch.cat(labels))
    for x, y in DataLoader(data, batch_size=4, num_workers=1):
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(x), y))
        run.step()


@idiom(worlds=RANKS)
def copies_sent_to_a_process(run: Run) -> None:
    start(run)
    for step in range(4):
        one_step(run, step)
        for parameter in run.inner.parameters():
            parameter.detach().clone().share_memory_()


def _with_a_child(run: Run, work: Callable[[Run], Any]) -> None:
    """A process forked in the middle of the loop has a copy of the model, with which it does what it likes."""
    start(run)
    for step in range(4):
        one_step(run, step)
        if step != 1:
            continue
        process = get_context("fork").Process(target=work, args=(run,))
        process.start()
        process.join()
        run.tensors.append(torch.tensor(float(process.exitcode or 0)))


def _reads(run: Run) -> None:
    run.model(torch.ones(2, 5)).sum().backward()


def _changes(run: Run) -> None:
    for parameter in run.inner.parameters():
        parameter.data.zero_()


def _trains(run: Run) -> None:
    for _ in range(3):
        run.optimizer.zero_grad()
        run.model(torch.ones(2, 5)).square().sum().backward()
        run.optimizer.step()
    assert not all(p.grad is None for p in run.inner.parameters())


for what, work in {"reads": _reads, "changes": _changes, "trains": _trains}.items():
    add(f"a_forked_process_{what}_the_model", partial(_with_a_child, work=work), worlds=RANKS)
