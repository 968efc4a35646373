"""Hooks of tensors, modules and autograd, registered before and after ``distribute``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from helpers.idioms.run import Run, add, idiom, net, sgd, start, train


def halve_gradient(parameter: Tensor) -> None:
    parameter.grad *= 0.5  # type: ignore[operator]


def clamp_gradient(parameter: Tensor) -> None:
    """Not linear, so its place before the average matters."""
    parameter.grad.clamp_(-0.01, 0.01)  # type: ignore[union-attr]


def replace_gradient(parameter: Tensor) -> None:
    parameter.grad = parameter.grad.clamp(-0.01, 0.01)  # type: ignore[union-attr]


def _on_parameters(run: Run, register: Any, when: str) -> None:
    model = net()
    optimizer = sgd(model)
    if when == "before":
        for parameter in model.parameters():
            register(parameter)
    run.distribute(model, optimizer)
    if when == "after":
        for parameter in run.parameters():
            register(parameter)
    train(run, steps=2)
    if when == "in the middle":
        for parameter in run.parameters():
            register(parameter)
    train(run, first=2, steps=3)


ON_PARAMETERS = {
    "tensor_hook_that_scales": lambda p: p.register_hook(lambda g: g * 0.5),
    "tensor_hook_that_clamps": lambda p: p.register_hook(lambda g: g.clamp(-0.01, 0.01)),
    "accumulate_hook_that_scales": lambda p: p.register_post_accumulate_grad_hook(halve_gradient),
    "accumulate_hook_that_clamps": lambda p: p.register_post_accumulate_grad_hook(clamp_gradient),
    "accumulate_hook_that_replaces": lambda p: p.register_post_accumulate_grad_hook(replace_gradient),
}
for name, register in ON_PARAMETERS.items():
    for when in ("before", "after", "in the middle"):
        add(
            f"{name}_{when.replace(' ', '_')}", partial(_on_parameters, register=register, when=when), worlds=("ranks",)
        )


def _on_modules(run: Run, register: Any, when: str) -> None:
    model = net()
    optimizer = sgd(model)
    if when == "before":
        register(model[0])
    run.distribute(model, optimizer)
    if when == "after":
        for one in run.models:
            register(one[0])
    train(run)


ON_MODULES = {
    "forward_hook": lambda m: m.register_forward_hook(lambda module, x, y: y * 0.5),
    "forward_pre_hook": lambda m: m.register_forward_pre_hook(lambda module, x: (x[0] * 0.5,)),
    "forward_hook_with_keywords": lambda m: m.register_forward_hook(lambda module, x, kw, y: y * 2, with_kwargs=True),
    "backward_hook": lambda m: m.register_full_backward_hook(lambda module, gx, gy: tuple(g and g * 2 for g in gx)),
    "backward_pre_hook": lambda m: m.register_full_backward_pre_hook(lambda module, g: (g[0] * 0.5,)),
}
for name, register in ON_MODULES.items():
    for when in ("before", "after"):
        add(f"{name}_{when}", partial(_on_modules, register=register, when=when))


@idiom()
def hook_on_the_whole_model(run: Run) -> None:
    start(run)
    for model in run.models:
        model.register_forward_hook(lambda module, inputs, outputs: outputs * 0.5)
    train(run)


@idiom()
def hook_on_an_activation(run: Run) -> None:
    class Hooked(nn.Sequential):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self[0](inputs)
            hidden.register_hook(lambda gradient: gradient * 0.5)
            return self[2](self[1](hidden))

    start(run, Hooked(*net()))
    train(run)


@idiom(worlds=("ranks",))
def activations_kept_by_a_hook(run: Run) -> None:
    start(run)
    kept: list[Tensor] = []
    run.inner[1].register_forward_hook(lambda module, inputs, outputs: kept.append(outputs))
    train(run)
    run.tensors.append(torch.stack([one.detach() for one in kept]))


@idiom()
def saved_tensors_hooks(run: Run) -> None:
    start(run)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        train(run)


@idiom()
def global_forward_hook(run: Run) -> None:
    start(run)
    calls: list[int] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, x, y: calls.append(1))
    try:
        train(run)
    finally:
        handle.remove()


@idiom()
def tensor_hook_that_is_removed(run: Run) -> None:
    start(run)
    handles = [model[0].weight.register_hook(lambda gradient: gradient * 0.5) for model in run.models]
    train(run, steps=2)
    for handle in handles:
        handle.remove()
    train(run, first=2, steps=2)


@idiom(worlds=("ranks",))
def multi_grad_hook(run: Run) -> None:
    start(run)
    calls: list[int] = []
    torch.autograd.graph.register_multi_grad_hook(list(run.inner.parameters()), lambda gradients: calls.append(1))
    train(run)
    run.tensors.append(torch.tensor(len(calls)))


@idiom()
def hook_of_the_accumulation_node(run: Run) -> None:
    start(run)
    nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in run.parameters()]
    for node in nodes:
        node.register_prehook(lambda gradients: (gradients[0] * 0.5,))
    train(run)


@idiom()
def hook_of_a_node_from_before_distribute(run: Run) -> None:
    model = net()
    nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in model.parameters()]
    for node in nodes:
        node.register_prehook(lambda gradients: (gradients[0] * 0.5,))
    start(run, model)
    train(run)


def _after_the_node(run: Run, when: str, change: Any) -> None:
    """Hooks of accumulation nodes that run after all others, as Apex and Horovod have them."""
    model, kept = net(), []

    def register(parameters: Any) -> None:
        for parameter in parameters:
            kept.append(torch.autograd.graph.get_gradient_edge(parameter).node)
            kept[-1].register_hook(lambda *_, parameter=parameter: change(parameter))

    optimizer = sgd(model)
    if when == "before":
        register(model.parameters())
    run.distribute(model, optimizer)
    if when == "after":
        register(run.parameters())
    train(run, steps=2)
    if when == "in the middle":
        register(run.parameters())
    train(run, first=2, steps=3)


for how, change in {"halves": halve_gradient, "clamps": clamp_gradient, "replaces": replace_gradient}.items():
    for when in ("before", "after", "in the middle"):
        worlds = ("ranks",) if when == "before" else ("ranks", "virtual")  # the function holds learner 0's parameter
        add(
            f"hook_after_the_accumulation_node_{how}_{when.replace(' ', '_')}",
            partial(_after_the_node, when=when, change=change),
            worlds=worlds,
        )


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 0.5


@idiom()
def custom_autograd_function(run: Run) -> None:
    class Binary(nn.Sequential):
        def forward(self, inputs: Tensor) -> Tensor:
            return self[2](Straight.apply(self[0](inputs)))

    start(run, Binary(*net()))
    train(run)
