"""Two network namespaces that emulate two hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpcore.experiments import hosts
from helpers import ranks

pytestmark = pytest.mark.slow


def process(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        hosts.check()
    except hosts.NotPermitted as error:
        pytest.skip(f"network namespaces: {error}")
    environment = ranks.environment()
    environment["PYTHONPATH"] += os.pathsep + str(ranks.HERE)
    code = f"import hosts_worker; hosts_worker.main({name!r}, {str(folder)!r})"
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900)


def test_two_networks_and_one_cable(tmp_path: Path) -> None:
    done = process("look", tmp_path)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [one["sum"] for one in found] == [15.0] * 4
    spaces = [one["namespace"] for one in found]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3]
    assert os.readlink("/proc/self/ns/net") not in spaces
    assert [one["devices"] for one in found] == [["ddpcore0", "lo"]] * 2 + [["ddpcore1", "lo"]] * 2
    assert [one["world"] for one in found] == [[0, 0, 2], [1, 1, 2], [2, 0, 2], [3, 1, 2]]
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(found[0]["cores"]) & set(found[2]["cores"]), "hosts share no core"


def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    done = process("fail", tmp_path)
    assert "RankFailed: rank 1 failed" in done.stderr
    assert "rank 1 cannot count" in done.stderr
    for rank in range(4):
        pid = int((tmp_path / f"{rank}.pid").read_text())
        assert not Path(f"/proc/{pid}").exists()


def test_a_network_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of one line, and no process stays behind."""
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(hosts.subprocess, "Popen", Recorded)
    monkeypatch.setattr(hosts, "_inside", lambda keeper: ["false"])
    with pytest.raises(hosts.NotPermitted) as caught:
        hosts.check()
    assert "\n" not in str(caught.value)
    assert len(started) > hosts.NUM_HOSTS
    assert all(process.returncode is not None for process in started)


def test_without_the_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(hosts.NotPermitted, match=r"^there is no unshare$"):
        hosts.check()


def test_a_file_that_a_user_of_the_hosts_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is an error of the user's, and says nothing about namespaces."""
    monkeypatch.setattr(hosts, "_call", lambda *words: None)
    monkeypatch.setattr(hosts, "_await_namespace", lambda keeper: None)
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(hosts.subprocess, "Popen", lambda words, **more: _Keeper())
    with pytest.raises(FileNotFoundError, match="absent"), hosts.networks(2):
        Path("absent").read_text()


class _Keeper:
    pid = 0

    def kill(self) -> None: ...

    def communicate(self) -> None: ...


@pytest.mark.parametrize("world_size", [0, 1, 3])
def test_ranks_that_two_hosts_cannot_share(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error before anything starts; half of three ranks would be one, and the third would have no host."""
    monkeypatch.setattr(hosts.launch, "run", lambda *args, **kwargs: pytest.fail("ranks were started"))
    with pytest.raises(ValueError, match=f"world_size is {world_size}: 2 hosts need an even number of ranks"):
        hosts.run(print, (), world_size=world_size)
