"""Reading pickles of byte arrays without running what is in them.

`pickle.loads` calls any function that a file names. Here the four names that an array of bytes needs stand for harmless
classes of this file, and any other name is an error: what comes out is numbers, text, lists, dicts and byte arrays.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np


class _Dtype:
    """Stands for numpy.dtype, of unsigned bytes only."""

    def __init__(self, name: str, *flags: object) -> None:
        if name not in ("u1", "|u1", "uint8"):
            raise pickle.UnpicklingError(f"an array of {name}, where bytes belong")

    def __setstate__(self, state: object) -> None:
        """Byte order, names and alignment: they say nothing of single bytes."""


class _Array:
    """Stands for numpy.ndarray: keeps the shape, the order and the bytes."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, self.is_fortran, content = state
        if not isinstance(dtype, _Dtype):
            raise pickle.UnpicklingError("an array without a dtype")
        self.shape = tuple(int(size) for size in shape)
        self.content = content.encode("latin1") if isinstance(content, str) else bytes(content)

    def array(self) -> np.ndarray:
        """The array itself. ValueError if the bytes do not fill the shape."""
        return np.frombuffer(self.content, np.uint8).reshape(self.shape, order="F" if self.is_fortran else "C")


def _reconstruct(kind: type, shape: object, code: object) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    """codecs.encode, by which Python 3 writes bytes into old pickles, for latin1 alone."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"text in {encoding}, where latin1 belongs")
    return text.encode("latin1")


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,  # NumPy 2
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What a name in the file stands for."""
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it calls {module}.{name}, which no array needs")
        return _NAMES[module, name]


def load(content: bytes) -> dict[str, Any]:
    """The dictionary that a pickle of Python 2 or 3 holds, its arrays uint8; nothing in it is run.

    ValueError if it is damaged, no dictionary, or holds anything but numbers, text, lists, dicts and byte arrays.
    """
    try:
        loaded = _Unpickler(io.BytesIO(content), encoding="latin1").load()
        if not isinstance(loaded, dict):
            raise pickle.UnpicklingError(f"it holds a {type(loaded).__name__}, where a dictionary belongs")
        return {str(key): value.array() if isinstance(value, _Array) else value for key, value in loaded.items()}
    except Exception as error:  # damaged bytes are instructions too: they may fail in any way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(reason) from error
