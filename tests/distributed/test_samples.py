"""Numbers of samples that a loop sets: one for all passes whose gradients are added, else an error."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore import SSGD, LocalSGD
from ddpcore.strategies.base import Strategy

OTHER = "num_samples was another one in another pass of this step"


def _begin(strategy: Strategy, model: nn.Module | None = None, **options: Any) -> tuple[Any, ...]:
    """The optimizer, the handle of two learners, and the weights."""
    torch.manual_seed(0)
    model = model or nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=2, **options)
    return optimizer, handle, next(model.parameters()).detach().clone()


def _pass(handle: Any, counts: list[int], divisors: list[int] | None = None) -> list[torch.Tensor]:
    """A backward pass of each learner. Returns the inputs."""
    inputs = [torch.randn(num, 3) for num in counts]
    for one, own, num in zip(handle.models, inputs, divisors or counts, strict=True):
        (one(own).sum() / num).backward()
    return inputs


def _accumulated(strategy: Strategy, counts: list[list[int]], mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights after a step of two learners, one row of counts a pass, and those of a mean over all samples."""
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=2)
    begin, seen, sizes = model.weight.detach().clone(), [], [0, 0]
    with ExitStack() as outer:
        for number, given in enumerate(counts):
            is_last = number == len(counts) - 1
            sizes[:] = given  # one list, which the loop fills anew
            handle.num_samples = sizes
            if mode == "once" and is_last:
                outer.close()
            if mode in ("once", "inside sync") and not number:
                outer.enter_context(handle.no_sync())
            inner = {"each": handle.no_sync, "inside sync": handle.sync}.get(mode, nullcontext)
            with inner() if is_last == (mode == "inside sync") else nullcontext():
                for one, num in zip(handle.models, given, strict=True):
                    own = torch.randn(num, 3)
                    seen.append(own)
                    (one(own).sum() / sum(each[len(seen) % 2 - 1] for each in counts)).backward()
    optimizer.step()
    return model.weight.detach(), begin - torch.cat(seen).mean(0)


@pytest.mark.parametrize("mode", ["each", "once", "inside sync"])
@pytest.mark.parametrize("counts", [[[3, 1], [4, 2]], [[4, 1], [2, 2], [2, 2]], [[2, 2], [2, 2], [1, 2]]], ids=str)
def test_samples_of_accumulated_passes_are_those_of_the_step(counts: list[list[int]], mode: str) -> None:
    with pytest.raises(RuntimeError, match="num_samples was another one in another pass of this step"):
        _accumulated(SSGD(weights="samples"), counts, mode)
    torch.testing.assert_close(*_accumulated(SSGD(weights="samples"), [counts[-1]] * 3, mode))


def test_samples_of_local_steps_are_those_of_all_passes() -> None:
    with pytest.raises(RuntimeError, match="local_sgd: num_samples was another one in another pass"):
        _accumulated(LocalSGD(1, weights="samples"), [[4, 1], [2, 2]], "no context")


