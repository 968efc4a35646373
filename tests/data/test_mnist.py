"""MNIST files made here, whole and damaged."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from ddpcore.data import Dataset, load_dataset, mnist

NUM_SAMPLES = {"train": 5, "t10k": 3}


def pixels(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).integers(0, 256, (NUM_SAMPLES[name], 28, 28), dtype=np.uint8)


def labels(name: str) -> np.ndarray:
    return (np.arange(NUM_SAMPLES[name], dtype=np.uint8) + 7) % 10


def images_file(count: int, height: int, width: int, content: bytes, magic: int = 2051) -> bytes:
    return struct.pack(">IIII", magic, count, height, width) + content


def labels_file(count: int, content: bytes, magic: int = 2049) -> bytes:
    return struct.pack(">II", magic, count) + content


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in NUM_SAMPLES.items():
        (raw / f"{name}-images-idx3-ubyte").write_bytes(images_file(count, 28, 28, pixels(name).tobytes()))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(labels_file(count, labels(name).tobytes()))
    return raw


def load(folder: Path) -> Dataset:
    return mnist.load(folder.parents[1], verify=False)


def check(data: Dataset) -> None:
    assert (data.name, data.num_classes, data.input_shape) == ("mnist", 10, (1, 28, 28))
    assert data.test is not None
    for name, split in (("train", data.train), ("t10k", data.test)):
        assert split.inputs.dtype == torch.uint8
        np.testing.assert_array_equal(split.inputs.numpy(), pixels(name)[:, None])
        np.testing.assert_array_equal(split.labels.numpy(), labels(name))


def test_plain_files(folder: Path) -> None:
    check(load(folder))
    check(mnist.load(str(folder.parents[1]), verify=False))


def test_gzipped_files(folder: Path) -> None:
    for path in list(folder.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    check(load(folder))


def test_the_plain_file_wins(folder: Path) -> None:
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"rubbish")
    check(load(folder))


def refused(folder: Path, message: str) -> str:
    with pytest.raises(ValueError, match=message) as caught:
        load(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_missing_folder_and_file(folder: Path) -> None:
    gone = folder / "t10k-labels-idx1-ubyte"
    gone.unlink()
    text = refused(folder, "no such file")
    assert str(gone) in text
    assert "--data-dir" in text
    with pytest.raises(ValueError, match="/nowhere/MNIST/raw/train-images-idx3-ubyte: no such file"):
        mnist.load("/nowhere")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train-images-idx3-ubyte", labels_file(5, bytes(5)), "mislabelled"),
        ("train-labels-idx1-ubyte", images_file(5, 28, 28, bytes(5 * 784)), "mislabelled"),
        ("train-images-idx3-ubyte", b"<html>", "mislabelled"),
        ("train-images-idx3-ubyte", images_file(5, 28, 28, bytes(5 * 784 - 1)), "truncated, 3935 bytes of 3936"),
        ("train-labels-idx1-ubyte", labels_file(5, bytes(4)), "truncated, 12 bytes of 13"),
        ("train-images-idx3-ubyte", images_file(2**32 - 1, 28, 28, bytes(784)), "truncated"),
        ("train-images-idx3-ubyte", b"", "truncated"),
        ("train-images-idx3-ubyte", b"\0\0\x08", "truncated"),
        ("train-images-idx3-ubyte", images_file(5, 28, 28, b"")[:15], "truncated"),
        ("train-images-idx3-ubyte", images_file(5, 28, 28, bytes(5 * 784 + 2)), "2 trailing bytes"),
        ("train-labels-idx1-ubyte", labels_file(5, bytes(6)), "1 trailing bytes"),
        ("train-labels-idx1-ubyte", labels_file(4, bytes(4)), "5 images, but train-labels-idx1-ubyte has 4 labels"),
        ("train-labels-idx1-ubyte", labels_file(5, bytes([0, 9, 10, 3, 4])), "label 10 is above 9"),
        ("train-images-idx3-ubyte", images_file(5, 32, 28, bytes(5 * 32 * 28)), "32x28"),
        ("train-images-idx3-ubyte", images_file(0, 28, 28, b""), "no samples"),
        ("t10k-labels-idx1-ubyte", labels_file(3, bytes([0, 200, 1])), "label 200"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, file: str, content: bytes, message: str) -> None:
    (folder / file).write_bytes(content)
    text = refused(folder, message)
    assert file in text


@pytest.mark.parametrize("damage", ["not gzip", "cut", "flipped", "bad block", "empty"])
def test_corrupt_gzip(folder: Path, damage: str) -> None:
    plain = folder / "train-labels-idx1-ubyte"
    packed = gzip.compress(plain.read_bytes())
    middle = len(packed) // 2
    spoiled = {
        "not gzip": b"rubbish that is long enough",
        "cut": packed[:middle],
        "flipped": packed[:middle] + bytes([packed[middle] ^ 255]) + packed[middle + 1 :],
        "bad block": packed[:10] + b"\x07" + packed[11:],  # the first byte after the header, a reserved block type
        "empty": b"",
    }[damage]
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(spoiled)
    plain.unlink()
    text = refused(folder, "truncated" if damage == "empty" else "corrupt gzip")
    assert "train-labels-idx1-ubyte.gz" in text


def test_a_folder_in_place_of_a_file(folder: Path) -> None:
    path = folder / "train-images-idx3-ubyte"
    path.unlink()
    path.mkdir()
    refused(folder, "train-images-idx3-ubyte: cannot be read")


def test_digits_are_cropped_and_never_mirrored(folder: Path) -> None:
    """A mirrored digit is another sign: every training image is one of the 81 crops of the padded original."""
    train = load_dataset("mnist", data_dir=folder.parents[1], augment=True, verify=False).train
    padded = torch.nn.functional.pad(train.inputs[:, 0], (4,) * 4)
    crops = padded.unfold(1, 28, 1).unfold(2, 28, 1).flatten(1, 2)
    places = set()
    for epoch in range(8):
        inputs, _ = train.batch(torch.arange(5), epoch)
        found = (inputs.mul(255).round().to(torch.uint8) == crops).flatten(2).all(2)
        assert found.any(1).all(), epoch
        places.update(found.int().argmax(1).tolist())
    assert len(places) > 10


@pytest.mark.parametrize("packed", [False, True])
def test_files_that_are_not_the_canonical_ones_are_a_warning_each(folder: Path, packed: bool) -> None:
    for path in list(folder.iterdir()) if packed else []:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    with pytest.warns(UserWarning, match="MD5") as caught:
        check(mnist.load(folder.parents[1]))
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 4
    for path in folder.iterdir():
        content = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
        sums = (hashlib.md5(content).hexdigest(), mnist.MD5[path.name.removesuffix(".gz")])
        assert any(text.startswith(f"{path}: ") and all(s in text for s in sums) for text in texts)
