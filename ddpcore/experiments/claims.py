"""Published claims as predicates over rows: ``mean("lars-8192") > mean("sgdm-8192") + 5``.

A predicate is a Python expression of numbers, ``+ - * /``, comparisons, ``and``, ``or``, ``not`` and the functions of
docs/experiments.md. Its syntax tree is evaluated here, node by node; Python never runs the text.
"""

import ast
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ddpcore.options.extras import extra
from ddpcore.options.typed import is_finite, suggest

HOLDS, FAILS, NOT_RUN, VOID = "holds", "does not hold", "not run", "void"
WITHIN_SPREAD = f"{HOLDS}, within the spread"
_ABOUT_SPREADS = ("count", "std", "paired", "min", "max")
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_OVER_SEEDS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean, "min": min, "max": max, "std": statistics.stdev,
}  # fmt: skip
_OF_EXPRESSIONS = ("abs", "all_seeds", "count")
_OF_ROWS = {**dict.fromkeys((*_OVER_SEEDS, "diverged", "value"), 1), "paired": 2}
"""Functions of rows, with their numbers of rows."""
_MIN_PAIRS = 6  # of five differences the smallest p-value is 0.0625: no test at 5 percent could succeed
_MAX_LEVELS = 100  # of nesting: Python ends a recursion at about 1000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one row with one seed: numbers by name (None if the run has none), and whether it diverged."""

    metrics: Mapping[str, float | None]
    diverged: bool = False


Outcomes = Mapping[str, Mapping[int, Outcome]]
"""Outcomes of finished runs, by row and seed."""


@dataclass(frozen=True)
class Verdict:
    """``holds``, ``does not hold``, ``not run`` or ``void``, with the number of seeds or the reason.

    ``holds, within the spread``: it holds of the means, and not of each seed that all rows have, or there is none.
    """

    word: str
    reason: str = ""


class _NotRun(Exception):
    """The outcomes lack a number that the predicate needs."""


def check(predicate: str, rows: Sequence[str] | None, metrics: Sequence[str]) -> None:
    """Raise ValueError, in one line, unless the text is a predicate over these rows (None: any) and metrics."""
    try:
        tree = _parse(predicate)
        named = rows_in(tree)
        for row in named:
            if rows is not None and row not in rows:
                raise ValueError(f"unknown row {row!r}: {suggest(row, rows)}")
        placeholder = dict.fromkeys(range(_MIN_PAIRS), Outcome(metrics=dict.fromkeys(metrics, math.nan)))
        _Evaluation(outcomes=dict.fromkeys(named, placeholder), metric=metrics[0], checking=True).of(tree, bool)
        if not named:
            raise ValueError("it names no row: name one")
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"claim {predicate!r}: {error}") from None


