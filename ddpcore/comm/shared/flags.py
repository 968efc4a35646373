"""Counters in shared memory: one process posts, the others wait.

``Flags`` is ``ddpcore._flags.Flags`` (futex waits that release the GIL). If that is not compiled, it is
:class:`PollingFlags`.
"""

from __future__ import annotations

import platform
import time
from typing import Any

LINE_BYTES = 64  # each flag has its own cache line
_SLEEP_SECONDS = 50e-6


class PollingFlags:
    """``ddpcore._flags.Flags`` in Python: one flag in each 64 bytes of a buffer, and waits that poll.

    A flag is a 32-bit counter that grows and may wrap around. It has reached a target that is less than 2^31 below.

    Args:
        buffer: writable bytes.

    Raises:
        ImportError: the processor is not x86. Other processors may reorder the stores that another process sees.
    """

    def __init__(self, buffer: Any) -> None:
        if platform.machine().lower() not in ("x86_64", "amd64", "i686", "i386"):
            raise ImportError(f"shared memory on {platform.machine()} needs ddpcore._flags: run 'pip install -e .'")
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


try:
    from ddpcore._flags import Flags
except ImportError:
    Flags = PollingFlags

__all__ = ["LINE_BYTES", "Flags", "PollingFlags"]
