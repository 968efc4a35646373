"""Starting ranks, joining torchrun's, and leaving nothing behind when one of them fails.

What is tested of a start runs in new interpreters. What is tested of ranks that have started is forked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddpcore.runtime import launch
from ddpcore.runtime.launch import World, torchrun_world
from helpers import forked, ranks

WORKER = Path(__file__).parents[1] / "helpers" / "launch_worker.py"
MARK = "DDPCORE_TEST_MARK"
TIMEOUT = 300
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc to find processes")


class Launcher:
    """Starts the worker script, and finds it and all its children: by a mark in their environment, or by their log."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.logs = folder, folder / "logs"
        self.mark = f"{os.getpid()}-{folder.name}-{time.monotonic_ns()}"

    def start(self, trial: str, world_size: int, *launcher: str) -> subprocess.Popen[str]:
        command = [sys.executable, *launcher, str(WORKER), str(self.folder), trial, str(world_size)]
        environment = ranks.environment() | {MARK: self.mark}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def forked(self, trial: str, world_size: int) -> tuple[int | None, str]:
        """The exit code and standard error of a process that is forked, as are its ranks."""
        shutil.rmtree(self.logs, ignore_errors=True)  # of a call before
        self.logs.mkdir()
        words = [str(WORKER), str(self.folder), trial, str(world_size)]
        process = forked.start(words, self.logs, ranks.environment(), Path.cwd())
        process.join(TIMEOUT)
        return process.exitcode, forked.output(self.logs)[1]

    def run(self, trial: str, world_size: int, *launcher: str) -> tuple[int, str]:
        """The exit code and standard error."""
        process = self.start(trial, world_size, *launcher)
        try:
            _, errors = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            self.clean_up()
            raise
        return process.returncode, errors

    def alive(self) -> list[str]:
        """Command lines of living processes that carry the mark, or write to the log."""
        found, writers = [], forked.writers(self.logs)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                marked = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                if marked or int(entry.name) in writers:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found.append(f"{entry.name} {(entry / 'cmdline').read_bytes().decode().replace(chr(0), ' ')}")
            except OSError:  # it has just ended
                continue
        return found

    def wait_until_gone(self, seconds: float) -> list[str]:
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def clean_up(self) -> None:
        for line in self.alive():
            try:
                os.kill(int(line.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                continue

    def results(self, world_size: int) -> list[Any]:
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    one = Launcher(tmp_path)
    yield one
    one.clean_up()


# --- where a process stands --------------------------------------------------------------------------------------


def test_torchrun_world() -> None:
    assert torchrun_world({}) is None
    assert torchrun_world({"RANK": "1"}) is None
    assert torchrun_world({"WORLD_SIZE": "4"}) is None
    full = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "1"}
    assert torchrun_world(full) == World(5, 8, 1, 4)
    assert torchrun_world({"RANK": "2", "WORLD_SIZE": "3"}) == World(2, 3, 2, 3)
    with pytest.raises(ValueError, match="one"):
        torchrun_world({"RANK": "one", "WORLD_SIZE": "3"})


def test_torchrun_world_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert torchrun_world() is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert torchrun_world() == World(0, 2, 0, 2)


@pytest.mark.parametrize(("cores", "ranks_here", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1), (16, 16, 1)])
def test_threads_per_rank(cores: int, ranks_here: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "num_cores", lambda: cores)
    assert launch.threads_per_rank(ranks_here) == threads


def test_num_cores_follows_the_affinity() -> None:
    if hasattr(os, "sched_getaffinity"):
        assert launch.num_cores() == len(os.sched_getaffinity(0))
    assert launch.num_cores() >= 1


def test_virtual_learners_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    seen: list[Any] = []
    launch.run(lambda *args: seen.append((os.getpid(), *args)), ("a", 2), world_size=7, backend="virtual")
    assert seen == [(os.getpid(), World(), "a", 2)]


