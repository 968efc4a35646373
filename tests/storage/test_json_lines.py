"""Lines that any JSON reader accepts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from ddpcore.storage import json_lines as metrics


def test_numbers_that_json_does_not_have() -> None:
    assert metrics.to_json([1.5, math.nan, math.inf, -math.inf]) == [1.5, None, None, None]


@dataclass(frozen=True)
class Row:
    loss: float
    shape: tuple[int, ...]


def test_to_json_reaches_everything() -> None:
    value = {
        "row": Row(math.nan, (1, 2)),
        "list": [Row(0.5, ()), math.inf, {"deep": -math.inf}],
        3: np.float32(0.25),
        "array": np.array([1.0, math.nan]),
        "tensor": torch.tensor([[1, 2]]),
        "scalar": torch.tensor(math.nan),
        "float64": np.float64(math.nan),
        "bool": np.bool_(True),
        "path": Path("a") / "b",
        "set": {3, 1, 2},
        "plain": [None, True, 2, "text"],
    }
    assert metrics.to_json(value) == {
        "row": {"loss": None, "shape": [1, 2]},
        "list": [{"loss": 0.5, "shape": []}, None, {"deep": None}],
        "3": 0.25,
        "array": [1.0, None],
        "tensor": [[1, 2]],
        "scalar": None,
        "float64": None,
        "bool": True,
        "path": "a/b",
        "set": [1, 2, 3],
        "plain": [None, True, 2, "text"],
    }
    json.dumps(metrics.to_json(value), allow_nan=False)
    for stranger in (object(), 1j, Row):
        with pytest.raises(TypeError, match="cannot write"):
            metrics.to_json({"x": stranger})


def test_record_appends_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one.jsonl"
    with metrics.JsonLines(path) as record:
        record.append(Row(math.nan, (3,)))
        assert metrics.read_lines(path).rows == [{"loss": None, "shape": [3]}]  # before close
        record.append({"step": 1, "text": "two\nlines"})
        with metrics.JsonLines(path) as second:
            second.append({"step": 2})
        record.append({"step": 3})
    with metrics.JsonLines(path) as again:
        again.append({"step": 4})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.get("step") for row in rows] == [None, 1, 2, 3, 4]
    record.close()


def test_a_row_that_cannot_be_written_leaves_no_trace(tmp_path: Path) -> None:
    with metrics.JsonLines(tmp_path / "one.jsonl") as record:
        with pytest.raises(TypeError):
            record.append({"fine": 1, "bad": object()})
        record.append({"fine": 2})
    assert metrics.read_lines(tmp_path / "one.jsonl") == metrics.Lines([{"fine": 2}])


def test_the_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    metrics.write_json(path, {"a": float("nan"), "b": [1, 2.5]})
    assert metrics.read_json(path) == {"a": None, "b": [1, 2.5]}
    assert list(json.loads(path.read_text())) == ["a", "b", "checksum"]
    with pytest.raises(TypeError):
        metrics.write_json(path, {"a": object()})
    assert metrics.read_json(path) == {"a": None, "b": [1, 2.5]}, "the old file survives a failed write"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_lines_end_at_newlines_alone(tmp_path: Path) -> None:
    """JSON allows other characters inside a text at which Python would split lines."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "one\u2028two\x85"}\n{"b": 2}\n{"c": ')
    seen = metrics.read_lines(path)
    assert seen.rows == [{"a": "one\u2028two\x85"}, {"b": 2}]
    assert seen.problems == [f"{path}: line 3 is incomplete, as after a crash"]


def written(path: Path, num: int) -> list[bytes]:
    """A file of rows ``{"step": 0}`` and so on; its lines."""
    metrics.write_lines(path, [{"step": step} for step in range(num)])
    return path.read_bytes().splitlines(keepends=True)


def steps(path: Path) -> list[int]:
    return [row["step"] for row in metrics.read_lines(path).rows]


def test_each_byte_of_a_line_is_covered(tmp_path: Path) -> None:
    """Whichever byte of the middle line changes, it is named. All other lines are read, but for a line joined to it."""
    path = tmp_path / "rows.jsonl"
    lines = written(path, 5)
    for place in range(len(lines[2])):
        for flip in (1, 2, 128):
            middle = bytearray(lines[2])
            middle[place] ^= flip
            path.write_bytes(b"".join([*lines[:2], bytes(middle), *lines[3:]]))
            seen = metrics.read_lines(path)
            kept = [row["step"] for row in seen.rows]
            assert seen.problems, (place, flip)
            assert all(problem.startswith(f"{path}: line ") for problem in seen.problems)
            assert kept == ([0, 1, 4] if place == len(lines[2]) - 1 else [0, 1, 3, 4]), (place, flip, seen)


