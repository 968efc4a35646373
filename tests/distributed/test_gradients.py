"""The gradients after accumulation, after averaging, and after a failed pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ddpcore
from ddpcore.distributed.handle import Observer
from ddpcore.optim import FusedSGD
from helpers import training
from helpers.connection import connected


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("optimizer_name", ["fused", "sgd"])
@pytest.mark.parametrize("how", ["no_sync", "averages", "backwards"])
def test_accumulation_is_one_big_batch(how: str, optimizer_name: str) -> None:
    """ssgd with three micro-batches a step, averaged once or three times, against one learner on all samples."""
    model, plain = training.mlp(), training.mlp()
    optimizer = training.OPTIMIZERS[optimizer_name](model.parameters())
    twin = training.OPTIMIZERS["sgd"](plain.parameters())
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, **connected(**training.SMALL))
    for step in range(3):
        inputs, labels = training.samples(2, 6, seed=step)
        optimizer.zero_grad(set_to_none=step != 1)
        for micro in range(3):
            part = slice(2 * micro, 2 * micro + 2)
            loss = training.loss_of(handle.model(inputs[:, part]), labels[:, part]) / 3
            if how != "backwards" and micro < 2:
                with handle.no_sync():
                    loss.backward()
            elif how == "averages":
                with handle.no_sync(), handle.sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        twin.zero_grad()
        F.cross_entropy(plain(inputs.flatten(0, 1)), labels.flatten()).backward()
        twin.step()
    for row in training.weights_of_learners(handle):
        training.assert_near(row, training.flat_weights(plain))


@pytest.mark.parametrize("optimizer_name", ["fused", "sgd"])
def test_accumulation_by_one_learner_after_the_other(optimizer_name: str) -> None:
    """All micro-batches of a learner come before those of the next one, each with its last pass outside of no_sync."""
    model, plain = training.mlp(), training.mlp()
    optimizer = training.OPTIMIZERS[optimizer_name](model.parameters())
    twin = training.OPTIMIZERS["sgd"](plain.parameters())
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=3, **connected(**training.SMALL))
    for step in range(3):
        inputs, labels = training.samples(3, 6, seed=step)
        optimizer.zero_grad()
        for one, own, wanted in zip(handle.models, inputs, labels, strict=True):
            with handle.no_sync():
                for micro in range(2):
                    part = slice(2 * micro, 2 * micro + 2)
                    (F.cross_entropy(one(own[part]), wanted[part]) / 3).backward()
            (F.cross_entropy(one(own[4:]), wanted[4:]) / 3).backward()
        optimizer.step()
        twin.zero_grad()
        F.cross_entropy(plain(inputs.flatten(0, 1)), labels.flatten()).backward()
        twin.step()
    for row in training.weights_of_learners(handle):
        training.assert_near(row, training.flat_weights(plain))


class Passes(Observer):
    num = 0

    def before_forward(self, learner: Any) -> None:
        self.num += 1


@pytest.mark.parametrize("optimizer_name", ["fused", "sgd"])
def test_several_calls_of_each_model_before_its_backward_pass(optimizer_name: str) -> None:
    """As a recurrent or siamese model has them: learner 0 was forgotten when another one called its model again."""
    model, plain = training.mlp(), training.mlp()
    optimizer = training.OPTIMIZERS[optimizer_name](model.parameters())
    twin = training.OPTIMIZERS["sgd"](plain.parameters())
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=3, **connected(**training.SMALL))
    handle.observers.append(passes := Passes())
    for step in range(3):
        inputs, labels = training.samples(3, 6, seed=step)
        optimizer.zero_grad()
        for one, own, wanted in zip(handle.models, inputs, labels, strict=True):
            F.cross_entropy(one(own) - one(own.flip(0)) + one(-own), wanted).backward()
        optimizer.step()
        assert passes.num == 3 * (1 + step)  # as on a rank: the calls of learner 0
        twin.zero_grad()
        outputs = plain(inputs) - plain(inputs.flip(1)) + plain(-inputs)
        F.cross_entropy(outputs.flatten(0, 1), labels.flatten()).backward()
        twin.step()
    for row in training.weights_of_learners(handle):
        training.assert_near(row, training.flat_weights(plain))


def test_a_call_after_the_backward_pass_of_one_learner() -> None:
    """As a loop that counts correct answers, outside of no_grad, before the passes of other learners."""
    model, plain = training.mlp(), training.mlp()
    optimizer, twin = (training.OPTIMIZERS["sgd"](one.parameters()) for one in (model, plain))
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, **connected(**training.SMALL))
    for step in range(3):
        inputs, labels = training.samples(2, 6, seed=step)
        optimizer.zero_grad()
        for one, own, wanted in zip(handle.models, inputs, labels, strict=True):
            F.cross_entropy(one(own), wanted).backward()
            one(own)
        optimizer.step()
        twin.zero_grad()
        F.cross_entropy(plain(inputs.flatten(0, 1)), labels.flatten()).backward()
        twin.step()
    for row in training.weights_of_learners(handle):
        training.assert_near(row, training.flat_weights(plain))


def test_two_backward_passes_of_each_learner_name_no_sync() -> None:
    """As on generated and on real samples: all gradients of learner 1 but those of its first pass are its own."""
    model = training.mlp()
    optimizer = training.OPTIMIZERS["sgd"](model.parameters())
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, **connected(**training.SMALL))
    for one in handle.models:
        for sign in (1, -1):
            one(sign * torch.ones(4, 5)).square().mean().backward()
    with pytest.raises(
        RuntimeError, match=r"learner 1 alone were changed .* \(no_sync\(\) for all its backward passes"
    ):
        optimizer.step()


def test_a_learner_that_began_again_after_an_error_has_a_new_pass() -> None:
    """Learner 1 fails in its second call. The loop begins again with learner 0, whose first gradients do not count."""
    model, plain = training.mlp(), training.mlp()
    optimizer, twin = (training.OPTIMIZERS["sgd"](one.parameters()) for one in (model, plain))
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, **connected(**training.SMALL))
    inputs, labels = training.samples(2, 6)
    F.cross_entropy(handle.models[0](5 * inputs[0]), labels[0]).backward()
    handle.models[1](inputs[1])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        handle.models[1](inputs[1, :, 1:])
    optimizer.zero_grad()
    for one, own, wanted in zip(handle.models, inputs, labels, strict=True):
        F.cross_entropy(one(own), wanted).backward()
    optimizer.step()
    F.cross_entropy(plain(inputs.flatten(0, 1)), labels.flatten()).backward()
    twin.step()
    for row in training.weights_of_learners(handle):
        training.assert_near(row, training.flat_weights(plain))


def test_reentrant_checkpoints_of_virtual_learners_are_named() -> None:
    """Their backward passes run inside other ones: in the middle of a learner's pass, and at its beginning."""

    class Checkpointed(nn.Module):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.place = place
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                x = checkpoint(layer, x, use_reentrant=True) if index == self.place else layer(x)
            return x

    for place in (1, 2):
        model = Checkpointed(place)
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
        before = training.weights_of_learners(handle)
        with pytest.raises(RuntimeError, match=r"use_reentrant=False\)?$"):
            for one in handle.models:
                one(torch.ones(4, 5)).square().mean().backward()
            optimizer.step()
        assert torch.equal(training.weights_of_learners(handle), before)


