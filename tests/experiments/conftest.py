"""A study that trains within milliseconds, and the command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ddpcore.experiments import __main__ as experiments

TINY = """
title = "A tiny study"
question = "Does it run?"
source = "Nobody, Table 1"
metrics = ["train_loss"]
seeds = 2

[shared]
model = "simplenet"
data.name = "synthetic"
data.batch_size = 100
run.steps = 4
run.device = "cpu"
run.checkpoint_every = 0

[groups.fast]
optimizer.lr = 0.5
scales = { smoke = { optimizer.lr = 0.25 } }

[scales.smoke]
run.steps = 2
seeds = 1

[rows]
"a" = { published = { train_loss = 0.7 } }
"b" = { groups = ["fast"], published = { train_loss = 0.6 } }
"ssgd" = { strategy.name = "ssgd", strategy.learners = 2 }

[[claims]]
text = "a is above b"
source = "Nobody, section 1"
predicate = 'mean("a") > mean("b")'

[[claims]]
text = "ssgd does not diverge"
source = "Nobody, section 2"
predicate = 'not diverged("ssgd")'
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """The file of a small study."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``main("run", ...)``: exit code, standard output, standard error."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = experiments.main([str(word) for word in words])
        out, error = capsys.readouterr()
        return code, out, error

    return call
