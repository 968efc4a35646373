"""Network namespaces that emulate hosts: what they say where they cannot be made."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers import hosts

pytestmark = pytest.mark.slow


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
    assert len(started) > 2
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
