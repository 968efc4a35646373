"""Checkpoints: saving, loading, damage."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from ddpcore.records.run import read_manifest, steps_of
from ddpcore.storage.files import replace_file
from ddpcore.training.checkpoint import Checkpoints
from helpers.bounded import refused


def checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(folder=folder, config={"optimizer": {"lr": 0.1}})


def no_warning(line: str) -> None:
    raise AssertionError(line)


def test_the_last_one_comes_back(tmp_path: Path) -> None:
    saved = checkpoints(tmp_path / "deep" / "folder")
    assert saved.load_last("cpu", no_warning) is None
    for step in (5, 12):
        saved.save(step, {"x": torch.full((2,), float(step)), "step": step}, keep_last=3)
    step, state = saved.load_last("cpu", no_warning)
    assert (step, state["step"], state["x"].tolist()) == (12, 12, [12.0, 12.0])
    assert read_manifest(saved.path(12))["config"] == {"optimizer": {"lr": 0.1}}
    assert sorted(path.name for path in saved.path(12).iterdir()) == [
        "manifest.json",
        "rank-0.json",
        "rank-0.safetensors",
    ]


def test_which_are_kept(tmp_path: Path) -> None:
    saved = checkpoints(tmp_path)
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 3)):
        saved.save(step, {}, keep_last=2, best=best)
    assert steps_of(saved.folder) == [3, 4, 5]
    saved.save(4, {}, keep_last=2)  # of a run that was resumed before step 5
    assert steps_of(saved.folder) == [3, 4]
    saved.save(6, {}, keep_last=1)
    assert steps_of(saved.folder) == [6]


def test_a_crash_while_saving_leaves_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = checkpoints(tmp_path)
    saved.save(1, {"x": torch.ones(1)}, keep_last=1)

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:3])
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("ddpcore.training.checkpoint.write_file", full)
        with pytest.raises(OSError, match="full"):
            saved.save(2, {"x": torch.zeros(1)}, keep_last=1)
    assert saved.load_last("cpu", no_warning)[0] == 1
    saved.save(2, {"x": torch.zeros(1)}, keep_last=1)  # removes what the failed save has left
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


FILE_OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def killed_at(operation: int, function: Callable[[], None]) -> bool:
    """Call a function in a forked process, which is killed before this file operation. Return whether it was killed."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def step(event: str) -> None:
            nonlocal count
            if event in FILE_OPERATIONS:
                count += 1
                if count > operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sync = os.fsync
        os.fsync = lambda descriptor: (step("open"), sync(descriptor))
        sys.addaudithook(lambda event, args: step(event))
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


@pytest.mark.slow
def test_the_same_step_again_killed_at_each_file_operation(tmp_path: Path) -> None:
    """The old or the new checkpoint of the step loads, whole and without a warning, and the next save works."""
    first = checkpoints(tmp_path / "first")
    for step, value in ((1, 1.0), (2, 2.0)):
        first.save(step, {"x": torch.full((2,), value)}, keep_last=2)
    seen = []
    for operation in range(200):
        saved = checkpoints(tmp_path / f"killed-{operation}")
        shutil.copytree(first.folder, saved.folder)
        was_killed = killed_at(operation, partial(saved.save, 2, {"x": torch.full((2,), 3.0)}, keep_last=1))
        step, state = saved.load_last("cpu", no_warning)
        assert step == 2 and state["x"].tolist() in ([2.0] * 2, [3.0] * 2), f"killed at operation {operation}"
        assert set(steps_of(saved.folder)) <= {1, 2} and all(
            saved._problem(step) is None for step in steps_of(saved.folder)
        )
        saved.save(3, {}, keep_last=1)
        assert [path.name for path in saved.folder.iterdir()] == ["step-00000003"]
        seen.append(state["x"][0].item())
        if not was_killed:
            break
    assert seen == sorted(seen) and seen[0] == 2.0 and seen[-1] == 3.0
    assert len(seen) > 15, "each write, rename and removal is an operation"


