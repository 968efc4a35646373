"""Optimizers of torch and of ddpcore, their options, and schedules of the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from helpers.idioms.run import STEPS, Run, add, idiom, net, one_step, sgd, start, train

O = torch.optim  # noqa: E741
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd_plain": partial(O.SGD, lr=0.1),
    "sgd_momentum": partial(O.SGD, lr=0.1, momentum=0.9),
    "sgd_nesterov": partial(O.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_dampening": partial(O.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "sgd_maximize": partial(O.SGD, lr=0.01, maximize=True),
    "sgd_foreach": partial(O.SGD, lr=0.1, momentum=0.9, foreach=True),
    "sgd_for_loop": partial(O.SGD, lr=0.1, momentum=0.9, foreach=False),
    "sgd_fused": partial(O.SGD, lr=0.1, momentum=0.9, fused=True),
    "sgd_tensor_lr": lambda p: O.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "adam": partial(O.Adam, lr=0.01),
    "adam_amsgrad": partial(O.Adam, lr=0.01, amsgrad=True, foreach=True),
    "adam_fused": partial(O.Adam, lr=0.01, fused=True),
    "adamw": partial(O.AdamW, lr=0.01),
    "adamw_fused": partial(O.AdamW, lr=0.01, fused=True),
    "adagrad": partial(O.Adagrad, lr=0.1),
    "adagrad_fused": partial(O.Adagrad, lr=0.1, fused=True),
    "adadelta": partial(O.Adadelta, lr=1.0),
    "adamax": partial(O.Adamax, lr=0.01),
    "nadam": partial(O.NAdam, lr=0.01),
    "radam": partial(O.RAdam, lr=0.01),
    "rmsprop": partial(O.RMSprop, lr=0.01, momentum=0.9),
    "rmsprop_centered": partial(O.RMSprop, lr=0.01, centered=True),
    "asgd": partial(O.ASGD, lr=0.1),
    "adafactor": partial(O.Adafactor, lr=0.01),
    "fused_sgd": partial(FusedSGD, lr=0.1, momentum=0.9, nesterov=True),
    "fused_sgd_max_grad_norm": partial(FusedSGD, lr=0.1, momentum=0.9, max_grad_norm=0.1),
    "fused_adamw": partial(FusedAdamW, lr=0.01),
    "fused_lars": partial(FusedLARS, lr=0.1, momentum=0.9),
    "fused_lamb": partial(FusedLAMB, lr=0.01),
}


def train_with(run: Run, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = net()
    run.distribute(model, make(model.parameters()))
    train(run)


for name, make in OPTIMIZERS.items():
    add(f"optimizer_{name}", partial(train_with, make=make), digits=6 if "sgd" in name else 4)


@idiom(refused={"dpsgd": "takes no closure"}, worlds=("ranks",))
def optimizer_lbfgs(run: Run) -> None:
    """The loss of a learner is not that of the others, so the line search is left out."""
    model = net()
    run.distribute(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2))
    for step in range(2):
        inputs, labels = run.batch(step)

        def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            run.optimizer.zero_grad()
            loss = run.loss(run.model(inputs), labels)
            run.backward(loss)
            return loss.detach() * 0 + 1  # equal on all learners

        run.step(partial(run.optimizer.step, closure))


def _steps_by_closure(run: Run) -> None:
    for step in range(STEPS):
        inputs, labels = run.batch(step)

        def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            run.optimizer.zero_grad()
            loss = run.loss(run.model(inputs), labels)
            run.backward(loss)
            return loss

        run.step(partial(run.optimizer.step, closure))


@idiom(refused={"dpsgd": "takes no closure"})
def closure_of_sgd(run: Run) -> None:
    start(run)
    _steps_by_closure(run)


class FourTimes(torch.optim.SGD):
    """Calls its closure at four places, as LBFGS does."""

    def step(self, closure: Any = None) -> Any:
        for _ in range(4):
            loss = closure()
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.sub_(0.1 * parameter.grad)
        return loss


def _closure_at_four_places(run: Run, vectorized: bool) -> None:
    model = net()
    options = {"vectorize": vectorized} if run.world == "virtual" else {}
    run.distribute(model, FourTimes(model.parameters(), lr=0.1), **options)
    _steps_by_closure(run)


for vectorized in (True, False):
    add(
        f"a_closure_at_four_places_{'together' if vectorized else 'in_turn'}",
        partial(_closure_at_four_places, vectorized=vectorized),
        refused={"dpsgd": "takes no closure"},
    )


class CallsSuper(torch.optim.SGD):
    """Its hooks run in this ``step`` and again in that of the base class."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        return super().step(closure)