def test_each_average_has_its_own_samples() -> None:
    """Two passes outside of no_sync() are two averages, so that gradients are sums of two means over samples."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = ddpcore.distribute(model, optimizer, SSGD(weights="samples"), learners=2)
    expected = model.weight.detach().clone()
    for counts in ([4, 1], [2, 2]):
        inputs = [torch.randn(num, 3) for num in counts]
        expected -= torch.cat(inputs).mean(0)
        handle.num_samples = counts
        for one, own in zip(handle.models, inputs, strict=True):
            one(own).mean().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), expected)


@pytest.mark.parametrize("how", ["zero_grad", "zeros", "None"])
@pytest.mark.parametrize("make", [lambda: SSGD(weights="samples"), lambda: LocalSGD(1, weights="samples")])
def test_a_step_that_is_left_out_has_samples_of_its_own(make: Any, how: str) -> None:
    """And one in which learner 0 alone has samples needs no pass of others."""
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = ddpcore.distribute(model, optimizer, make(), learners=2)
    handle.num_samples, first = [5, 0], torch.randn(5, 3)
    expected = model.weight.detach() - first.mean(0)
    model(first).mean().backward()
    optimizer.step()
    for counts in ([4, 1], [2, 2]):
        handle.num_samples = None if how == "None" else counts
        handle.num_samples = counts
        optimizer.zero_grad(set_to_none=how != "zeros")
        inputs = [torch.randn(num, 3) for num in counts]
        for one, own in zip(handle.models, inputs, strict=True):
            one(own).mean().backward()
    optimizer.step()
    torch.testing.assert_close(handle.evaluation_model().weight.detach(), expected - torch.cat(inputs).mean(0))


@pytest.mark.parametrize("more", ["an average", "a forward pass"])
def test_what_follows_an_average_does_not_hide_other_samples(more: str) -> None:
    """Also a forward pass for a metric."""
    optimizer, handle, _ = _begin(SSGD(weights="samples"))
    handle.num_samples = [4, 1]
    with handle.no_sync():
        _pass(handle, [4, 1], [6, 3])
    handle.num_samples = [2, 2]
    with pytest.raises(RuntimeError, match=OTHER):
        _pass(handle, [2, 2], [6, 3])
        if more == "an average":
            _pass(handle, [2, 2])
        else:
            handle.models[0](torch.randn(2, 3))
        optimizer.step()


@pytest.mark.parametrize("size", [3, 70_000])
def test_learners_of_one_average_have_the_numbers_of_one_list(size: int) -> None:
    """In turn: each learner's pass had another list, also in the second average of a step. A large gradient moves."""
    _, handle, _ = _begin(SSGD(weights="samples"), nn.Linear(size, 1), vectorize=False)

    def run(one: nn.Module, counts: list[int]) -> None:
        handle.num_samples = counts
        one(torch.randn(2, size)).mean().backward()

    for one in handle.models if size == 3 else ():
        run(one, [2, 2])
    with pytest.raises(RuntimeError, match=OTHER):
        for counts, one in zip(([4, 1], [1, 4]), handle.models, strict=True):
            run(one, counts)


class _Towers(nn.ModuleDict):
    def forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self[name](x)


def test_gradients_that_another_pass_averages_have_its_numbers() -> None:
    """The second pass gives another layer its gradients, and moves those of the first into the flat buffer."""
    _, handle, _ = _begin(SSGD(weights="samples"), _Towers({name: nn.Linear(3, 1) for name in "ab"}))
    with pytest.raises(RuntimeError, match=OTHER):
        for name, counts, context in (("a", [4, 1], handle.no_sync()), ("b", [2, 2], nullcontext())):
            handle.num_samples = counts
            with context:
                for one, num in zip(handle.models, counts, strict=True):
                    one(name, torch.randn(num, 3)).mean().backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("what", ["graph", "replaced", "dense on sparse"])
def test_sums_in_a_new_tensor_have_one_number(what: str) -> None:
    model = nn.Embedding(3, 1, sparse=True) if what == "dense on sparse" else None
    optimizer, handle, _ = _begin(LocalSGD(1, weights="samples"), model)
    with pytest.raises(RuntimeError, match=OTHER):
        for counts in ([4, 1], [2, 2]):
            for one in handle.models if what == "replaced" and counts == [2, 2] else ():
                one.weight.grad = one.weight.grad * 0.5
            handle.num_samples = counts
            for one, num in zip(handle.models, counts, strict=True):
                if model is None or counts == [2, 2]:
                    loss = (torch.randn(num, 3) @ one.weight.view(3)).square().mean()
                else:
                    loss = one(torch.randint(3, (num,))).mean()
                loss.backward(create_graph=what == "graph")
        optimizer.step()