def test_a_world_that_torchrun_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="torchrun started 2 ranks, not 3"):
        launch.run(print, (), world_size=3, backend="gloo")
    with pytest.raises(ValueError, match="one process"):
        launch.run(print, (), world_size=2, backend="virtual")


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_no_rank_can_keep(timeout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error before anything starts."""
    monkeypatch.setattr(launch, "_start", lambda *args: pytest.fail("ranks were started"))
    with pytest.raises(ValueError, match="it must be above 0 and at most 1000000 seconds"):
        launch.run(print, (), world_size=2, backend="gloo", timeout=timeout)


# --- both ways of starting ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Launcher, subprocess.Popen[str]]]:
    """Two ranks that have trained, and hang."""
    one = Launcher(tmp_path_factory.mktemp("training"))
    yield one, started_and_hanging(one, 2, "trains_and_hangs")
    one.clean_up()


@pytest.mark.slow
def test_self_started_and_torchrun_are_the_same(
    training: tuple[Launcher, subprocess.Popen[str]], launcher: Launcher
) -> None:
    """Bit for bit: the same losses and weights on every rank, and the same place in the world."""
    done = ranks.torchrun([WORKER, launcher.folder, "train", 2], Path.cwd())
    assert done.returncode == 0, done.stderr
    seen = [
        [{name: rank[name] for name in ("world", "losses", "weights")} for rank in one.results(2)]
        for one in (training[0], launcher)
    ]
    assert seen[0] == seen[1]
    assert [rank["world"] for rank in seen[0]] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert seen[0][0]["losses"] != seen[0][1]["losses"], "ranks train on different data"


@pytest.mark.slow
@needs_proc
def test_ranks_listen_on_this_machine_alone_and_share_its_cores(
    training: tuple[Launcher, subprocess.Popen[str]],
) -> None:
    """Neither the store of the parent nor gloo's sockets of the ranks listen elsewhere, in IPv4 or IPv6."""
    found = training[0].results(2)
    assert [one["threads"] for one in found] == [launch.threads_per_rank(2)] * 2
    assert found[0]["parent"], "the parent has no store: this tests nothing"
    for one in found:
        assert one["rank"], "gloo has no socket: this tests nothing"
        assert {*one["parent"], *one["rank"]} == {"0100007F"}, "another address than 127.0.0.1"


@pytest.mark.slow
def test_processes_that_nothing_connects(launcher: Launcher) -> None:
    code, errors = launcher.forked("unconnected", 3)
    assert code == 0, errors
    assert launcher.results(3) == [[rank, 3, launch.threads_per_rank(3), False] for rank in range(3)]


# --- failures ----------------------------------------------------------------------------------------------------


@needs_proc
def test_a_rank_that_raises(launcher: Launcher) -> None:
    """Its own traceback comes first, and not that of a rank that lost its connection to it."""
    code, errors = launcher.forked("raises", 3)  # in time: rank 0 and 2 would never end by themselves
    assert code == 1
    lines = errors.strip().splitlines()
    assert lines[0] == "rank 1 failed:"
    assert lines[1].startswith("Traceback")
    assert lines[-1] == "LookupError: the cause of it all"
    assert errors.count("Traceback") == 1
    assert not launcher.alive()


@pytest.mark.slow
@needs_proc
def test_a_rank_that_leaves_without_a_word(launcher: Launcher) -> None:
    code, errors = launcher.forked("exits", 3)
    assert code == 1
    assert re.search(r"rank 1 ended with exit code 7", errors)
    assert not launcher.alive()


@pytest.mark.slow
@needs_proc
def test_a_rank_that_is_killed_is_named(launcher: Launcher) -> None:
    """Although the ranks that lost their connection to it have tracebacks to show."""
    code, errors = launcher.forked("is_killed", 3)
    assert code == 1
    assert errors.strip().splitlines()[0] == "rank 2 was ended by SIGKILL"
    assert not launcher.alive()


@pytest.mark.slow
def test_the_others_go_on_if_they_may(launcher: Launcher) -> None:
    """``on_failure="shrink"``: no failed rank ends the others; all ranks failing is an error."""
    code, errors = launcher.forked("goes_on", 3)
    assert code == 0, errors
    assert (launcher.folder / "finished").exists()
    assert "ddpcore: rank 0 was ended by SIGKILL: the others go on" in errors
    assert "ddpcore: rank 1 failed (LookupError: no such luck): the others go on" in errors
    code, errors = launcher.forked("goes_on", 1)
    assert code == 1
    assert "rank 0 was ended by SIGKILL" in errors


@pytest.mark.slow
def test_all_are_waited_for_once_one_has_stopped(launcher: Launcher) -> None:
    """Each saves what it did, however long it takes."""
    code, errors = launcher.forked("stops", 2)
    assert (code, errors.strip()) == (3, "rank 0 stopped")
    assert (launcher.folder / "saved").exists()


@pytest.mark.slow
@needs_proc
def test_a_rank_that_ignores_sigterm_is_ended_all_the_same(launcher: Launcher) -> None:
    code, errors = launcher.forked("ignores_sigterm", 2)
    assert code == 1
    assert errors.startswith("rank 1 failed:")
    assert not launcher.alive()


def started_and_hanging(
    launcher: Launcher, world_size: int, trial: str = "hangs", start: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    process = launcher.start(trial, world_size, *start)
    deadline = time.monotonic() + TIMEOUT
    while len(list(launcher.folder.glob("*.there"))) < world_size:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "ranks did not come up"
        time.sleep(0.05)
    return process


@pytest.mark.slow
@needs_proc
def test_ranks_die_with_their_parent(launcher: Launcher) -> None:
    """Also those that hang in a collective, though a killed parent cannot tell them."""
    process = started_and_hanging(launcher, 2)
    assert len(launcher.alive()) >= 3
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=TIMEOUT)  # not communicate(): a rank left behind would hold its pipes open
    assert not launcher.wait_until_gone(5)


@pytest.mark.slow
@needs_proc
def test_ranks_of_torchrun_die_with_their_agent(launcher: Launcher) -> None:
    """Both of them: torchrun leaves them behind when it is killed, and they would train on."""
    process = started_and_hanging(launcher, 2, "orphans", TORCHRUN)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=TIMEOUT)
    assert not launcher.wait_until_gone(10)


