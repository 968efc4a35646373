"""MNIST (LeCun et al. 1998) from its four canonical IDX files, plain or gzipped."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddpcore.data.base import Dataset, Split

NUM_CLASSES = 10
INPUT_SHAPE = (1, 28, 28)

_IMAGES_MAGIC = 0x0803  # unsigned bytes, three dimensions
_LABELS_MAGIC = 0x0801  # unsigned bytes, one dimension


def load(data_dir: str | Path) -> Dataset:
    """Training and test split, images uint8 [N, 1, 28, 28], from data_dir/MNIST/raw/*-ubyte or *-ubyte.gz.

    A file that is missing, damaged or the wrong one is a ValueError that names it and says what is wrong.
    """
    folder = Path(data_dir) / "MNIST" / "raw"
    return Dataset("mnist", _split(folder, "train"), _split(folder, "t10k"), NUM_CLASSES, INPUT_SHAPE)


def _split(folder: Path, name: str) -> Split:
    images_path, images_bytes = _read(folder / f"{name}-images-idx3-ubyte")
    labels_path, labels_bytes = _read(folder / f"{name}-labels-idx1-ubyte")
    images = _parse(images_path, images_bytes, _IMAGES_MAGIC, INPUT_SHAPE[1:])
    labels = _parse(labels_path, labels_bytes, _LABELS_MAGIC, ())
    if len(images) != len(labels):
        raise ValueError(
            f"{images_path}: {len(images)} images, but {labels_path.name} has {len(labels)} labels, fetch both again"
        )
    if int(labels.max()) >= NUM_CLASSES:
        raise ValueError(f"{labels_path}: label {int(labels.max())} is above {NUM_CLASSES - 1}, fetch it again")
    return Split(images.unsqueeze(1), labels.long())


def _read(path: Path) -> tuple[Path, bytes]:
    """The file's content, unpacked, and the path it came from; the plain file wins over the gzipped one."""
    packed = path.with_name(path.name + ".gz")
    try:
        if path.exists():
            return path, path.read_bytes()
        if packed.exists():
            return packed, gzip.decompress(packed.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{packed}: corrupt gzip ({error}), fetch it again") from error
    except OSError as error:
        raise ValueError(
            f"{error.filename or path}: cannot be read ({error.strerror}), make it a readable file"
        ) from error
    raise ValueError(f"{path}: no such file, nor its .gz, pass as --data-dir the folder that holds MNIST/raw")


def _parse(path: Path, content: bytes, magic: int, sample_shape: tuple[int, ...]) -> Tensor:
    """An IDX file as uint8 [N, *sample_shape]: a magic and the dimensions, 4 bytes big-endian each, then samples."""
    header_size = 4 * (2 + len(sample_shape))
    found = int.from_bytes(content[:4], "big")
    if len(content) >= 4 and found != magic:
        raise ValueError(f"{path}: mislabelled, it begins with {found} where this file has {magic}, fetch it again")
    if len(content) < header_size:
        raise ValueError(f"{path}: truncated, {len(content)} bytes of a header of {header_size}, fetch it again")
    count, *shape = struct.unpack_from(f">{1 + len(sample_shape)}I", content, 4)
    if tuple(shape) != sample_shape:
        raise ValueError(f"{path}: images of {'x'.join(map(str, shape))} pixels where MNIST has 28x28, fetch it again")
    if count == 0:
        raise ValueError(f"{path}: it holds no samples, fetch it again")
    expected = header_size + count * int(np.prod(sample_shape, dtype=np.int64))
    if len(content) < expected:
        raise ValueError(f"{path}: truncated, {len(content)} bytes of {expected}, fetch it again")
    if len(content) > expected:
        raise ValueError(f"{path}: {len(content) - expected} trailing bytes after {expected}, fetch it again")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header_size).reshape(count, *sample_shape).copy())