def test_a_learner_with_all_its_passes_inside_no_sync_is_refused() -> None:
    """The others had one outside, and wait for it."""
    model = training.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=3)
    inputs, _ = training.samples(3, 4)
    handle.models[0](inputs[0]).sum().backward()
    with handle.no_sync():
        for one, own in zip(handle.models[1:], inputs[1:], strict=True):
            one(own).sum().backward()
    with pytest.raises(RuntimeError, match=r"learner 1, 2 had no backward pass outside of no_sync\(\)"):
        optimizer.step()


def test_nested_no_sync_stays_paused_and_a_step_without_an_average_is_refused() -> None:
    """As of a shorter last window of passes. One more pass outside averages them all."""
    strategies = [ddpcore.SSGD(), ddpcore.SSGD(weights=[1, 3]), ddpcore.NoisySSGD(0.01)]
    strategies += [ddpcore.LocalSGD(9, switch_step=9), ddpcore.LocalSGD(9, group=2)]
    for strategy in strategies:
        model = training.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, strategy, learners=2)
        inputs, labels = training.samples(2, 4)
        with handle.no_sync():
            with handle.no_sync():
                pass
            training.loss_of(handle.model(inputs), labels).backward()
        first, second = (next(one.parameters()).grad for one in handle.models)
        assert not torch.equal(first, second), "gradients were averaged inside no_sync()"
        with pytest.raises(RuntimeError, match=r"all backward passes of this step were inside no_sync\(\)"):
            optimizer.step()
        training.loss_of(handle.model(inputs), labels).backward()
        optimizer.step()
        assert torch.equal(*training.weights_of_learners(handle)), strategy