def test_a_checksum_that_was_changed_in_a_file_of_one_line(tmp_path: Path) -> None:
    """Whichever byte of it changes: no other line shows that lines of this file have a checksum."""
    path = tmp_path / "rows.jsonl"
    (line,) = written(path, 1)
    for place in range(line.index(b', "checksum'), len(line) - 1):
        path.write_bytes(line[:place] + bytes([line[place] ^ 1]) + line[place + 1 :])
        (problem,) = metrics.read_lines(path).problems
        assert problem.startswith(f"{path}: line 1 is "), place


def test_files_without_checksums_and_those_that_go_on(tmp_path: Path) -> None:
    """A file of an older version is read, and continued with checksums."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    assert metrics.read_lines(path) == metrics.Lines([{"step": 0}, {"step": 1}])
    with metrics.JsonLines(path) as file:
        file.append({"step": 2})
        file.append({"step": 3})
    assert metrics.read_lines(path) == metrics.Lines([{"step": step} for step in range(4)])
    with path.open("a") as stranger:
        stranger.write('{"step": 9}\n')
    seen = metrics.read_lines(path)
    assert [row["step"] for row in seen.rows] == [0, 1, 2, 3]
    assert seen.problems == [f"{path}: line 5 is damaged: it has no checksum, or a changed one"]


# Lines of version 0.2, whose checksums have that of the line before them.
OF_0_2 = [
    b'{"step": 0, "checksum": "68fba1e3-00000000"}\n',
    b'{"step": 1, "checksum": "90e11b05-68fba1e3"}\n',
]


def test_files_of_version_0_2(tmp_path: Path) -> None:
    """They are read, checked and continued."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(OF_0_2))
    with metrics.JsonLines(path) as file:
        file.append({"step": 2})
    assert metrics.read_lines(path) == metrics.Lines([{"step": step} for step in range(3)])
    path.write_bytes(OF_0_2[0] + OF_0_2[1].replace(b'"step": 1', b'"step": 7'))
    assert metrics.read_lines(path).problems == [f"{path}: line 2 is damaged: it does not match its checksum"]


@pytest.mark.parametrize("name", ["saddle-escape", "gpu-configs-cifar10/cpu", "state-dtype"])
def test_committed_results_are_read(name: str) -> None:
    """Without checksums, with checksums from some line on, and with those of version 0.2."""
    path = Path(__file__).parents[2] / "docs" / "results" / name / "results.jsonl"
    found = metrics.read_lines(path)
    assert not found.problems and len(found.rows) == len(path.read_bytes().splitlines())


def test_a_line_that_was_cut_is_ended_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = written(path, 2)
    path.write_bytes(b"".join(lines)[:-9])
    with metrics.JsonLines(path) as file:
        file.append({"step": 7})
    assert steps(path) == [0, 7]
    assert len(metrics.read_lines(path).problems) == 1
    said: list[str] = []
    metrics.mend(path, said.append)
    assert len(said) == 1 and said[0].startswith(f"{path}: line 2 is") and said[0].endswith(": the rest is kept")
    assert metrics.read_lines(path) == metrics.Lines([{"step": 0}, {"step": 7}])


@pytest.mark.parametrize("flip", [1, 64])
def test_each_byte_of_a_json_file_is_covered(tmp_path: Path, flip: int) -> None:
    """Or what is read is what was written: a changed space between two entries changes no value."""
    path, value = tmp_path / "one.json", {"rows": [{"ms": 12.5}, {"ms": 7}], "name": "digits"}
    metrics.write_json(path, value)
    content = path.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= flip
        path.write_bytes(bytes(damaged))
        with pytest.raises(ValueError, match=r"checksum|Expecting|Invalid|Extra|decode|Unterminated"):
            metrics.read_json(path)


def test_json_files_without_a_checksum(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text('{"a": 1}')
    assert metrics.read_json(path) == {"a": 1}
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="too many brackets"):
        metrics.read_json(path)


def test_keys_that_are_the_same_text_are_refused(tmp_path: Path) -> None:
    with metrics.JsonLines(tmp_path / "rows.jsonl") as file, pytest.raises(ValueError, match="keys of 1, '1' are"):
        file.append({"loss": {1: 0.5, "1": 0.25}})
    assert metrics.read_lines(tmp_path / "rows.jsonl").rows == []


def test_an_object_without_entries(tmp_path: Path) -> None:
    metrics.write_json(tmp_path / "one.json", {})
    assert metrics.read_json(tmp_path / "one.json") == {}
