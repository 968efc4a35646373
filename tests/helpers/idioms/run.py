"""One idiom, run as a plain loop that averages by the equation of a strategy, or with ``distribute``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import ddpcore
from helpers.connection import connected

L = 2
STEPS = 4
PERIOD = 2
STRATEGIES: dict[str, Callable[[], ddpcore.Strategy]] = {
    "ssgd": ddpcore.SSGD,
    "dpsgd": lambda: ddpcore.DPSGD(ddpcore.Complete()),
    "local_sgd": lambda: ddpcore.LocalSGD(period=PERIOD),
}


class Run:
    """What an idiom uses of ``distribute``. With two learners the average over neighbours is the mean of both.

    Args:
        strategy: a name of ``STRATEGIES``.
        world: ``plain`` (real ranks that average by all-reduce, without ddpcore), ``ranks`` (over shared memory),
            ``pg`` (ranks over gloo) or ``virtual``. There may be one rank, which averages with nobody.
    """

    def __init__(self, strategy: str, world: str) -> None:
        self.strategy, self.world = strategy, world
        self.rank = dist.get_rank() if world != "virtual" else 0
        self.tensors: list[Tensor] = []  # what is compared besides the weights
        self.paused = False
        self._steps = 0

    @property
    def is_plain(self) -> bool:
        return self.world == "plain"

    @property
    def models(self) -> list[Any]:
        """The models of the learners held here: what a loop does to its model, it does to each of them."""
        return list(getattr(self.handle, "models", [self.inner]))

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all models."""
        return [parameter for model in self.models for parameter in model.parameters()]

    def each(self, step: int) -> list[tuple[Any, Tensor]]:
        """Every model with its inputs of a step."""
        inputs = self.batch(step)[0]
        return list(zip(self.models, inputs if self.world == "virtual" else [inputs], strict=True))

    def distribute(self, model: nn.Module, optimizer: Any, **options: Any) -> Any:
        """Returns the model to call. The random numbers of the learners differ from here on."""
        self.inner, self.optimizer, self.handle = model, optimizer, None
        self._members = {id(parameter): parameter for parameter in model.parameters() if parameter.requires_grad}
        self.model: Any = model
        if not self.is_plain:
            if self.world == "virtual":
                options["learners"] = L
            elif self.world == "pg":
                options["transport"] = "pg"
            handle = self.handle = ddpcore.distribute(
                model, optimizer, STRATEGIES[self.strategy](), **connected(**options)
            )
            self.model = handle.model
        torch.default_generator.manual_seed(100 + self.rank)
        return self.model

    def batch(self, step: int, *shape: int) -> tuple[Tensor, Tensor]:
        """Inputs ``[B, 5]`` and labels ``[B]`` of this learner; ``[L, B, 5]`` and ``[L, B]`` for virtual learners."""
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(L, *(shape or (4, 5)), generator=generator)
        labels = torch.randint(3, (L, 4), generator=generator)
        return (inputs, labels) if self.world == "virtual" else (inputs[self.rank], labels[self.rank])

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean loss; for virtual learners the sum of theirs."""
        if self.world == "virtual":
            return sum(F.cross_entropy(o.float(), y) for o, y in zip(outputs, labels, strict=True))  # type: ignore
        return F.cross_entropy(outputs.float(), labels)

    def mean(self, values: Tensor) -> Tensor:
        """The mean of this learner; for virtual learners the sum of their means."""
        return values.flatten(1).mean(dim=1).sum() if self.world == "virtual" else values.mean()

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)
        if self.is_plain and self.strategy == "ssgd" and not self.paused:
            self._average([p.grad for p in self._trained() if p.grad is not None])

    def step(self, call: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer, or ``call`` what steps it."""
        if self.is_plain and self.strategy == "dpsgd":
            self._average(self._trained())
        result = (call or self.optimizer.step)()
        self._steps += 1
        if self.is_plain and self.strategy == "local_sgd" and self._steps % PERIOD == 0:
            self._average(self._trained())
        return result

    def no_sync(self) -> AbstractContextManager[Any]:
        return self._paused() if self.handle is None else self.handle.no_sync()

    def close(self) -> tuple[list[Tensor], list[Tensor]]:
        """The weights of the learners held here and their average, and with both the tensors of the idiom."""
        own = [parameter.detach().clone() for parameter in self._trained()]
        if len(self.models) > 1:
            own = [torch.stack(rows).detach() for rows in zip(*map(self._trained_of, self.models), strict=True)]
        source = self.inner if self.handle is None else self.handle.evaluation_model()
        pairs = zip(_used(source), self.inner.parameters(), strict=True)
        mean = [one for one, parameter in pairs if id(parameter) in self._members]
        if self.handle is None:
            self._average(mean)
        return [*own, *self.tensors], mean

    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self.inner.parameters() if id(parameter) in self._members]

    def _trained_of(self, model: nn.Module) -> list[Tensor]:
        """The parameters of a copy of the model that stand where those of :meth:`_trained` do."""
        pairs = zip(model.parameters(), self.inner.parameters(), strict=True)
        return [parameter for parameter, first in pairs if id(first) in self._members]

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self.paused = True
        yield
        self.paused = False

    @torch.no_grad()
    def _average(self, tensors: list[Tensor]) -> None:
        if not tensors:
            return
        flat = torch.cat([tensor.detach().float().flatten() for tensor in tensors])
        dist.all_reduce(flat)  # one call, because ranks wait for each other in each
        mean = (flat / dist.get_world_size()).split([tensor.numel() for tensor in tensors])
        for tensor, values in zip(tensors, mean, strict=True):
            tensor.copy_(values.view_as(tensor))


