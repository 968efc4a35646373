"""Progress without and with a terminal."""

from __future__ import annotations

import io

from ddpcore.runtime.progress import ProgressReport


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_every_ten_seconds_with_the_time_left() -> None:
    out, clock = io.StringIO(), Clock()
    with ProgressReport("training", 100, out=out, clock=clock) as progress:
        for _ in range(50):
            clock.seconds += 0.5
            progress.advance(1, "loss 0.1")
    assert out.getvalue().splitlines() == [
        "training (loss 0.1): 20 of 100, about 40 s left",
        "training (loss 0.1): 40 of 100, about 30 s left",
    ]


def test_steps_of_an_earlier_process_say_nothing_of_the_speed() -> None:
    out, clock = io.StringIO(), Clock()
    with ProgressReport("training", 100, completed=80, out=out, clock=clock) as progress:
        clock.seconds = 10
        progress.advance(5)
    assert out.getvalue() == "training: 85 of 100, about 30 s left\n"


def test_a_short_task_and_other_ranks_print_nothing() -> None:
    out, clock = io.StringIO(), Clock()
    with ProgressReport("training", 2, out=out, clock=clock) as progress:
        clock.seconds = 9
        progress.advance(2)
    with ProgressReport("training", 2, shown=False, out=out, clock=clock) as progress:
        clock.seconds = 99
        progress.advance(2)
    assert out.getvalue() == ""


def test_a_terminal_gets_a_bar() -> None:
    out = Terminal()
    with ProgressReport("training", 3, out=out) as progress:
        progress.advance(2, "loss 0.5")
    assert "loss 0.5" in out.getvalue()
    assert "2/3" in out.getvalue()
