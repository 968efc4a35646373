"""Steps in which some learners have other backward passes than the others: left-out ones, late ones, and none."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ddpcore
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