@pytest.mark.parametrize("order", ["None, set, pass", "set, None, pass", "set, pass, None", "zeros, set, pass"])
def test_a_learner_without_samples_takes_part_after_a_step_that_was_left_out(order: str) -> None:
    optimizer, handle, expected = _begin(SSGD(weights="samples"))
    for counts in ([4, 1], [4, 0]):
        inputs = [torch.randn(num, 3) for num in counts]
        for part in order.split(", "):
            if part == "set":
                handle.num_samples = counts
            elif part == "pass":
                pairs = zip(handle.models, inputs, strict=True)
                losses = [one(own).mean() for one, own in pairs if len(own)]
            else:
                optimizer.zero_grad(set_to_none=part == "None")
        torch.stack(losses).sum().backward()
    optimizer.step()
    for one in handle.models:
        torch.testing.assert_close(one.weight.detach(), expected - inputs[0].mean(0))


def test_each_average_of_local_steps_before_their_switch_has_its_own_samples() -> None:
    optimizer, handle, expected = _begin(LocalSGD(1, weights="samples", switch_step=1))
    seen = []
    for counts in ([4, 1], [2, 3]):
        handle.num_samples = counts
        seen += _pass(handle, counts)
    optimizer.step()
    for one in handle.models:
        torch.testing.assert_close(
            one.weight.detach(), expected - torch.cat(seen[:2]).mean(0) - torch.cat(seen[2:]).mean(0)
        )


@pytest.mark.parametrize("make", [lambda: SSGD(weights="samples"), lambda: LocalSGD(1, weights="samples")])
def test_passes_of_a_closure_have_one_number(make: Any) -> None:
    optimizer, handle, _ = _begin(make())

    def closure() -> None:
        optimizer.zero_grad()
        handle.num_samples = [4, 1]
        with handle.no_sync():
            _pass(handle, [4, 1], [6, 3])
        handle.num_samples = [2, 2]
        _pass(handle, [2, 2], [6, 3])

    with pytest.raises(RuntimeError, match=OTHER):
        optimizer.step(closure)


@pytest.mark.parametrize("switch_step", [0, 1])
def test_local_steps_after_a_switch_compare_their_passes(switch_step: int) -> None:
    """Buckets of gradients move them, also in steps that average none."""
    optimizer, handle, _ = _begin(LocalSGD(1, weights="samples", switch_step=switch_step))
    for _ in range(2):
        handle.num_samples = [4, 4]
        _pass(handle, [4, 4])
        optimizer.step()
        optimizer.zero_grad()
    handle.num_samples = [9, 1]
    _pass(handle, [9, 1])
    handle.num_samples = [1, 1]
    with pytest.raises(RuntimeError, match=OTHER):
        _pass(handle, [1, 1])
        optimizer.step()


@pytest.mark.parametrize("num", [{0: 3, 1: 4}.values(), torch.tensor([3.0, 4.0], requires_grad=True) * 1])
def test_numbers_of_any_kind(num: Any) -> None:
    optimizer, handle, expected = _begin(SSGD(weights="samples"))
    handle.num_samples = num
    inputs = _pass(handle, [3, 4])
    optimizer.step()
    torch.testing.assert_close(handle.models[0].weight.detach(), expected - torch.cat(inputs).mean(0))


def test_one_number_cannot_be_changed_alone() -> None:
    """Only an assignment of all is noted."""
    _, handle, _ = _begin(LocalSGD(1, weights="samples"))
    handle.num_samples = [4, 1]
    with pytest.raises(TypeError, match="does not support item assignment"):
        handle.num_samples[0] = 2
    assert handle.num_samples == (4, 1)


def test_numbers_that_were_not_set_are_named_after_two_passes() -> None:
    _, handle, _ = _begin(SSGD(weights="samples"))
    with pytest.raises(ValueError, match="num_samples of learner 0 was not set"):
        for _ in range(2):
            handle.num_samples = [None, 3]
            with handle.no_sync():
                _pass(handle, [2, 3])
        _pass(handle, [2, 3])


@pytest.mark.parametrize("before", [None, [4, 1]])
@pytest.mark.parametrize("make", [lambda: SSGD(weights="samples"), lambda: LocalSGD(1, weights="samples")])
def test_the_number_of_a_closure_counts(make: Any, before: list[int] | None) -> None:
    optimizer, handle, expected = _begin(make())
    seen = []

    def closure() -> None:
        optimizer.zero_grad()
        handle.num_samples = [2, 3]
        seen.extend(_pass(handle, [2, 3]))

    handle.num_samples = before
    optimizer.step(closure)
    found = next(handle.evaluation_model().parameters()).detach()
    torch.testing.assert_close(found, expected - torch.cat(seen).mean(0))


