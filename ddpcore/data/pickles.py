"""A reader of CIFAR's pickles that never runs anything that a file names.

A restricted ``pickle.Unpickler``, whose ``find_class`` refuses all other names, stops hostile calls. But small files
can still crash it: a dictionary key of a million nested tuples overflows the C stack when it is hashed (a segmentation
fault), and one ``LONG_BINPUT`` of 5 bytes allocates up to 64 GiB for its index. So this reader itself executes the few
instructions that such files need, on Python lists and on dictionaries with text keys. It counts the memory that they
take: a pickle of 1 MB can make many arrays from one text, or name one empty list a million times.
"""

from __future__ import annotations

import pickletools
from enum import Enum
from typing import Any

import numpy as np

from ddpcore.storage.limits import CIFAR_BYTES, DATA_LIMIT, plain


class _Name(Enum):
    """A name that a file may use."""

    ARRAY = "numpy.ndarray"
    DTYPE = "numpy.dtype"
    RECONSTRUCT = "numpy.core.multiarray._reconstruct"  # makes an empty array, which BUILD fills
    RECONSTRUCT_2 = "numpy._core.multiarray._reconstruct"  # the same of NumPy 2
    ENCODE = "_codecs.encode"  # how Python 3 writes bytes with protocols 0 to 2


_NAMES = {name.value: name for name in _Name}
_UINT8 = np.dtype(np.uint8)
_INSTRUCTION_BYTES = 256  # the most that one instruction takes besides the bytes of arrays: an entry of the memo
_REASON_LENGTH = 200  # characters of a message: an error may quote a text of the file, of any length
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE"}
    | {"BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"}
)
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None}  # items; None: to the mark


class _Array:
    """A uint8 array: one instruction makes it, a later one fills it."""

    value: np.ndarray | None = None

    def fill(self, state: Any) -> int:
        """Fill it from (version, shape, dtype, whether in Fortran order, content); Python 2 wrote content as text.

        Returns the number of bytes that this allocates.
        """
        _, shape, dtype, is_fortran, content = state
        if dtype is not _UINT8:
            raise ValueError("an array without a dtype")
        if not isinstance(content, bytes | str):
            raise ValueError("an array whose content is no bytes")
        pixels = np.frombuffer(content.encode("latin1") if isinstance(content, str) else content, np.uint8)
        self.value = pixels.reshape(tuple(shape), order="F" if is_fortran else "C")
        return pixels.nbytes if isinstance(content, str) else 0


