"""Counters in memory that several processes map: one posts, the others wait.

``Flags`` is the one of ``ddpcore._flags`` (futex waits, the GIL free meanwhile), or where that cannot be loaded the one
below, which asks again and again.
"""

from __future__ import annotations

import platform
import time
from typing import Any

LINE_BYTES = 64  # a flag has a cache line of its own
_SLEEP_SECONDS = 50e-6


class PollingFlags:
    """What ``ddpcore._flags.Flags`` does, in Python; one flag in each 64 bytes of a buffer.

    Flags are 32-bit counters that only grow and may wrap round: a value is reached if it is less than 2^31 behind.

    Args:
        buffer: writable bytes.

    Raises:
        ImportError: this processor may show one process's stores to another in a different order. x86 does not.
    """

    def __init__(self, buffer: Any) -> None:
        if platform.machine().lower() not in ("x86_64", "amd64", "i686", "i386"):
            raise ImportError(f"shared memory on {platform.machine()} needs ddpcore._flags: run 'pip install -e .'")
        self._words = memoryview(buffer).cast("B").cast("I")

    def read(self, index: int) -> int:
        """The value of a flag."""
        return self._words[index * LINE_BYTES // 4]

    def post(self, index: int, value: int) -> None:
        """Set a flag. What this process wrote before is seen by whoever reads this value."""
        self._words[index * LINE_BYTES // 4] = value % 2**32

    def wait(self, index: int, target: int, seconds: float) -> bool:
        """Whether the flag reached the target within that time."""
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
