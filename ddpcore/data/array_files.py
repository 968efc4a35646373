"""Arrays of NumPy and HDF5 files from strangers: what a file claims can be checked before its arrays are read.

A header of 100 bytes can claim an array of any size, and an HDF5 file can refer to other files of this machine.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from typing_extensions import override

from ddpcore.options.extras import extra
from ddpcore.storage.limits import MiB, open_file, plain, shown

NUMPY = (".npz",)
HDF5 = (".h5", ".hdf5")
_CHUNK_BYTES = 64 * MiB  # of an HDF5 array, unless the array is larger: a chunk is unpacked as a whole
_OWN_FILTERS = range(1, 7)  # of HDF5; for others it would load a library


class Claim(NamedTuple):
    """What a file says of one of its arrays, and where the library finds it."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    source: Any

    @property
    def nbytes(self) -> int:
        """Memory of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class ArrayFile:
    """An open file; :func:`opened` makes it."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._file = path, file

    def claim(self, name: str) -> Claim | None:
        """What the file says of the array of this name; None if it has none. Reads only headers.

        Raises:
            ValueError: the file is damaged, the array lies in another file, or its size is not that of what is stored.
        """
        with _damage(self._path):
            return self._claim(name)

    def read(self, claim: Claim) -> np.ndarray:
        """The array. ValueError if the file is damaged."""
        with _damage(self._path):
            return self._read(claim)

    def _claim(self, name: str) -> Claim | None:
        raise NotImplementedError

    def _read(self, claim: Claim) -> np.ndarray:
        raise NotImplementedError


@contextmanager
def opened(path: Path) -> Iterator[ArrayFile]:
    """The file, until the ``with`` block ends.

    Raises:
        MissingPackage: it is HDF5, and h5py is not installed.
        ValueError: it is no regular file, or damaged.
    """
    with ExitStack() as stack:
        try:
            content = stack.enter_context(open_file(path))
        except OSError as error:
            raise ValueError(f"{shown(path)}: cannot be read ({error.strerror}), make it a readable file") from error
        yield stack.enter_context(_open_hdf5(path) if path.suffix in HDF5 else _open_npz(path, content))


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Whatever a library raises becomes one line: damaged bytes can cause any error."""
    try:
        yield
    except Exception as error:
        reason = plain((str(error).splitlines() or [""])[0]) or type(error).__name__
        raise ValueError(f"{shown(path)}: cannot be read ({reason}), write it again") from error


@contextmanager
def _open_npz(path: Path, content: BinaryIO) -> Iterator[ArrayFile]:
    with _damage(path):
        if not zipfile.is_zipfile(content):
            raise ValueError("no zip archive")
        archive = zipfile.ZipFile(content)
    with archive:
        yield _Npz(path, archive)


@contextmanager
def _open_hdf5(path: Path) -> Iterator[ArrayFile]:
    with extra("train"):
        import h5py  # noqa: PLC0415  only HDF5 files need it
    with _damage(path):
        file = h5py.File(path, "r")
    with file:
        yield _Hdf5(path, file)


class _Npz(ArrayFile):
    @override
    def _claim(self, name: str) -> Claim | None:
        member = next((info for info in self._file.infolist() if info.filename == f"{name}.npy"), None)
        if member is None:
            return None
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name} is compressed in a way that NumPy does not use")
        with self._file.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"{name} has the format {version[0]}.{version[1]}, use 1.0 or 2.0")
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = header(file)
            stored = member.file_size - file.tell()
        claim = Claim(dtype, shape, member)
        if claim.nbytes != stored and not dtype.hasobject:
            raise ValueError(f"the header of {name} says {claim.nbytes:,} bytes, and there are {stored:,}")
        return claim

    @override
    def _read(self, claim: Claim) -> np.ndarray:
        with self._file.open(claim.source) as file:
            return np.lib.format.read_array(file, allow_pickle=False)


class _Hdf5(ArrayFile):
    @override
    def _claim(self, name: str) -> Claim | None:
        import h5py  # noqa: PLC0415  :func:`_open_hdf5` has checked that it is there

        link = self._file.get(name, getlink=True)
        if link is None:
            return None
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"{name} is a link that can lead to another file, store the array itself")
        array = self._file[name]
        if not isinstance(array, h5py.Dataset) or array.shape is None:
            return None
        if array.external is not None or array.is_virtual:
            raise ValueError(f"{name} lies in other files, store the array itself")
        claim = Claim(array.dtype, array.shape, array)
        if array.chunks is None and array.id.get_storage_size() < claim.nbytes:
            raise ValueError(f"the header of {name} says {claim.nbytes:,} bytes, and there are fewer")
        chunk_bytes = 0 if array.chunks is None else math.prod(array.chunks) * claim.dtype.itemsize
        if chunk_bytes > max(claim.nbytes, _CHUNK_BYTES):
            raise ValueError(f"{name} has chunks that are larger than the array")
        settings = array.id.get_create_plist()
        filters = {settings.get_filter(index)[0] for index in range(settings.get_nfilters())}
        if not filters <= {*_OWN_FILTERS, h5py.h5z.FILTER_LZF}:
            raise ValueError(f"{name} is compressed in a way that needs another library, use gzip")
        return claim

    @override
    def _read(self, claim: Claim) -> np.ndarray:
        return np.asarray(claim.source[()])
