"""``each``: all cases run in one item, and a failure names its case."""

from __future__ import annotations

import pytest

from helpers.cases import each

seen: list[tuple[int, str]] = []


@each(number=[1, 2], letter="ab")
def test_every_case_runs(number, letter, request):
    seen.append((number, letter))
    assert request.node.name == "test_every_case_runs"


def test_all_of_them_and_no_other():
    seen.clear()
    test_every_case_runs(request=type("Request", (), {"node": type("Node", (), {"name": "test_every_case_runs"})}))
    assert seen == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_a_failure_names_its_case():
    @each(number=[1, 2, 3])
    def fails(number: int, limit: int) -> None:
        if number > limit:
            raise RuntimeError("too large")

    fails(limit=3)
    with pytest.raises(AssertionError, match=r"\{'number': 2\}: too large"):
        fails(limit=1)
