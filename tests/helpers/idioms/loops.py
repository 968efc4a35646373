"""The training loop: accumulation, clipping, evaluation, mixed precision and passes that are no training."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.idioms.run import STEPS, Run, add, idiom, net, one_step, start, train


@idiom()
def the_usual_loop(run: Run) -> None:
    start(run)
    train(run)


@idiom()
def gradients_zeroed_in_place(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad(set_to_none=False)
        run.backward(run.loss(run.model(inputs), labels))
        run.step()


@idiom()
def gradients_zeroed_by_the_model(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.backward(run.loss(run.model(inputs), labels))
        run.step()
        for model in run.models:
            model.zero_grad()


@idiom()
def gradients_set_to_none_by_hand(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        for parameter in run.parameters():
            parameter.grad = None
        run.backward(run.loss(run.model(inputs), labels))
        run.step()


def _accumulate(run: Run, how: str) -> None:
    start(run)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        for micro in range(3):
            inputs, labels = run.batch(10 * step + micro)
            if how == "no_sync" and micro < 2:
                with run.no_sync():
                    run.backward(run.loss(run.model(inputs), labels) / 3)
            else:
                run.backward(run.loss(run.model(inputs), labels) / 3)
        run.step()


add("accumulation_with_no_sync", partial(_accumulate, how="no_sync"))
add("accumulation_without_no_sync", partial(_accumulate, how="plain"))


@idiom()
def accumulation_over_steps_without_zero_grad(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.backward(run.loss(run.model(inputs), labels))
        run.step()


@idiom()
def two_forward_passes_then_one_backward(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        losses = []
        for micro in range(2):
            inputs, labels = run.batch(10 * step + micro)
            losses.append(run.loss(run.model(inputs), labels))
        run.backward(losses[0] + 0.5 * losses[1])
        run.step()


@idiom()
def two_losses_of_one_graph(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        outputs = run.model(inputs)
        run.backward(run.loss(outputs, labels), retain_graph=True)
        run.backward(run.mean(outputs.square()))
        run.step()


@idiom()
def two_steps_on_one_gradient(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        one_step(run, step)
        run.step()


@idiom()
def a_step_without_gradients(run: Run) -> None:
    start(run)
    one_step(run, 0)
    run.optimizer.zero_grad()
    run.step()
    train(run, first=1)


@idiom()
def a_batch_that_is_left_out(run: Run) -> None:
    """A forward and a backward pass without a step, as after a loss of NaN."""
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        if step != 1:
            run.step()


@idiom()
def many_passes_without_a_step(run: Run) -> None:
    """As a program that measures gradients does."""
    start(run)
    for step in range(9):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
    run.step()


def _clip(run: Run, clip: Any) -> None:
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels))
        for model in run.models:
            clip(list(model.parameters()))
        run.step()


def _scale(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.grad *= 0.5


def _replace(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.grad = parameter.grad.clone() * 0.5


def _replace_data(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.grad.data = parameter.grad.data * 0.5


def _centralize(parameters: list[Any]) -> None:
    for parameter in parameters:
        if parameter.dim() > 1:
            parameter.grad.sub_(parameter.grad.mean(dim=-1, keepdim=True))


add("clip_grad_norm", partial(_clip, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.1)))
add("clip_grad_norm_foreach", partial(_clip, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=True)))
add("clip_grad_norm_of_infinity", partial(_clip, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type="inf")))
add("clip_grads_with_norm", partial(_clip, clip=lambda p: nn.utils.clip_grads_with_norm_(p, 0.1, torch.tensor(1.0))))
add("clip_grad_value", partial(_clip, clip=lambda p: nn.utils.clip_grad_value_(p, 0.01)))
add("gradients_scaled_in_place", partial(_clip, clip=_scale))
add("gradients_replaced", partial(_clip, clip=_replace))
add("gradients_replaced_by_data", partial(_clip, clip=_replace_data))
add("gradients_centralized", partial(_clip, clip=_centralize))


@idiom()
def gradients_of_the_step_before(run: Run) -> None:
    """Kept, and compared with those of the next step."""
    start(run)
    kept: list[Any] = []
    for step in range(STEPS):
        one_step(run, step)
        gradients = [parameter.grad for parameter in run.parameters()]
        if kept:
            with torch.no_grad():  # the change of the gradients enters the weights
                for parameter, gradient, before in zip(run.parameters(), gradients, kept, strict=True):
                    parameter += 0.1 * (gradient - before)
        kept = gradients


@idiom()
def layers_frozen_between_forward_and_backward(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        loss = run.loss(run.model(inputs), labels)
        for model in run.models:
            model[0].requires_grad_(False)
        run.backward(loss)
        run.step()
        for model in run.models:
            model[0].requires_grad_(True)


def _evaluate(run: Run, context: Any) -> None:
    start(run)
    for step in range(STEPS):
        one_step(run, step)
        run.model.eval()
        with context():
            run.model(run.batch(50)[0])
        run.model.train()


add("evaluation_without_gradients", partial(_evaluate, context=torch.no_grad))
add("evaluation_in_inference_mode", partial(_evaluate, context=torch.inference_mode))
add("evaluation_with_gradients", partial(_evaluate, context=torch.enable_grad))
add("evaluation_by_set_grad_enabled", partial(_evaluate, context=lambda: torch.set_grad_enabled(False)))


@idiom(worlds=("ranks",), refused={"dpsgd": "run a pass of one rank alone under torch.no_grad"})
def evaluation_with_gradients_on_one_rank(run: Run) -> None:
    """Rank 0 alone calls its model outside of a step. Under gossip it has begun an exchange then, also at the end."""
    start(run)
    for step in range(STEPS):
        one_step(run, step)
        if run.rank == 0:
            run.models[0](torch.ones(2, 5)).sum()


@idiom()
def evaluation_between_forward_and_backward(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        loss = run.loss(run.model(inputs), labels)
        with torch.no_grad():
            run.model(run.batch(50)[0])
        run.backward(loss)
        run.step()


@idiom()
def anomaly_detection(run: Run) -> None:
    start(run)
    with torch.autograd.detect_anomaly(check_nan=True):
        train(run)


@idiom(digits=2)
def autocast_to_bfloat16(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run.loss(run.model(inputs), labels)
        run.backward(loss)
        run.step()


@idiom()
def loss_scaled_by_hand(run: Run) -> None:
    start(run)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs), labels) * 1024)
        for parameter in run.parameters():
            parameter.grad.div_(1024)
        run.step()


def _scaler(run: Run, clip: bool) -> None:
    start(run)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(STEPS):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(scaler.scale(run.loss(run.model(inputs), labels)))
        if clip:
            scaler.unscale_(run.optimizer)
            nn.utils.clip_grad_value_(run.parameters(), 0.01)
        run.step(partial(scaler.step, run.optimizer))
        scaler.update()


add("grad_scaler", partial(_scaler, clip=False))
add("grad_scaler_and_clipping", partial(_scaler, clip=True))


@idiom()
def activation_checkpointing(run: Run) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, inputs: Tensor) -> Tensor:
            return checkpoint(self.body, inputs, use_reentrant=False)

    start(run, Checkpointed())
    train(run)
