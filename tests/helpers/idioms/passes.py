"""Passes that are no training, steps by hand, and models beside the one that trains."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.func import functional_call, grad, hessian, jvp, vmap

from helpers.idioms.run import STEPS, Run, add, idiom, one_step, sgd, start

SET = {"ssgd": "gradients were set or changed without a backward pass"}


@idiom(refused=SET)
def gradients_by_autograd_grad(run: Run) -> None:
    """Gradients that the program computes and sets itself. SSGD has not averaged them."""
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        parameters = run.parameters()
        gradients = torch.autograd.grad(run.loss(run.model(inputs), labels), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        run.step()


@idiom()
def a_penalty_on_the_gradient_of_the_input(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        inputs.requires_grad_()
        run.optimizer.zero_grad()
        loss = run.loss(run.model(inputs), labels)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        run.backward(loss + slope.square().sum())
        run.step()


@idiom()
def a_penalty_on_the_gradient_of_the_weights(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        loss = run.loss(run.model(inputs), labels)
        slopes = torch.autograd.grad(loss, run.parameters(), create_graph=True)
        run.backward(loss + sum(slope.square().sum() for slope in slopes))
        run.step()


@idiom(refused={"ssgd": "create_graph=True: the averaged gradient has no graph"})
def backward_that_keeps_the_graph(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels), create_graph=True)
        curvature = sum(parameter.grad.square().sum() for parameter in run.parameters())
        for parameter in run.parameters():
            parameter.grad = None
        run.backward(run.loss(run.model(inputs), labels) + 0.1 * curvature)
        run.step()


def _between(run: Run, look: Any) -> None:
    """Look at the model between two steps, and after the forward and backward pass of a step."""
    start(run)
    for step in range(STEPS):
        for model, x in run.each(60):
            look(model, x)
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        for model, x in run.each(60):
            look(model, x)
        run.step()


def _loss_at(parameters: dict[str, Tensor], model: nn.Module, inputs: Tensor) -> Tensor:
    return functional_call(model, parameters, (inputs,)).square().sum()


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _tangents(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}


LOOKS: dict[str, Any] = {
    "func_grad": lambda model, x: grad(_loss_at)(_values(model), model, x),
    "gradients_of_samples": lambda model, x: vmap(grad(_loss_at), (None, None, 0))(_values(model), model, x[:, None]),
    "ensemble_by_vmap": lambda model, x: vmap(lambda p: functional_call(model, p, (x,)))(
        {name: torch.stack([value, value + 1]) for name, value in _values(model).items()}
    ),
    "jvp": lambda model, x: jvp(lambda p: _loss_at(p, model, x), (_values(model),), (_tangents(model),)),
    "hessian": lambda model, x: hessian(lambda b: _loss_at({**_values(model), "2.bias": b}, model, x))(
        model[2].bias.detach()
    ),
    "functional_call_with_other_weights": lambda model, x: functional_call(
        model, {name: value + 1 for name, value in model.named_parameters()}, (x,)
    ),
    "functional_call_with_new_parameters": lambda model, x: functional_call(
        model, {name: nn.Parameter(value + 1) for name, value in _values(model).items()}, (x,)
    ),
    "vmap_over_inputs": lambda model, x: vmap(model)(x),
    "a_deep_copy": lambda model, x: copy.deepcopy(model)(x).sum().backward(),
    "gradient_of_the_input": lambda model, x: torch.autograd.grad(model(x.requires_grad_()).sum(), x),
    "the_hessian_by_double_backward": lambda model, x: torch.autograd.grad(
        torch.autograd.grad(F.softplus(model(x)).sum(), model[2].bias, create_graph=True)[0].sum(), model[2].bias
    ),
    "parameters_to_vector": lambda model, x: nn.utils.parameters_to_vector(model.parameters()),
    "state_dict": lambda model, x: model.state_dict(),
    "norm_of_gradients": lambda model, x: nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    ),
}
for name, look in LOOKS.items():
    add(f"between_steps_{name}", partial(_between, look=look))


@idiom(refused=SET)
def gradients_of_samples_set_as_gradients(run: Run) -> None:
    """Without a forward pass of the model itself. Under SSGD nothing averages them."""
    start(run)
    for step in range(STEPS):
        for model, inputs in run.each(step):
            slopes = vmap(grad(_loss_at), (None, None, 0))(_values(model), model, inputs[:, None])
            for name, parameter in model.named_parameters():
                parameter.grad = slopes[name].mean(dim=0)
        run.step()


def _hand_step(parameters: Any) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter -= 0.1 * parameter.grad


def _data_step(parameters: Any) -> None:
    for parameter in parameters:
        parameter.data.add_(parameter.grad, alpha=-0.1)


def _by_hand(run: Run, update: Any) -> None:
    """No optimizer steps. SSGD has averaged the gradients, so it needs none."""
    start(run)
    for step in range(8):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        update(run.parameters()) if run.strategy == "ssgd" else run.step(partial(update, run.parameters()))


BY_HAND = "weights were changed between several forward passes without optimizer.step"
for name, update in (("in_place", _hand_step), ("by_data", _data_step)):
    add(f"a_step_by_hand_{name}", partial(_by_hand, update=update), refused={"dpsgd": BY_HAND, "local_sgd": BY_HAND})


@idiom(refused="parameter 2.bias has left the flat buffer")
def weights_replaced_by_data(run: Run) -> None:
    """A step by hand of old programs."""
    start(run)
    for step in range(STEPS):
        one_step(run, step)
        for parameter in run.parameters():
            parameter.data = parameter.data - 0.01


@idiom(worlds=("ranks",))
def exponential_moving_average(run: Run) -> None:
    start(run)
    ema = torch.optim.swa_utils.AveragedModel(run.inner, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        one_step(run, step)
        ema.update_parameters(run.inner)
    run.tensors += [parameter.detach() for parameter in ema.parameters()]


@idiom(worlds=("ranks",))
def stochastic_weight_averaging(run: Run) -> None:
    start(run, nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)))
    swa = torch.optim.swa_utils.AveragedModel(run.inner)
    for step in range(STEPS):
        one_step(run, step)
        if step % 2:
            swa.update_parameters(run.inner)
    torch.optim.swa_utils.update_bn([run.batch(70)[0]], swa)
    run.tensors += [*(parameter.detach() for parameter in swa.parameters()), swa.module[1].running_mean]


@idiom()
def weights_swapped_for_evaluation(run: Run) -> None:
    """Other weights for an evaluation between steps, and back."""
    start(run)
    for step in range(STEPS):
        one_step(run, step)
        own = [copy.deepcopy(model.state_dict()) for model in run.models]
        for model in run.models:
            model.load_state_dict({name: value * 0 for name, value in model.state_dict().items()})
        with torch.no_grad():
            run.model(run.batch(50)[0])
        for model, state in zip(run.models, own, strict=True):
            model.load_state_dict(state)


@idiom()
def two_models_in_turn(run: Run) -> None:
    """Each with its own optimizer and distribute call, as in a GAN."""
    other = Run(run.strategy, run.world)
    model = nn.Linear(5, 3)
    other.distribute(model, sgd(model))
    start(run)
    for step in range(STEPS):
        one_step(run, step)
        one_step(other, step)
    run.tensors += other.close()[0]


def _compiled_autograd(run: Run, inside: bool, vectorize: bool | None) -> None:
    """torch.compile of the backward pass: it runs the hooks of ddpcore at other times."""
    start(run, nn.Linear(5, 3), **({"vectorize": vectorize} if run.world == "virtual" else {}))
    for step in range(2):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        loss = run.loss(run.model(inputs), labels)
        with compiled_autograd._enable(torch.compile(backend="eager")) if not run.is_plain else nullcontext():
            run.backward(run.loss(run.model(inputs), labels) if inside else loss)
        run.step()


COMPILED = "compiled autograd runs the backward pass, and ddpcore's hooks need autograd"
for inside in (False, True):
    place = "whole_pass" if inside else "backward"
    add(
        f"compiled_autograd_of_the_{place}",
        partial(_compiled_autograd, inside=inside, vectorize=False),
        refused={"ssgd": COMPILED},
    )
    add(
        f"compiled_autograd_of_the_{place}_with_vmap",
        partial(_compiled_autograd, inside=inside, vectorize=True),
        refused=COMPILED,
        worlds=("virtual",),
    )
