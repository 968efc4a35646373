"""Many small cases in one test, as ``pytest.mark.parametrize`` would give them, and what fails is named together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from helpers import seeds


def each(
    names: str | tuple[str, ...], cases: Iterable[Any], num_fast: int | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test on every case, one after the other: pytest takes longer for an item than a small case takes.

    Each case has the random numbers of a test of its own; fixtures are set up once, so take none that a case changes.

    Args:
        names: the arguments of a case, as in ``parametrize``: one name, or a tuple of them.
        cases: the values of each case; of one name the values themselves.
        num_fast: cases of ``make test``; the others are a second test, which is marked slow. None: all are one test.
    """
    keys = (names,) if isinstance(names, str) else names
    rows = [(case,) if isinstance(names, str) else tuple(case) for case in cases]
    assert rows, "there is no case"
    parts = [rows] if num_fast is None else [rows[:num_fast], rows[num_fast:]]
    assert all(parts), "there is no case on one side of num_fast"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            chosen, failed = parts[fixtures.pop("part", 0)], []
            for row in chosen:
                seeds.seed()
                try:
                    test(**dict(zip(keys, row, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    failed.append(f"{', '.join(map(str, row))}: {type(error).__name__}: {str(error)[:300]}")
            assert not failed, f"{len(failed)} of {len(chosen)} cases fail:\n" + "\n".join(failed)

        signature = inspect.signature(test)
        others = [value for name, value in signature.parameters.items() if name not in keys]
        if len(parts) > 1:
            others.append(inspect.Parameter("part", inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        if len(parts) == 1:
            return run
        both = [pytest.param(0, id="fast"), pytest.param(1, id="others", marks=pytest.mark.slow)]
        return pytest.mark.parametrize("part", both)(run)  # type: ignore[no-any-return]

    return decorate
