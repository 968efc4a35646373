"""Pickles of byte arrays, from any Python; and what else a pickle could do, which is refused before it is done."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpcore.data import pickles

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 12), dtype=np.uint8)


def python2(text: str, kind: str = "U") -> bytes:
    """A str as Python 2 pickled it: SHORT_BINSTRING or BINSTRING."""
    content = text.encode("latin1")
    return (
        b"U" + struct.pack("<B", len(content)) + content
        if kind == "U"
        else b"T" + struct.pack("<i", len(content)) + content
    )


def python2_batch(pixels: np.ndarray, labels: list[int]) -> bytes:
    """{'data': pixels, 'labels': labels} as cPickle of Python 2 and NumPy wrote it with protocol 2."""
    dtype = (
        b"cnumpy\ndtype\n"
        + python2("u1")
        + b"K\x00K\x01\x87R(K\x03"
        + python2("|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    shape = b"".join(b"J" + struct.pack("<i", size) for size in pixels.shape) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + python2("b") + b"\x87R"
    state = b"(K\x01" + shape + dtype + b"\x89" + python2(pixels.tobytes().decode("latin1"), "T") + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + python2("data") + array + state + python2("labels") + numbers + b"u."


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_arrays_come_back_from_every_old_protocol(protocol: int) -> None:
    for pixels in (PIXELS, np.asfortranarray(PIXELS), PIXELS.reshape(-1)):
        content = pickle.dumps({"data": pixels, "labels": [1, 2], "name": "a"}, protocol=protocol)
        loaded = pickles.load(content)
        np.testing.assert_array_equal(loaded["data"], pixels)
        assert loaded["data"].dtype == np.uint8
        assert (loaded["labels"], loaded["name"]) == ([1, 2], "a")


def test_python_2_wrote_bytes_as_text() -> None:
    content = python2_batch(PIXELS, [3, 1, 4])
    np.testing.assert_array_equal(pickle.loads(content, encoding="bytes")[b"data"], PIXELS)  # a pickle proper
    loaded = pickles.load(content)
    np.testing.assert_array_equal(loaded["data"], PIXELS)
    assert loaded["labels"] == [3, 1, 4]


class Call:
    """Pickled as a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_in_a_pickle_is_run(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "run"
    evil = {
        "posix.system": Call(os.system, f"touch {mark}"),
        "open": Call(open, str(mark), "w"),
        "eval": Call(eval, f"open({str(mark)!r}, 'w')"),
        "numpy.*tofile": Call(np.ndarray.tofile, PIXELS, str(mark)),
        "getattr": Call(getattr, "a", "upper"),
    }
    for name, value in evil.items():
        content = pickle.dumps({"data": value}, protocol=protocol)
        with pytest.raises(ValueError, match="which no array needs") as caught:
            pickles.load(content)
        assert "\n" not in str(caught.value)
        assert not mark.exists(), name
    pickle.loads(pickle.dumps(evil["open"], protocol=protocol)).close()
    assert mark.exists(), "the file would have done it"


def test_stand_ins_are_no_way_to_numpy() -> None:
    """The names that are allowed do nothing but keep bytes."""
    for wrong in (
        np.zeros(2),
        np.array([object()]),
        np.zeros(2, dtype=[("a", "u1")]),
        np.zeros(2, dtype="datetime64[s]"),
    ):
        with pytest.raises(ValueError):
            pickles.load(pickle.dumps({"data": wrong}, protocol=2))
    with pytest.raises(ValueError, match="text in zip, where latin1 belongs"):
        pickles.load(b"\x80\x02}U\x01ac_codecs\nencode\n" + b"U\x01aU\x03zip\x86Rs.")
    with pytest.raises(ValueError, match="cannot reshape"):
        pickles.load(pickle.dumps({"data": PIXELS}, protocol=2).replace(b"K\x05K\x0c\x86", b"K\x06K\x0c\x86"))


def test_damage_is_one_line() -> None:
    content = python2_batch(PIXELS, [3, 1, 4])
    assert len(list(pickletools.genops(content))) > 20
    for end in range(len(content)):
        with pytest.raises(ValueError) as caught:
            pickles.load(content[:end])
        assert str(caught.value) and "\n" not in str(caught.value)
    for junk in (
        b"\x80\x04K\x01.",
        b"<html>\n</html>",
        pickle.dumps([1], protocol=2),
        pickle.dumps(PIXELS, protocol=2),
    ):
        with pytest.raises(ValueError):
            pickles.load(junk)