def judge(
    predicate: str, outcomes: Outcomes, metric: str, *, published: bool = False, crowded: Mapping[str, str] = {}
) -> Verdict:
    """Whether a predicate that :func:`check` accepted is true of the outcomes of finished runs.

    ``metric`` is for functions that name none. With ``published`` the outcomes are numbers of a source, one a row,
    which has neither seeds nor divergence. The reason of a verdict on runs is ``n=``, the fewest seeds of a function.
    Outcomes of ``crowded`` rows make it void, each for its reason.
    """
    tree = _parse(predicate)
    if missing := [row for row in rows_in(tree) if not outcomes.get(row)]:
        return Verdict(NOT_RUN, f"no finished run of {', '.join(missing)}")
    try:
        holds = _Evaluation(outcomes=outcomes, metric=metric, published=published).of(tree, bool)
    except (_NotRun, ArithmeticError) as error:  # ArithmeticError: a division by zero, or a number that is too large
        return Verdict(NOT_RUN, str(error))
    if void := [crowded[row] for row in rows_in(tree) if row in crowded]:
        return Verdict(VOID, void[0])
    used = [rows_in(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    num_seeds = min(len(_common_seeds(outcomes, rows)) for rows in used if rows)
    if published:
        return Verdict(HOLDS if holds else FAILS)
    word = (HOLDS if _holds_of_each(tree, outcomes, metric) else WITHIN_SPREAD) if holds else FAILS
    return Verdict(word, f"n={num_seeds}")


def _holds_of_each(tree: ast.expr, outcomes: Outcomes, metric: str) -> bool:
    """Whether what holds of the means holds of each seed alone too, of one at least, or is about the spread itself."""
    rows = rows_in(tree)
    if any(isinstance(node, ast.Call) and ast.unparse(node.func) in _ABOUT_SPREADS for node in ast.walk(tree)):
        return True
    of_seeds = [{row: {seed: outcomes[row][seed]} for row in rows} for seed in _common_seeds(outcomes, rows)]
    try:
        return bool(of_seeds) and all(_Evaluation(outcomes=one, metric=metric).of(tree, bool) for one in of_seeds)
    except (_NotRun, ArithmeticError):  # a seed without a number
        return False


def rows_in(tree: ast.AST) -> list[str]:
    """The rows that an expression names, each once."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [arg for call in calls for arg in call.args[: _OF_ROWS.get(ast.unparse(call.func), 0)]]
    texts = [name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str)]
    return list(dict.fromkeys(texts))


def _common_seeds(outcomes: Outcomes, rows: Sequence[str]) -> list[int]:
    return sorted(set.intersection(*(set(outcomes[row]) for row in rows)))


def _parse(predicate: str) -> ast.expr:
    try:
        tree = ast.parse(f"({predicate.strip()})", mode="eval").body  # in brackets it may take several lines
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is not an expression ({type(error).__name__})") from None
    level: list[ast.AST] = [tree]
    for _ in range(_MAX_LEVELS):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ValueError(f"it is nested in more than {_MAX_LEVELS} levels: write it in fewer")
    return tree


@dataclass(frozen=True, kw_only=True)
class _Evaluation:
    """Values of the nodes of a predicate. With ``checking`` every part is evaluated, to find all errors."""

    outcomes: Outcomes
    metric: str
    published: bool = False
    checking: bool = False
    seed: int | None = None  # inside of all_seeds and count

    def of(self, node: ast.expr, kind: type[float] | type[bool]) -> Any:
        value = self._value(node)
        if isinstance(value, bool) != (kind is bool):
            raise ValueError(f"{ast.unparse(node)} must be {'true or false' if kind is bool else 'a number'}")
        return value

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=number) if type(number) in (int, float):
                if not is_finite(number):
                    raise ValueError("a number in it is too large")
                return number
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.of(operand, bool)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.of(operand, float)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](self.of(left, float), self.of(right, float))
            case ast.BoolOp(op=op, values=values):
                conditions: Iterable[bool] = (self.of(child, bool) for child in values)
                conditions = list(conditions) if self.checking else conditions
                return all(conditions) if isinstance(op, ast.And) else any(conditions)
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
                numbers = [self.of(child, float) for child in (left, *others)]
                return all(_COMPARISONS[type(op)](a, b) for op, a, b in zip(ops, numbers, numbers[1:], strict=False))
            case ast.Call(func=function, args=args, keywords=keywords):
                name, functions = ast.unparse(function), (*_OF_ROWS, *_OF_EXPRESSIONS)
                if name not in functions or keywords:
                    raise ValueError(f"unknown function {name!r}: {suggest(name, functions)}")
                return self._of_rows(name, args) if name in _OF_ROWS else self._of_expression(name, args)
        raise ValueError(f"{ast.unparse(node)!r} is not allowed in a claim")

    def _of_expression(self, name: str, args: Sequence[ast.expr]) -> Any:
        if len(args) != 1:
            raise ValueError(f"{name} takes one expression")
        if name == "abs":
            return abs(self.of(args[0], float))
        if not (rows := rows_in(args[0])):
            raise ValueError(f"{name} needs the seeds of a row: use value(row) inside it")
        if name == "count" and self.published:
            raise _NotRun("the source gives no seeds to count")
        for_each = [replace(self, seed=seed) for seed in self._seeds(rows)]
        if name == "all_seeds":
            return all(evaluation.of(args[0], bool) for evaluation in for_each)
        num = 0
        for evaluation in for_each:
            with suppress(_NotRun):
                num += evaluation.of(args[0], bool)
        return num

    def _of_rows(self, name: str, args: Sequence[ast.expr]) -> Any:
        if (name == "value") != (self.seed is not None):
            raise ValueError(f"{name} is in the wrong place: use value(row) inside all_seeds and count, and only there")
        texts = [arg.value for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        num_rows = _OF_ROWS[name]
        if len(texts) != len(args) or not num_rows <= len(texts) <= num_rows + (name != "diverged"):
            wanted = "a row" if num_rows == 1 else "two rows"
            raise ValueError(f"{name} takes {wanted} and an optional metric, in quotes")
        rows, metric = texts[:num_rows], [*texts[num_rows:], self.metric][0]
        if name == "diverged":
            if self.published:
                raise _NotRun(f"the source does not say whether {rows[0]} diverged")
            return all(outcome.diverged for outcome in self.outcomes[rows[0]].values())
        if name == "value" and self.seed is not None:
            return self._numbers(rows[0], [self.seed], metric)[0]
        if name == "paired":
            seeds = self._seeds(rows)
            first, second = (self._numbers(row, seeds, metric) for row in rows)
            if len(seeds) < _MIN_PAIRS:
                raise _NotRun(f"a test of {rows[0]} and {rows[1]} needs {_MIN_PAIRS} seeds, they share {len(seeds)}")
            with extra("train"):
                from scipy.stats import wilcoxon  # noqa: PLC0415  it takes a second to import
            return 1.0 if first == second else float(wilcoxon(first, second).pvalue)
        numbers = self._numbers(rows[0], self.outcomes[rows[0]], metric)
        if name == "std" and len(numbers) < 2:
            raise _NotRun(f"the spread of {rows[0]} needs two seeds")
        return math.nan if self.checking else _OVER_SEEDS[name](numbers)

    def _seeds(self, rows: Sequence[str]) -> list[int]:
        if not (seeds := _common_seeds(self.outcomes, rows)):
            raise _NotRun("its rows have no seed in common")
        return seeds

    def _numbers(self, row: str, seeds: Iterable[int], metric: str) -> list[float]:
        found = []
        for seed in seeds:
            outcome = self.outcomes[row][seed]
            number = outcome.metrics.get(metric)
            if number is None and self.checking:
                raise ValueError(f"unknown metric {metric!r}: {suggest(metric, outcome.metrics)}")
            if number is None:
                why = "diverged" if outcome.diverged else "has none"
                raise _NotRun(f"no {metric} of {row}: it {why} with seed {seed}")
            found.append(number)
        return found
