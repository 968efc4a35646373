"""From which momentum on the differences between learners grow by themselves, against all matchings written out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from ddpcore import GASLoC, NoLoCo, RandomPair, Ring


def matchings(learners: tuple[int, ...], may_be_idle: bool) -> Iterator[list[tuple[int, int]]]:
    """All matchings; with an odd number one learner is idle."""
    if not learners:
        yield []
        return
    first, *others = learners
    for index, partner in enumerate(others):
        for rest in matchings((*others[:index], *others[index + 1 :]), may_be_idle):
            yield [(first, partner), *rest]
    if may_be_idle:
        yield from matchings(tuple(others), False)


def all_matrices(num_learners: int, num_partners: int) -> list[np.ndarray]:
    """W of each draw of matchings; all draws are equally likely."""
    permutations = []
    for pairs in matchings(tuple(range(num_learners)), num_learners % 2 == 1):
        permutations.append(np.eye(num_learners))
        for left, right in pairs:
            permutations[-1][[left, right]] = permutations[-1][[right, left]]
    draws = product(permutations, repeat=num_partners)
    return [(np.eye(num_learners) + sum(draw)) / (num_partners + 1) for draw in draws]


def growth(strategy: Any, num_learners: int) -> float:
    """The factor by which E[d d^T] grows in a round, from the linear map of each draw without gradients."""
    partners = strategy.topology.num_partners
    identity, total = np.eye(num_learners), 0.0
    apart = np.kron(np.eye(2), identity - 1 / num_learners)  # differences alone
    draws = all_matrices(num_learners, partners)
    for matrix in draws:
        momentum = strategy.outer_momentum * identity
        if isinstance(strategy, GASLoC):  # of z(r) and z(r-1)
            step = np.block([[matrix + momentum, -momentum], [identity, 0 * identity]])
        else:  # of phi and m
            pull = strategy.outer_lr * (matrix - identity)
            step = np.block([[identity + pull, momentum], [pull, momentum]])
        total += np.kron(step @ apart, step @ apart) / len(draws)
    return float(np.abs(np.linalg.eigvals(total)).max())


def grows(strategy: GASLoC | NoLoCo, num_learners: int) -> bool:
    return strategy.differences_grow(num_learners)


@pytest.mark.parametrize("make", [GASLoC, NoLoCo])
@pytest.mark.parametrize(("num_learners", "num_partners"), [(4, 1), (5, 1), (6, 1), (4, 2), (5, 2)])
def test_the_bound_is_where_the_differences_grow(make: Any, num_learners: int, num_partners: int) -> None:
    low, high = 0.3, 0.999
    topology = RandomPair(num_partners=num_partners)
    assert not grows(make(topology, outer_momentum=low), num_learners)
    assert grows(make(topology, outer_momentum=high), num_learners)
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if grows(make(topology, outer_momentum=middle), num_learners) else (middle, high)
    assert growth(make(topology, outer_momentum=low - 1e-3), num_learners) < 1
    assert growth(make(topology, outer_momentum=high + 1e-3), num_learners) > 1


@pytest.mark.parametrize("make", [GASLoC, NoLoCo])
def test_where_nothing_grows(make: Any) -> None:
    """By default, with two learners, who meet in each round, and with fixed neighbours."""
    for num_learners in (1, 2, 3, 8, 1001, 4096):
        assert not grows(make(), num_learners)
    assert not grows(make(outer_momentum=0.95), 2)
    assert not grows(make(Ring(), outer_momentum=0.95), 8)
    assert not grows(make(outer_momentum=0.95), 1)


@pytest.mark.parametrize("make", [GASLoC, NoLoCo])
def test_other_random_pairs_have_other_bounds(make: Any) -> None:
    """A subclass may draw other pairs, of which nothing is known here."""
    assert grows(make(RandomPair(), outer_momentum=0.95), 8)
    assert not grows(make(type("Others", (RandomPair,), {})(), outer_momentum=0.95), 8)


@pytest.mark.parametrize("make", [GASLoC, NoLoCo])
def test_a_warning(make: Any) -> None:
    message = "outer_momentum is 0.9: with 8 learners and RandomPair.seed=0. the differences between learners grow"
    with pytest.warns(UserWarning, match=message):
        make(outer_momentum=0.9).setup(8, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().setup(8, torch.float32)


def test_the_numbers_in_the_docstrings() -> None:
    for strategy, expected in ((GASLoC, 0.707), (NoLoCo, 0.806)):
        assert not grows(strategy(outer_momentum=expected), 100_001)
        assert grows(strategy(outer_momentum=expected + 1e-3), 100_001)
    assert grows(NoLoCo(outer_lr=2.1, outer_momentum=0.0), 1000)
    two = RandomPair(num_partners=2)
    assert not grows(GASLoC(two, outer_momentum=0.795), 100_001) and grows(GASLoC(two, outer_momentum=0.796), 100_001)


def test_what_is_kept_of_differences() -> None:
    """Against the mean of W and of W^2 over all matchings."""
    for num_learners, num_partners in ((4, 1), (5, 1), (6, 1), (4, 2), (5, 2)):
        draws = all_matrices(num_learners, num_partners)
        apart = np.arange(num_learners) - (num_learners - 1) / 2
        e, s = RandomPair(num_partners=num_partners).kept(num_learners)
        np.testing.assert_allclose(np.mean(draws, axis=0) @ apart, e * apart, atol=1e-12)
        np.testing.assert_allclose(np.mean([one @ one for one in draws], axis=0) @ apart, s * apart, atol=1e-12)
