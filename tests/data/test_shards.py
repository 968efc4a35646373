"""Shards: the same global batch for any number of learners, torch's DistributedSampler, or a part for each learner."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from ddpcore.data import SAMPLERS, ResharedBatches, ShardedBatches
from ddpcore.data.shards import _order, _permuted, permutation


def test_an_epoch_visits_each_sample_once_and_drops_the_rest() -> None:
    batches = ShardedBatches(103, 20, 4, seed=1)
    assert batches.steps_per_epoch == 5
    for epoch in range(3):
        seen = torch.cat([batches.indices(5 * epoch + step).flatten() for step in range(5)])
        assert seen.dtype == torch.int64
        assert len(set(seen.tolist())) == len(seen) == 100
        assert int(seen.min()) >= 0 and int(seen.max()) < 103


def test_the_global_batch_does_not_depend_on_the_number_of_learners() -> None:
    for step in range(12):
        whole = ShardedBatches(50, 12, 1, seed=3).indices(step)
        assert whole.shape == (1, 12)
        for num_learners in (2, 3, 4, 6, 12):
            shards = ShardedBatches(50, 12, num_learners, seed=3).indices(step)
            assert shards.shape == (num_learners, 12 // num_learners)
            assert torch.equal(shards.flatten(), whole.flatten())


def test_epochs_and_seeds_differ() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return ShardedBatches(64, 64, 1, seed).indices(number).flatten().tolist()

    orders = [epoch(seed, number) for seed in range(3) for number in range(3)]
    assert len(set(map(tuple, orders))) == 9  # also: seed and epoch are not added up
    assert all(sorted(order) == list(range(64)) != order for order in orders)


def test_indices_are_a_function_of_the_step_alone() -> None:
    batches = ShardedBatches(30, 6, 2, seed=8)
    in_order = [batches.indices(step) for step in range(40)]
    steps = list(range(40))
    random.Random(0).shuffle(steps)
    _permuted.cache_clear()
    torch_state = torch.get_rng_state()
    for step in steps:
        again = batches.indices(step)
        assert torch.equal(again, in_order[step])
        again.zero_()  # a caller's own copy
        assert torch.equal(batches.indices(step), in_order[step])
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_the_order_is_the_same_on_every_machine() -> None:
    assert ShardedBatches(8, 8, 2, seed=0).indices(1).tolist() == [[7, 6, 2, 3], [1, 0, 4, 5]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, 3, 4), "batch size 3 is below .* 4 learners: take 4"),
        ((100, 10, 4), "batch size 10 is not a multiple of 4 learners: take 8"),
        ((100, 11, 4), "take 12"),
        ((100, 9, 4), "take 8"),
        ((11, 11, 4), "take 8"),
        ((100, 101, 1), "batch size is 101 but there are only 100 samples: take at most 100"),
        ((100, 0, 1), "batch size is 0"),
        ((100, 10, 0), "num_learners is 0"),
        ((100, 10, 1, -1), "seed is -1"),
    ],
)
def test_impossible_batches(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ShardedBatches(*arguments)
    assert "\n" not in str(caught.value)


def test_sizes_need_a_multiple_of_the_learners() -> None:
    with pytest.raises(ValueError, match="21 is not a multiple of 4 learners, which sizes need, too: take 20"):
        ShardedBatches(100, 21, 4, sizes=(6, 5, 5, 5))


def test_what_an_error_says_to_take_is_accepted() -> None:
    refused = 0
    for samples, learners in [(1, 1), (11, 4), (11, 11), (14, 6), (30, 7)]:
        for batch in range(1, samples + 9):
            try:
                ShardedBatches(samples, batch, learners)
            except ValueError as error:
                refused += 1
                ShardedBatches(samples, int(str(error).split()[-1]), learners)
    assert refused > 50
    with pytest.raises(ValueError, match="take at most 14 learners, and a batch size of at most 14 that they divide"):
        ShardedBatches(14, 2, 20)


def test_a_step_before_the_first() -> None:
    with pytest.raises(ValueError, match="step is -1"):
        ShardedBatches(10, 5).indices(-1)


def epoch_of(batches: ShardedBatches, epoch: int) -> list[torch.Tensor]:
    steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
    assert {batches.epoch(step) for step in steps} == {epoch}
    return [batches.indices(step) for step in steps]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("samples", "learners", "batch"), [(40, 4, 8), (41, 4, 8), (43, 4, 12), (7, 5, 5), (9, 1, 4)])
def test_distributed_is_torchs_distributed_sampler(samples: int, learners: int, batch: int, drop_last: bool) -> None:
    """The sample numbers of torch's sampler and loader, batch by batch, for every rank and epoch."""
    batches = ShardedBatches(samples, batch, learners, seed=11, sampler="distributed", drop_last=drop_last)
    for epoch in (0, 1, 5):
        found = epoch_of(batches, epoch)
        for rank in range(learners):
            sampler = DistributedSampler(range(samples), num_replicas=learners, rank=rank, seed=11, drop_last=drop_last)
            sampler.set_epoch(epoch)
            loader = DataLoader(range(samples), batch_size=batch // learners, sampler=sampler, drop_last=drop_last)
            expected = [numbers.tolist() for numbers in loader]
            assert [indices[rank].tolist() for indices in found] == expected


@pytest.mark.parametrize("drop_last", [True, False])
def test_fixed_shards_belong_to_their_learner(drop_last: bool) -> None:
    batches = ShardedBatches(103, 20, 5, seed=4, sampler="fixed", drop_last=drop_last)
    assert batches.steps_per_epoch == 5
    owned: list[set[int]] = [set() for _ in range(5)]
    orders = []
    for epoch in range(6):
        rows = torch.cat(epoch_of(batches, epoch), dim=1)
        assert rows.shape == (5, 20)
        assert all(len(set(row)) == 20 for row in rows.tolist()), "a sample is seen once an epoch"
        for learner, row in enumerate(rows.tolist()):
            owned[learner].update(row)
        orders.append(rows)
    assert [len(part) for part in owned] == [20] * 5, "the same samples each epoch"
    assert len(set().union(*owned)) == 100, "and nobody else's"
    assert any(not torch.equal(orders[0], order) for order in orders[1:])
    assert len({tuple(row) for order in orders for row in order.tolist()}) == 30, "in another order each epoch"
    assert sorted(owned[0]) != sorted(range(20)), "the parts are random"


def test_learners_with_fixed_shards_shuffle_on_their_own() -> None:
    """From one epoch to the next the same reordering of each part would tie the learners together."""
    batches = ShardedBatches(60, 60, 3, seed=4, sampler="fixed")
    before, after = batches.indices(0).tolist(), batches.indices(1).tolist()
    moves = {tuple(row.index(sample) for sample in later) for row, later in zip(before, after, strict=True)}
    assert len(moves) == 3


def test_fixed_shards_follow_from_the_seed_alone() -> None:
    one, other = (ShardedBatches(60, 12, 3, seed=seed, sampler="fixed") for seed in (1, 2))
    assert not torch.equal(one.indices(0), other.indices(0))
    before = [one.indices(step) for step in range(12)]
    _order.cache_clear()
    for step in reversed(range(12)):
        assert torch.equal(ShardedBatches(60, 12, 3, 1, "fixed").indices(step), before[step])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_without_drop_last_an_epoch_sees_every_sample(sampler: str) -> None:
    batches = ShardedBatches(54, 20, 2, seed=1, sampler=sampler, drop_last=False)
    found = epoch_of(batches, 3)
    assert [indices.shape[1] for indices in found] == [10, 10, 7]
    assert sorted(torch.cat(found, dim=1).flatten().tolist()) == list(range(54))
    whole = ShardedBatches(54, 20, 2, seed=1, sampler=sampler)
    assert whole.steps_per_epoch == 2
    assert torch.equal(found[0], whole.indices(6))


def test_the_global_last_batch_is_the_same_for_any_number_of_learners() -> None:
    whole = [indices.flatten() for indices in epoch_of(ShardedBatches(54, 20, 1, drop_last=False), 1)]
    halves = [indices.flatten() for indices in epoch_of(ShardedBatches(54, 20, 2, drop_last=False), 1)]
    assert all(torch.equal(one, other) for one, other in zip(whole, halves, strict=True))
    with pytest.raises(ValueError, match="last batch of 14 samples is not a multiple of 4 learners: set drop_last"):
        ShardedBatches(54, 20, 4, drop_last=False)


def test_an_unknown_sampler() -> None:
    with pytest.raises(ValueError, match="unknown sampler 'random': choose one of global, distributed, fixed"):
        ShardedBatches(8, 4, sampler="random")


def test_permutations_of_other_keys_are_others() -> None:
    keys: list[tuple[int, ...]] = [(), (0,), (0, 0), (0, 1), (1,), (0, 0, 0)]
    orders = {tuple(permutation(50, 3, *key).tolist()) for key in keys}
    assert len(orders) == len(keys)
    assert all(sorted(order) == list(range(50)) for order in orders)


@settings(deadline=None)
@given(
    samples=st.integers(40, 200),
    changes=st.lists(st.tuples(st.integers(1, 9), st.sets(st.integers(0, 6), min_size=2, max_size=6)), max_size=6),
    seed=st.integers(0, 5),
)
def test_resharded_samples_are_used_at_most_once_an_epoch(
    samples: int, changes: list[tuple[int, set[int]]], seed: int
) -> None:
    """Whoever dies and joins: every sample at most once an epoch, and no epoch is left out."""
    batches = ShardedBatches(samples, 12, 4, seed)
    begins = np.cumsum([gap for gap, _ in changes]).tolist()
    deals = tuple((begin, tuple(sorted(who))) for begin, (_, who) in zip(begins, changes, strict=True))
    resharded = ResharedBatches(batches, deals)
    used: dict[int, list[int]] = {}
    for step in range(sum(begins[-1:]) + 20):
        members = next((who for begin, who in reversed(deals) if begin <= step), (0, 1, 2, 3))
        for learner in members:
            used.setdefault(resharded.epoch(step), []).extend(resharded.indices(step, learner).tolist())
    assert sorted(used) == list(range(max(used) + 1))
    for epoch, numbers in used.items():
        assert len(numbers) == len(set(numbers)), epoch
        assert set(numbers) <= set(range(samples))


def test_resharded_without_changes_is_the_global_sampler() -> None:
    batches = ShardedBatches(50, 12, 4, 3)
    resharded = ResharedBatches(batches)
    for step in range(9):
        rows = torch.stack([resharded.indices(step, learner) for learner in range(4)])
        assert torch.equal(rows, batches.indices(step))
        assert resharded.epoch(step) == batches.epoch(step)
    with pytest.raises(ValueError, match="learner 4 takes no samples in step 0"):
        resharded.indices(0, 4)