def test_a_rank_whose_agent_has_died_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent is then the first process of the machine, which is no torchrun."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(launch.os, "getppid", lambda: 1)
    monkeypatch.setattr(launch.Path, "read_bytes", lambda path: b"/sbin/init")
    with pytest.raises(ValueError, match="torchrun's agent has died"):
        launch.end_with_torchrun()
    assert not launch._watching.is_set()


@pytest.mark.parametrize(("local", "refused"), [("3", True), ("1", False)])
def test_one_agent_for_all_ranks_cannot_shrink(local: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends all its ranks when one dies."""
    launch.check_agents()  # no torchrun
    given = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": local}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    if not refused:
        launch.check_agents()
        return
    with pytest.raises(ValueError, match=r"start a torchrun for each rank with --nproc-per-node 1") as error:
        launch.check_agents()
    assert "\n" not in str(error.value)


@pytest.mark.slow
@needs_proc
def test_a_late_rank_ends_the_wait(launcher: Launcher) -> None:
    """After run(timeout=), for calls of the process group that have no timeout of their own."""
    code, errors = launcher.forked("comes_late", 2)
    assert code == 1
    assert "RuntimeError: the barrier of this test failed on rank 0: a rank of [1] did not come within 2 s" in errors
    assert not launcher.alive()


@pytest.mark.slow
@needs_proc
def test_ctrl_c_ends_all(training: tuple[Launcher, subprocess.Popen[str]]) -> None:
    """It reaches the whole foreground group: the parent decides, and the ranks print nothing of it."""
    launcher, process = training
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0
    assert errors.count("Traceback") <= 1, "a rank reported the interrupt as its own failure"
    assert not launcher.wait_until_gone(5)


def test_a_rank_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "START_SECONDS", 0.5)
    world, store = World(world_size=2), dist.HashStore()
    with pytest.raises(TimeoutError, match=r"a rank did not start within 0\.5 s: see its output, or raise timeout"):
        launch._run_rank(print, (), "gloo", 0.5, world, store=store, rank=0, world_size=2)
    assert not dist.is_initialized()
