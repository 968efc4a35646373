"""Published claims as predicates over rows: ``mean("lars-8192") > mean("sgdm-8192") + 5``.

A predicate is an expression of Python's grammar, of which these nodes alone are known: numbers, ``+ - * /``,
comparisons, ``and``, ``or``, ``not``, and the functions below. Nothing of it is run as Python.

- ``mean(row)``, ``min(row)``, ``max(row)``, ``std(row)``: over seeds, of the study's first metric or of the one
  named second, as in ``mean("single", "seconds")``; ``std`` divides by one less than the number of seeds.
- ``abs(number)``.
- ``diverged(row)``: whether the loss of every seed left the finite numbers, or went above the row's bound.
- ``all_seeds(truth)``: whether it holds for each seed that all of its rows have; ``value(row)`` is that seed's number.
- ``count(truth)``: for how many of those seeds it holds; a seed that lacks one of the numbers, because it diverged or
  never came there, does not count.
- ``paired(row, other)``: the two-sided p-value of Wilcoxon's signed-rank test on the differences of the seeds that both
  rows have, six at least; which row is above is for ``mean`` to say.
"""

from __future__ import annotations

import ast
import operator
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scipy import stats

from ddpcore.advice import advice
from ddpcore.engine.kinds import is_finite

HOLDS, FAILS, NOT_RUN = "holds", "does not hold", "not run"
_NUMBER, _TRUTH = "a number", "true or false"
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_OVER_SEEDS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean, "min": min, "max": max, "std": statistics.stdev,
}  # fmt: skip
_EACH_SEED = {"all_seeds": _TRUTH, "count": _NUMBER}  # what they are
_FUNCTIONS = (*_OVER_SEEDS, *_EACH_SEED, "abs", "diverged", "paired", "value")
_FEWEST_PAIRS = 6  # fewer differences, even of one sign, are no surprise at 5 percent: they would refute nothing
_DEEPEST = 100  # levels of an expression, so that whatever walks through it comes to its end
_ROWS = {"paired": 2}  # that a function takes; all others take one


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one row with one seed.

    Attributes:
        metrics: numbers by name; None is one that this run has not.
        diverged: whether it ended for that.
    """

    metrics: Mapping[str, float | None]
    diverged: bool = False


Outcomes = Mapping[str, Mapping[int, Outcome]]
"""By row and seed; runs that failed, or were not begun, are not in it."""


@dataclass(frozen=True)
class Verdict:
    """``holds``, ``does not hold``, or ``not run``, and what is to be said of it: why, or of how many seeds."""

    word: str
    reason: str = ""


class _NotRun(Exception):
    """A number that the predicate needs is not there."""


def check(predicate: str, rows: Sequence[str] | None, metrics: Sequence[str]) -> None:
    """Raise ValueError, in one line, unless the text is a predicate over these rows (None: any) and metrics."""
    tree = _parse(predicate)
    if _kind(tree, predicate, rows_in(tree) if rows is None else rows, metrics, in_seeds=False) != _TRUTH:
        raise ValueError(f"claim {predicate!r}: it is a number: compare it with another")
    if not rows_in(tree):
        raise ValueError(f"claim {predicate!r}: it is about no row: name one")


def judge(predicate: str, outcomes: Outcomes, metric: str, *, printed: bool = False) -> Verdict:
    """Whether a predicate, one that :func:`check` passed, is true of what was measured.

    Args:
        predicate: the text.
        outcomes: of the rows that were run.
        metric: what functions take that name none.
        printed: the outcomes are numbers of a source, one a row, which says nothing of seeds and of divergence.
    """
    tree = _parse(predicate)
    missing = [name for name in rows_in(tree) if not outcomes.get(name)]
    if missing:
        return Verdict(NOT_RUN, f"no finished run of {', '.join(missing)}")
    try:
        return Verdict(HOLDS if _Evaluation(outcomes, metric, printed).of(tree) else FAILS)
    except _NotRun as error:
        return Verdict(NOT_RUN, str(error))
    except ZeroDivisionError:
        return Verdict(NOT_RUN, "it divides by zero")
    except OverflowError:
        return Verdict(NOT_RUN, "a number in it is too large")


def num_seeds(predicate: str, outcomes: Outcomes) -> int:
    """The fewest seeds that one of its functions looks at, of rows that all have some."""
    looks = [rows_in(node) for node in ast.walk(_parse(predicate)) if isinstance(node, ast.Call)]
    return min(len(set.intersection(*(set(outcomes[row]) for row in rows))) for rows in looks if rows)


def rows_in(tree: ast.AST) -> list[str]:
    """The rows that a predicate names, each once."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    taken = [arg for call in calls for arg in call.args[: _ROWS.get(ast.unparse(call.func), 1)]]
    return list(dict.fromkeys(str(arg.value) for arg in taken if isinstance(arg, ast.Constant)))


