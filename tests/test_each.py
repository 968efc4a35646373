"""Many cases in one test: every case runs, and every failure is named."""

from __future__ import annotations

import pytest
import torch

from helpers.each import each

SEEN: list[tuple[str, int, float]] = []


@each(("name", "number"), [("a", 1), ("b", 2)])
@pytest.mark.parametrize("more", [10, 20])
def test_each_case_runs_with_random_numbers_of_its_own(name: str, number: int, more: int) -> None:
    SEEN.append((name, number + more, torch.rand(()).item()))
    assert len({draw for _, _, draw in SEEN}) == 1
    assert [one[:2] for one in SEEN] == [("a", 11), ("b", 12), ("a", 21), ("b", 22)][: len(SEEN)]


def test_all_that_fail_are_named() -> None:
    @each("number", [1, 2, 3])
    def odd(number: int) -> None:
        assert number % 2, f"{number} is even"
        if number == 3:
            raise ValueError("three")

    with pytest.raises(AssertionError) as caught:
        odd()
    assert str(caught.value).splitlines()[0] == "2 of 3 cases fail:"
    assert "2: AssertionError: 2 is even" in str(caught.value) and "3: ValueError: three" in str(caught.value)
    with pytest.raises(AssertionError, match="there is no case"):
        each("number", [])


@each("number", [1, 2, 3], num_fast=2)
def test_the_first_are_fast_and_the_others_slow(number: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("slow") is None) == (number <= 2)
