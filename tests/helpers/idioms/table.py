"""The table of idioms: the files that fill it, in order, and the worlds in which each runs with each strategy."""

from __future__ import annotations

import functools
import re

from helpers.idioms import (
    around,
    changes,
    distributed,
    families,
    hooks,
    loops,
    models,
    optimizers,
    parts,
    passes,
    state,
)
from helpers.idioms.run import IDIOMS, STRATEGIES

__all__ = [
    "FAST",
    "IDIOMS",
    "around",
    "changes",
    "distributed",
    "families",
    "hooks",
    "loops",
    "models",
    "optimizers",
    "parts",
    "passes",
    "state",
    "worlds",
]


# Every third idiom, without the seconds of a compiler.
FAST = [name for name in [*IDIOMS][::3] if "compile" not in name and "export" not in name]
# A process group cannot detect that ranks are at different operations.
UNSEEN_BY_A_GROUP = re.compile("came to operation|one rank alone")


def worlds(name: str, strategy: str, num_ranks: int = 2) -> tuple[str, ...]:
    """Where an idiom runs with a strategy.

    With the strategy that refuses it, and with averages of gradients if it stands alone, it runs in each of its worlds.
    Else worlds and strategies take turns: each idiom runs in each world, and about half of them, and of each family, in
    each pair of a world and a strategy. A family is one function with other arguments. A line that breaks one run also
    breaks another one, because averages of weights share the code around a model, and so do the members of a family.

    Over gloo, and of one rank, every fifth idiom runs, the strategies in turn.
    """
    one, number = IDIOMS[name], [*STRATEGIES].index(strategy)
    position, turn, alone = _places()[name]
    sampled = position % 5 == 0 and position // 5 % len(STRATEGIES) == number and "ranks" in one.worlds
    if num_ranks == 1:
        return ("ranks",) if sampled else ()
    if strategy in one.refused or (alone and strategy == "ssgd"):
        found = one.worlds
    elif len(one.worlds) > 1:
        found = (one.worlds[(turn + number) % 2],)
    else:
        found = one.worlds if strategy == "ssgd" or (turn + number) % 2 else ()
    return (*found, "pg") if sampled and not UNSEEN_BY_A_GROUP.search(one.message(strategy) or "") else found


@functools.cache
def _places() -> dict[str, tuple[int, int, bool]]:
    """Of each idiom: its position, its turn, which is 0 or 1, and whether it stands alone."""
    families: dict[object, list[str]] = {}
    for name, one in IDIOMS.items():
        families.setdefault(getattr(one.train, "func", one.train).__code__, []).append(name)
    places = {}
    for position, (name, one) in enumerate(IDIOMS.items()):
        family = families[getattr(one.train, "func", one.train).__code__]
        alone = len(family) < 3
        # The sequence 0110 1001... has no period: of the options in a family, each comes to both turns.
        turn = (position if alone else family.index(name)).bit_count() % 2
        places[name] = position, turn, alone
    return places
