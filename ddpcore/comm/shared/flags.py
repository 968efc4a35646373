"""Counters in shared memory: one process posts, the others wait.

``Flags`` is :class:`CompiledFlags` (futex waits that release the GIL). Without the compiled library it is
:class:`PollingFlags`.
"""

from __future__ import annotations

import ctypes
import platform
import time
from typing import Any

from ddpcore.ops.library import LIBRARY_FILE, WHY_NOT_COMPILED

LINE_BYTES = 64  # each flag has its own cache line
_SLEEP_SECONDS = 50e-6


class CompiledFlags:
    """One flag in each 64 bytes of a buffer. The functions are in ``csrc/bindings/flags.cpp``.

    A flag is a 32-bit counter that grows and may wrap around. It has reached a target that is less than 2^31 below. The
    next 32 bits of its line count the processes that sleep until it grows.

    Args:
        buffer: writable bytes that start on a cache line.

    Raises:
        ValueError: the buffer does not start on a cache line.
        TypeError: the buffer is read-only, or no buffer.
    """

    def __init__(self, buffer: Any) -> None:
        num_bytes = memoryview(buffer).nbytes
        self._memory = (ctypes.c_char * num_bytes).from_buffer(buffer)  # keeps the buffer alive
        first = ctypes.addressof(self._memory)
        if first % LINE_BYTES:
            raise ValueError("flags need a buffer that starts on a cache line")
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


class PollingFlags:
    """:class:`CompiledFlags` in Python, with waits that poll.

    Args:
        buffer: writable bytes.

    Raises:
        ImportError: the processor is not x86. Other processors may reorder the stores that another process sees.
    """

    def __init__(self, buffer: Any) -> None:
        if platform.machine().lower() not in ("x86_64", "amd64", "i686", "i386"):
            text = f"shared memory on {platform.machine()} needs ddpcore's compiled library: run 'pip install -e .'"
            raise ImportError(text)
        self._words = memoryview(buffer).cast("B").cast("I")

    def read(self, index: int) -> int:
        """The value of a flag."""
        return self._words[index * LINE_BYTES // 4]

    def post(self, index: int, value: int) -> None:
        """Set a flag. A process that reads the new value also sees all earlier writes of this process."""
        self._words[index * LINE_BYTES // 4] = value % 2**32

    def wait(self, index: int, target: int, seconds: float) -> bool:
        """Return whether the flag reaches the target within that time."""
        deadline = time.monotonic() + seconds
        while (self.read(index) - target) % 2**32 >= 2**31:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_SLEEP_SECONDS)
        return True


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


Flags: Any = PollingFlags
if WHY_NOT_COMPILED is None:
    _quick = ctypes.PyDLL(str(LIBRARY_FILE))  # keeps the GIL: these calls take less time than to give it away
    _read = _function(_quick, "ddpcore_flag_read", ctypes.c_uint32, ctypes.c_void_p)
    _post = _function(_quick, "ddpcore_flag_post", None, ctypes.c_void_p, ctypes.c_uint32)
    _slow = ctypes.CDLL(str(LIBRARY_FILE))  # releases the GIL
    _wait = _function(_slow, "ddpcore_flag_wait", ctypes.c_bool, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_double)
    Flags = CompiledFlags

__all__ = ["LINE_BYTES", "CompiledFlags", "Flags", "PollingFlags"]
