"""Reading pickles of byte arrays without unpickling them.

`pickle.loads` calls any function that a file names, sets attributes of what it finds, and hashes whatever a file nests.
Here a small machine goes through the instructions of the file. It knows those that whole numbers, text, lists,
dictionaries and arrays of bytes are written with, and the four names that an array needs, whose work it does itself:
nothing that a file names is ever called, and anything else is an error.
"""

from __future__ import annotations

import pickletools
from enum import Enum
from typing import Any

import numpy as np


class _Name(Enum):
    """What a file may name."""

    ARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"
    RECONSTRUCT = "_reconstruct"  # of numpy: an array that is filled later
    ENCODE = "_codecs.encode"  # by which Python 3 writes bytes into old pickles


_NAMES = {
    ("numpy", "ndarray"): _Name.ARRAY,
    ("numpy", "dtype"): _Name.DTYPE,
    ("numpy.core.multiarray", "_reconstruct"): _Name.RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _Name.RECONSTRUCT,  # NumPy 2
    ("_codecs", "encode"): _Name.ENCODE,
}
_BYTES = ("u1", "|u1", "uint8")  # names of the only dtype
_MOVES = frozenset({"PROTO", "FRAME", "STOP"})  # which change nothing
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE"}
    | {"BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"}
)
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})


class _Dtype:
    """An array's, of unsigned bytes: there is no other."""


class _Array:
    """An array whose shape and bytes come after it."""

    shape: tuple[int, ...] = ()
    is_fortran = False
    content = b""

    def fill(self, state: Any) -> None:
        """Version, shape, dtype, whether in Fortran's order, bytes (as text where Python 2 wrote them)."""
        _, shape, dtype, is_fortran, content = state
        if not isinstance(dtype, _Dtype):
            raise ValueError("an array without a dtype")
        if not isinstance(content, bytes | str):
            raise ValueError("an array whose content is no bytes")
        self.shape, self.is_fortran = tuple(shape), bool(is_fortran)
        self.content = content.encode("latin1") if isinstance(content, str) else content

    def array(self) -> np.ndarray:
        """The array itself. ValueError if the bytes do not fill the shape."""
        return np.frombuffer(self.content, np.uint8).reshape(self.shape, order="F" if self.is_fortran else "C")


class _Machine:
    """What the instructions of a pickle work on: a stack, marks in it, and what is to be used again."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def do(self, code: str, arg: Any) -> None:
        """One instruction."""
        if code in _VALUES:
            self.stack.append(arg)
        elif code in _CONSTANTS:
            self.stack.append(_CONSTANTS[code])
        elif code in _PUTS or code == "MEMOIZE":
            self.memo[len(self.memo) if code == "MEMOIZE" else arg] = self.stack[-1]
        elif code in _GETS:
            self.stack.append(self.memo[arg])
        elif code in _TUPLES:
            self.stack.append(tuple(self.take(_TUPLES[code])))
        elif code == "MARK":
            self.marks.append(len(self.stack))
        elif code not in _MOVES:
            self.build(code, arg)

    def build(self, code: str, arg: Any) -> None:
        """An instruction that makes or fills something."""
        if code == "TUPLE":
            self.stack.append(tuple(self.take()))
        elif code in ("EMPTY_LIST", "LIST"):
            self.stack.append(self.take() if code == "LIST" else [])
        elif code in ("EMPTY_DICT", "DICT"):
            self.stack.append(_dictionary(self.take() if code == "DICT" else []))
        elif code in ("APPEND", "APPENDS"):
            items = self.take(1 if code == "APPEND" else None)
            self.top(list).extend(items)
        elif code in ("SETITEM", "SETITEMS"):
            items = self.take(2 if code == "SETITEM" else None)
            self.top(dict).update(_dictionary(items))
        elif code in ("GLOBAL", "STACK_GLOBAL"):
            self.stack.append(_named(*(arg.split(" ", 1) if code == "GLOBAL" else self.take(2))))
        elif code == "REDUCE":
            called, args = self.take(2)
            self.stack.append(_result(called, args))
        elif code == "BUILD":
            (state,) = self.take(1)
            filled = self.top(_Array, _Dtype)
            if isinstance(filled, _Array):  # a dtype's byte order and the like say nothing of bytes
                filled.fill(state)
        else:
            raise ValueError(f"its instruction {code} is one that no array needs")

    def take(self, count: int | None = None) -> list[Any]:
        """The last so many of the stack, all since the last mark where it is None."""
        begin = self.marks.pop() if count is None else len(self.stack) - count
        if not 0 <= begin <= len(self.stack):
            raise ValueError("it takes what it has not made")
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def top(self, *kinds: type) -> Any:
        """The last of the stack, of one of these kinds."""
        if not isinstance(self.stack[-1], kinds):
            raise ValueError("it fills what cannot be filled")
        return self.stack[-1]


def _dictionary(items: list[Any]) -> dict[str, Any]:
    """Of keys and values in turn. Keys are text alone: to hash what a file nests may take forever, or all the stack."""
    keys, values = items[::2], items[1::2]
    if not all(isinstance(key, str) for key in keys):
        raise ValueError("a key of a dictionary is no text")
    return dict(zip(keys, values, strict=True))


def _named(module: Any, name: Any) -> _Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("it names something by what is no text")
    if (module, name) not in _NAMES:
        raise ValueError(f"it calls {module}.{name}, which no array needs")
    return _NAMES[module, name]


def _result(called: Any, args: Any) -> Any:
    """What a function of the file gives."""
    if not isinstance(args, tuple):
        raise ValueError("it calls with what are no arguments")
    if called is _Name.RECONSTRUCT and args[:1] == (_Name.ARRAY,):
        return _Array()
    if called is _Name.DTYPE and args and isinstance(args[0], str):
        if args[0] not in _BYTES:
            raise ValueError(f"an array of {args[0][:20]}, where bytes belong")
        return _Dtype()
    if called is _Name.ENCODE and len(args) == 2 and all(isinstance(arg, str) for arg in args):
        if args[1] != "latin1":
            raise ValueError(f"text in {args[1][:20]}, where latin1 belongs")
        return args[0].encode("latin1")
    raise ValueError("it calls something in a way that no array needs")


def load(content: bytes) -> dict[str, Any]:
    """The dictionary that a pickle of Python 2 or 3 holds, its arrays uint8; nothing in it is run. Protocols 0 to 4.

    ValueError if it is damaged, no dictionary, or holds anything but whole numbers, text, lists, dicts and byte arrays.
    """
    machine = _Machine()
    try:
        for instruction, arg, _ in pickletools.genops(content):
            machine.do(instruction.name, arg)
        (loaded,) = machine.take(1)
        if not isinstance(loaded, dict):
            raise ValueError(f"it holds a {type(loaded).__name__}, where a dictionary belongs")
        return {key: value.array() if isinstance(value, _Array) else value for key, value in loaded.items()}
    except Exception as error:  # damaged bytes are instructions too: they may fail in any way
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise ValueError(reason) from error
