"""Counters in shared memory: one process posts, the others wait (futexes that release the GIL)."""

from __future__ import annotations

import ctypes
from typing import Any

from ddpcore.ops.library import LIBRARY_FILE, WHY_NOT_COMPILED

LINE_BYTES = 64  # each flag has its own cache line


class Flags:
    """One flag in each 64 bytes of a buffer. The functions are in ``csrc/bindings/flags.cpp``.

    A flag is a 32-bit counter that grows and may wrap around. It has reached a target that is less than 2^31 below. The
    next 32 bits of its line count the processes that sleep until it grows. The buffer starts on a cache line.
    ImportError: there is no compiled library. TypeError: the buffer is read-only, or no buffer.
    """

    def __init__(self, buffer: Any) -> None:
        if WHY_NOT_COMPILED is not None:
            raise ImportError(f"shared memory needs compiled counters: {WHY_NOT_COMPILED}")
        num_bytes = memoryview(buffer).nbytes
        self._memory = (ctypes.c_char * num_bytes).from_buffer(buffer)  # keeps the buffer alive
        first = ctypes.addressof(self._memory)
        self._addresses = range(first, first + num_bytes - LINE_BYTES + 1, LINE_BYTES)

    def read(self, index: int) -> int:
        """The value of a flag."""
        return int(_read(self._addresses[index]))

    def post(self, index: int, value: int) -> None:
        """Set a flag and wake those who wait for it. A process that reads the new value sees all earlier writes."""
        _post(self._addresses[index], value % 2**32)

    def wait(self, index: int, target: int, seconds: float) -> bool:
        """Return whether the flag reaches the target within that time. The GIL is free meanwhile."""
        flag = self._addresses[index]
        return (_read(flag) - target) % 2**32 < 2**31 or bool(_wait(flag, target % 2**32, seconds))


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


if WHY_NOT_COMPILED is None:
    _quick = ctypes.PyDLL(str(LIBRARY_FILE))  # keeps the GIL: these calls take less time than to give it away
    _read = _function(_quick, "ddpcore_flag_read", ctypes.c_uint32, ctypes.c_void_p)
    _post = _function(_quick, "ddpcore_flag_post", None, ctypes.c_void_p, ctypes.c_uint32)
    _slow = ctypes.CDLL(str(LIBRARY_FILE))  # releases the GIL
    _wait = _function(_slow, "ddpcore_flag_wait", ctypes.c_bool, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_double)
