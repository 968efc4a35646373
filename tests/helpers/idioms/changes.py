"""What a loop changes in the middle of a step, or on one rank alone: kinds of changes x places x optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.optim import FusedAdamW, FusedLAMB, FusedSGD, Muon
from helpers.idioms.run import STEPS, Run, add, net, start, train

RANKS = ("ranks",)
Model = Any


# ---- weights, at every place of a step ----


def _by_data(parameter: Tensor) -> None:
    parameter.data.mul_(0.9)


def _by_a_copy(parameter: Tensor) -> None:
    parameter.data.copy_(parameter.data.clamp(-0.05, 0.05))


def _by_numpy(parameter: Tensor) -> None:
    values = parameter.detach().numpy()
    values *= 0.9


def _without_gradients(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(0.9)


WAYS: dict[str, Callable[[Tensor], None]] = {
    "by_data": _by_data,
    "by_a_copy": _by_a_copy,
    "by_numpy": _by_numpy,
    "without_gradients": _without_gradients,
}


class Bounded(nn.Module):
    """A model that changes a weight of its own in each forward pass."""

    def __init__(self, change: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.body, self.change = net(), change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.body[0].weight)
        result: Tensor = self.body(x)
        return result


def _changed(run: Run, change: Callable[[Tensor], None], place: str) -> None:
    start(run, Bounded(change) if place == "forward" else None)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        for parameter in run.parameters() if place == "before_step" else ():
            change(parameter)
        run.step()
        for parameter in run.parameters() if place == "after_step" else ():
            change(parameter)


def _after_our_hook(run: Run, kind: str, change: Callable[[Tensor], None]) -> None:
    """A hook of the optimizer that runs after the average finds averaged weights, whatever optimizer it is of."""
    model = net()
    run.distribute(model, KINDS[kind](run, model))
    run.optimizer.register_step_pre_hook(lambda *_: [change(one) for one in run.parameters()] and None)
    train(run)


def _in_a_subclass(run: Run, base: Any, change: Callable[[Tensor], None]) -> None:
    """So does the step of a subclass before it calls that of its base class."""

    class Changes(torch.optim.SGD if run.is_plain else base):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    change(parameter)
            return super().step(closure)

    model = net()
    run.distribute(model, Changes(model.parameters(), lr=0.1, momentum=0.9))
    train(run)


MIDDLE = {"dpsgd": "weights were changed between a forward pass and the next step"}  # while neighbours read them
for how, change in WAYS.items():
    for place in ("before_step", "after_step", "forward"):
        add(
            f"weights_changed_{place}_{how}",
            partial(_changed, change=change, place=place),
            refused={} if place == "after_step" else MIDDLE,
            worlds=("ranks", "virtual") if place == "after_step" else RANKS,
        )


# ---- groups and gradients, with every kind of optimizer ----


def _muon(model: Model) -> Muon:
    own = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return Muon([{"params": own, "rule": "muon"}, {"params": rest, "rule": "adamw"}], lr=0.02)


def _pair(plain: Any, fused: Any, **options: Any) -> Callable[[Run, Model], torch.optim.Optimizer]:
    """The plain loop has torch's optimizer."""
    return lambda run, model: (plain if run.is_plain else fused)(model.parameters(), **options)


