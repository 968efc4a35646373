"""A NaN in one learner of four: it is named, no other learner ever holds it, and ranks do what virtual learners do."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore.distributed.alike import sampled_columns
from ddpcore.optim import FusedSGD
from ddpcore.strategies.learner import (
    NonFinite,
    NonFiniteError,
    first_nonfinite,
    is_finite,
    row_sums,
    suspects,
)
from helpers import nonfinite_ranks as helper
from helpers import ranks
from helpers.connection import connected
from helpers.each import each


@pytest.fixture(scope="module")
def real() -> list[dict[Any, helper.Outcome]]:
    saved = ranks.run("nonfinite_ranks", helper.NUM_RANKS)
    return [{case: helper.Outcome(*outcome) for case, outcome in rank.items()} for rank in saved]


@pytest.fixture(scope="module")
def virtual(one_thread: None) -> dict[helper.Case, helper.Outcome]:
    return {case: helper.train(case, learners=helper.NUM_RANKS, vectorize=False) for case in helper.CASES}


def averages(case: helper.Case) -> bool:
    return case.strategy == "ssgd" or (case.strategy == "post_local" and case.bad_step == 0)


@pytest.mark.slow
@each(("case", "transport"), helper.RUNS)
def test_ranks_do_what_virtual_learners_do(
    case: helper.Case, transport: str, real: list[dict[Any, Any]], virtual: dict[Any, Any]
) -> None:
    """Weights, batch norm and what was found, bit for bit. The runs themselves check every weight after every step."""
    seen, oracle = [rank[(*case, transport)] for rank in real], virtual[case]
    assert torch.equal(torch.cat([one.weights for one in seen]), oracle.weights)
    own = seen[helper.BAD_LEARNER]
    assert (own.found, own.errors) == (oracle.found, oracle.errors)
    for rank, one in enumerate(seen):
        if rank == helper.BAD_LEARNER:
            continue
        if case.strategy == "grouped" and rank // 2 == helper.BAD_LEARNER // 2:  # whose average is not finite
            assert one.found == [replace(event, learner=None) for event in own.found]
            assert one.errors == [error.replace("learner 2", "the average over learners") for error in own.errors]
        else:
            assert (one.found, one.errors) == ((own.found, own.errors) if averages(case) else ([], []))


@each("case", helper.CASES)
def test_learner_step_and_parameter_are_named(case: helper.Case, virtual: dict[Any, Any]) -> None:
    assert case.bad_step is not None
    found, errors = virtual[case].found, virtual[case].errors
    if case.mode == "raise":
        text = f"step {case.bad_step + 1}, learner 2: the gradient of 0.weight is not finite: no weight has changed"
        assert len(errors) == 1
        assert errors[0].startswith(text)
        assert not found
    else:
        assert found == [
            ddpcore.NonFinite(
                step=case.bad_step + 1, learner=2, parameter="0.weight", what="gradient", action=case.mode
            )
        ]


@pytest.mark.parametrize("strategy", helper.STRATEGIES)
def test_after_an_error_the_loop_may_take_the_step_again(strategy: str, virtual: dict[Any, Any]) -> None:
    """Nothing had changed: the run ends with the bits of a run without the NaN."""
    clean = helper.train(helper.Case(strategy, "raise", None), learners=helper.NUM_RANKS, vectorize=False)
    for bad_step in (0, 3):
        assert torch.equal(virtual[helper.Case(strategy, "raise", bad_step)].weights, clean.weights)


def test_quarantine_takes_the_average_of_the_neighbours() -> None:
    """w_2 <- (w_1 + w_3) / 2 on a ring of four; the others average as always, with w_2 before the step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = FusedSGD(model.parameters(), lr=0.0)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), learners=4, on_nonfinite="quarantine")
    assert handle.learner is not None
    for row, one in enumerate(handle.models):
        nn.init.constant_(one.weight, float(row**2))
    inputs = torch.ones(4, 1, 3)
    inputs[2] = torch.inf
    handle.model(inputs).square().sum().backward()
    optimizer.step()
    third = torch.tensor(1 / 3)
    expected = [third * 0 + third * 1 + third * 9, third * 1 + third * 0 + third * 4, torch.tensor(5.0)]
    expected.append(third * 9 + third * 0 + third * 4)
    for one, value in zip(handle.models, expected, strict=True):
        torch.testing.assert_close(one.weight, value.expand(2, 3), rtol=1e-6, atol=0)
    assert torch.equal(handle.models[2].weight, torch.full((2, 3), 5.0))


