"""Steps in which some learners have other backward passes than the others: left-out ones, late ones, and none."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore.optim import FusedSGD
from helpers import training
from helpers.connection import connected


def _begin(num: int, strategy: Any = None) -> tuple[Any, ...]:
    """The handle of so many learners and its optimizer, and a plain model with its optimizer."""
    model, plain = training.mlp(), training.mlp()
    optimizer, twin = (training.OPTIMIZERS["sgd"](one.parameters()) for one in (model, plain))
    strategy = strategy or ddpcore.SSGD()
    return ddpcore.distribute(model, optimizer, strategy, learners=num, **connected(**training.SMALL)), plain, twin


def test_learners_of_a_step_that_was_left_out_have_no_pass_in_the_next() -> None:
    """Learner 0's loss was NaN, so it had none. The next step accumulates, in any order or with one pass for all."""
    for order, clips in product(("models", "micro", "whole"), (True, False)):
        handle, plain, twin = _begin(3)
        inputs, labels = training.samples(3, 4)
        for row in range(3):
            loss = F.cross_entropy(handle.models[row](inputs[row]), labels[row])
            if row:
                loss.backward()
        handle.learner.optimizer.zero_grad()
        passes = [(micro, row) for micro in range(2) for row in range(3)]
        if order == "whole":
            passes = passes[3:]
            with handle.no_sync():
                assert handle.learners_run.startswith("together")
                training.loss_of(handle.model(inputs[:, :2]), labels[:, :2]).div(2).backward()
        for micro, row in sorted(passes, key=lambda one: one[::-1]) if order == "models" else passes:
            part = slice(2 * micro, 2 * micro + 2)
            with nullcontext() if micro else handle.no_sync():
                F.cross_entropy(handle.models[row](inputs[row, part]), labels[row, part]).div(2).backward()
        F.cross_entropy(plain(inputs.flatten(0, 1)), labels.flatten()).backward()
        if clips:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            torch.testing.assert_close(torch.stack(handle.clip_grad_norm_(0.1)), norm.repeat(3))
        handle.learner.optimizer.step()
        twin.step()
        for weights in training.weights_of_learners(handle):
            training.assert_near(weights, training.flat_weights(plain))


def _scale(handle: Any) -> None:
    for parameter in handle.model.parameters():
        parameter.grad.mul_(0.5)


def _passes(handle: Any, order: list[int], inputs: Tensor, labels: Tensor, change: Any) -> None:
    for row in order:
        F.cross_entropy(handle.models[row](inputs[row]), labels[row]).backward()
    change(handle)


CHANGES = (
    lambda handle: None,
    lambda handle: handle.clip_grad_norm_(0.05),
    lambda handle: [nn.utils.clip_grad_norm_(one.parameters(), 0.05) for one in handle.models],
    lambda handle: nn.utils.clip_grad_value_(handle.model.parameters(), 0.01),
    _scale,
)


def test_a_pass_of_one_learner_after_the_average_is_refused() -> None:
    """Also where the loop then changes all gradients, which hid the pass, and in a closure."""
    orders, both = ([0, 0, 1, 1], [0, 1, 0, 1, 0]), (False, True)
    for change, order, samples, in_closure in product(CHANGES, orders, both, both):
        handle, _, _ = _begin(2, ddpcore.SSGD("samples" if samples else None))
        optimizer = handle.learner.optimizer
        before = training.weights_of_learners(handle).clone()
        if samples:
            handle.num_samples = [6, 6]
        passes = partial(_passes, handle, order, *training.samples(2, 6), change)
        if not in_closure:
            passes()
        message = rf"learner {order[-1]} alone were changed by .* \(no_sync\(\) for all its backward passes"
        with pytest.raises(RuntimeError, match=message):
            optimizer.step(*[passes] if in_closure else [])
        assert torch.equal(training.weights_of_learners(handle), before)


