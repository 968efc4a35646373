"""Which parameters take part changes: heads that the loop chooses, unfreezing, and passes that a learner leaves out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.idioms.run import Run, add, net, one_step, sgd


class Parts(nn.Module):
    """A trunk and two heads, of which the loop chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(7, 3)
        self.heads = "first"

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return sum(getattr(self, head)(x) for head in self.heads.split("+"))  # type: ignore[no-any-return]


PARTS: dict[str, Callable[[int, int], str]] = {
    "the_first_step_only": lambda step, rank: "first+second" if step == 0 else "first",
    "from_step_two_on": lambda step, rank: "first" if step < 2 else "first+second",
    "every_other_step": lambda step, rank: "first" if step % 2 else "second",
    "one_learner_alone": lambda step, rank: "first+second" if rank == 1 else "first",
    "one_learner_alone_in_one_step": lambda step, rank: "first+second" if rank == 0 and step == 1 else "first",
    "each_learner_another": lambda step, rank: "first" if rank == 0 else "second",
}


def _takes_part(run: Run, of: Callable[[int, int], str]) -> None:
    """With momentum and decay, which would move a parameter that has a gradient of zero."""
    model = Parts()
    run.distribute(model, sgd(model, weight_decay=0.1))
    for step in range(5):
        for row, one in enumerate(run.models):
            one.heads = of(step, row if run.world == "virtual" else run.rank)
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        loss = run.loss(run.model(inputs), labels)
        if run.is_plain and run.strategy == "ssgd":  # as DDP does with find_unused_parameters
            loss.backward()
            _average_used(model)
        else:
            run.backward(loss)
        run.step()


def _average_used(model: nn.Module) -> None:
    for parameter in model.parameters():
        used = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(used)
        if used:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad)
            parameter.grad = grad / dist.get_world_size()


def _without_a_pass(run: Run, places: tuple[tuple[int, int], ...]) -> None:
    """A learner has no backward pass in a step, such as for an empty batch: the average has its zeros, and is clipped.

    In every second step it has no forward pass either.
    """
    model = net()
    run.distribute(model, sgd(model, weight_decay=0.1))
    for step in range(5):
        run.optimizer.zero_grad(set_to_none=step != 3)
        losses = [
            nn.functional.cross_entropy(one(inputs), torch.zeros(4, dtype=torch.long))
            for row, (one, inputs) in enumerate(run.each(step))
            if ((row if run.world == "virtual" else run.rank), step) not in places
        ]
        if not losses and step % 2 == 0:
            with torch.no_grad() if run.is_plain else nullcontext():
                run.inner(torch.zeros(4, 5))
        if run.is_plain and run.strategy == "ssgd":
            for loss in losses:
                loss.backward()
            _average_used(model)
        elif losses:
            sum(losses).backward()  # type: ignore[union-attr]
        if run.is_plain:
            for one in run.models:
                nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        else:
            run.handle.clip_grad_norm_(0.1)
        run.step()


for where, places in {
    "one_learner": ((1, 2),),
    "the_first_step": ((0, 0),),
    "all_learners": ((0, 1), (1, 1), (0, 2), (1, 2)),
    "both_in_turn": ((0, 1), (1, 3)),
}.items():
    worlds = ("ranks", "virtual") if where == "all_learners" else ("ranks",)
    add(f"no_backward_pass_of_{where}", partial(_without_a_pass, places=places), worlds=worlds)

for part, of in PARTS.items():
    add(f"a_head_takes_part_in_{part}", partial(_takes_part, of=of))


def _frozen_apart(run: Run) -> None:
    """At the end each learner has frozen another layer, which changes nothing about the average of the weights."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    run.distribute(model, sgd(model))
    for step in range(5):  # after an odd number of steps learners differ under local SGD, too
        one_step(run, step)
    for row, one in enumerate(run.models):
        one[0 if (row if run.world == "virtual" else run.rank) else 2].requires_grad_(False)


add("each_learner_has_frozen_another_layer", _frozen_apart)


def _unfrozen(run: Run, begin: int) -> None:
    """Gradual unfreezing: frozen after ``distribute``, then trained."""
    model = Parts()
    model.heads = "first+second"
    run.distribute(model, sgd(model, weight_decay=0.1))
    for one in run.models:
        one.trunk.requires_grad_(False)
    for step in range(5):
        if step == begin:
            for one in run.models:
                one.trunk.requires_grad_(True)
        one_step(run, step)


for begin in (1, 3):
    add(f"unfrozen_in_step_{begin}", partial(_unfrozen, begin=begin))
