"""How the layers of a study file become a run, and how a damaged one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcore.experiments import study


def test_layers(tiny: Path) -> None:
    """Shared, groups, the row, then the scale of each, then what the command line says."""
    rows = study.load(str(tiny)).rows
    assert rows["a"].config("full").lr == 0.1
    assert rows["b"].config("full").lr == 0.5
    assert rows["b"].config("full").steps == 4
    assert rows["b"].config("smoke").lr == 0.25
    assert rows["b"].config("smoke").steps == 2
    assert rows["b"].config("smoke", {"lr": 0.125, "epochs": 3}).lr == 0.125
    assert rows["b"].config("smoke", {"epochs": 3}).steps is None


DAMAGE = {
    "no TOML": ('title = "A', "title = A", ["tiny.toml", "line 2"]),
    "a key twice": ('"b" = {', '"a" = {', ["tiny.toml", "line 26"]),
    "a row's field": ("learners = 2", "learner = 2", ["row ssgd", "'learner'", "did you mean 'learners'?"]),
    "a group": ('groups = ["fast"]', 'groups = ["fats"]', ["row b", "did you mean 'fast'?"]),
    "a scale": ("scales = { smoke", "scales = { smok", ["'smok'", "did you mean 'smoke'?"]),
    "a metric": ("published = { train_loss = 0.7", "published = { train_los = 0.7", ["row a", "'train_loss'"]),
    "a published word": ("train_loss = 0.7", 'train_loss = "low"', ["row a", "must be a number"]),
    "a predicate": ('mean("b")', 'mean("x")', ["claim", "unknown row 'x'"]),
    "a claim": ("text = ", "txt = ", ["a claim", "did you mean 'text'?"]),
    "the top": ("question = ", "questions = ", ["'questions'", "did you mean 'question'?"]),
    "nothing shared": ("[shared]", "[scales.cpu]", ["no 'shared'"]),
    "a row's name": ('"ssgd" = {', '"../up" = {', ["row ../up", "folder"]),
    "seeds": ("seeds = 2", "seeds = 0", ["seeds is 0"]),
    "a type": ("seeds = 2", 'seeds = "2"', ["seeds is '2'", "int"]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged(case: str, tiny: Path) -> None:
    before, after, says = DAMAGE[case]
    text = tiny.read_text()
    assert before in text
    tiny.write_text(text.replace(before, after, 1))
    with pytest.raises(ValueError) as caught:
        study.load(str(tiny))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(tiny))
    for part in says:
        assert part in message


def test_what_is_no_text(tiny: Path) -> None:
    tiny.write_bytes(tiny.read_bytes().replace(b"Nobody", b"No\xffbody", 1))
    with pytest.raises(ValueError, match=r"tiny.toml: line 4 is no UTF-8"):
        study.load(str(tiny))


def test_an_impossible_row_names_itself(tiny: Path) -> None:
    rows = study.load(str(tiny)).rows
    with pytest.raises(ValueError, match="row ssgd, scale full: batch_size is 101"):
        rows["ssgd"].config("full", {"batch_size": 101})
