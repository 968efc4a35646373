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
    with pytest.raises(ValueError, match="text in zip: only latin1 is read"):
        pickles.load(b"\x80\x02}U\x01ac_codecs\nencode\n" + b"U\x01aU\x03zip\x86Rs.")
    with pytest.raises(ValueError, match="cannot reshape"):
        pickles.load(pickle.dumps({"data": PIXELS}, protocol=2).replace(b"K\x05K\x0c\x86", b"K\x06K\x0c\x86"))


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
ARRAY = RECONSTRUCT + b"cnumpy\nndarray\nK\x00\x85U\x01b\x87R"
DTYPE = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
DEEP = b"N" + b"\x85" * 100_000  # ((((None,),),),), deeper than the stack


def refused(value: bytes, message: str) -> None:
    """A dictionary with that value."""
    with pytest.raises(ValueError, match=message) as caught:
        pickles.load(b"\x80\x02}U\x04data" + value + b"s.")
    assert "\n" not in str(caught.value)


def test_the_pieces_are_those_of_an_array() -> None:
    """What the tests below damage."""
    content = b"\x80\x02}U\x04data" + ARRAY + b"(K\x01K\x02\x85" + DTYPE + b"\x89U\x02abtb" + b"s."
    assert pickles.load(content)["data"].tolist() == [97, 98]


@pytest.mark.parametrize("named", [RECONSTRUCT, b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"c_codecs\nencode\n"])
def test_attributes_of_what_is_named_are_not_set(named: bytes) -> None:
    """By BUILD, for the whole process: state is (None, {"__defaults__": (1, 2, 3)})."""
    before = [dict(vars(value)) for value in vars(pickles).values() if hasattr(value, "__dict__")]
    refused(named + b"N}(U\x0c__defaults__K\x01K\x02K\x03\x87u\x86b", "fills what cannot be filled")
    assert before == [dict(vars(value)) for value in vars(pickles).values() if hasattr(value, "__dict__")]


@pytest.mark.parametrize("size", [b"J\x00\x00\x00\x40", b"K\x01", b"K\x01\x85", b"]", b"N"])
def test_the_content_of_an_array_is_bytes_or_text(size: bytes) -> None:
    """`bytes` of a number would be as many zeros: a gigabyte of the first."""
    refused(ARRAY + b"(K\x01K\x01\x85" + DTYPE + b"\x89" + size + b"tb", "an array whose content is no bytes")


def test_nested_keys_are_not_hashed() -> None:
    """Python hashes tuples by recursion in C, which ends the process; text alone may be a key, or name something."""
    refused(b"}" + DEEP + b"K\x01s", "a key of a dictionary is no text")
    refused(b"(" + DEEP + b"K\x01d", "a key of a dictionary is no text")
    refused(b"}(" + DEEP + b"K\x01u", "a key of a dictionary is no text")
    refused(DEEP + b"U\x01a\x93", "uses a name that is no text")
    refused(b"cnumpy\ndtype\n" + DEEP + b"R", "in a way that no array needs")
    for value in (DEEP, b"]" * 100_000 + b"a" * 99_999, b"Nr\xff\xff\xff\xff"):  # the last is the memo's largest index
        assert list(pickles.load(b"\x80\x02}U\x04data" + value + b"s.")) == ["data"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"]2a", "instruction DUP"),
        (b"\x8f", "instruction EMPTY_SET"),
        (b"G" + bytes(8), "instruction BINFLOAT"),
        (b"cnumpy\nndarray\n)\x81", "instruction NEWOBJ"),
        (b"(inumpy\nndarray\n", "instruction INST"),
        (b"(cnumpy\nndarray\no", "instruction OBJ"),
        (b"P1\n", "instruction PERSID"),
        (b"\x82\x01", "instruction EXT1"),
        (b"cnumpy\nndarray\n)R", "in a way that no array needs"),
        (RECONSTRUCT + b"K\x01R", "calls without a tuple of arguments"),
        (RECONSTRUCT + b")R", "in a way that no array needs"),
        (RECONSTRUCT + b"cnumpy\ndtype\n\x85R", "in a way that no array needs"),
        (b"U\x01aU\x01b\x85R", "in a way that no array needs"),
        (b"U\x01aK\x01a", "fills what cannot be filled"),
        (b"]U\x01aK\x01s", "fills what cannot be filled"),
        (b"}(U\x01au", "zip"),
        (b"\x87", "takes more values than there are"),
        (b"(\x86t", "takes more values than there are"),
        (ARRAY + b"(K\x01K\x01\x85N\x89U\x01atb", "an array without a dtype"),
    ],
)
def test_instructions_that_no_array_needs(value: bytes, message: str) -> None:
    refused(value, message)


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
