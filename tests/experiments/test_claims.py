"""Predicates of claims: verdicts on made-up results, and errors."""

from __future__ import annotations

import pytest

from ddpcore.experiments.claims import FAILS, HOLDS, NOT_RUN, WITHIN_SPREAD, Outcome, check, judge
from helpers.each import each

ROWS = ("a", "b", "c", "gone")
METRICS = ("loss", "seconds")
OUTCOMES = {
    "a": {0: Outcome(metrics={"loss": 1.0, "seconds": 10.0}), 1: Outcome(metrics={"loss": 3.0, "seconds": 20.0})},
    "b": {0: Outcome(metrics={"loss": 2.0, "seconds": 5.0}), 1: Outcome(metrics={"loss": 5.0, "seconds": 6.0})},
    "c": {0: Outcome(metrics={"loss": None, "seconds": 1.0}, diverged=True)},
}
TRUE = [
    'mean("a") == 2',
    'mean("b") == 3.5 and mean("a", "seconds") == 15',
    'min("a") == 1 and max("a") == 3',
    'std("a") > 1.4142 and std("a") < 1.4143',
    'abs(mean("a") - mean("b")) == 1.5',
    '-mean("a") < 0 < mean("a") <= 2 != 3',
    '(mean("a") + 1) * 2 / 3 - 2 >= 0',
    'diverged("c") and not diverged("a")',
    'all_seeds(value("a") < value("b"))',
    'all_seeds(value("a") < value("b") and value("a", "seconds") > value("b", "seconds"))',
    'diverged("c") or mean("c") < 1',
    'mean("a") > 1\nand mean("a") < 3',
    'count(value("a") > 2) == 1 and count(value("b") > 1) == 2',
    'count(value("c") > 0) == 0 and count(value("c", "seconds") > 0) == 1',
    'count(value("a") < value("b")) / 2 == 1',
    f'{"not " * 96}diverged("c")',
]
FALSE = [
    'mean("a") > 2',
    'not diverged("c")',
    'all_seeds(value("a") > 1)',
    'max("a") < min("b")',
    'mean("a") < mean("b") < 3',
]
UNKNOWN = {
    'mean("gone") > 1': "no finished run of gone",
    'mean("a") > 1 or mean("gone") > 1': "no finished run of gone",
    'mean("c") > 1': "no loss of c: it diverged",
    'std("c", "seconds") > 1': "two seeds",
    'paired("a", "b") < 1': "a test of a and b needs 6 seeds, they share 2",
    'paired("a", "gone") < 1': "no finished run of gone",
    'paired("c", "a") < 1': "no loss of c: it diverged",
    'mean("a") / (mean("a") - 2) > 1': "division by zero",
}
REFUSED = {
    'mean("a")': "must be true or false",
    '"a" > 1': "not allowed in a claim",
    'mean("d") > 1': "unknown row 'd'",
    'mean("gon") > 1': "did you mean 'gone'?",
    'mean("a", "second") > 1': "did you mean 'seconds'?",
    'avg("a") > 1': "unknown function 'avg'",
    'means("a") > 1': "did you mean 'mean'?",
    'mean(a) > 1': "in quotes",
    'paired("a") < 1': "takes two rows",
    'paired("a", "loss") < 1': "unknown row 'loss'",
    'paired("a", "b", "secs") < 1': "did you mean 'seconds'?",
    'count(value("a")) > 1': "must be true or false",
    'count(diverged("a")) > 1': "wrong place",
    'count(value("a") > 1)': "must be true or false",
    '1 / 0 > mean("a")': "division by zero",
    'mean() > 1': "in quotes",
    'mean("a", "loss", "b") > 1': "in quotes",
    'diverged("a", "loss")': "in quotes",
    'mean("a") > 1 +': "not an expression",
    'mean("a") ** 9 > 1': "not allowed in a claim",
    'mean("a") in 3': "not allowed in a claim",
    'diverged("a") > 1': "must be a number",
    'not mean("a")': "must be true or false",
    'mean("a") and diverged("b")': "must be true or false",
    'value("a") > 1': "wrong place",
    'all_seeds(mean("a") > 1)': "wrong place",
    'all_seeds(1)': "use value(row) inside it",
    'all_seeds(1 < 2)': "use value(row) inside it",
    'count(1 < 2) > 0': "use value(row) inside it",
    'all_seeds(value("a") > 1 or count(1 < 2) > 0)': "use value(row) inside it",
    '1 < 2': "names no row",
    f'mean("a") > 1{"0" * 400} * 1.5': "a number in it is too large",
    f'mean("a") > 1{"0" * 300} * 1{"0" * 300} * 1.5': "too large",
    'mean("a") < 1e400': "a number in it is too large",
    f'{"not " * 98}diverged("a")': "more than 100 levels",
    f'{"not " * 1000}diverged("a")': "more than 100 levels",
    'True': "not allowed in a claim",
    '__import__("os").system("true") > 1': "unknown function",
    '(lambda: 1)() > 1': "unknown function",
    'mean("a").real > 1': "not allowed in a claim",
    '[x for x in (1,)] > 1': "not allowed in a claim",
    'mean(row="a") > 1': "unknown function",
    'abs(mean("a"), 1) > 1': "takes one expression",
    '1 if 1 > 0 else 2': "not allowed in a claim",
}  # fmt: skip