def test_a_step_left_out_in_the_order_of_torchs_tutorial() -> None:
    """Forward pass, zero_grad, backward pass."""
    optimizer, handle, expected = _begin(LocalSGD(1, weights="samples"))
    for counts in ([4, 1], [2, 3]):
        handle.num_samples = counts
        inputs = [torch.randn(num, 3) for num in counts]
        losses = [one(own).mean() for one, own in zip(handle.models, inputs, strict=True)]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
    optimizer.step()
    found = next(handle.evaluation_model().parameters()).detach()
    torch.testing.assert_close(found, expected - torch.cat(inputs).mean(0))


def test_passes_that_failed_run_again_with_fewer_samples() -> None:
    optimizer, handle, expected = _begin(SSGD(weights="samples"))
    handle.num_samples = [4, 4]
    handle.models[0](torch.randn(4, 3)).mean().backward()  # learner 1 runs out of memory
    handle.num_samples = [2, 3]
    optimizer.zero_grad()
    inputs = _pass(handle, [2, 3])
    optimizer.step()
    torch.testing.assert_close(handle.models[0].weight.detach(), expected - torch.cat(inputs).mean(0))


def test_sparse_gradients_that_are_zeroed_in_place() -> None:
    optimizer, handle, expected = _begin(LocalSGD(1, weights="samples"), nn.Embedding(5, 2, sparse=True))
    for counts in ([4, 1], [2, 3]):
        handle.num_samples = counts
        optimizer.zero_grad(set_to_none=False)
        indices = [torch.randint(5, (num,)) for num in counts]
        for one, own in zip(handle.models, indices, strict=True):
            one(own).sum().div(len(own)).backward()
    optimizer.step()
    share = torch.bincount(torch.cat(indices), minlength=5)[:, None] / 5
    found = next(handle.evaluation_model().parameters()).detach()
    torch.testing.assert_close(found, expected - share)


def test_clipping_takes_the_average_of_a_learner_that_has_no_samples_now() -> None:
    """It had some in the step before."""
    torch.manual_seed(0)
    model, plain = nn.Linear(16, 4), nn.Linear(16, 4)
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (model, plain)]
    handle = ddpcore.distribute(model, optimizers[0], ddpcore.SSGD("samples"), learners=3)
    for counts in ([8, 8, 8], [8, 2, 0], [8, 8, 0]):
        for optimizer in optimizers:
            optimizer.zero_grad()
        handle.num_samples = counts
        batches = [torch.randn(count, 16) for count in counts]
        for one, batch in zip(handle.models, batches, strict=True):
            if len(batch):
                one(batch).square().mean().backward()
        plain(torch.cat(batches)).square().mean().backward()
        norms, norm = handle.clip_grad_norm_(0.05), nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        torch.testing.assert_close(torch.stack(norms), norm.repeat(3))
        for optimizer in optimizers:
            optimizer.step()
    for one in handle.models:
        torch.testing.assert_close(one.weight, plain.weight)


def test_learners_of_a_step_that_was_left_out_do_not_count_in_the_next() -> None:
    """Learner 0 had no samples in it, so its average was still open."""
    torch.manual_seed(0)
    model, plain = nn.Linear(16, 4), nn.Linear(16, 4)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD("samples"), learners=3)
    for counts in ([0, 8, 1], [3, 1, 1]):
        handle.num_samples = counts
        optimizer.zero_grad()
        batches = [torch.randn(count, 16) for count in counts]
        for one, batch in zip(handle.models, batches, strict=True):
            if len(batch):
                one(batch).square().mean().backward()
    plain(torch.cat(batches)).square().mean().backward()
    optimizer.step()
    for one in handle.models:
        torch.testing.assert_close(one.weight.grad, plain.weight.grad)
