"""A user's own frames of features, from a folder of NumPy or HDF5 files.

A header of 100 bytes can claim an array of any size, and an HDF5 file can refer to other files of this machine. So what
a file says of its arrays is checked before they are read.
"""

from __future__ import annotations

import hashlib
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from ddpcore.data.base import Dataset, Split
from ddpcore.options.extras import extra
from ddpcore.storage.limits import DATA_LIMIT, FEATURES_BYTES, MiB, check_bytes, open_file, plain, read_file, shown

ARRAYS = {"inputs": (np.dtype(np.float32), "[N, frames, features]"), "labels": (np.dtype(np.int64), "[N]")}
SUMS = "SHA256SUMS"
_SUM = re.compile("([0-9a-f]{64}) [ *](.+)")
_HDF5 = (".h5", ".hdf5")
_CHUNK_BYTES = 64 * MiB  # of an HDF5 array, unless the array is larger: a chunk is unpacked as a whole
_OWN_FILTERS = range(1, 7)  # of HDF5; for others it would load a library


def load(data_dir: str | Path, num_classes: int | None = None, *, max_bytes: int = FEATURES_BYTES) -> Dataset:
    """Read ``data_dir/train`` and, if it exists, ``data_dir/test`` into memory.

    The files of a folder are joined in the order of their names. A file is ``.npz`` or, with h5py, ``.h5`` or
    ``.hdf5``. It holds ``inputs`` float32 ``[N, frames, features]`` and ``labels`` int64 ``[N]``.
    By default ``num_classes`` is one more than the largest label, and at least 2. ``max_bytes`` is the most memory that
    the arrays of all files together may take. A file may not refer to other files.

    If there is a file ``data_dir/SHA256SUMS``, as ``sha256sum train/* test/* > SHA256SUMS`` writes it, all files must
    match it. HDF5 files have no checksum of their own, so without it a changed number is read as it is.

    Raises:
        ValueError: a file is missing or damaged; an array is missing or has another dtype or shape; an input is not
            finite; a label is negative or too large. One line that names the file or the folder.
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
        raise ValueError(
            f"{shown(path)}: cannot be read ({type(error).__name__}), write it again with sha256sum"
        ) from error
    if None in lines:
        raise ValueError(f"{shown(path)}: line {lines.index(None) + 1} is none of sha256sum, write it again")
    sums = {root / match[2]: match[1] for match in lines if match is not None}
    for missing in (one for one in sums if not one.exists()):
        raise ValueError(f"{shown(missing)}: {SUMS} lists it and it is missing, fetch it again")
    return sums


def _check_sum(path: Path, content: BinaryIO, sums: Mapping[Path, str]) -> None:
    if path not in sums:
        raise ValueError(f"{shown(path)}: {SUMS} does not list it, write that file again")
    found = hashlib.sha256()
    while part := content.read(MiB):
        found.update(part)
    if found.hexdigest() != sums[path]:
        raise ValueError(f"{shown(path)}: does not match its checksum in {SUMS}, fetch it again")


def _split(folder: Path, sums: Mapping[Path, str] | None, max_bytes: int, used: int = 0) -> Split:
    paths = sorted(path for path in folder.glob("*") if path.suffix in (".npz", *_HDF5))
    if not paths:
        advice = "set data_dir (--data-dir) to the folder that holds train"
        raise ValueError(f"{shown(folder)}: holds no .npz, .h5 or .hdf5 file, {advice}")
    parts = []
    for path in paths:
        parts.append(_checked(shown(path), _read(path, max_bytes, used, sums)))
        used += sum(array.nbytes for array in parts[-1])
    shape = parts[0][0].shape[1:]
    for path, (inputs, _) in zip(paths, parts, strict=True):
        if inputs.shape[1:] != shape:
            first = f"the samples of {shown(paths[0].name)} {list(shape)}"
            raise ValueError(f"{shown(path)}: samples are {list(inputs.shape[1:])}, {first}, make them equal")
    inputs, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Split(torch.from_numpy(inputs), torch.from_numpy(labels))


class _Stored(NamedTuple):
    """An array that a file says it has, and how to read it."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Memory of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def _read(path: Path, max_bytes: int, used: int, sums: Mapping[Path, str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of ARRAYS. What the file claims is checked before anything is allocated."""
    with ExitStack() as stack:
        try:
            content = stack.enter_context(open_file(path))
            if sums is not None:
                _check_sum(path, content, sums)
        except OSError as error:
            raise ValueError(f"{shown(path)}: cannot be read ({error.strerror}), make it a readable file") from error
        claimed = _in_hdf5(path, stack) if path.suffix in _HDF5 else _in_npz(path, content, stack)
        total = used + sum(_check_claim(shown(path), name, claimed[name]).nbytes for name in ARRAYS)
        check_bytes(path, total, max_bytes, DATA_LIMIT, "up to this file, the arrays take")
        with _damage(path):
            return {name: stored.read() for name, stored in claimed.items() if stored is not None}


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Whatever a library raises becomes one line: damaged bytes can cause any error."""
    try:
        yield
    except Exception as error:
        reason = plain((str(error).splitlines() or [""])[0]) or type(error).__name__
        raise ValueError(f"{shown(path)}: cannot be read ({reason}), write it again") from error


def _in_npz(path: Path, content: BinaryIO, stack: ExitStack) -> dict[str, _Stored | None]:
    with _damage(path):
        if not zipfile.is_zipfile(content):
            raise ValueError("no zip archive")
        archive = stack.enter_context(zipfile.ZipFile(content))
        return {name: _npz_array(archive, name) for name in ARRAYS}


def _npz_array(archive: zipfile.ZipFile, name: str) -> _Stored | None:
    """What the header of an array says. ``numpy.load`` would allocate that much before it reads."""
    member = next((info for info in archive.infolist() if info.filename == f"{name}.npy"), None)
    if member is None:
        return None
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack any size at once
        raise ValueError(f"{name} is compressed in a way that NumPy does not use")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{name} has the format {version[0]}.{version[1]}, use 1.0 or 2.0")
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
        num_bytes = member.file_size - file.tell()

    def read() -> np.ndarray:
        with archive.open(member) as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    stored = _Stored(dtype, shape, read)
    if stored.nbytes != num_bytes and not dtype.hasobject:
        raise ValueError(f"the header of {name} says {stored.nbytes:,} bytes, and there are {num_bytes:,}")
    return stored


def _in_hdf5(path: Path, stack: ExitStack) -> dict[str, _Stored | None]:
    with extra("train"):
        import h5py  # noqa: PLC0415  only HDF5 files need it
    with _damage(path):
        file = stack.enter_context(h5py.File(path, "r"))
        return {name: _hdf5_array(h5py, file, name) for name in ARRAYS}


def _hdf5_array(h5py: Any, file: Any, name: str) -> _Stored | None:
    """What the file says of an array. ValueError if it lies elsewhere, or unpacks to more than itself."""
    link = file.get(name, getlink=True)
    if link is None:
        return None
    if not isinstance(link, h5py.HardLink):
        raise ValueError(f"{name} is a link that can lead to another file, store the array itself")
    array = file[name]
    if not isinstance(array, h5py.Dataset) or array.shape is None:
        return None
    if array.external is not None or array.is_virtual:
        raise ValueError(f"{name} lies in other files, store the array itself")
    stored = _Stored(array.dtype, array.shape, lambda: np.asarray(array[()]))
    if array.chunks is None and array.id.get_storage_size() < stored.nbytes:
        raise ValueError(f"the header of {name} says {stored.nbytes:,} bytes, and there are fewer")
    chunk_bytes = 0 if array.chunks is None else math.prod(array.chunks) * array.dtype.itemsize
    if chunk_bytes > max(stored.nbytes, _CHUNK_BYTES):
        raise ValueError(f"{name} has chunks that are larger than the array")
    settings = array.id.get_create_plist()
    filters = {settings.get_filter(index)[0] for index in range(settings.get_nfilters())}
    if not filters <= {*_OWN_FILTERS, h5py.h5z.FILTER_LZF}:
        raise ValueError(f"{name} is compressed in a way that needs another library, use gzip")
    return stored


def _check_claim(path: str, name: str, claim: _Stored | None) -> _Stored:
    dtype, axes = ARRAYS[name]
    if claim is None:
        raise ValueError(f"{path}: holds no array '{name}', save inputs and labels")
    if claim.dtype != dtype or len(claim.shape) != axes.count(",") + 1:
        raise ValueError(f"{path}: {name} are {claim.dtype} {list(claim.shape)}, they must be {dtype} {axes}")
    return claim


def _checked(path: str, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of a file, after a check of their values."""
    inputs, labels = arrays["inputs"], arrays["labels"]
    if len(inputs) != len(labels) or inputs.size == 0:
        raise ValueError(f"{path}: {list(inputs.shape)} inputs and {len(labels)} labels, save as many, at least one")
    if not np.isfinite(inputs).all():
        raise ValueError(f"{path}: inputs hold numbers that are not finite, leave those samples out")
    if labels.min() < 0:
        raise ValueError(f"{path}: there is a label {labels.min()}, number the classes from 0")
    return inputs, labels