@pytest.mark.parametrize(("predicate", "word"), [*((p, HOLDS) for p in TRUE), *((p, FAILS) for p in FALSE)])
def test_verdicts(predicate: str, word: str) -> None:
    check(predicate, ROWS, METRICS)
    assert judge(predicate, OUTCOMES, "loss").word.removesuffix(", within the spread") == word


@pytest.mark.parametrize("predicate", UNKNOWN)
def test_missing_results_are_not_judged(predicate: str) -> None:
    check(predicate, ROWS, METRICS)
    verdict = judge(predicate, OUTCOMES, "loss")
    assert verdict.word == NOT_RUN
    assert UNKNOWN[predicate] in verdict.reason


@pytest.mark.parametrize("predicate", ['not diverged("c")', 'count(value("a") > 2) < 9'])
def test_published_numbers_have_neither_seeds_nor_divergence(predicate: str) -> None:
    assert judge(predicate, OUTCOMES, "loss").word != NOT_RUN
    assert judge(predicate, OUTCOMES, "loss", published=True).word == NOT_RUN
    assert judge('mean("a") > 0', OUTCOMES, "loss", published=True).word == HOLDS


def test_rows_without_common_seeds() -> None:
    apart = {"a": {0: OUTCOMES["a"][0]}, "b": {1: OUTCOMES["b"][1]}}
    assert judge('all_seeds(value("a") < value("b"))', apart, "loss").word == NOT_RUN
    both = {"a": OUTCOMES["a"], "b": {1: OUTCOMES["b"][1]}}
    assert judge('all_seeds(value("b") - value("a") == 2)', both, "loss").word == HOLDS, "only seed 1"
    assert judge('mean("a") < mean("b")', both, "loss").word == HOLDS
    assert judge('mean("a") < mean("b")', apart, "loss").word == "holds, within the spread", "no seed tests it"


def test_paired_is_wilcoxons_exact_test() -> None:
    """Ten differences of one sign: 2 of the 2^10 sign assignments are as extreme. Runs are paired by seed."""
    low = {seed: Outcome(metrics={"loss": seed / 7}) for seed in range(10)}
    high = {seed: Outcome(metrics={"loss": seed / 7 + 0.1 + seed**2 / 100}) for seed in reversed(range(12))}
    outcomes = {"a": low, "b": high}
    assert judge(f'abs(paired("a", "b") - {2 / 2**10}) < 1e-12', outcomes, "loss").word == HOLDS
    assert judge('paired("a", "b") == paired("b", "a")', outcomes, "loss").word == HOLDS
    assert judge('paired("a", "a") == 1', outcomes, "loss").word == HOLDS
    mixed = {seed: Outcome(metrics={"loss": (-2.0) ** seed}) for seed in range(6)}
    zero = {seed: Outcome(metrics={"loss": 0.0}) for seed in range(6)}
    verdict = judge('abs(paired("a", "b") - 54 / 64) < 1e-12', {"a": mixed, "b": zero}, "loss")
    assert verdict.word == HOLDS, "ranks 1, 3, 5 above: of 64 choices 54 have one side at 9 or less"


@pytest.mark.parametrize("predicate", REFUSED)
def test_refused(predicate: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(predicate, ROWS, METRICS)
    assert REFUSED[predicate] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_how_many_seeds_a_verdict_is_based_on() -> None:
    """The smallest number of one of its functions; a function of two rows uses their common seeds."""
    one, two = Outcome(metrics={"loss": 1.0}), Outcome(metrics={"loss": 2.0})
    outcomes = {"a": dict.fromkeys(range(10), one), "b": dict.fromkeys(range(9, 12), two), "c": {0: one, 1: two}}
    expected = {
        'mean("a") < mean("b")': 3,
        'abs(mean("a")) > 1 or diverged("c")': 2,
        'all_seeds(value("a") < value("b"))': 1,
        'mean("a") < 2 and count(value("a") < value("c")) > 0': 2,
        'abs(mean("a") - mean("b")) < 2': 1,
    }
    for predicate, num_seeds in expected.items():
        assert judge(predicate, outcomes, "loss").reason == f"n={num_seeds}", predicate


@each(
    ("predicate", "word"),
    [
        ('mean("low") < mean("high")', WITHIN_SPREAD),
        ('mean("low") < mean("far")', HOLDS),
        ('mean("low") > mean("high")', FAILS),
        ('all_seeds(value("low") < value("far"))', HOLDS),
        ('abs(mean("low") - mean("high")) < 2', WITHIN_SPREAD),
        ('std("low") > 1', HOLDS),
        ('count(value("low") < value("high")) > 1', HOLDS),
        ('mean("one") < mean("far")', HOLDS),
        ('mean("low") < mean("holes")', WITHIN_SPREAD),
    ],
)
def test_what_holds_of_the_means_alone_is_within_the_spread(predicate: str, word: str) -> None:
    """Of each common seed alone it must hold too; what is about the spread, or of one seed, is as it is."""
    losses = {"low": (1, 4, 2), "high": (2, 3, 5), "far": (9, 8, 7), "one": (1,), "holes": (5, 4, 9)}
    outcomes = {
        row: {seed: Outcome(metrics={"loss": float(value)}) for seed, value in enumerate(values)}
        for row, values in losses.items()
    }
    assert judge(predicate, outcomes, "loss").word == word
    assert judge('mean("low") < mean("high")', outcomes, "loss", published=True).word == HOLDS
