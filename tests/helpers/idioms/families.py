"""Families of idioms: every place where a model may keep a callable or a state from before ``distribute``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.idioms.run import STEPS, L, Run, add, net, sgd, start, train

Model = Any


class Layers(nn.Module):
    """A model with methods that hooks may be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.factor = 0.5
        self.wrap: Callable[[Tensor], Tensor] = torch.tanh
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.wrap(self.first(x)))
        return result

    def scale(self, *arguments: Any) -> Tensor:
        """The last argument times the factor: of a gradient, inputs or outputs."""
        last = arguments[-1]
        return (last[0] if isinstance(last, tuple) else last) * self.factor

    def bent(self, x: Tensor) -> Tensor:
        """An activation that depends on a weight."""
        return torch.tanh(x) + self.first.weight.mean()


class Scale:
    """A callable with a state: it counts its calls, and scales less each time."""

    def __init__(self, of: nn.Module | None = None) -> None:
        self.calls, self.of = 0, of

    def __call__(self, *arguments: Any) -> Tensor:
        self.calls += 1
        last = arguments[-1]
        value: Tensor = last[0] if isinstance(last, tuple) else last
        more = 0.0 if self.of is None else self.of.last.weight.detach().mean()
        return value * (1 - 0.5 / self.calls + more)


def half(*arguments: Any) -> Tensor:
    last = arguments[-1]
    return (last[0] if isinstance(last, tuple) else last) * 0.5


def _of_weight(model: Model, *arguments: Any) -> Tensor:
    return half(*arguments) + model.last.weight.detach().mean()


CALLABLES: dict[str, Callable[[Model], Callable[..., Any]]] = {
    "a_function": lambda model: half,
    "a_method_of_the_model": lambda model: model.scale,
    "a_partial_of_the_model": lambda model: partial(_of_weight, model),
    "an_object": lambda model: Scale(),
    "an_object_with_the_model": lambda model: Scale(model),
}
HELD: list[Any] = []  # accumulation nodes live as long as something holds them


def _on_nodes(model: Model, hook: Callable[..., Any]) -> None:
    for parameter in model.parameters():
        HELD.append(torch.autograd.graph.get_gradient_edge(parameter).node)
        HELD[-1].register_prehook(lambda gradients: (hook(gradients[0]),))


def _after_accumulation(hook: Callable[..., Any], parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = hook(parameter.grad)


def _of_inputs(hook: Callable[..., Any], module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if one is None else hook(one) for one in inputs)


PLACES: dict[str, Callable[[Model, Callable[..., Any]], Any]] = {
    "hooks_of_parameters": lambda model, hook: [p.register_hook(hook) for p in model.parameters()],
    "hooks_after_accumulation": lambda model, hook: [
        p.register_post_accumulate_grad_hook(partial(_after_accumulation, hook)) for p in model.parameters()
    ],
    "forward_hook": lambda model, hook: model.first.register_forward_hook(hook),
    "forward_pre_hook": lambda model, hook: model.last.register_forward_pre_hook(hook),
    "backward_hook": lambda model, hook: model.last.register_full_backward_hook(partial(_of_inputs, hook)),
}


def _called(run: Run, place: str, how: str) -> None:
    model = Layers()
    PLACES[place](model, CALLABLES[how](model))
    start(run, model)
    train(run)


for place in PLACES:
    for how in CALLABLES:
        add(f"before_{place}_{how}", partial(_called, place=place, how=how))


def _on_every_node(run: Run) -> None:
    model = net()
    _on_nodes(model, half)
    start(run, model)
    train(run)


add("before_hooks_of_nodes", _on_every_node)


# ---- functions that hold the model itself: Python cannot copy them ----


def _closure(model: Model) -> Callable[..., Any]:
    return lambda x: model.bent(x)


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*arguments: Any) -> Any:
        return function(*arguments)

    return inner


HOLDERS: dict[str, Callable[[Model], Any]] = {
    "a_closure": lambda model: setattr(model, "wrap", _closure(model)),
    "a_default": lambda model: setattr(model, "wrap", lambda x, model=model: model.bent(x)),
    "a_closure_in_a_list": lambda model: model.seen.append(_closure(model)),
    "a_closure_in_a_partial": lambda model: setattr(model, "wrap", partial(_closure(model))),
    "a_closure_as_hook": lambda model: model.first.register_forward_hook(lambda m, i, o: model.bent(o)),
    "a_closure_as_gradient_hook": lambda model: model.first.weight.register_hook(lambda g: g * model.factor),
    "a_decorated_forward": lambda model: setattr(model, "forward", _decorated(model.forward)),
    "a_decorated_forward_of_a_layer": lambda model: setattr(model.first, "forward", _decorated(model.first.forward)),
    "a_weak_reference": lambda model: object.__setattr__(model.first, "parent", weakref.ref(model)),
}