@pytest.mark.parametrize("order", helper.ORDERS.values())
@pytest.mark.parametrize("mode", ["raise", "skip", "quarantine"])
def test_weights_that_are_not_finite_are_not_sent(order: str, mode: str) -> None:
    """Whoever has changed them: a step that overflows, or the program."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    strategy = ddpcore.DPSGD(ddpcore.Ring(), order=order)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=4, on_nonfinite=mode)
    for _ in range(2):
        handle.model(torch.ones(4, 2, 3)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        handle.models[1][1].weight[0, 1] = -torch.inf
    text = "step 2, learner 1: the weights of 1.weight are not finite: no other learner has got them"
    if order == "adapt_then_combine":  # sends after the step
        text = "step 3, learner 1: the gradient of 0.weight is not finite" if mode == "raise" else text[6:]
    with pytest.raises(ddpcore.NonFiniteError, match=text):
        handle.model(torch.ones(4, 2, 3)).sum().backward()
        optimizer.step()
    assert [all(p.isfinite().all() for p in one.parameters()) for one in handle.models] == [True, False, True, True]


def test_one_weight_of_many_that_is_not_finite_is_not_sent() -> None:
    """No version counts a write by ``.data``, and a sample misses it, so that the weights are read whole."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), learners=4)
    for _ in range(2):
        handle.model(torch.ones(4, 2, 64)).sum().backward()
        optimizer.step()
    weight = handle.models[1].weight
    version, place = weight._version, 64 * 64 - 2
    assert place not in sampled_columns(handle.learner.flat)
    weight.data.view(-1)[place] = torch.nan
    assert weight._version == version
    with pytest.raises(ddpcore.NonFiniteError, match="step 2, learner 1: the weights of weight are not finite: no oth"):
        handle.model(torch.ones(4, 2, 64)).sum().backward()
        optimizer.step()
    assert [bool(one.weight.isfinite().all()) for one in handle.models] == [True, False, True, True]


@pytest.mark.parametrize("strategy", ["local_sgd", "push_sum", "slowmo"])
def test_a_step_that_overflows_stays_with_its_learner(strategy: str) -> None:
    """The gradient is finite, and the new weight is not."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    handle = ddpcore.distribute(model, optimizer, helper.STRATEGIES[strategy](), learners=4)
    with pytest.raises(ddpcore.NonFiniteError, match="learner 3: the weights of weight are not finite"):
        for _ in range(3):
            optimizer.zero_grad()
            (handle.model(torch.ones(4, 1, 1)) * torch.tensor([0.0, 0.0, 0.0, 1e20]).view(4, 1, 1)).sum().backward()
            optimizer.step()
    assert [bool(one.weight.isfinite()) for one in handle.models] == [True, True, True, False]


def test_finite_gradients_whose_sum_overflows_are_finite() -> None:
    """The sum only selects what is looked at."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = FusedSGD(model.parameters(), lr=1e-38)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), learners=3)
    (handle.model(torch.ones(3, 1, 2)) * 3e38).sum().backward()
    optimizer.step()
    assert not handle.nonfinite


def test_sums_of_16_bits_do_not_overflow() -> None:
    """Else a learner with finite gradients would be named beside the one that has a NaN."""
    rows = torch.full((2, 64), 30000.0, dtype=torch.float16)
    rows[1, 5] = torch.nan
    assert suspects(row_sums(rows)) == [1]
    assert suspects(row_sums(rows[:1])) == []
    assert suspects(row_sums(rows[1:])) == [0]