KINDS: dict[str, Callable[[Run, Model], torch.optim.Optimizer]] = {
    "sgd": _pair(torch.optim.SGD, torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": _pair(torch.optim.AdamW, torch.optim.AdamW, lr=0.01),
    "fused_sgd": _pair(torch.optim.SGD, FusedSGD, lr=0.1, momentum=0.9),
    "fused_adamw": _pair(torch.optim.AdamW, FusedAdamW, lr=0.01, weight_decay=0.01),
    "fused_lamb": _pair(FusedLAMB, FusedLAMB, lr=0.01),
    "muon": lambda run, model: _muon(model),
}


def _moved_to_a_group(run: Run, kind: str, without: tuple[int, ...]) -> None:
    """Parameters that get a learning rate of their own in the middle, and no gradient in some steps."""
    model = net()
    run.distribute(model, KINDS[kind](run, model))
    train(run, steps=2)
    moved = [one[2].bias for one in run.models]
    group = next(one for one in run.optimizer.param_groups if any(p is moved[0] for p in one["params"]))
    group["params"] = [p for p in group["params"] if all(p is not other for other in moved)]
    run.optimizer.add_param_group({**group, "params": moved, "lr": 0.003})
    for step in range(2, 7):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        for parameter in moved if step in without else ():
            parameter.grad = None
        run.step()


for kind in KINDS:
    add(f"parameters_moved_to_a_new_group_{kind}", partial(_moved_to_a_group, kind=kind, without=()))
    add(f"parameters_moved_and_left_out_{kind}", partial(_moved_to_a_group, kind=kind, without=(3, 5)))


def _one_alone(run: Run, kind: str, change: Callable[[Run], Any]) -> None:
    """Rank 0 alone changes its gradients after the backward pass of one step."""
    model = net()
    run.distribute(model, KINDS[kind](run, model))
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        if run.rank == 0 and step == 2:
            change(run)
        run.step()


def _noise(run: Run) -> None:
    for parameter in run.parameters():
        parameter.grad.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))  # type: ignore


ALONE: dict[str, Callable[[Run], Any]] = {
    "clips": lambda run: nn.utils.clip_grad_norm_(run.parameters(), 0.01),
    "adds_noise": _noise,
    "removes_gradients": lambda run: run.optimizer.zero_grad(),
}
for kind in ("sgd", "fused_adamw", "muon"):
    apart = "is not that of learner 0, and Muon divides" if kind == "muon" else "weights of learner 1 differ from those"
    for what, change in ALONE.items():
        add(
            f"one_rank_alone_{what}_{kind}",
            partial(_one_alone, kind=kind, change=change),
            refused={"ssgd": "came to operation" if what == "removes_gradients" else apart},
            worlds=RANKS,
        )


def _leaves_out_a_step(run: Run, kind: str) -> None:
    model = net()
    run.distribute(model, KINDS[kind](run, model))
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        if run.rank == 0 or step != 1:
            run.step()


for kind in ("sgd", "muon"):
    leaves_out = partial(_leaves_out_a_step, kind=kind)
    add(f"one_rank_leaves_out_a_step_{kind}", leaves_out, worlds=RANKS, refused="came to operation")


def _sets(run: Run, change: Callable[[Run], Any]) -> None:
    start(run)
    train(run, steps=2)
    if run.rank == 0:
        change(run)
    train(run, first=2)


OPTIONS: dict[str, tuple[Callable[[Run], Any], str]] = {
    "no_number": (
        lambda run: run.optimizer.param_groups[0].update(foreach=False),
        "foreach of group 0 is not the same on learner 0 and on learner 1",
    ),
    "another_group": (
        lambda run: run.optimizer.add_param_group({"params": [torch.zeros(2)]}),
        r"the optimizer has [0-9]+ options in its groups on learner 0 and [0-9]+ on learner 1",
    ),
}
for what, (change, message) in OPTIONS.items():
    add(f"one_rank_has_{what}", partial(_sets, change=change), refused={"ssgd": message}, worlds=RANKS)


def _steps_inside_no_sync(run: Run) -> None:
    """Whole steps without an average: each learner steps along its own gradients."""
    start(run)
    with run.no_sync():
        train(run, steps=3)


add("steps_inside_no_sync", _steps_inside_no_sync)

for how, change in [("by_data", _by_data), ("without_gradients", _without_gradients)]:
    for kind in KINDS:
        add(f"weights_changed_step_hook_{how}_{kind}", partial(_after_our_hook, kind=kind, change=change))
    for base in (torch.optim.SGD, FusedSGD):
        name = f"weights_changed_subclass_{how}_{base.__name__}"
        add(name, partial(_in_a_subclass, base=base, change=change))
