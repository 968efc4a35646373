"""``--set``: fields of all rows from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpcore.experiments import study
from ddpcore.training.settings import settings

FIELDS: dict[str, dict[str, Any]] = {
    "lr=0.5": {"lr": 0.5},
    "lr=0.5 lr=0.25": {"lr": 0.25},
    "model=lenet5": {"model": "lenet5"},
    "milestones=[1,2]": {"milestones": [1, 2]},
    "optimizer_options.momentum=0.5": {"optimizer_options": {"momentum": 0.5}},
    "optimizer_options.nesterov=true optimizer_options={momentum=0.5}": {
        "optimizer_options": {"nesterov": True, "momentum": 0.5}
    },
    "optimizer_options={momentum=0.5} optimizer_options.nesterov=true": {
        "optimizer_options": {"momentum": 0.5, "nesterov": True}
    },
    "optimizer_options={momentum=0.5} optimizer_options.momentum=0.25": {"optimizer_options": {"momentum": 0.25}},
    "optimizer_options.momentum=0.25 optimizer_options={momentum=0.5}": {"optimizer_options": {"momentum": 0.5}},
}
REFUSED = {
    "optimizer_options=abc": "--set optimizer_options=abc: write optimizer_options.OPTION=VALUE",
    "optimizer_options=3": "--set optimizer_options=3: write optimizer_options.OPTION=VALUE",
    "policies=3": "--set policies=3: write policies.OPTION=VALUE",
    "optimizer_options={momentum=0.5} optimizer_options=3": "--set optimizer_options=3: write",
    "lr=0.1 lr.x=2": "--set lr.x=2: write lr=VALUE, it has no options",
    "lr.x=2": "--set lr.x=2: write lr=VALUE, it has no options",
    "lr={x=2}": "--set lr={x=2}: write lr=VALUE, it has no options",
    "strategy_options.outer.lr=1": "write KEY=VALUE, or KEY.OPTION=VALUE",
}


@pytest.mark.parametrize("words", FIELDS)
def test_fields(words: str) -> None:
    assert settings(words.split()) == FIELDS[words]


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str, main: Callable[..., tuple[int, str, str]], tiny: Path) -> None:
    given = [part for text in words.split() for part in ("--set", text)]
    code, out, error = main("run", tiny, *given)
    assert (code, out) == (2, "")
    assert REFUSED[words] in error and len(error.splitlines()) == 1


def test_an_optimizer_that_is_the_same_keeps_its_options(tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace("steps = 4", "steps = 4\noptimizer_options = { momentum = 0.9 }", 1))
    row = study.find_study(str(tiny)).rows["a"]
    assert row.config("full", settings(["optimizer=sgd"])).optimizer_options == {"momentum": 0.9}
    assert row.config("full", settings(["optimizer=lars"])).optimizer_options == {}
