"""Names from strangers as they are shown, files that are no files, and records of any bytes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcore.storage.files import plain, read_file, shown
from ddpcore.storage.json_lines import read_lines

SETTINGS = settings(max_examples=200, deadline=None)
NAMES = st.text(st.characters(codec=None), max_size=20)  # surrogates too: names that are no UTF-8
KEYS = st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
)


@SETTINGS
@given(NAMES)
def test_a_name_is_shown_as_one_printable_text(name: str) -> None:
    assert shown(name).isprintable() and plain(name).isprintable()
    if name.isprintable():
        assert shown(name) == plain(name) == name
    else:
        assert shown(name)[0] in "'\"", "it is quoted"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a\x1b[31m", r"'a\x1b[31m'"),
        ("a\nb", r"'a\nb'"),
        ("a\0", r"'a\x00'"),
        ("\u202e", r"'\u202e'"),
        ("[red]", "[red]"),
    ],
)
def test_names_in_quotes(name: str, expected: str) -> None:
    assert shown(name) == shown(Path(name)) == expected


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(ValueError, match=r"cannot be read \(a folder, a FIFO or a device\), name a file"):
            read_file(path)
    for path in (tmp_path / "none", tmp_path / "a\0b"):
        with pytest.raises(FileNotFoundError):
            read_file(path)
    (tmp_path / "file").write_bytes(b"123456789")
    assert read_file(tmp_path / "file", 9) == b"123456789"
    with pytest.raises(ValueError, match="file: it has 9 bytes, more than 8: raise the limit if you trust the file"):
        read_file(tmp_path / "file", 8, "the limit")


@pytest.mark.slow
@SETTINGS
@given(st.lists(st.dictionaries(KEYS, JSON, max_size=3), max_size=5), st.binary(max_size=30), st.data())
def test_a_record_of_any_bytes(lines: list[dict[str, Any]], junk: bytes, data: st.DataObject) -> None:
    """Whole lines before the damage are read as they were written; the damage is one line of text."""
    whole = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    at = data.draw(st.integers(0, len(whole)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.jsonl"
        path.write_bytes(whole[:at] + junk + whole[at:])
        seen = read_lines(path)
        assert all(problem.isprintable() and str(path) in problem for problem in seen.problems)
    before = whole[:at].count(b"\n")
    expected = [line for line in lines[:before] if isinstance(line.get("config", {}), dict)]
    assert seen.rows[: len(expected)] == expected
