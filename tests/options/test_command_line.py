"""What the commands share: names, and the file that is written whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from ddpcore.bench import commands as bench
from ddpcore.experiments import commands as experiments
from ddpcore.options import command_line
from ddpcore.report.__main__ import ReportOptions
from ddpcore.training.__main__ import TrainOptions


def test_names() -> None:
    assert command_line.names(" a, b,,") == ("a", "b")
    assert command_line.names(",") == ()


@pytest.mark.parametrize(
    "options",
    [
        *(kind.options for kind in bench.COMMANDS.values()),
        *(options for options, _ in experiments.COMMANDS.values()),
        ReportOptions,
        TrainOptions,
    ],
)
def test_help_begins_with_an_example_that_is_right(options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parser = command_line.Parser(prog="ddpcore")
    command_line.add_flags(parser, options)
    parser.print_help()
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("example: ddpcore ")
    words = first.split()[3:]
    own = {"list", "run", "compare", *bench.COMMANDS}
    options(**vars(parser.parse_intermixed_args(words[words[0] in own :])))


def test_the_help_of_all_studies_begins_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        experiments.parse(["--help"])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("example: ddpcore experiments run ")
    experiments.parse(first.split()[3:])