def _parse(predicate: str) -> ast.expr:
    try:
        tree = ast.parse(f"({predicate.strip()})", mode="eval").body  # in brackets it may take several lines
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"claim {predicate!r}: it is no expression ({type(error).__name__})") from None
    level: list[ast.AST] = [tree]
    for _ in range(_DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ValueError(f"claim {predicate!r}: it is nested in more than {_DEEPEST} levels: write it in fewer")
    return tree


def _kind(node: ast.expr, predicate: str, rows: Sequence[str], metrics: Sequence[str], *, in_seeds: bool) -> str:
    """Whether a node is a number or true or false. ValueError where it is none of the language."""

    def demand(child: ast.expr, wanted: str, inside: bool = in_seeds) -> None:
        if _kind(child, predicate, rows, metrics, in_seeds=inside) != wanted:
            raise ValueError(f"claim {predicate!r}: {ast.unparse(child)} must be {wanted}")

    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        if not is_finite(node.value):
            raise ValueError(f"claim {predicate!r}: a number in it is larger than any that can be measured")
        return _NUMBER
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        kind = _TRUTH if isinstance(node.op, ast.Not) else _NUMBER
        demand(node.operand, kind)
        return kind
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        demand(node.left, _NUMBER)
        demand(node.right, _NUMBER)
        return _NUMBER
    if isinstance(node, ast.BoolOp):
        for child in node.values:
            demand(child, _TRUTH)
        return _TRUTH
    if isinstance(node, ast.Compare) and all(type(op) in _COMPARISONS for op in node.ops):
        for child in (node.left, *node.comparators):
            demand(child, _NUMBER)
        return _TRUTH
    if not isinstance(node, ast.Call):
        raise ValueError(f"claim {predicate!r}: {ast.unparse(node)!r} is not of the language of claims")
    name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
    if name not in _FUNCTIONS or node.keywords:
        raise ValueError(f"claim {predicate!r}: unknown function {name!r}: {advice(name, _FUNCTIONS)}")
    if name == "abs" or name in _EACH_SEED:
        if len(node.args) != 1:
            raise ValueError(f"claim {predicate!r}: {name} takes one expression")
        demand(node.args[0], _NUMBER if name == "abs" else _TRUTH, in_seeds or name in _EACH_SEED)
        if name in _EACH_SEED and not rows_in(node.args[0]):
            raise ValueError(f"claim {predicate!r}: {name} is over the seeds of rows: take value(row) inside of it")
        return _EACH_SEED.get(name, _NUMBER)
    if (name == "value") != in_seeds:
        wanted = "value(row) inside of all_seeds and count, and nowhere else"
        raise ValueError(f"claim {predicate!r}: {name} stands in the wrong place: take {wanted}")
    _check_names(node, name, predicate, rows, metrics)
    return _TRUTH if name == "diverged" else _NUMBER


def _check_names(call: ast.Call, name: str, predicate: str, rows: Sequence[str], metrics: Sequence[str]) -> None:
    texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    num_rows = _ROWS.get(name, 1)
    if len(texts) != len(call.args) or not num_rows <= len(texts) <= num_rows + (name != "diverged"):
        wanted = "a row" if num_rows == 1 else "two rows"
        raise ValueError(f"claim {predicate!r}: {name} takes {wanted}, and a metric if need be, in quotes")
    kinds = [("row", rows)] * num_rows + [("metric", metrics)]
    for (what, known), text in zip(kinds, texts, strict=False):
        if text not in known:
            raise ValueError(f"claim {predicate!r}: unknown {what} {text!r}: {advice(text, tuple(known))}")


@dataclass(frozen=True)
class _Evaluation:
    outcomes: Outcomes
    metric: str
    printed: bool = False
    seed: int | None = None

    def of(self, node: ast.expr) -> Any:
        """The number or truth of a node that was checked."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp):
            value = self.of(node.operand)
            return not value if isinstance(node.op, ast.Not) else -value
        if isinstance(node, ast.BinOp):
            return _ARITHMETIC[type(node.op)](self.of(node.left), self.of(node.right))
        if isinstance(node, ast.BoolOp):
            judged = (self.of(child) for child in node.values)
            return all(judged) if isinstance(node.op, ast.And) else any(judged)
        if isinstance(node, ast.Compare):
            values = [self.of(child) for child in (node.left, *node.comparators)]
            pairs = zip(node.ops, values, values[1:], strict=False)
            return all(_COMPARISONS[type(op)](left, right) for op, left, right in pairs)
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        return self._call(node.func.id, node.args)

    def _call(self, name: str, args: Sequence[ast.expr]) -> Any:
        if name == "abs":
            return abs(self.of(args[0]))
        if name == "all_seeds":
            return all(replace(self, seed=seed).of(args[0]) for seed in self._common(rows_in(args[0])))
        if name == "count" and self.printed:
            raise _NotRun("the source gives no seeds to count")
        if name == "count":
            return sum(self._holds(args[0], seed) for seed in self._common(rows_in(args[0])))
        if name == "paired":
            return self._paired(*(str(ast.literal_eval(arg)) for arg in args))
        row, metric = [*(str(ast.literal_eval(arg)) for arg in args), self.metric][:2]
        seeds = self.outcomes[row]
        if name == "diverged" and self.printed:
            raise _NotRun(f"the source does not say whether {row} diverged")
        if name == "diverged":
            return all(outcome.diverged for outcome in seeds.values())
        if name == "value":
            assert self.seed is not None
            return next(self._values(row, {self.seed: seeds[self.seed]}, metric))
        values = list(self._values(row, seeds, metric))
        if name == "std" and len(values) < 2:
            raise _NotRun(f"the spread of {row} needs two seeds")
        return _OVER_SEEDS[name](values)

    def _common(self, rows: Sequence[str]) -> list[int]:
        if not rows:
            raise _NotRun("it is about no row")
        common = set.intersection(*(set(self.outcomes[row]) for row in rows))
        if not common:
            raise _NotRun("its rows have no seed in common")
        return sorted(common)

    def _holds(self, node: ast.expr, seed: int) -> bool:
        try:
            return bool(replace(self, seed=seed).of(node))
        except _NotRun:
            return False

    def _paired(self, row: str, other: str, metric: str | None = None) -> float:
        common = self._common([row, other])
        mine, theirs = (
            list(self._values(name, {seed: self.outcomes[name][seed] for seed in common}, metric or self.metric))
            for name in (row, other)
        )
        if len(common) < _FEWEST_PAIRS:
            raise _NotRun(f"a test of {row} and {other} needs {_FEWEST_PAIRS} seeds, they share {len(common)}")
        if mine == theirs:
            return 1.0
        return float(stats.wilcoxon(mine, theirs).pvalue)

    def _values(self, row: str, seeds: Mapping[int, Outcome], metric: str) -> Iterator[float]:
        for seed, outcome in seeds.items():
            value = outcome.metrics.get(metric)
            if value is None:
                why = "diverged" if outcome.diverged else "has none"
                raise _NotRun(f"no {metric} of {row}: it {why} with seed {seed}")
            yield value
