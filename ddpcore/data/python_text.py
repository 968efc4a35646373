"""Text that is on every machine with Python: source files of the standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddpcore.data.base import Dataset, Split
from ddpcore.options.typed import check_range
from ddpcore.storage.limits import shown

NUM_CLASSES = 256  # values of a byte
TRAIN_MODULES = (
    "argparse", "ast", "base64", "bdb", "calendar", "cmd", "code", "codecs", "configparser", "contextlib", "copy",
    "dataclasses", "dis", "doctest", "enum", "fileinput", "fractions", "ftplib", "functools", "getopt", "gettext",
    "glob", "gzip", "hashlib", "hmac", "imaplib", "inspect", "ipaddress", "linecache", "lzma", "mimetypes", "netrc",
    "optparse", "os", "pdb", "pickle", "pickletools", "platform", "plistlib", "poplib", "posixpath", "pprint", "pstats",
    "pyclbr", "pydoc", "queue", "random", "runpy", "sched", "selectors", "shelve", "shutil", "smtplib", "socket",
    "socketserver", "ssl", "subprocess", "symtable", "tarfile", "textwrap", "threading", "tokenize", "trace",
    "traceback", "tracemalloc", "types", "typing", "warnings", "wave", "weakref",
)  # fmt: skip
TEST_MODULES = ("csv", "difflib", "heapq", "mailbox", "shlex", "statistics", "tempfile", "timeit", "uuid")
"""Modules that are one file in each CPython from 3.10 to 3.14."""


def load(context: int = 64) -> Dataset:
    """Windows of ``context`` bytes, int64 ``[context]``; the labels of a window are the next bytes, ``[context]``.

    The training split has the files of ``TRAIN_MODULES``, the test split the files of ``TEST_MODULES``. No file is in
    both. Windows of a file follow each other without a gap. The bytes after its last whole window are left out.

    Other versions of Python have other text. The record of a run has the digest of its data (:meth:`Dataset.digest`)
    and the version of Python. Compare only runs with the same digest.

    Raises:
        ValueError: the context is below 1, a source file of the standard library is missing, or a file is shorter than
            a window.
    """
    check_range("python_text: context", context, least=1)
    train, test = (_split(modules, context) for modules in (TRAIN_MODULES, TEST_MODULES))
    return Dataset("python_text", train, test, NUM_CLASSES, (context,))


def _split(modules: Sequence[str], context: int) -> Split:
    windows = [_windows(module, context) for module in modules]
    inputs, labels = (torch.cat(parts) for parts in zip(*windows, strict=True))
    return Split(inputs, labels)


def _windows(module: str, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels ``[N, context]`` of a file: byte i of all of them has byte i + 1 as its label."""
    path = Path(sysconfig.get_path("stdlib")) / f"{module}.py"
    try:
        text = torch.from_numpy(np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.int64))
    except OSError as error:
        raise ValueError(
            f"python_text: {shown(path)} cannot be read ({error.strerror}): this Python lacks a source file of its "
            "standard library, take another Python or another data set"
        ) from None
    num = (len(text) - 1) // context
    if num < 1:
        raise ValueError(f"python_text: context is {context}: {shown(path)} has {len(text)} bytes, take less")
    return text[: num * context].view(num, context), text[1 : num * context + 1].view(num, context)
