"""A user's own frames of features, from a folder of NumPy files.

A header of 100 bytes can claim an array of any size. So what a file says of its arrays is checked before they are read.
"""

import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddpcore.data.base import Dataset, Split
from ddpcore.storage.files import DATA_LIMIT, FEATURES_BYTES, check_bytes, open_file, plain, read_file, sha256_of, shown

ARRAYS: dict[str, tuple[np.dtype[Any], str]] = {
    "inputs": (np.dtype(np.float32), "[N, frames, features]"),
    "labels": (np.dtype(np.int64), "[N]"),
}
SUMS = "SHA256SUMS"
_SUM = re.compile("([0-9a-f]{64}) [ *](.+)")


def load(data_dir: str | Path, num_classes: int | None = None, *, max_bytes: int = FEATURES_BYTES) -> Dataset:
    """Read ``data_dir/train`` and, if it exists, ``data_dir/test`` into memory.

    The ``.npz`` files of a folder are joined in the order of their names. A file holds ``inputs`` float32
    ``[N, frames, features]`` and ``labels`` int64 ``[N]``. By default ``num_classes`` is one more than the largest
    label, and at least 2. ``max_bytes`` is the most memory that the arrays of all files together may take.

    If there is a file ``data_dir/SHA256SUMS``, as ``sha256sum train/* test/* > SHA256SUMS`` writes it, all files match.

    ValueError, in one line that names the file or the folder: a file is missing or damaged; an array is missing or has
    another dtype or shape; an input is not finite; a label is negative or too large.
    """
    root = Path(data_dir)
    sums = _checksums(root)
    train = _split(root / "train", sums, max_bytes)
    used = train.inputs.nbytes + train.labels.nbytes
    test = _split(root / "test", sums, max_bytes, used) if (root / "test").exists() else None
    splits = [split for split in (train, test) if split is not None]
    shapes = [tuple(split.inputs.shape[1:]) for split in splits]
    if shapes[0] != shapes[-1]:
        both = f"train has samples of {list(shapes[0])}, test of {list(shapes[1])}"
        raise ValueError(f"{shown(root)}: {both}, make them equal")
    found = 1 + max(int(split.labels.max()) for split in splits)
    total = sum(len(split.labels) for split in splits)
    if num_classes is None and found > total:
        raise ValueError(f"{shown(root)}: there is a label {found - 1} for {total} samples, number classes from 0")
    if num_classes is not None and found > num_classes:
        raise ValueError(f"{shown(root)}: there is a label {found - 1} for {num_classes} classes, raise num_classes")
    return Dataset("features", train, test, max(2, found) if num_classes is None else num_classes, shapes[0])


def _checksums(root: Path) -> dict[Path, str] | None:
    """The SHA-256 of each file; None if there is no list of them."""
    path = root / SUMS
    if not path.exists():
        return None
    try:
        lines = [_SUM.fullmatch(line) for line in read_file(path).decode().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = type(error).__name__
        raise ValueError(f"{shown(path)}: cannot be read ({reason}), write it again with sha256sum") from error
    if None in lines:
        raise ValueError(f"{shown(path)}: line {lines.index(None) + 1} is none of sha256sum, write it again")
    sums = {root / match[2]: match[1] for match in lines if match is not None}
    for missing in (one for one in sums if not one.exists()):
        raise ValueError(f"{shown(missing)}: {SUMS} lists it and it is missing, fetch it again")
    return sums


def _split(folder: Path, sums: Mapping[Path, str] | None, max_bytes: int, used: int = 0) -> Split:
    paths = sorted(folder.glob("*.npz"))
    if others := [path for path in folder.glob("*") if path.suffix in (".h5", ".hdf5")]:
        raise ValueError(f"{shown(others[0])}: HDF5 is not read, save its arrays by numpy.savez and remove the file")
    if not paths:
        advice = "set data_dir (--data-dir) to the folder that holds train"
        raise ValueError(f"{shown(folder)}: holds no .npz file, {advice}")
    parts = []
    for path in paths:
        parts.append(_read(path, max_bytes, used, sums))
        used += sum(array.nbytes for array in parts[-1])
    shape = parts[0][0].shape[1:]
    for path, (inputs, _) in zip(paths, parts, strict=True):
        if inputs.shape[1:] != shape:
            first = f"the samples of {shown(paths[0].name)} {list(shape)}"
            raise ValueError(f"{shown(path)}: samples are {list(inputs.shape[1:])}, {first}, make them equal")
    inputs, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Split(torch.from_numpy(inputs), torch.from_numpy(labels))


def _read(path: Path, max_bytes: int, used: int, sums: Mapping[Path, str] | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of a file. What the file claims is checked before anything is allocated."""
    try:
        content = open_file(path)
    except OSError as error:
        raise ValueError(f"{shown(path)}: cannot be read ({error.strerror}), make it a readable file") from error
    with content:
        if sums is not None and path not in sums:
            raise ValueError(f"{shown(path)}: {SUMS} does not list it, write that file again")
        if sums is not None and sha256_of(content) != sums[path]:
            raise ValueError(f"{shown(path)}: does not match its checksum in {SUMS}, fetch it again")
        with _damage(path):
            if not zipfile.is_zipfile(content):
                raise ValueError("no zip archive")
            archive = zipfile.ZipFile(content)
            claims = {name: _claim(archive, name) for name in ARRAYS}
        for name, (dtype, axes) in ARRAYS.items():
            if (claim := claims[name]) is None:
                raise ValueError(f"{shown(path)}: holds no array '{name}', save inputs and labels")
            if claim[0] != dtype or len(claim[1]) != axes.count(",") + 1:
                found = f"{name} are {claim[0]} {list(claim[1])}"
                raise ValueError(f"{shown(path)}: {found}, they must be {dtype} {axes}")
            used += math.prod(claim[1]) * dtype.itemsize
        check_bytes(path, used, max_bytes, DATA_LIMIT, "up to this file, the arrays take")
        with _damage(path):
            files = (archive.open(f"{name}.npy") for name in ARRAYS)
            inputs, labels = (np.lib.format.read_array(file, allow_pickle=False) for file in files)
    if len(inputs) != len(labels) or inputs.size == 0:
        sizes = f"{list(inputs.shape)} inputs and {len(labels)} labels"
        raise ValueError(f"{shown(path)}: {sizes}, save as many, at least one")
    if not np.isfinite(inputs).all():
        raise ValueError(f"{shown(path)}: inputs hold numbers that are not finite, leave those samples out")
    if labels.min() < 0:
        raise ValueError(f"{shown(path)}: there is a label {labels.min()}, number the classes from 0")
    return inputs, labels


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Whatever a library raises becomes one line: damaged bytes can cause any error."""
    try:
        yield
    except Exception as error:
        reason = plain((str(error).splitlines() or [""])[0]) or type(error).__name__
        raise ValueError(f"{shown(path)}: cannot be read ({reason}), write it again") from error


def _claim(archive: zipfile.ZipFile, name: str) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """What the header of an array says. ``numpy.load`` would allocate that much before it reads."""
    if f"{name}.npy" not in archive.namelist():
        return None
    member = archive.getinfo(f"{name}.npy")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack any size at once
        raise ValueError(f"{name} is compressed in a way that NumPy does not use")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{name} has the format {version[0]}.{version[1]}, use 1.0 or 2.0")
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
        num_bytes, claimed = member.file_size - file.tell(), math.prod(shape) * dtype.itemsize
    if claimed != num_bytes and not dtype.hasobject:
        raise ValueError(f"the header of {name} says {claimed:,} bytes, and there are {num_bytes:,}")
    return dtype, shape