@pytest.mark.parametrize("in_closure", [False, True])
def test_a_learner_that_has_no_samples_has_no_pass(in_closure: bool) -> None:
    """However often the others have one."""
    handle, plain, twin = _begin(2, ddpcore.SSGD("samples"))
    optimizer = handle.learner.optimizer
    for step in range(3):
        inputs, labels = training.samples(1, 6, seed=step)
        handle.num_samples = [6, 0]

        def passes(inputs: Any = inputs[0], labels: Any = labels[0]) -> None:
            optimizer.zero_grad()
            for part in (slice(0, 3), slice(3, 6)):
                (F.cross_entropy(handle.models[0](inputs[part]), labels[part]) / 2).backward()

        if not in_closure:
            passes()
        optimizer.step(*[passes] if in_closure else [])
        twin.zero_grad()
        F.cross_entropy(plain(inputs[0]), labels[0]).backward()
        twin.step()
    for weights in training.weights_of_learners(handle):
        training.assert_near(weights, training.flat_weights(plain))


@pytest.mark.parametrize("make", [torch.optim.SGD, FusedSGD])
def test_a_closure_without_the_average_of_all_is_refused(make: Any) -> None:
    """Learners stepped by gradients of their own."""
    said = {
        "none": "gradients were set or changed .*learner 1 has no gradient",
        "paused": r"learner 1 had no backward pass outside of no_sync\(\)",
        "all paused": r"all backward passes of this step were inside no_sync\(\)",
        "late": r"a backward pass inside no_sync\(\) came after the pass that averages",
    }
    for what, message in said.items():
        model = training.mlp()
        optimizer = make(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
        before = training.weights_of_learners(handle).clone()
        inputs, _ = training.samples(2, 6)

        def closure(handle: Any = handle, what: str = what, inputs: Any = inputs) -> None:
            for row in range(2):
                with handle.no_sync() if what == "all paused" or (row and what == "paused") else nullcontext():
                    loss = handle.models[row](inputs[row]).square().mean()
                    if not row or what != "none":
                        loss.backward()
            if what == "late":
                with handle.no_sync():
                    handle.models[1](inputs[1]).square().mean().backward()

        with pytest.raises(RuntimeError, match=message):
            optimizer.step(closure)
        assert torch.equal(training.weights_of_learners(handle), before), what


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("a fault of the program")


def test_a_local_step_after_a_step_that_was_left_out() -> None:
    """Inside ``no_sync()``, after a late pass, or after an error in ``sync()`` or in a backward pass of one learner."""
    for how in ("late", "sync", "backward"):
        handle, _, _ = _begin(2)
        optimizer = handle.learner.optimizer
        inputs, labels = training.samples(2, 4)

        def run(rows: Any = (0, 1), last: Any = lambda x: x, handle=handle, inputs=inputs, labels=labels) -> None:
            for row in rows:
                output = handle.models[row](inputs[row])
                F.cross_entropy(last(output) if row == rows[-1] else output, labels[row]).backward()

        if how == "late":
            run()
            with handle.no_sync():
                run()
        elif how == "sync":
            with pytest.raises(ValueError, match="a fault"), handle.no_sync():
                run()
                with handle.sync():
                    run((0,), _Fails.apply)
        else:
            with pytest.raises(ValueError, match="a fault"):
                run((0, 1), _Fails.apply)
        optimizer.zero_grad()
        plain = [copy.deepcopy(model) for model in handle.models]
        with handle.no_sync():
            run()
            optimizer.step()
        twins = [training.OPTIMIZERS["sgd"](one.parameters()) for one in plain]
        for row, (one, twin) in enumerate(zip(plain, twins, strict=True)):
            F.cross_entropy(one(inputs[row]), labels[row]).backward()
            twin.step()
            training.assert_near(training.weights_of_learners(handle)[row], training.flat_weights(one))


def test_a_step_refuses_torchs_mode_that_keeps_saved_tensors() -> None:
    """A backward pass of an earlier graph would take weights of other steps."""
    for make in (ddpcore.SSGD, lambda: ddpcore.LocalSGD(9), lambda: ddpcore.DPSGD(ddpcore.Ring())):
        for kind in (torch.optim.SGD, ddpcore.optim.FusedSGD):
            model = nn.Linear(3, 2)
            optimizer = kind(model.parameters(), lr=0.1)
            handle = ddpcore.distribute(model, optimizer, make(), learners=3)
            before = handle.learner.flat.param_LP.clone()
            error = pytest.raises(RuntimeError, match="inside torch's allow_mutation_on_saved_tensors")
            with torch.autograd.graph.allow_mutation_on_saved_tensors(), error:
                handle.model(torch.ones(3, 2, 3)).square().sum().backward()
                optimizer.step()
            assert torch.equal(handle.learner.flat.param_LP, before)