class _Machine:
    """What the instructions of a pickle work on: a stack, marks in it, and values by number for later use."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def execute(self, code: str, arg: Any) -> None:
        """Execute one instruction: its name and its argument as :mod:`pickletools` gives them."""
        self.count(_INSTRUCTION_BYTES)
        push = self.stack.append
        if code in _VALUES:
            push(arg)
        elif code in _CONSTANTS:
            push(_CONSTANTS[code])
        elif code in _TUPLES:
            push(tuple(self.take(_TUPLES[code])))
        elif code == "MARK":
            self.marks.append(len(self.stack))
        elif code in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if code == "MEMOIZE" else arg] = self.stack[-1]
        elif code in ("GET", "BINGET", "LONG_BINGET"):
            push(self.memo[arg])
        elif code in ("EMPTY_LIST", "LIST"):
            push(self.take() if code == "LIST" else [])
        elif code in ("EMPTY_DICT", "DICT"):
            push(_dictionary(self.take() if code == "DICT" else []))
        elif code in ("APPEND", "APPENDS"):
            items = self.take(1 if code == "APPEND" else None)
            self.top(list).extend(items)
        elif code in ("SETITEM", "SETITEMS"):
            items = self.take(2 if code == "SETITEM" else None)
            self.top(dict).update(_dictionary(items))
        elif code in ("GLOBAL", "STACK_GLOBAL"):
            push(_named(*(arg.split(" ", 1) if code == "GLOBAL" else self.take(2))))
        elif code == "REDUCE":
            push(_result(*self.take(2)))
            self.count(len(self.stack[-1]) if isinstance(self.stack[-1], bytes) else 0)
        elif code == "BUILD":
            (state,) = self.take(1)
            filled = self.top(_Array, np.dtype)
            if isinstance(filled, _Array):  # the state of a dtype, its byte order, does not matter to bytes
                self.count(filled.fill(state))
        elif code not in ("PROTO", "FRAME", "STOP"):  # these change nothing
            raise ValueError(f"its instruction {code} is one that no array needs")

    def count(self, num_bytes: int) -> None:
        """Count memory that an instruction takes."""
        self.num_bytes += num_bytes
        if self.num_bytes > self.max_bytes:
            raise ValueError(f"it takes more memory than {self.max_bytes:,} bytes, the limit {DATA_LIMIT}")

    def take(self, count: int | None = None) -> list[Any]:
        """Remove and return the last values of the stack: ``count``, or all since the last mark if it is None."""
        begin = self.marks.pop() if count is None else len(self.stack) - count
        if not 0 <= begin <= len(self.stack):
            raise ValueError("it takes more values than there are")
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def top(self, *kinds: type) -> Any:
        """The last value of the stack, which must be of one of these types."""
        if not isinstance(self.stack[-1], kinds):
            raise ValueError("it fills what cannot be filled")
        return self.stack[-1]


def _dictionary(items: list[Any]) -> dict[str, Any]:
    """The dictionary of alternating keys and values. Keys are text only: nothing nested is hashed."""
    keys, values = items[::2], items[1::2]
    if not all(isinstance(key, str) for key in keys):
        raise ValueError("a key of a dictionary is no text")
    return dict(zip(keys, values, strict=True))


def _named(module: Any, name: Any) -> _Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("it uses a name that is no text")
    if f"{module}.{name}" not in _NAMES:
        raise ValueError(f"it calls {module}.{name}, which no array needs")
    return _NAMES[f"{module}.{name}"]


def _result(called: Any, args: Any) -> Any:
    """What an allowed function returns; its work is done here, and the function itself is never called."""
    if not isinstance(args, tuple):
        raise ValueError("it calls without a tuple of arguments")
    if called in (_Name.RECONSTRUCT, _Name.RECONSTRUCT_2) and args[:1] == (_Name.ARRAY,):
        return _Array()
    if called is _Name.DTYPE and args and isinstance(args[0], str):
        if args[0] not in ("u1", "|u1", "uint8"):
            raise ValueError(f"an array of {args[0][:20]}: only unsigned bytes are read")
        return _UINT8
    if called is _Name.ENCODE and len(args) == 2 and all(isinstance(arg, str) for arg in args):
        if args[1] != "latin1":
            raise ValueError(f"bytes as text in {args[1][:20]}: only latin1 is read")
        return args[0].encode("latin1")
    raise ValueError("it calls something in a way that no array needs")


def load(content: bytes, max_bytes: int = CIFAR_BYTES) -> dict[str, Any]:
    """Read the dictionary in a pickle that Python 2 or 3 wrote with protocol 0 to 4; its arrays are uint8.

    It may take ``max_bytes`` of memory, besides the content itself.

    Raises:
        ValueError: it is damaged, too large, no dictionary, or holds anything but whole numbers, text, bytes, lists,
            tuples, dictionaries and uint8 arrays; one line.
    """
    machine = _Machine(max_bytes)
    try:
        for instruction, arg, _ in pickletools.genops(content):
            machine.execute(instruction.name, arg)
        (loaded,) = machine.take(1)
        if not isinstance(loaded, dict):
            raise ValueError(f"it holds a {type(loaded).__name__} instead of a dictionary")
        return {key: item.value if isinstance(item, _Array) else item for key, item in loaded.items()}
    except Exception as error:  # damaged bytes are instructions too: any error can occur
        reason = plain((str(error).splitlines() or [""])[0][:_REASON_LENGTH]) or type(error).__name__
        raise ValueError(reason) from error