def _of_two() -> tuple[torch.optim.Optimizer, ddpcore.Distributed, torch.Tensor, torch.Tensor]:
    """An optimizer and the handle of two learners under SSGD, and a batch of each."""
    model = training.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
    inputs, labels = training.samples(2, 4)
    return optimizer, handle, inputs, labels


def test_sync_alone_changes_nothing() -> None:
    """Outside of no_sync: gradients that the program has set are refused there, too."""
    optimizer, handle, inputs, labels = _of_two()
    with handle.sync():
        training.loss_of(handle.model(inputs), labels).backward()
    optimizer.step()
    assert torch.equal(*training.weights_of_learners(handle))
    with handle.sync(), pytest.raises(RuntimeError, match="set or changed without a backward pass"):
        for index, own in enumerate(handle.models):
            for parameter in own.parameters():
                parameter.grad = torch.full_like(parameter, index)
        optimizer.step()


@pytest.mark.parametrize("late", [False, True])
def test_a_pass_inside_no_sync_may_average(late: bool) -> None:
    """Also after others, as Accelerate's trigger_sync_in_backward asks for it; none may follow."""
    optimizer, handle, inputs, labels = _of_two()
    with handle.no_sync():
        losses = [training.loss_of(handle.model(inputs), labels) for _ in range(2 + late)]
        losses[0].backward()
        with handle.sync():
            losses[1].backward()
        if late:
            losses[2].backward()
            with handle.no_sync():
                pass
    if late:
        with pytest.raises(RuntimeError, match="came after the pass that averages"):
            optimizer.step()
    else:
        optimizer.step()
        assert torch.equal(*training.weights_of_learners(handle))


def test_a_pass_that_averages_may_follow_no_sync_inside_sync() -> None:
    optimizer, handle, inputs, labels = _of_two()
    with handle.no_sync(), handle.sync():
        with handle.no_sync():
            training.loss_of(handle.model(inputs), labels).backward()
        training.loss_of(handle.model(inputs), labels).backward()
    optimizer.step()
    with handle.no_sync():
        training.loss_of(handle.model(inputs), labels).backward()
        with handle.no_sync(), handle.sync():
            training.loss_of(handle.model(inputs), labels).backward()
    optimizer.step()
    assert torch.equal(*training.weights_of_learners(handle))


def test_a_step_inside_no_sync_has_no_average_and_does_not_excuse_the_next() -> None:
    optimizer, handle, inputs, labels = _of_two()
    with handle.no_sync():
        training.loss_of(handle.model(inputs), labels).backward()
        optimizer.step()
    first, second = training.weights_of_learners(handle)
    assert not torch.equal(first, second)
    for one in handle.models:
        next(one.parameters()).grad = torch.ones_like(next(one.parameters()))
    with pytest.raises(RuntimeError, match="gradients were set or changed without a backward pass"):
        optimizer.step()