@pytest.mark.parametrize("number", [1, 3])
def test_other_formats(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Format 1, of version 0.1.0, and a format of a later version are damage with a reason."""
    saved = checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("ddpcore.training.checkpoint.FORMAT", number)
        saved.save(1, {"x": torch.ones(2)}, keep_last=1)
    assert saved._problem(1) == f"format {number} where this version reads 2"


def test_folders_of_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    saved = checkpoints(tmp_path)
    saved.save(1, {}, keep_last=1)
    for name in (
        "step-\u00b2",
        "step-\u0663\u0663\u0663\u0663\u0663\u0663\u0663\u0663",
        "step-5",
        "step-",
        "step-00000002.bak",
    ):
        (tmp_path / name).mkdir()
    assert steps_of(saved.folder) == [1]
    assert saved.load_last("cpu", no_warning)[0] == 1


def test_a_damaged_checkpoint_does_not_count_as_one_that_is_kept(tmp_path: Path) -> None:
    """Otherwise the next save would remove a complete one instead. Files of a killed save are removed too."""
    saved = checkpoints(tmp_path)
    for step in (1, 2, 3):
        saved.save(step, {}, keep_last=3)
    for step in (2, 3):
        (saved.path(step) / "rank-0.json").write_text("{")
    (tmp_path / "partial-00000003").mkdir()
    said: list[str] = []
    assert saved.load_last("cpu", said.append)[0] == 1 and len(said) == 2
    assert saved.load_last("cpu", no_warning)[0] == 1
    saved.save(4, {}, keep_last=2)
    assert steps_of(saved.folder) == [1, 4]
    names = ["damaged-00000002", "damaged-00000003", "step-00000001", "step-00000004"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_changed_manifest_is_damage(tmp_path: Path) -> None:
    saved = checkpoints(tmp_path)
    saved.save(1, {}, keep_last=1)
    text = (saved.path(1) / "manifest.json").read_text()
    (saved.path(1) / "manifest.json").write_text(text.replace('"num_ranks": 1', '"num_ranks": 2'))
    said: list[str] = []
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        saved.load_last("cpu", said.append)
    assert len(said) == 1 and "manifest.json does not match its checksum" in said[0]


def test_of_another_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints(tmp_path).save(1, {}, keep_last=1)
    monkeypatch.setattr("ddpcore.training.checkpoint.gather_objects", lambda group, mine, what: [mine, (-1, [])])
    monkeypatch.setattr("ddpcore.training.checkpoint.default_group", lambda group: None)
    ranks = Checkpoints(folder=tmp_path, config={}, rank=0, num_ranks=2)
    with pytest.raises(ValueError, match="was written by 1 processes and these are 2: resume with as many"):
        ranks.load_last("cpu", no_warning)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_file(path, b"one")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            replace_file(path, b"another")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def with_manifest(saved: Checkpoints, **changes: object) -> None:
    """Change the manifest of step 1, and its checksum with it, as a stranger would."""
    path = saved.path(1) / "manifest.json"
    manifest = json.loads(path.read_text())["manifest"] | changes
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"manifest": manifest, "sha256": digest}))


@pytest.mark.parametrize(
    "name", ["../../../../dev/zero", "/dev/zero", "rank-0.json/../../x", "\x1b[31m", "manifest.json"]
)
def test_a_manifest_names_no_other_files(tmp_path: Path, name: str) -> None:
    saved = checkpoints(tmp_path)
    saved.save(1, {"x": torch.ones(1)}, keep_last=1)
    with_manifest(saved, files={name: "0"})
    lines: list[str] = []
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        saved.load_last("cpu", lines.append)
    assert len(lines) == 1 and "is no file of a checkpoint" in lines[0] and lines[0].isprintable()


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.json", "rank-0.safetensors"])
def test_a_fifo_in_place_of_a_file(tmp_path: Path, name: str) -> None:
    saved = checkpoints(tmp_path)
    saved.save(1, {"x": torch.ones(1)}, keep_last=1)
    (saved.path(1) / name).unlink()
    os.mkfifo(saved.path(1) / name)
    assert "every checkpoint is damaged" in refused(lambda: saved.load_last("cpu", lambda line: None))


def test_a_state_that_fits_its_checksums_and_not_its_tensors(tmp_path: Path) -> None:
    """A tensor of one element as one of 4 TB, a tree that names another tensor or is too deep."""
    for tree in (
        '{"x": {"__tensor__": ".x", "shape": [1000000000000], "stride": [0], "on": "cpu"}}',
        '{"x": {"__tensor__": ".x", "shape": [1], "stride": [-1], "on": "cpu"}}',
        '{"x": {"__tensor__": ".y", "shape": [1], "stride": [1], "on": "cpu"}}',
        '{"x": {"__tensor__": ".x"}}',
        "[" * 100_000,
    ):
        saved = checkpoints(tmp_path)
        saved.save(1, {"x": torch.ones(1)}, keep_last=1)
        (saved.path(1) / "rank-0.json").write_text(tree)
        names = ("rank-0.json", "rank-0.safetensors")
        files = {name: hashlib.sha256((saved.path(1) / name).read_bytes()).hexdigest() for name in names}
        with_manifest(saved, files=files)
        message = refused(lambda saved=saved: saved.load_last("cpu", no_warning))  # type: ignore[misc]
        assert str(saved.path(1)) in message and "cannot be read (" in message
