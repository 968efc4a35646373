"""The benchmark of averages in a thread runs, and both ways average."""

from __future__ import annotations

from helpers import ranks


def test_both_ways_average() -> None:
    """The script itself checks the averages."""
    words = "benchmarks/hidden_averages.py", "--numel", 1000, "--idle", 0.001, "--repeats", 2
    run = ranks.python(*words, cwd=ranks.ROOT)
    assert run.returncode == 0, run.stderr
    first, waits, thread = run.stdout.splitlines()
    assert (
        first.startswith("2 ranks")
        and waits.startswith("who waits averages:")
        and thread.startswith("a thread averages:")
    )
