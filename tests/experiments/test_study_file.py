"""How the layers of a study file become a run, and the errors for damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcore.experiments import study


def test_layers(tiny: Path) -> None:
    """Later layers override earlier ones: shared, groups, row, scales of each, command line."""
    rows = study.find_study(str(tiny)).rows
    assert rows["a"].config("full").optimizer.lr == 0.1
    assert rows["b"].config("full").optimizer.lr == 0.5
    assert rows["b"].config("full").run.steps == 4
    assert rows["b"].config("smoke").optimizer.lr == 0.25
    assert rows["b"].config("smoke").run.steps == 2
    assert rows["b"].config("smoke", {"optimizer": {"lr": 0.125}, "run": {"epochs": 3}}).optimizer.lr == 0.125
    assert rows["b"].config("smoke", {"run": {"epochs": 3}}).run.steps is None


DAMAGE = {
    "no TOML": ('title = "A', "title = A", ["tiny.toml", "line 2"]),
    "a key twice": ('"b" = {', '"a" = {', ["tiny.toml", "line 26"]),
    "a row's field": (
        "strategy.learners = 2",
        "learner = 2",
        ["row ssgd", "'learner'", "did you mean 'strategy.learners'?"],
    ),
    "a group": ('groups = ["fast"]', 'groups = ["fats"]', ["row b", "did you mean 'fast'?"]),
    "a scale": ("scales = { smoke", "scales = { smok", ["'smok'", "did you mean 'smoke'?"]),
    "a metric": ("published = { train_loss = 0.7", "published = { train_los = 0.7", ["row a", "'train_loss'"]),
    "a published word": ("train_loss = 0.7", 'train_loss = "low"', ["row a", "must be a finite number"]),
    "a predicate": ('mean("b")', 'mean("x")', ["claim", "unknown row 'x'"]),
    "a claim": ("text = ", "txt = ", ["a claim", "did you mean 'text'?"]),
    "the top": ("question = ", "questions = ", ["'questions'", "did you mean 'question'?"]),
    "no list": ("seeds = 2", 'notes = "one"', ["notes is 'one'", "a list of text"]),
    "nothing shared": ("[shared]", "[scales.cpu]", ["no 'shared'"]),
    "a row's name": ('"ssgd" = {', '"../up" = {', ["row ../up", "folder"]),
    "seeds": ("seeds = 2", "seeds = 0", ["seeds is 0"]),
    "a type": ("seeds = 2", 'seeds = "2"', ["seeds is '2'", "a whole number"]),
    "seeds of a scale": ("seeds = 1", "seeds = 0", ["scale smoke: seeds is 0"]),
    "metrics in a list": ('["train_loss"]', '[["train_loss"]]', ["metrics is ['train_loss']", "text"]),
    "groups in a list": ('["fast"]', '[["fast"]]', ["row b: groups is ['fast']", "text"]),
    "rows in a list": ("run.steps = 2", 'rows = [["a"]]', ["scale smoke: rows is ['a']", "text"]),
    "notes in a list": ("seeds = 2", "notes = [1]", ["notes is 1", "text"]),
    "no metrics": ('["train_loss"]', "[]", ["metrics is empty"]),
    "no rows of a scale": ("run.steps = 2", "rows = []", ["scale smoke: rows is empty"]),
    "no hosts": ('"b" = {', '"b" = { hosts = 0,', ["row b: hosts is 0: it must be at least 1"]),
    "less than no hosts": ('"b" = {', '"b" = { hosts = -1,', ["row b: hosts is -1: it must be at least 1"]),
    "no hosts of a group": ("optimizer.lr = 0.5", "hosts = 0", ["group fast: hosts is 0"]),
    "a rank below 0": ('"b" = {', '"b" = { kill_rank = -1,', ["row b: kill_rank is -1: it must be at least 0"]),
    "shared options": ("run.steps = 4", "strategy = { policies = 3 }", ["shared: strategy.policies is 3", "a mapping"]),
    "a row's options": (
        '"b" = {',
        '"b" = { strategy.policies = "keep",',
        ["row b: strategy.policies is 'keep'", "a mapping"],
    ),
    "a scale's options": (
        "{ optimizer.lr = 0.25 }",
        "{ optimizer.lr = [1] }",
        ["group fast, scale smoke: optimizer.lr is [1]", "finite number"],
    ),
    "a group's scale": ("scales = { smoke", "scales = { smok", ["group fast", "did you mean 'smoke'?"]),
    "a scale of a group": (
        "{ optimizer.lr = 0.25 }",
        "{ lrr = 0.25 }",
        ["group fast, scale smoke", "did you mean 'optimizer.lr'?"],
    ),
    "a metric twice": ('["train_loss"]', '["train_loss", "train_loss"]', ["metrics is", "name each once"]),
    "a published infinity": (
        "train_loss = 0.7",
        "train_loss = inf",
        ["row a: published.train_loss is", "finite number"],
    ),
    "a published integer": (
        "train_loss = 0.7",
        f"train_loss = 1{'0' * 400}",
        ["row a: published.train_loss is", "finite number"],
    ),
    **{
        f"a chart {name}": ("[[claims]]", f"[[charts]]\n{chart}\n[[claims]]", says)
        for name, chart, says in (
            (
                "of no field",
                'x = "optimzer.lr"\nby = "strategy"',
                ["a chart's x has no 'optimzer'", "did you mean 'optimizer'?"],
            ),
            ("by no field", 'x = "optimizer.lr"\nby = "topolog"', ["a chart's by has no 'topolog'"]),
            ("of no row", 'x = "optimizer.lr"\nlines = { one = ["x-*"] }', ["rows has no 'x-*'"]),
            ("of no value", 'x = "lr"\nvalues = [1]\nlines = { one = ["{x}"] }', ["rows has no '1'"]),
            ("without lines", 'x = "lr"', ["the chart over lr: give lines, or by without values"]),
            ("over both", 'x = "lr"\nby = "lr"\nlines = {}', ["the chart over lr: give lines, or by without values"]),
            ("over nothing", 'by = "lr"', ["a chart has no 'x'"]),
            ("of other values", 'x = "lr"\nvalues = [[1]]\nlines = {}', ["a chart: values is [[1]]"]),
            ("of another key", 'x = "lr"\nline = {}', ["a chart has no 'line'"]),
        )
    },
    "a claim of no row": ('mean("b")\'', 'mean("b") or all_seeds(1 < 2)\'', ["claim", "value(row)"]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged(case: str, tiny: Path) -> None:
    before, after, says = DAMAGE[case]
    text = tiny.read_text()
    assert before in text
    tiny.write_text(text.replace(before, after, 1))
    with pytest.raises(ValueError) as caught:
        study.find_study(str(tiny))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(tiny))
    for part in says:
        assert part in message


def test_no_rows(tiny: Path) -> None:
    text = tiny.read_text()
    tiny.write_text(text[: text.index('"a" = {')])
    with pytest.raises(ValueError, match=r"tiny.toml: rows is empty"):
        study.find_study(str(tiny))


def test_a_file_that_is_not_utf8(tiny: Path) -> None:
    tiny.write_bytes(tiny.read_bytes().replace(b"Nobody", b"No\xffbody", 1))
    with pytest.raises(ValueError, match=r"tiny.toml: line 4 is no UTF-8"):
        study.find_study(str(tiny))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ('strategy = { name = "dpsgd", compression = 3 }', "compression is 3"),
        ('data.input_shape = "a"', "data set synthetic: input_shape is 'a'"),
        ('data = { name = "saddle", dimension = "a" }', "data set saddle: dimension is 'a'"),
        (
            'strategy.topology = { name = "ring", neighbors_each_side = "a" }',
            "topology ring: neighbors_each_side is 'a'",
        ),
    ],
)
def test_options_of_another_type(fields: str, says: str, tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace('"b" = {', f'"b" = {{ {fields},'))
    with pytest.raises(ValueError) as caught:
        study.find_study(str(tiny)).rows["b"].config("full")
    assert str(caught.value).startswith(f"{tiny}: row b, scale full: ")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_the_error_of_an_invalid_run_names_its_row(tiny: Path) -> None:
    rows = study.find_study(str(tiny)).rows
    with pytest.raises(ValueError, match=r"row ssgd, scale full: data\.batch_size is 101"):
        rows["ssgd"].config("full", {"data": {"batch_size": 101}})