def _held(run: Run, how: str) -> None:
    model = Layers()
    HOLDERS[how](model)
    start(run, model)
    train(run)


for how in HOLDERS:
    worlds = ("virtual",) if "gradient" in how else ("ranks", "virtual")  # a copy for evaluation has no such hooks
    add(
        f"function_holds_the_model_{how}", partial(_held, how=how), refused="that holds the model itself", worlds=worlds
    )
add(
    "forward_is_a_bound_method",
    lambda run: (start(run, _with(Layers(), lambda m: setattr(m, "forward", m.forward))), train(run)),  # type: ignore
)


def _with(model: Model, change: Callable[[Model], Any]) -> Model:
    change(model)
    return model


# ---- state ----


class Student(nn.Module):
    """A model with state of every kind, which a loop changes after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.teacher = net(), net().requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))
        self.number, self.numbers, self.plain = 1.0, [1.0], torch.ones(3)
        self.table: dict[str, Tensor] = {"a": torch.ones(3)}
        self._hidden = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.plain + self._hidden + self.table["a"]) * (self.number + self.numbers[0]) / (1 + self.count)
        result: Tensor = self.net(x) * scale + self.teacher(x)
        return result


def _follow(model: Model, write: Callable[[Tensor, Tensor], Any]) -> None:
    with torch.no_grad():
        for slow, fast in zip(model.teacher.parameters(), model.net.parameters(), strict=True):
            write(slow, slow * 0.5 + fast * 0.5)


def _set_data(slow: Tensor, value: Tensor) -> None:
    slow.data = value


STATES: dict[str, Callable[[Model], Any]] = {
    "frozen_parameters": lambda model: _follow(model, lambda slow, value: slow.copy_(value)),
    "frozen_parameters_by_data": lambda model: _follow(model, lambda slow, value: slow.data.copy_(value)),
    "frozen_parameters_with_new_data": lambda model: _follow(model, _set_data),
    "frozen_parameters_loaded": lambda model: model.teacher.load_state_dict(model.net.state_dict()),
    "a_buffer": lambda model: model.count.add_(model.net[0].weight.detach().abs().mean()),
    "a_number": lambda model: setattr(model, "number", float(model.net[0].weight.detach().mean())),
    "a_list": lambda model: model.numbers.insert(0, float(model.net[0].weight.detach().mean())),
    "a_tensor": lambda model: model.plain.add_(model.net[0].weight.detach().mean()),
    "a_private_tensor": lambda model: model._hidden.mul_(1 + model.net[0].weight.detach().mean()),
    "a_dictionary": lambda model: model.table.update(a=model.table["a"] + model.net[2].bias.detach()),
}


def _changed(run: Run, change: Callable[[Model], Any], vectorized: bool | None = None) -> None:
    model = Student()
    options = {"vectorize": vectorized} if run.world == "virtual" else {}
    run.distribute(model, sgd(model), **options)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        run.step()
        for one in run.models:
            change(one)
    parts = [torch.cat([p.detach().flatten() for p in one.teacher.parameters()]) for one in run.models]
    run.tensors.append(torch.stack(parts) if run.world == "virtual" else parts[0])


for state, change in STATES.items():
    add(f"state_of_each_learner_{state}", partial(_changed, change=change))
    name = f"state_of_each_learner_{state}_vectorized"
    add(name, partial(_changed, change=change, vectorized=True), worlds=("virtual",))


def _attributes(run: Run) -> None:
    """As muP scales the step of each parameter."""
    model = net()
    for index, parameter in enumerate(model.parameters()):
        parameter.factor = 1.0 / (1 + index)  # type: ignore[attr-defined]
    start(run, model)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        for parameter in run.parameters():
            parameter.grad.mul_(parameter.factor)  # type: ignore[union-attr, attr-defined]
        run.step()


add("attributes_of_parameters", _attributes, worlds=("virtual",))


def _gradients(run: Run) -> None:
    """A backward pass before ``distribute`` is part of the first step."""
    model = net()
    model(torch.ones(2, 5)).sum().backward()
    start(run, model)
    inputs, labels = run.batch(0)
    with run.no_sync():
        run.loss(run.model(inputs), labels).backward()
    grads = [[parameter.grad.clone() for parameter in one.parameters()] for one in run.models]
    run.tensors += map(torch.stack, zip(*grads, strict=True)) if run.world == "virtual" else grads[0]
    run.optimizer.zero_grad()
    train(run, first=1)


add("gradients_from_before", _gradients)


def _mean_of_the_teacher(run: Run) -> None:
    """``evaluation_model()`` averages a teacher as it averages its student."""
    _changed(run, STATES["frozen_parameters"])
    if run.handle is not None:
        model: Model = run.handle.evaluation_model()
        mean = torch.cat([p.detach().flatten() for p in model.teacher.parameters()])
    else:
        mean = run.tensors[-1].clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    run.tensors.append(torch.stack([mean] * L) if run.world == "virtual" else mean)


add("the_mean_of_a_teacher", _mean_of_the_teacher)


# ---- learners that must stay equal ----


def _given_to_one(run: Run, give: Callable[[Run], Any], after: int = 2) -> None:
    start(run)
    train(run, steps=after)
    if run.rank == 0:
        give(run)
    train(run, first=after, steps=4)


def _no_momentum(run: Run) -> None:
    state = run.optimizer.state_dict()
    for one in state["state"].values():
        one["momentum_buffer"] = torch.zeros_like(one["momentum_buffer"])
    run.optimizer.load_state_dict(state)


def _load_weights(run: Run) -> None:
    run.models[0].load_state_dict({name: value * 0.5 for name, value in run.models[0].state_dict().items()})


def _set(run: Run, key: str, value: float) -> None:
    run.optimizer.param_groups[0][key] = value


for key, value in {"lr": 0.03, "momentum": 0.5, "weight_decay": 0.1, "dampening": 0.2}.items():
    add(
        f"one_rank_has_another_{key}",
        partial(_given_to_one, give=partial(_set, key=key, value=value)),
        worlds=("ranks",),
        refused={"ssgd": f"{key} of group 0 is [0-9.]+ on learner 0 and [0-9.]+ on learner 1, which must stay equal"},
    )
add(
    "one_rank_has_another_schedule",
    partial(_given_to_one, give=lambda run: torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5).step()),
    worlds=("ranks",),
    refused={"ssgd": "lr of group 0 is 0.05 on learner 0 and 0.1 on learner 1"},
)
add(
    "one_rank_loads_a_state_of_the_optimizer",
    partial(_given_to_one, give=_no_momentum),
    worlds=("ranks",),
    refused={"ssgd": "the state of the optimizer for [a-z0-9.]+ on learner 1 differs from that of learner 0"},
)
add(
    "one_learner_loads_weights",
    partial(_given_to_one, give=_load_weights),
    refused={"ssgd": "the weights of learner 1 differ from those of learner 0"},
)


def _last_pass_without_average(run: Run) -> None:
    start(run)
    for step in range(0, 2 * STEPS, 2):
        run.optimizer.zero_grad()
        inputs, labels = run.batch(step)
        run.backward(run.loss(run.model(inputs), labels))
        inputs, labels = run.batch(step + 1)
        with run.no_sync():
            run.backward(run.loss(run.model(inputs), labels))
        run.step()


add("no_sync_around_the_last_pass", _last_pass_without_average, refused={"ssgd": "came after the pass that averages"})


def _middle_pass_without_average(run: Run) -> None:
    """The last pass averages all that was accumulated."""
    start(run)
    run.optimizer.zero_grad()
    for step, is_paused in enumerate([False, True, False]):
        inputs, labels = run.batch(step)
        if is_paused:
            with run.no_sync():
                run.backward(run.loss(run.model(inputs), labels))
        else:
            run.backward(run.loss(run.model(inputs), labels))
    run.step()


add("no_sync_around_the_middle_pass", _middle_pass_without_average)


def _only_the_first_model(run: Run) -> None:
    start(run)
    inputs, _ = run.batch(0)
    run.inner(inputs[0]).square().mean().backward()
    run.step()


add(
    "the_model_in_place_of_the_handle",
    _only_the_first_model,
    worlds=("virtual",),
    refused="only the model of learner 0",
)


def _changes_its_input(run: Run, vectorize: bool | None = None) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    run.distribute(model, sgd(model), **({"vectorize": vectorize} if run.world == "virtual" else {}))
    train(run)


add("the_first_layer_changes_its_input", _changes_its_input)
add("the_first_layer_changes_its_input_in_turn", partial(_changes_its_input, vectorize=False))
