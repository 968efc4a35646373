"""Many cases in one test."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def each(**lists: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test with all combinations of these values of its parameters, as one item. A failure names them.

    Like ``pytest.mark.parametrize``, for cases that take less time than an item of pytest.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @wraps(test)
        def run(**fixtures: Any) -> None:
            for values in itertools.product(*lists.values()):
                case = dict(zip(lists, values, strict=True))
                try:
                    test(**case, **fixtures)
                except Exception as error:
                    raise AssertionError(f"{case}: {error}") from error

        others = [parameter for name, parameter in signature.parameters.items() if name not in lists]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate
