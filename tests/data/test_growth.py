"""Batches that grow in a run: every sample of an epoch at most once, in the order that it has without growth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcore.data import SAMPLERS, ResharedBatches, ShardedBatches
from ddpcore.data.shards import permutation


def by_hand(growth: dict[int, int], num_steps: int, **fields: Any) -> list[tuple[int, torch.Tensor]]:
    """Epoch and samples ``[L, B]`` of each step, one after the other, cut from the steps of one sample a learner."""
    learners = fields["num_learners"]
    single = ShardedBatches(**{**fields, "batch_size": learners})
    whole, size, epoch, taken, found = single.steps_per_epoch, fields["batch_size"], 0, 0, []
    for step in range(num_steps):
        size = growth.get(step, size)
        share = size // learners
        if taken == whole or (fields["drop_last"] and taken + share > whole):
            epoch, taken = epoch + 1, 0
        singles = range(taken, min(taken + share, whole))
        columns = torch.cat([single.indices(epoch * whole + one) for one in singles], dim=1)
        if fields["sampler"] == "global":  # the learners share the next samples in order
            columns = columns.T.reshape(learners, -1)
        found.append((epoch, columns))
        taken += len(singles)
    return found


@settings(deadline=None)
@given(
    sampler=st.sampled_from(SAMPLERS),
    drop_last=st.booleans(),
    learners=st.integers(1, 3),
    per_learner=st.integers(12, 20),
    more=st.integers(0, 2),
    shares=st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True),
    begins=st.sets(st.integers(0, 25), min_size=3, max_size=3),
    seed=st.integers(0, 3),
)
def test_the_next_samples_in_the_same_order(
    sampler: str, drop_last: bool, learners: int, per_learner: int, more: int, shares: list[int], begins: set[int],
    seed: int,
) -> None:  # fmt: skip
    rest = 0 if sampler == "global" and not drop_last else more % learners
    first, *later = sorted(share * learners for share in shares)
    growth = dict(zip(sorted(begins), later, strict=False))
    fields = {
        "num_samples": per_learner * learners + rest, "batch_size": first, "num_learners": learners, "seed": seed,
        "sampler": sampler, "drop_last": drop_last,
    }  # fmt: skip
    batches = ShardedBatches(**fields, growth=tuple(growth.items()))
    expected = by_hand(growth, 40, **fields)
    for step in reversed(range(40)):
        epoch, indices = expected[step]
        assert batches.epoch(step) == epoch
        assert torch.equal(batches.indices(step), indices)
        assert batches.batch_size_at(step) >= indices.numel()
        assert batches.num_taken(step + 1) - batches.num_taken(step) == indices.shape[1]
    epochs = [epoch for epoch, _ in expected]
    for epoch in set(epochs):
        assert batches.first_step(epoch) == epochs.index(epoch)
        seen = [sample for one, indices in expected if one == epoch for sample in indices.flatten().tolist()]
        padded = sampler == "distributed" and not drop_last and rest > 0
        assert padded or len(set(seen)) == len(seen)


def test_an_example() -> None:
    """50 samples: two batches of 12, one of 24, and 2 samples are left; then batches of 24, and of 48."""
    batches = ShardedBatches(50, 12, 2, seed=3, growth=((2, 24), (4, 48)))
    places = [(0, 0, 12), (0, 12, 24), (0, 24, 48), (1, 0, 24), (2, 0, 48), (3, 0, 48)]
    for step, (epoch, begin, end) in enumerate(places):
        assert batches.indices(step).flatten().tolist() == permutation(50, 3, epoch)[begin:end].tolist()
        assert batches.place(step) == (epoch, begin // 2)
        assert batches.batch_size_at(step) == end - begin
    assert [batches.first_step(epoch) for epoch in range(5)] == [0, 3, 4, 5, 6]
    assert [batches.step_without_growth(step) for step in range(6)] == [0, 1, 2, 4, 8, 12]
    assert batches.steps_per_epoch == 4


def test_growth_at_step_0_is_another_batch_size() -> None:
    grown, plain = ShardedBatches(50, 12, 2, growth=((0, 24),)), ShardedBatches(50, 24, 2)
    assert grown.steps_per_epoch == plain.steps_per_epoch == 2
    for step in range(9):
        assert torch.equal(grown.indices(step), plain.indices(step))
        assert grown.place(step) == plain.place(step)
        assert grown.step_without_growth(step) == step


def test_a_learner_with_a_part_goes_on_in_it() -> None:
    parts = [list(range(7)), list(range(7, 30))]
    fields = {"num_samples": 50, "num_learners": 2, "seed": 2, "parts": parts}
    grown = ShardedBatches(batch_size=4, growth=((3, 10), (9, 40)), **fields)
    plain = ShardedBatches(batch_size=4, **fields)
    found = torch.cat([grown.indices(step) for step in range(13)], dim=1)
    assert found.shape == (2, 3 * 2 + 6 * 5 + 4 * 20)
    assert torch.equal(found, torch.cat([plain.indices(step) for step in range(58)], dim=1))
    # 15 samples of a learner in an epoch: 3 batches of 2, one of 5, and 4 are left; then 3 of 5; and 20 are an epoch
    assert [grown.epoch(step) for step in range(13)] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("growth", "message"),
    [
        (((5, 20), (5, 30)), r"growth has the steps \[5, 5\]: they must ascend, from 0"),
        (((-1, 20),), r"growth has the steps \[-1\]: they must ascend, from 0"),
        (((5, 10),), r"growth has the batch sizes \[10\]: they must ascend, from above 10"),
        (5, r"growth is 5: it must be a list of pairs, such as \[\[300, 256\]\]"),
        (((5,),), r"growth is \[\[5\]\]: it must be a list of pairs"),
        (((5, 20.0),), r"growth is 20.0: it must be a whole number"),
        (((5, 30), (6, 20)), r"growth has the batch sizes \[30, 20\]: they must ascend, from above 10"),
        (((5, 15),), "the batch size 15 is not a multiple of 2 learners: take 14"),
        (((5, 102),), "the batch size is 102 but there are only 100 samples: take at most 100"),
    ],
)
def test_growth_that_is_none(growth: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardedBatches(100, 10, 2, growth=growth)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_growth_from_lists(sampler: str) -> None:
    lists, tuples = (ShardedBatches(50, 12, 2, sampler=sampler, growth=growth) for growth in ([[3, 24]], ((3, 24),)))
    assert lists == tuples and hash(lists) == hash(tuples)
    assert torch.equal(lists.indices(3), tuples.indices(3))


def test_resharded_samples_do_not_grow() -> None:
    with pytest.raises(ValueError, match="batches of one size: leave growth out"):
        ResharedBatches(ShardedBatches(100, 10, 2, growth=((5, 20),)))
