"""A small training run that has the same lines for real ranks and for virtual learners."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from ddpcore import Connection, Distributed, Strategy, distribute
from ddpcore.optim import FusedSGD

STEPS = 6
BATCH = 4  # samples of a learner in a step
MAX_LEARNERS = 64

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
fused_sgd: MakeOptimizer = partial(FusedSGD, lr=0.3, momentum=0.9, weight_decay=0.01)
"""The default optimizer of the small run."""
torch_sgd: MakeOptimizer = partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.01)
"""The same rule by ``torch.optim.SGD``."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """How a small run differs from the plain one."""

    name: str = "plain"  #: for error messages
    #: makes the optimizer of the parameters that it is given. Ranks import it by its name.
    make_optimizer: MakeOptimizer = fused_sgd
    accumulation: int = 1  #: backward passes in a step; 1, 2 or 4
    averages_each: bool = False  #: whether each of them averages; else all but the last are in ``no_sync()``
    freeze: bool = False  #: whether the bias of the first layer is frozen
    batch_norm: bool = False  #: whether the model has running statistics
    #: number of steps after which everything is made again and goes on from the saved state; None does not
    resume_at: int | None = None
    bucket_bytes: int = 128  #: size of a bucket of averaged gradients: there are several, cut inside tensors
    lr_decay: float = 1.0  #: factor of the learning rate after each step


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the learners of this process end with."""

    weights: Tensor  #: of all parameters and of the running statistics, ``[L, x]``
    num_weights: int  #: columns of ``weights`` that are parameters
    losses: Tensor  #: of the last backward pass of each step, ``[steps, L]``
    average: Tensor  #: parameters and running statistics of ``evaluation_model()``, ``[x]``
    consensus: float  #: ``consensus_distance()``
    shares: Tensor | None  #: how much each learner counts in an average; None where all count alike
    bytes_sent: int  #: of one learner


def batch(step: int, num_learners: int) -> tuple[Tensor, Tensor]:
    """Inputs ``[n, 4, 5]`` and labels ``[n, 4]``: another mini-batch for each learner at each step."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(MAX_LEARNERS, BATCH, 5, generator=generator)
    return inputs[:num_learners], torch.randint(3, (MAX_LEARNERS, BATCH), generator=generator)[:num_learners]


class SmallRun:
    """A model of 66 weights in training.

    Args:
        mesh: instead of a group: ``learners`` and ``shards``, so that several ranks are one learner.
        arguments: of :func:`ddpcore.distribute`; the connection gets the buckets of the scenario. With a ``group`` or a
            mesh and without ``learners`` each rank is one learner. Without both all learners are virtual.
    """

    def __init__(
        self,
        make_strategy: Callable[[], Strategy],
        num_learners: int,
        scenario: Scenario,
        *,
        mesh: DeviceMesh | None = None,
        device: torch.device | str = "cpu",
        **arguments: Any,
    ) -> None:
        self._make_strategy, self._scenario, self._num_learners = make_strategy, scenario, num_learners
        self._mesh, self._device = mesh, device
        group = arguments.get("group") if mesh is None else mesh.get_group("learners")
        self._rank = 0 if group is None else dist.get_rank(group)
        learners = num_learners if group is None else arguments.get("learners")
        self._is_real, rows = learners is None, learners or 1
        self._held = range(self._rank * rows, (self._rank + 1) * rows)
        size, connection = scenario.bucket_bytes, arguments.get("connection") or Connection()
        self._arguments = {
            **arguments,
            **({} if mesh is None else {"group": mesh["learners"]}),
            "learners": learners,
            "vectorize": None if self._is_real else False,
            "connection": replace(connection, bucket_bytes=size, first_bucket_bytes=size // 2),
        }

    def run(self, num_steps: int = STEPS) -> Result:
        """Train from the start."""
        model, optimizer, handle = self._start(seed=17 + self._rank)  # all must start from learner 0's weights
        losses = []
        for step in range(num_steps):
            if step == self._scenario.resume_at:
                states = (dict(model.state_dict()), optimizer.state_dict(), handle.state_dict())
                saved = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x), states)
                model, optimizer, handle = self._start(seed=99)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                handle.load_state_dict(saved[2])
            losses.append(self._step(step, optimizer, handle))
        return self._result(handle, torch.stack(losses))

    def _start(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Distributed]:
        torch.manual_seed(seed)
        middle = (nn.BatchNorm1d(7),) if self._scenario.batch_norm else ()
        model = nn.Sequential(nn.Linear(5, 7), *middle, nn.Tanh(), nn.Linear(7, 3)).to(self._device)
        model[0].bias.requires_grad_(not self._scenario.freeze)
        if self._mesh is not None:
            from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  its import takes long

            for module in (model[0], model[-1], model):
                fully_shard(module, mesh=self._mesh["shards"])
        optimizer = self._scenario.make_optimizer([p for p in model.parameters() if p.requires_grad])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*there is one learner")  # as intended here
            return model, optimizer, distribute(model, optimizer, self._make_strategy(), **self._arguments)

    def _step(self, step: int, optimizer: torch.optim.Optimizer, handle: Distributed) -> Tensor:
        """One step; the losses ``[L]`` of its last backward pass."""
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if handle.counts_samples:
            handle.num_samples = [1 + learner for learner in self._held]
        size = BATCH // self._scenario.accumulation
        for begin in range(0, BATCH, size):
            with nullcontext() if begin + size == BATCH or self._scenario.averages_each else handle.no_sync():
                inputs, labels = (
                    x[self._held[0] : self._held[-1] + 1, begin : begin + size].to(self._device)
                    for x in batch(step, self._num_learners)
                )
                if self._mesh is not None:
                    num, own = self._mesh.size(1), self._mesh.get_local_rank("shards")
                    inputs, labels = (x.chunk(num, dim=1)[own] for x in (inputs, labels))
                outputs = handle.model(inputs[0])[None] if self._is_real else handle.model(inputs)
                losses = torch.stack([F.cross_entropy(*pair) for pair in zip(outputs, labels, strict=True)])
                losses.sum().backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= self._scenario.lr_decay
        losses = losses.detach()
        if self._mesh is not None:
            dist.all_reduce(losses, group=self._mesh.get_group("shards"))
            losses /= self._mesh.size(1)
        return losses

    def _result(self, handle: Distributed, losses: Tensor) -> Result:
        bytes_sent = handle.comm.bytes_sent
        evaluation = handle.evaluation_model()
        return Result(
            weights=torch.stack([_row_of(model) for model in handle.models]).cpu(),
            num_weights=sum(parameter.numel() for parameter in evaluation.parameters()),
            losses=losses.cpu(),
            average=_row_of(evaluation).cpu(),
            consensus=handle.consensus_distance(),
            shares=None if handle.learner is None else handle.learner.shares,
            bytes_sent=bytes_sent,
        )


def _row_of(model: nn.Module) -> Tensor:
    """Parameters, and then buffers of floating-point numbers. A learner of several ranks gathers them."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    named: dict[str, Any] = {**(dict(model.named_parameters()) or model.state_dict()), **buffers}
    wholes = (one.full_tensor() if hasattr(one, "full_tensor") else one for one in named.values())
    return torch.cat([whole.detach().flatten() for whole in wholes])