class FusedCallsSuper(FusedSGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class CallsSuperTwice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step()
        return super().step()


for cls in (CallsSuper, FusedCallsSuper, CallsSuperTwice):

    def train_subclass(run: Run, cls: Any) -> None:
        torch.optim.SGD(
            [torch.zeros(1, requires_grad=True)], lr=0.1
        )  # torch wraps the step of a class at its first use
        model = net()
        run.distribute(model, cls(model.parameters(), lr=0.1, momentum=0.9))
        train(run)

    add(f"subclass_{cls.__name__}", partial(train_subclass, cls=cls))


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, and is one itself: slow weights every second step (Zhang et al. 2019)."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], dict(base.defaults))
        self.param_groups = base.param_groups
        self.base, self.count = base, 0
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                slow += 0.5 * (parameter - slow)
                parameter.copy_(slow)


@idiom(worlds=("ranks",))
def wrapper_distributed(run: Run) -> None:
    """distribute() gets the outer optimizer."""
    model = net()
    run.distribute(model, Lookahead(sgd(model)))
    train(run)


@idiom(worlds=("ranks",))
def wrapper_around_the_distributed(run: Run) -> None:
    """distribute() gets the inner optimizer. Its average comes after its step, before that of the outer one."""
    model = net()
    inner = sgd(model)
    run.distribute(model, inner)
    outer, step_inner = Lookahead(inner), inner.step
    if run.is_plain:
        inner.step = lambda: run.step(step_inner)  # type: ignore[method-assign, assignment, return-value]
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        inner.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        outer.step()


class NoSuper(torch.optim.Optimizer):
    """Wraps an optimizer without a call of ``Optimizer.__init__``, as several libraries do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state
        self.defaults = base.defaults

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@idiom(refused="NoSuper wraps another optimizer and has no step hooks: pass the optimizer that it wraps")
def wrapper_without_hooks(run: Run) -> None:
    model = net()
    run.distribute(model, NoSuper(sgd(model)))
    train(run)


@idiom(refused="optimizer is a StepLR: pass a torch.optim.Optimizer")
def scheduler_in_the_place_of_an_optimizer(run: Run) -> None:
    model = net()
    scheduler = schedules.StepLR(sgd(model), 2)
    run.distribute(model, scheduler)
    if run.is_plain:
        run.optimizer = scheduler.optimizer
    train(run)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization (Foret et al. 2021), with two passes a step by an inner optimizer."""

    def __init__(self, params: Any, base: Any, **options: Any) -> None:
        super().__init__(params, dict(options))
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def perturb(self, factor: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if factor > 0:
                    self.state[parameter]["old"] = parameter.clone()
                    parameter.add_(parameter.grad, alpha=factor)
                else:
                    parameter.copy_(self.state[parameter]["old"])

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@idiom(refused={"dpsgd": "weights were changed between a forward pass and the next step"}, worlds=("ranks",))
def sharpness_aware_minimization(run: Run) -> None:
    model = net()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    run.distribute(model, optimizer)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        for factor in (0.05, -0.05):
            optimizer.zero_grad()
            for _ in range(2):  # micro-batches
                run.backward(run.loss(run.model(inputs), labels) / 2)
            optimizer.perturb(factor)
        run.step()


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step_lr": lambda o: schedules.StepLR(o, 2, 0.5),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, STEPS),
    "one_cycle": lambda o: schedules.OneCycleLR(o, 0.2, total_steps=STEPS + 1),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: step / 2),  # the first step has rate 0
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.1), schedules.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "warmup_from_zero": lambda o: schedules.LinearLR(o, 1e-8, 1.0, total_iters=2),
}


def train_by_schedule(run: Run, make: Callable[[Any], Any]) -> None:
    start(run)
    scheduler = make(run.optimizer)
    for step in range(STEPS):
        one_step(run, step)
        scheduler.step()


for name, make_schedule in SCHEDULES.items():
    add(f"schedule_{name}", partial(train_by_schedule, make=make_schedule))


@idiom()
def learning_rate_set_by_hand(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        run.optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        one_step(run, step)


@idiom()
def momentum_set_by_hand(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        run.optimizer.param_groups[0]["momentum"] = 0.9 if step else 0.5
        one_step(run, step)


@idiom()
def a_group_for_each_kind_of_parameter(run: Run) -> None:
    model = net()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    run.distribute(model, torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.1))
    train(run)


@idiom(refused=r"shape \[2\] was unfrozen or added after distribute")
def a_group_added_later(run: Run) -> None:
    start(run)
    one_step(run, 0)
    extra = nn.Parameter(torch.ones(2))
    run.optimizer.add_param_group({"params": [extra]})
    inputs, labels = run.batch(1)
    run.backward(run.loss(run.model(inputs), labels) + extra.sum())
    run.step()


@idiom()
def named_parameters_in_the_optimizer(run: Run) -> None:
    model = net()
    run.distribute(model, torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9))
    train(run)


@idiom(worlds=("ranks",))
def hooks_of_the_optimizer(run: Run) -> None:
    """A step hook of the program, registered later."""
    start(run)
    calls = []
    run.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(run)
    run.tensors.append(torch.tensor(len(calls)))


def _new_optimizer(run: Run, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    start(run)
    one_step(run, 0)
    run.optimizer = make(run.inner)
    train(run, first=1, steps=3)


OTHER = "a {} that distribute.. did not get steps its parameters, so learners would not average: step the SGD"
add("a_new_optimizer", partial(_new_optimizer, make=sgd), refused=OTHER.format("SGD"))
add(
    "a_new_fused_optimizer",
    partial(_new_optimizer, make=lambda model: FusedSGD(model.parameters(), lr=0.1)),
    refused=OTHER.format("FusedSGD"),
)
add(
    "a_new_optimizer_of_one_layer",
    partial(_new_optimizer, make=lambda model: torch.optim.Adam(model[2].parameters())),
    refused=OTHER.format("Adam"),
)


@idiom(refused=OTHER.format("SGD"))
def an_optimizer_in_each_backward_hook(run: Run) -> None:
    """torch's tutorial: the optimizer steps each parameter during the backward pass."""
    start(run)
    for parameter in run.inner.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    train(run)


@idiom()
def another_model_with_its_own_optimizer(run: Run) -> None:
    """As in a GAN: the other optimizer holds none of the parameters."""
    start(run)
    other = nn.Linear(2, 2)
    own = torch.optim.Adam(other.parameters())
    for step in range(STEPS):
        one_step(run, step)
        own.zero_grad()
        other(torch.ones(1, 2)).sum().backward()
        own.step()


@idiom()
def torch_compile_of_the_step(run: Run) -> None:
    start(run, nn.Linear(5, 3))  # its two parameters take half the time of four
    step_compiled = torch.compile(run.optimizer.step, backend="eager") if not run.is_plain else run.optimizer.step
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        run.step(step_compiled)