def test_gradients_are_the_mean_right_after_backward() -> None:
    model, plain = training.mlp(), training.mlp()
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, **connected(**training.SMALL))
    inputs, labels = training.samples(2, 4)
    training.loss_of(handle.model(inputs), labels).backward()
    F.cross_entropy(plain(inputs.flatten(0, 1)), labels.flatten()).backward()
    for one in handle.models:
        for ours, theirs in zip(one.parameters(), plain.parameters(), strict=True):
            training.assert_near(ours.grad, theirs.grad)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(RuntimeError, match=r"the gradients of learner 0 alone were changed.* each of handle\.models"):
        optimizer.step()
    nn.utils.clip_grad_norm_(handle.models[1].parameters(), 0.01)
    before = training.weights_of_learners(handle).clone()
    optimizer.step()
    moved = (training.weights_of_learners(handle) - before)[1].square().sum().sqrt()
    assert moved.item() == pytest.approx(0.1 * 0.01, rel=1e-3), "the step must use the clipped gradient"


def test_an_error_inside_backward_leaves_the_next_step_sound() -> None:
    """Later backward passes must average after a backward pass that failed halfway."""

    def explode(grad: Tensor) -> None:
        raise ArithmeticError("boom")

    model = training.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(
        model, optimizer, ddpcore.SSGD(), learners=2, vectorize=False, **connected(**training.SMALL)
    )
    inputs, labels = training.samples(2, 4)
    hook = model[0].weight.register_hook(explode)
    with pytest.raises(ArithmeticError, match="boom"):
        training.loss_of(handle.model(inputs), labels).backward()
    hook.remove()
    assert model[2].bias.grad is not None, "the pass must fail after the first gradient, or this test tests nothing"
    optimizer.zero_grad()
    training.loss_of(handle.model(inputs), labels).backward()
    for first, second in zip(*(one.parameters() for one in handle.models), strict=True):
        assert torch.equal(first.grad, second.grad), "gradients are no longer averaged"
    optimizer.step()
    plain = training.mlp()
    F.cross_entropy(plain(inputs.flatten(0, 1)), labels.flatten()).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for row in training.weights_of_learners(handle):
        training.assert_near(row, training.flat_weights(plain))


@pytest.mark.parametrize("again", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("num_before", [0, 1])
def test_a_step_is_tried_again_after_a_learner_s_pass_has_failed(num_before: int, again: tuple[int, ...]) -> None:
    """With learners in any order: the pass that failed had begun a step, of which nothing is left."""

    def explode(grad: Tensor) -> None:
        raise ArithmeticError("boom")

    model, plain = training.mlp(), training.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2, vectorize=False)
    inputs, labels = training.samples(2, 4)
    for row in range(num_before):
        F.cross_entropy(handle.models[row](inputs[row]), labels[row]).backward()
    hook = handle.models[num_before][0].weight.register_hook(explode)
    with pytest.raises(ArithmeticError, match="boom"):
        F.cross_entropy(handle.models[num_before](inputs[num_before]), labels[num_before]).backward()
    hook.remove()
    optimizer.zero_grad()
    for row in again:
        F.cross_entropy(handle.models[row](inputs[row]), labels[row]).backward()
    optimizer.step()
    F.cross_entropy(plain(inputs.flatten(0, 1)), labels.flatten()).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for row in training.weights_of_learners(handle):
        training.assert_near(row, training.flat_weights(plain))


def test_a_branch_used_only_under_no_sync() -> None:
    """Both branches get a gradient in each step. Only the last micro-batch averages."""
    torch.manual_seed(0)
    model = training.Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
    for first, last in (("first", "second"), ("second", "first")):
        inputs, labels = training.samples(2, 4)
        optimizer.zero_grad()
        for one in handle.models:
            one.branch = first
        with handle.no_sync():
            training.loss_of(handle.model(inputs), labels).backward()
        for one in handle.models:
            one.branch = last
        training.loss_of(handle.model(inputs), labels).backward()
        for (name, parameter), other in zip(model.named_parameters(), handle.models[1].parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad), name
        optimizer.step()


