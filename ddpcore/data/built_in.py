"""Data sets that need no files of the user: digits of the package, source code of Python, and random samples."""

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddpcore.data.base import Dataset, Split, generator
from ddpcore.data.transforms import Normalization
from ddpcore.options.typed import check_range
from ddpcore.storage.files import shown

NUM_TRAIN = 1400
NORMALIZATION = Normalization((0.3055,), (0.3758,))


def load_digits() -> Dataset:
    """1400 training and 397 test images uint8 ``[N, 1, 8, 8]``, of 10 classes. Pixels of 0 to 16 are scaled to 255."""
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        images = torch.from_numpy(stored["images"]).unsqueeze(1)
        labels = torch.from_numpy(stored["labels"]).long()
    pixels = images.float().mul_(255 / 16).round_().to(torch.uint8)
    train, test = (Split(pixels[part], labels[part]) for part in (slice(NUM_TRAIN), slice(NUM_TRAIN, None)))
    return Dataset("digits", train, test, 10, (1, 8, 8), normalization=NORMALIZATION)


NUM_BYTES = 256  # values of a byte
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


def load_python_text(context: int = 64) -> Dataset:
    """Windows of ``context`` bytes, int64 ``[context]``; the labels of a window are the next bytes, ``[context]``.

    The training split has the files of ``TRAIN_MODULES``, the test split the files of ``TEST_MODULES``. No file is in
    both. Windows of a file follow each other without a gap. The bytes after its last whole window are left out.

    Other versions of Python have other text: compare only runs whose data have the same :meth:`Dataset.digest`.
    ValueError: the context is below 1, a source file of the standard library is missing, or is shorter than a window.
    """
    check_range("python_text: context", context, least=1)
    splits = []
    for modules in (TRAIN_MODULES, TEST_MODULES):
        inputs, labels = zip(*(_windows(module, context) for module in modules), strict=True)
        splits.append(Split(torch.cat(inputs), torch.cat(labels)))
    train, test = splits
    return Dataset("python_text", train, test, NUM_BYTES, (context,))


def _windows(module: str, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels ``[N, context]`` of a file: byte i of all of them has byte i + 1 as its label."""
    path = Path(sysconfig.get_path("stdlib")) / f"{module}.py"
    try:
        text = torch.from_numpy(np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.int64))
    except OSError as error:
        why = f"({error.strerror}): this Python lacks a source file of its standard library"
        advice = "take another Python or another data set"
        raise ValueError(f"python_text: {shown(path)} cannot be read {why}, {advice}") from None
    num = (len(text) - 1) // context
    if num < 1:
        raise ValueError(f"python_text: context is {context}: {shown(path)} has {len(text)} bytes, take less")
    return text[: num * context].view(num, context), text[1 : num * context + 1].view(num, context)


NUM_SAMPLES = 1000


def load_synthetic(input_shape: tuple[int, ...] = (10,), num_classes: int = 2, seed: int = 0) -> Dataset:
    """Standard normal samples float32 ``[1000, *input_shape]`` with uniformly random labels; no test split.

    They depend on the seed only, not on torch's global generator. ValueError if the shape is empty or a size is below
    1, there are fewer than 2 classes, or the seed is negative.
    """
    if not input_shape or any(size < 1 for size in input_shape):
        raise ValueError(f"synthetic: input_shape is {list(input_shape)}, each size must be at least 1")
    check_range("synthetic: num_classes", num_classes, least=2)
    check_range("synthetic: seed", seed, least=0)
    random = generator(seed)
    inputs = torch.randn(NUM_SAMPLES, *input_shape, generator=random, dtype=torch.float32, device="cpu")
    labels = torch.randint(num_classes, (NUM_SAMPLES,), generator=random, device="cpu")
    return Dataset("synthetic", Split(inputs, labels), None, num_classes, tuple(input_shape))


def load_saddle(
    seed: int = 0, *, dimension: int = 10, num_samples: int = 1024, slope: float = 0.3, coupling: float = 0.1
) -> Dataset:
    """The data set of the model `saddle`: its mean loss over these samples has a strict saddle point.

    Samples float32 ``[2 (dimension - 1)]`` in random order. All have label 1, and there is no test split.

    A sample holds a vector p and then a vector q. Their elements are normal with standard deviation ``slope`` in p and
    ``coupling`` in q. The negative of each sample is also a sample, so p and q have mean zero. The samples depend on
    the arguments only, not on torch's global generator.

    ValueError: the dimension is below 2, the number of samples is odd or below 2, or another argument is negative.
    """
    check_range("saddle: dimension", dimension, least=2)
    if num_samples < 2 or num_samples % 2:
        raise ValueError(f"saddle: num_samples is {num_samples}: it must be even and at least 2")
    for name, value in (("slope", slope), ("coupling", coupling), ("seed", seed)):
        check_range(f"saddle: {name}", value, least=0)
    random = generator(seed)
    half = torch.randn(num_samples // 2, 2, dimension - 1, generator=random, dtype=torch.float32, device="cpu")
    half *= torch.tensor([[slope], [coupling]], dtype=torch.float32, device="cpu")
    samples = torch.cat([half, -half]).flatten(1)[torch.randperm(num_samples, generator=random, device="cpu")]
    labels = torch.ones(num_samples, dtype=torch.int64, device="cpu")
    return Dataset("saddle", Split(samples, labels), None, 2, tuple(samples.shape[1:]))
