"""Freed memory stays with the process: what a training step frees costs the next one no page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from ddpcore.runtime import machine

PROGRAM = """
import resource, runpy, sys
path, mode = sys.argv[1:]
if mode == "keep":
    assert runpy.run_path(path)["keep_freed_memory"]()
def faults():
    for _ in range(8):
        bytearray(64 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(-faults() + faults())
"""


def faults(mode: str) -> int:
    """Page faults of eight zeroed blocks of 64 MiB, after eight others."""
    command = [sys.executable, "-c", PROGRAM, machine.__file__, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted on Linux alone")
def test_the_next_block_takes_the_memory_of_the_last() -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the C library is not glibc")
    assert faults("keep") < faults("give back") / 20
