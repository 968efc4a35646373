"""Writes that fail: the error names the file and comes at the write, and what was there stays."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddpcore.storage.files import replace_file
from ddpcore.storage.json_lines import JsonLines, read_lines, write_json, write_lines
from ddpcore.training.checkpoint import Checkpoints


@contextmanager
def full_disk(num_bytes: int = 10) -> Iterator[None]:
    """No file can grow beyond this size: the system refuses such a write as it does on a full disk."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


WRITES: dict[str, Any] = {
    "bytes": lambda path: replace_file(path, b"x" * 100),
    "json": lambda path: write_json(path, {"a": list(range(100))}),
    "lines": lambda path: write_lines(path, [{"a": 1}] * 100),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_full_disk_leaves_the_old_file(write: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with full_disk(), pytest.raises(OSError, match=r"File too large.*file"):
        write(path)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_the_checkpoints(tmp_path: Path) -> None:
    """The error names the file that could not be written. The checkpoint before stays and is loaded."""
    checkpoints = Checkpoints(folder=tmp_path / "checkpoints", config={})
    checkpoints.save(1, {"step": 1}, keep_last=1)
    with full_disk(), pytest.raises(OSError, match=r"partial-00000002/rank-0"):
        checkpoints.save(2, {"step": 2, "text": "x" * 100}, keep_last=1)
    assert checkpoints.load_last("cpu", print) == (1, {"step": 1})


@pytest.mark.parametrize("gone", ["file", "folder"])
def test_lines_of_a_file_that_was_removed_are_not_lost_without_a_word(gone: str, tmp_path: Path) -> None:
    """The system would let the process write on, into a file that nobody can open."""
    path = tmp_path / "run" / "record.jsonl"
    with JsonLines(path) as file:
        file.append({"step": 1})
        path.unlink() if gone == "file" else shutil.rmtree(path.parent)
        with pytest.raises(OSError, match=r"record.jsonl: the file was removed"):
            file.append({"step": 2})


def test_a_folder_that_vanishes_or_is_a_file(tmp_path: Path) -> None:
    for folder in (tmp_path / "gone", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError, match=folder.name):
            replace_file(folder / "name", b"x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into a read-only folder")
def test_a_read_only_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="file"):
            replace_file(tmp_path / "file", b"new")
    finally:
        tmp_path.chmod(0o700)
    assert (tmp_path / "file").read_bytes() == b"old"


def test_several_writers_of_one_file_make_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with JsonLines(path) as one, JsonLines(path) as other:
        for step in range(6):
            (one if step % 3 else other).append({"step": step})
    seen = read_lines(path)
    assert [row["step"] for row in seen.rows] == list(range(6))
    assert not seen.problems