def test_a_gradient_of_one_number_is_found_where_it_is() -> None:
    """Not only NaN that spreads: one infinite number in the last parameter, set after the backward pass."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(), learners=2, vectorize=False)
    handle.model(torch.ones(2, 2, 3)).sum().backward()
    for one in handle.models:
        one[1].bias.grad.mul_(torch.inf if one is handle.models[1] else 1.0)
    with pytest.raises(ddpcore.NonFiniteError, match=r"step 1, learner 1: the gradient of 1.bias is not finite"):
        optimizer.step()


@pytest.mark.parametrize("make", [ddpcore.SSGD, lambda: ddpcore.DPSGD(ddpcore.Ring())])
def test_a_scaler_skips_as_before(make: Any) -> None:
    """An overflow of scaled gradients is the scaler's: no error, the step is skipped and the scale halves."""
    model = nn.Linear(2, 1)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    handle = ddpcore.distribute(model, optimizer, make(), learners=2, scaler=scaler)
    before = model.weight.clone()
    scaler.scale(1e30 * handle.model(torch.ones(2, 1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0**99
    assert not handle.nonfinite


@pytest.mark.parametrize(
    ("strategy", "options", "text"),
    [
        (ddpcore.SSGD(), {}, "on_nonfinite is 'quarantine': ssgd has no neighbours: take 'skip'"),
        (ddpcore.LocalSGD(), {}, "on_nonfinite is 'quarantine': local_sgd has no neighbours: take 'skip'"),
        (ddpcore.SlowMo(), {}, "slowmo has no neighbours"),
        (ddpcore.PushSum(ddpcore.Ring()), {}, "push_sum averages no weights of neighbours alone: take 'skip'"),
        (ddpcore.DPSGD(ddpcore.Ring(), staleness=1), {}, "dpsgd averages no weights of neighbours alone"),
        (ddpcore.DPSGD(ddpcore.Ring()), {"learners": 1}, "one learner has no neighbours: take 'skip'"),
        (ddpcore.DPSGD(), {"on_nonfinite": "quit"}, "on_nonfinite is 'quit': choose from raise, skip, quarantine"),
        (ddpcore.Single(), {"learners": None}, "single does not use these options: leave on_nonfinite= out"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(strategy: Any, options: dict[str, Any], text: str) -> None:
    model = nn.Linear(2, 1)
    before = model.weight.data_ptr()
    with pytest.raises(ValueError, match=text) as error:
        ddpcore.distribute(
            model,
            FusedSGD(model.parameters()),
            strategy,
            **connected(**{"learners": 4, "on_nonfinite": "quarantine", **options}),
        )
    assert "\n" not in str(error.value)
    assert model.weight.data_ptr() == before


def test_complex_and_sparse_numbers() -> None:
    """Of states that a checkpoint holds, and of the gradients of embeddings."""
    infinite = torch.tensor([1.0, -torch.inf])
    assert is_finite([torch.ones(2), torch.arange(3), torch.ones(2, dtype=torch.complex64)])
    assert not is_finite([torch.ones(2), infinite])
    assert not is_finite([torch.complex(torch.ones(2), infinite)])
    assert not is_finite([torch.sparse_coo_tensor([[0, 3]], infinite, (5,), check_invariants=True)])


@pytest.mark.parametrize("mode", ["skip", "quarantine"])
def test_statistics_of_batch_norm_are_those_before_the_step(mode: str) -> None:
    """Of the learner that takes no step, as they were just before it; the others' change."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = ddpcore.DPSGD(ddpcore.Ring())
    handle = ddpcore.distribute(model, optimizer, strategy, learners=3, vectorize=False, on_nonfinite=mode)
    torch.manual_seed(0)
    means = []
    for step in range(4):
        inputs = torch.randn(3, 4, 2)
        if step == 3:
            inputs[1, 0, 0] = torch.nan
        optimizer.zero_grad()
        handle.model(inputs).square().sum().backward()
        optimizer.step()
        means.append([one[1].running_mean.clone() for one in handle.models])
    assert [(one.step, one.learner) for one in handle.nonfinite] == [(4, 1)]
    assert [torch.equal(before, after) for before, after in zip(*means[2:], strict=True)] == [False, True, False]
    assert not torch.equal(means[1][1], means[2][1]), "it changes in other steps"
    assert [int(one[1].num_batches_tracked) for one in handle.models] == [4, 3, 4], "by which momentum=None divides"


class _Running(nn.Linear):
    """Has a buffer of another dtype and shape from its first pass on."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mean", torch.tensor(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + inputs.mean(dim=0)
        return super().forward(inputs)


def test_a_buffer_that_has_changed_its_dtype_is_that_before_the_step() -> None:
    """It was kept as whole numbers."""
    model = _Running()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), learners=3, on_nonfinite="skip")
    for number in (0.3, 0.6, torch.nan):
        means = [one.mean.clone() for one in handle.models]
        inputs = torch.full((3, 4, 2), 0.3)
        inputs[1] = number
        optimizer.zero_grad()
        handle.model(inputs).square().sum().backward()
        optimizer.step()
    assert torch.equal(handle.models[1].mean, means[1]) and float(means[1][0]) == pytest.approx(0.75)
    assert not torch.equal(handle.models[0].mean, means[0])


def test_a_pass_whose_step_was_left_out_does_not_count() -> None:
    """A loop that sees a bad loss may go on with the next samples, without a step."""
    model = nn.Linear(2, 1)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=3)
    for learner in (1, 2):
        inputs = torch.ones(3, 1, 2)
        inputs[learner] = torch.nan
        optimizer.zero_grad()
        handle.model(inputs).sum().backward()
    with pytest.raises(ddpcore.NonFiniteError) as caught:
        optimizer.step()
    assert [one.learner for one in caught.value.found] == [2]


def test_a_large_gradient_outside_of_the_buffer_is_found() -> None:
    """Which a fused optimizer steps where it lies."""
    model = nn.Linear(256, 256)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="there is one learner"):
        handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(), learners=1, vectorize=False)
    for value in (1.0, torch.nan):
        handle.model(torch.ones(1, 1, 256)).sum().backward()
        for one in handle.models[0].parameters():
            one.grad = torch.ones_like(one)
        handle.models[0].weight.grad[3, 5] = value
        if value == 1.0:
            optimizer.step()
    with pytest.raises(ddpcore.NonFiniteError, match=r"step 2, learner 0: the gradient of weight is not finite"):
        optimizer.step()


def test_the_learner_is_named_whichever_message_had_its_gradient() -> None:
    """Each parameter is averaged by a message of its own, and only the last message has a NaN."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    buckets = {"bucket_bytes": 64, "first_bucket_bytes": 64}
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=3, vectorize=False, **connected(**buckets))
    for step in range(3):
        if step == 2:
            handle.models[1][0].weight.register_hook(lambda gradient: gradient * torch.nan)
        optimizer.zero_grad()
        handle.model(torch.ones(3, 1, 4)).sum().backward()
        if step < 2:
            optimizer.step()
    with pytest.raises(ddpcore.NonFiniteError, match=r"step 3, learner 1: the gradient of 0.weight is not finite"):
        optimizer.step()


def test_a_learner_that_is_gone_does_not_count() -> None:
    """Its row stays in the buffer of the virtual learners, and nothing reads it."""
    model = nn.Linear(2, 1)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(
        model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), learners=4, connection=ddpcore.Connection(on_failure="shrink")
    )
    handle.lose(2)
    for step in range(3):
        inputs = torch.ones(4, 1, 2)
        if step:
            inputs[2] = torch.nan
        optimizer.zero_grad()
        handle.model(inputs).sum().backward()
        optimizer.step()
    assert [bool(one.weight.isfinite().all()) for one in handle.models] == [True, True, False, True]
    assert not handle.nonfinite


def test_a_learner_that_the_next_average_leaves_out_does_not_count() -> None:
    """Rounds of local steps have no average in which it goes; all others take their steps."""
    model = nn.Linear(2, 1)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(
        model, optimizer, ddpcore.LocalSGD(3), learners=4, connection=ddpcore.Connection(on_failure="shrink")
    )
    for step in range(6):
        inputs = torch.ones(4, 1, 2)
        if step == 1:
            handle.lose(2)
        if step:
            inputs[2] = torch.nan
        optimizer.zero_grad()
        handle.model(inputs).sum().backward()
        optimizer.step()
        assert len(handle.changes) == (step > 1)
        if step < 5:  # then the average goes there too, unread
            finite = [bool(one.weight.isfinite().all()) for one in handle.models]
            assert finite == [True, True, step in (0, 2), True]
    inputs[3] = torch.nan
    handle.model(inputs).sum().backward()
    with pytest.raises(ddpcore.NonFiniteError):
        optimizer.step()


def test_learners_keep_their_ids_after_a_death() -> None:
    """What is not finite is named, restored and left out by the learner's id, not by its place among the living."""
    shrinks = ddpcore.Connection(on_failure="shrink")
    for dead, bad, mode in ((0, 3, "quarantine"), (1, 2, "quarantine"), (2, 0, "skip"), (0, 3, "skip")):
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = FusedSGD(model.parameters(), lr=0.0)
        strategy, more = ddpcore.DPSGD(ddpcore.Complete()), {"connection": shrinks, "on_nonfinite": mode}
        handle = ddpcore.distribute(model, optimizer, strategy, learners=4, vectorize=False, **more)
        handle.lose(dead)
        for step in range(3):
            inputs = torch.randn(4, 6, 2)
            if step == 1:
                inputs[bad, 0, 0] = torch.nan
                for row, one in enumerate(handle.models):
                    nn.init.constant_(one[1].weight, float(row**2))
                kept = [one[0].running_mean.clone() for one in handle.models]
            optimizer.zero_grad()
            sum(output.sum() for output in handle.model(inputs)).backward()
            optimizer.step()
            if step != 1:
                continue
            living = [one for one in range(4) if one != dead]
            for one in living:
                sources = [other for other in living if other != bad or one != bad or mode == "skip"]
                mean = torch.tensor(sum(other**2 for other in sources) / len(sources))
                torch.testing.assert_close(handle.models[one][1].weight, mean.expand(1, 2), rtol=1e-6, atol=0)
                assert torch.equal(handle.models[one][0].running_mean, kept[one]) == (one == bad)
        assert [(one.step, one.learner) for one in handle.nonfinite] == [(2, bad)]
        nn.init.constant_(handle.models[bad][1].bias, torch.inf)
        with pytest.raises(ddpcore.NonFiniteError, match=f"learner {bad}: the weights of 1.bias"):
            handle.model(inputs)
    for mode in ("skip", "raise"):
        model = nn.Linear(2, 1)
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        more = {"connection": shrinks, "on_nonfinite": mode}
        handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=4, **more)
        handle.lose(0)
        inputs = torch.ones(4, 1, 2)
        inputs[3] = torch.nan
        handle.model(inputs).sum().backward()
        if mode == "skip":
            optimizer.step()
            assert [one.learner for one in handle.nonfinite] == [3]
        else:
            with pytest.raises(ddpcore.NonFiniteError, match="step 1, learner 3: the gradient of weight"):
                optimizer.step()


def test_frozen_parameters_do_not_count() -> None:
    """Whose gradient is an old one, which no step uses."""
    model = nn.Linear(2, 1)
    model(torch.full((1, 2), torch.inf)).sum().backward()
    model.weight.requires_grad_(False)
    assert first_nonfinite(model, gradients=True) is None
    model.weight.requires_grad_(True)
    assert first_nonfinite(model, gradients=True) == "weight"


def test_an_error_says_how_many_learners_and_survives_pickle() -> None:
    """Ranks send their errors to the parent."""
    found = [NonFinite(step=3, learner=one, parameter="a", what="gradient", action="raise") for one in (1, 4, 5)]
    error = NonFiniteError(found)
    assert str(error).startswith("step 3, learner 1: the gradient of a is not finite, and 2 more learners: no weight")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.found == error.found