def _used(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters, without what ``torch.nn.utils.prune`` masks: a mean is that of these."""
    hooks = [(module, hook) for module in model.modules() for hook in module._forward_pre_hooks.values()]
    pruned = [(one, hook._tensor_name) for one, hook in hooks if isinstance(hook, prune.BasePruningMethod)]
    masks = {id(getattr(one, f"{name}_orig")): getattr(one, f"{name}_mask") for one, name in pruned}
    values = [(parameter.detach().clone(), masks.get(id(parameter))) for parameter in model.parameters()]
    return [value if mask is None else value * mask for value, mask in values]


@dataclass(frozen=True)
class Idiom:
    """An idiom: a function that trains with a :class:`Run`.

    Attributes:
        refused: what the error must say, by strategy; ``""`` is the key of all others. No entry: no error.
        worlds: where it runs.
        digits: of the comparison, relative to the largest weight.
    """

    name: str
    train: Callable[[Run], None]
    refused: dict[str, str] = field(default_factory=dict)
    worlds: tuple[str, ...] = ("ranks", "virtual")
    digits: int = 6

    def message(self, strategy: str) -> str | None:
        return self.refused.get(strategy, self.refused.get(""))


IDIOMS: dict[str, Idiom] = {}


def add(name: str, train: Callable[[Run], None], **options: Any) -> None:
    """Add an idiom to the table."""
    refused = options.pop("refused", {})
    refused = {"": refused} if isinstance(refused, str) else refused
    assert name not in IDIOMS, f"two idioms are called {name}"
    IDIOMS[name] = Idiom(name, train, refused, **options)


def idiom(**options: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Add the function to the table under its name."""

    def decorate(train: Callable[[Run], None]) -> Callable[[Run], None]:
        add(train.__name__, train, **options)
        return train

    return decorate


def execute(one: Idiom, strategy: str, world: str) -> dict[str, Any]:
    """The result of a run, or the first line of its error."""
    torch.default_generator.manual_seed(3)  # as helpers.seeds
    run = Run(strategy, world)
    if world == "plain" and one.message(strategy) is not None and dist.get_world_size() > 1:
        return {}  # there is nothing to compare
    try:
        one.train(run)
        weights, mean = run.close()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    return {"weights": weights, "mean": mean}


# ---- the usual parts of an idiom ----


def net() -> nn.Sequential:
    torch.default_generator.manual_seed(3)  # as helpers.seeds
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def start(run: Run, model: nn.Module | None = None, **options: Any) -> Any:
    """Distribute a model and torch's SGD. Returns the model to call."""
    model = net() if model is None else model
    return run.distribute(model, sgd(model), **options)


def one_step(run: Run, step: int, *shape: int) -> None:
    inputs, labels = run.batch(step, *shape)
    run.optimizer.zero_grad()
    run.backward(run.loss(run.model(inputs), labels))
    run.step()


def train(run: Run, *shape: int, steps: int = STEPS, first: int = 0) -> None:
    """The usual loop."""
    for step in range(first, first + steps):
        one_step(run, step, *shape)