def test_momentum_survives_a_first_step_without_synchronisation() -> None:
    """The first averaging backward pass changes the layout of the parameters: momentum must move with them."""
    ends = []
    for make in (FusedSGD, torch.optim.SGD):
        model = training.mlp()
        # Registered in the reverse of the order of use, so that the layout changes.
        model = nn.ModuleDict({"last": model[2], "first": model[0]})
        optimizer = make(model.parameters(), lr=0.1, momentum=0.9)

        class Chain(nn.Module):
            def __init__(self, parts: nn.ModuleDict) -> None:
                super().__init__()
                self.parts = parts

            def forward(self, inputs: Tensor) -> Tensor:
                return self.parts["last"](self.parts["first"](inputs).tanh())

        chain = Chain(model)
        handle = ddpcore.distribute(chain, optimizer, ddpcore.SSGD(), learners=2, **connected(**training.SMALL))
        handle.model(training.samples(2, 4)[0])
        optimizer.step()  # without a backward pass, which says nothing about the order
        assert not handle._laid_out
        for step in range(4):
            inputs, labels = training.samples(2, 4, seed=step)
            optimizer.zero_grad()
            with handle.no_sync() if step < 2 else nullcontext():
                training.loss_of(handle.model(inputs), labels).backward()
                optimizer.step()
        assert handle._laid_out
        ends.append(training.weights_of_learners(handle))
    training.assert_near(*ends)


@pytest.mark.parametrize("learners", [None, 2])
@pytest.mark.parametrize("strategy", [ddpcore.SSGD, lambda: ddpcore.LocalSGD(period=9)])
def test_kept_gradients_keep_their_values(strategy: Any, learners: int | None, one_rank: None) -> None:
    """As torch's own, which are new tensors after ``zero_grad()``."""
    model = training.mlp()
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, strategy(), learners=learners)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(3):
        optimizer.zero_grad()
        inputs, labels = training.samples(learners or 1, 6, seed=step)
        outputs = handle.model(inputs if learners else inputs[0])
        F.cross_entropy(outputs.flatten(0, -2), labels.flatten()).backward()
        optimizer.step()
        kept += [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    for gradient, value in kept:
        assert torch.equal(gradient, value)


@pytest.mark.parametrize("what", ["gradients swapped", "state moved in step 0", "state moved in step 1"])
def test_memory_that_the_program_changes(what: str) -> None:
    """FusedSGD steps flat buffers and torch's SGD does not."""
    ends = []
    for optimizer_class in (FusedSGD, torch.optim.SGD):
        model = training.mlp()
        optimizer = optimizer_class(model.parameters(), lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(period=9), learners=2)
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            inputs, labels = training.samples(2, 6, seed=step)
            training.loss_of(handle.model(inputs), labels).backward()
            first, second = (next(one.parameters()) for one in handle.models)
            if what == "gradients swapped":
                first.grad, second.grad = second.grad, first.grad
            optimizer.step()
            if what == f"state moved in step {step}":
                for state in optimizer.state.values():
                    state["momentum_buffer"].data = torch.ones_like(state["momentum_buffer"])
        ends.append(training.weights_of_learners(handle))
    for ours, theirs in zip(*ends, strict=True):
        training.assert_near(ours, theirs)


@pytest.mark.parametrize("strategy", [ddpcore.SSGD, lambda: ddpcore.LocalSGD(period=9)])
def test_gradients_that_nothing_keeps_are_not_copied(strategy: Any, one_rank: None) -> None:
    """A view is replaced by a new one only where the program keeps it."""
    model = training.mlp()
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(
        model, optimizer, strategy(), connection=ddpcore.Connection(bucket_bytes=256, first_bucket_bytes=64)
    )
    assert handle.learner is not None
    before: tuple[int, ...] = ()
    for step in range(4):
        optimizer.zero_grad()
        inputs, labels = training.samples(1, 6, seed=step)
        F.cross_entropy(handle.model(inputs[0]), labels[0]).backward()
        optimizer.step()
        views = tuple(map(id, handle.learner.flat.grad_views))
        assert step < 2 or views == before  # the first step settles the order
        before = views
