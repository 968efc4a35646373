"""Bombs, special files and files that refer to others are refused in 20 s and 500 MB, by limits that can be raised."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpcore.data import load_dataset, mnist
from ddpcore.experiments.study import load_study
from ddpcore.storage.files import STUDY_BYTES
from helpers.bounded import refused


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def mnist_of(root: Path) -> Path:
    """A folder of MNIST with one sample in each file. Returns its first file."""
    for name in mnist.FILES:
        is_image = "images" in name
        header = struct.pack(">IIII", 2051, 1, 28, 28) + bytes(784) if is_image else struct.pack(">II", 2049, 1) + b"\1"
        written(root / "MNIST" / "raw" / name, header)
    load_dataset("mnist", data_dir=root, verify=False)
    return root / "MNIST" / "raw" / mnist.FILES[0]


def test_a_gzip_bomb(tmp_path: Path) -> None:
    path = mnist_of(tmp_path)
    path.unlink()
    packed = written(path.with_name(path.name + ".gz"), gzip.compress(bytes(2**24)) * 64)  # a gigabyte
    assert packed.stat().st_size < 2**21
    message = refused(lambda: load_dataset("mnist", data_dir=tmp_path))
    assert f"{packed}: it unpacks to at least 68,157,440 bytes, more than 67,108,864: raise data.max_bytes" in message
    packed.write_bytes(gzip.compress(bytes(2**24)) * 5)
    raised = refused(lambda: load_dataset("mnist", data_dir=tmp_path, max_bytes=2**27))
    assert "mislabelled" in raised, "the limit is higher, so the content is what is wrong"


def special(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 6 << 30)  # sparse


@pytest.mark.parametrize("kind", ["fifo", "device", "6 GB"])
@pytest.mark.parametrize("reader", ["mnist", "npz", "study"])
def test_special_and_huge_files(tmp_path: Path, kind: str, reader: str) -> None:
    path, call = tmp_path / "train" / f"a.{reader}", lambda: load_dataset("features", data_dir=tmp_path)
    if reader == "mnist":
        path, call = mnist_of(tmp_path), lambda: load_dataset("mnist", data_dir=tmp_path)
    elif reader == "study":
        path, call = tmp_path / "a.toml", lambda: load_study(path)
    path.parent.mkdir(exist_ok=True)
    special(path, kind)
    message = refused(call)
    assert str(path) in message
    assert "name a file" in message or kind == "6 GB"


def npz_claims(content: bytes, size: int | None = None) -> bytes:
    """An archive whose array claims 6 GB."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1500000000, 1, 1), }".ljust(117) + b"\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("inputs.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content)
        labels = io.BytesIO()
        np.save(labels, np.zeros(1, np.int64))
        archive.writestr("labels.npy", labels.getvalue())
        if size is not None:  # the archive's list of contents lies too
            archive.infolist()[0].file_size = size
    return packed.getvalue()


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (None, "says 6,000,000,000 bytes, and there are 16"),
        (
            6_000_000_128,
            "the arrays take 6,000,000,008 bytes, more than 4,294,967,296: raise data.max_bytes",
        ),
    ],
)
def test_an_npz_header_of_6_gb(tmp_path: Path, size: int | None, words: str) -> None:
    path = written(tmp_path / "train" / "a.npz", npz_claims(bytes(16), size))
    message = refused(lambda: load_dataset("features", data_dir=tmp_path))
    assert str(path) in message and words in message


def test_the_files_of_a_folder_share_one_limit(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    arrays: dict[str, Any] = {"inputs": np.zeros((100, 10, 10), np.float32), "labels": np.zeros(100, np.int64)}
    for name in "ab":
        np.savez_compressed(tmp_path / "train" / f"{name}.npz", **arrays)
    message = refused(lambda: load_dataset("features", data_dir=tmp_path, max_bytes=50_000))
    assert "b.npz: up to this file, the arrays take 81,600 bytes, more than 50,000: raise data.max_bytes" in message
    assert len(load_dataset("features", data_dir=tmp_path, max_bytes=81_600).train) == 200


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a." * 100_000 + b"b = 1", "a line has more than 100 dots"),
        (b"[" + b"a." * 100_000 + b"b]", "a line has more than 100 dots"),
        (b"#" * (STUDY_BYTES + 1), "it has 262,145 bytes, more than 262,144: raise max_bytes of load_study"),
        (b"x = " + b"[" * 100_000, "nested too deeply"),
        (b"x = " + b"9" * 100_000, "x"),
    ],
)
def test_toml_that_takes_quadratic_time(tmp_path: Path, content: bytes, words: str) -> None:
    path = written(tmp_path / "a.toml", content)
    message = refused(lambda: load_study(path))
    assert str(path) in message and words in message
