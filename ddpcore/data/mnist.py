"""MNIST (LeCun et al. 1998) from its four canonical IDX files, plain or gzipped."""

import hashlib
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddpcore.data.base import Dataset, Split
from ddpcore.data.transforms import Augmentation, Normalization
from ddpcore.storage.files import MNIST_BYTES, read_packed, shown

NUM_CLASSES = 10
INPUT_SHAPE = (1, 28, 28)
NORMALIZATION = Normalization((0.1307,), (0.3081,))
FILES = tuple(f"{name}-ubyte" for part in ("train", "t10k") for name in (f"{part}-images-idx3", f"{part}-labels-idx1"))
MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}  # of the plain files

_IMAGES_MAGIC = 0x0803  # unsigned bytes, three dimensions
_LABELS_MAGIC = 0x0801  # unsigned bytes, one dimension


def load(data_dir: str | Path, verify: bool = True, *, max_bytes: int = MNIST_BYTES) -> Dataset:
    """Read images uint8 ``[N, 1, 28, 28]`` and labels of both splits from ``data_dir/MNIST/raw/*-ubyte`` (or ``.gz``).

    With ``verify``, a warning is given for each file whose content, unpacked, has another MD5 than the canonical
    file's. A file that has more than ``max_bytes``, unpacked, is refused. ValueError, with the path: a file is missing,
    damaged, or not a file of MNIST.
    """
    folder = Path(data_dir) / "MNIST" / "raw"
    train, test = (_split(folder, names, verify, max_bytes) for names in (FILES[:2], FILES[2:]))
    augmentation = Augmentation(flip=False)  # a mirrored digit is not a digit of its class
    return Dataset("mnist", train, test, NUM_CLASSES, INPUT_SHAPE, None, NORMALIZATION, augmentation)


def _split(folder: Path, names: Sequence[str], verify: bool, max_bytes: int) -> Split:
    advice = "set data_dir (--data-dir) to the folder that holds MNIST/raw"
    found = [read_packed(folder / name, advice, max_bytes) for name in names]
    (images_path, images_bytes), (labels_path, labels_bytes) = found
    images = _parse(images_path, images_bytes, _IMAGES_MAGIC, INPUT_SHAPE[1:])
    labels = _parse(labels_path, labels_bytes, _LABELS_MAGIC, ())
    if len(images) != len(labels):
        num = f"{len(images)} images, but {labels_path.name} has {len(labels)} labels"
        raise ValueError(f"{shown(images_path)}: {num}, fetch both again")
    if int(labels.max()) >= NUM_CLASSES:
        raise ValueError(f"{shown(labels_path)}: label {int(labels.max())} is above {NUM_CLASSES - 1}, fetch it again")
    for name, (path, content) in zip(names, found, strict=True) if verify else ():
        actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if actual != MD5[name]:
            text = f"MD5 {actual} is not {MD5[name]}, the MD5 of the canonical file: it is used nevertheless"
            warnings.warn(f"{shown(path)}: {text}", stacklevel=2)
    return Split(images.unsqueeze(1), labels.long())


def _parse(path: Path, content: bytes, magic: int, sample_shape: tuple[int, ...]) -> Tensor:
    """The samples of an IDX file, uint8 ``[N, *sample_shape]``, after a magic number and the dimensions.

    These are 4 bytes each, big-endian.
    """
    shown_path = shown(path)
    header_size = 4 * (2 + len(sample_shape))
    found = int.from_bytes(content[:4], "big")
    if len(content) >= 4 and found != magic:
        raise ValueError(f"{shown_path}: mislabelled, it begins with {found} instead of {magic}, fetch it again")
    if len(content) < header_size:
        raise ValueError(f"{shown_path}: truncated, {len(content)} bytes of a header of {header_size}, fetch it again")
    count, *shape = struct.unpack_from(f">{1 + len(sample_shape)}I", content, 4)
    if tuple(shape) != sample_shape:
        raise ValueError(f"{shown_path}: images of {'x'.join(map(str, shape))} pixels instead of 28x28, fetch it again")
    if count == 0:
        raise ValueError(f"{shown_path}: it holds no samples, fetch it again")
    expected = header_size + count * int(np.prod(sample_shape, dtype=np.int64))
    if len(content) < expected:
        raise ValueError(f"{shown_path}: truncated, {len(content)} bytes of {expected}, fetch it again")
    if len(content) > expected:
        raise ValueError(f"{shown_path}: {len(content) - expected} trailing bytes after {expected}, fetch it again")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header_size).reshape(count, *sample_shape).copy())
