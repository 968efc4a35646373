"""CIFAR files made here, pickled and binary, whole and damaged."""

from __future__ import annotations

import gzip
import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpcore.data import Dataset, cifar
from ddpcore.data.cifar import CIFAR10, CIFAR100, Variant

VARIANTS = [CIFAR10, CIFAR100]
LAYOUTS = ["python", "binary"]
IMAGES_PER_FILE = 4


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (IMAGES_PER_FILE, 3072), dtype=np.uint8)


def labels(variant: Variant, number: int) -> list[int]:
    return [(7 * number + 31 * i) % variant.num_classes for i in range(IMAGES_PER_FILE)]


def file_names(variant: Variant) -> list[str]:
    return [*variant.train, variant.test]


def write(variant: Variant, root: Path, layout: str) -> Path:
    """All files of a layout; file i holds pixels(i) and labels(i)."""
    folder = root / (variant.python_folder if layout == "python" else variant.binary_folder)
    folder.mkdir()
    for number, name in enumerate(file_names(variant)):
        own = labels(variant, number)
        if layout == "python":
            batch: dict[str, Any] = {"data": pixels(number), variant.label_key: own, "batch_label": "x"}
            if variant is CIFAR100:
                batch["coarse_labels"] = [19] * IMAGES_PER_FILE
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        else:
            coarse = [[19]] * IMAGES_PER_FILE if variant is CIFAR100 else [[]] * IMAGES_PER_FILE
            rows = [bytes([*c, label]) + p.tobytes() for c, label, p in zip(coarse, own, pixels(number), strict=True)]
            (folder / f"{name}.bin").write_bytes(b"".join(rows))
    return folder


def check(variant: Variant, data: Dataset) -> None:
    assert (data.name, data.num_classes, data.input_shape) == (variant.name, variant.num_classes, (3, 32, 32))
    numbers = range(len(variant.train))
    assert data.test is not None
    for split, files in ((data.train, numbers), (data.test, [len(variant.train)])):
        assert split.inputs.dtype == torch.uint8 and split.inputs.is_contiguous()
        expected = np.concatenate([pixels(number) for number in files]).reshape(-1, 3, 32, 32)
        np.testing.assert_array_equal(split.inputs.numpy(), expected)
        assert split.labels.tolist() == [label for number in files for label in labels(variant, number)]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_of_both_sets(tmp_path: Path, variant: Variant, layout: str) -> None:
    write(variant, tmp_path, layout)
    check(variant, cifar.load(variant, tmp_path, verify=False))
    check(variant, cifar.load(variant, str(tmp_path), verify=False))


def test_the_pickles_win(tmp_path: Path) -> None:
    write(CIFAR10, tmp_path, "python")
    for path in write(CIFAR10, tmp_path, "binary").iterdir():
        path.write_bytes(b"rubbish")
    check(CIFAR10, cifar.load(CIFAR10, tmp_path, verify=False))


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_that_is_whole_is_taken(tmp_path: Path, layout: str, kept: int) -> None:
    """The folder of the other one may be empty, or lack files."""
    for other in LAYOUTS:
        for path in sorted(write(CIFAR10, tmp_path, other).iterdir())[kept:]:
            if other != layout:
                path.unlink()
    check(CIFAR10, cifar.load(CIFAR10, tmp_path, verify=False))


def test_packed_files_make_a_layout_whole(tmp_path: Path) -> None:
    for path in write(CIFAR100, tmp_path, "python").iterdir():
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    write(CIFAR100, tmp_path, "binary").joinpath("train.bin").write_bytes(b"rubbish")
    check(CIFAR100, cifar.load(CIFAR100, tmp_path, verify=False))


def test_where_no_layout_is_whole_the_pickle_is_missed(tmp_path: Path) -> None:
    for layout, gone in (("python", "data_batch_2"), ("binary", "test_batch.bin")):
        (write(CIFAR10, tmp_path, layout) / gone).unlink()
    assert "data_batch_2: no such file" in refused(CIFAR10, tmp_path, "no such file")


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_pickles_that_are_not_the_canonical_ones_are_a_warning_each(tmp_path: Path, variant: Variant) -> None:
    folder = write(variant, tmp_path, "python")
    with pytest.warns(UserWarning, match="MD5") as caught:
        check(variant, cifar.load(variant, tmp_path))
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == len(variant.md5) == len(file_names(variant))
    for name, canonical in variant.md5.items():
        found = hashlib.md5((folder / name).read_bytes()).hexdigest()
        assert any(f"{folder / name}: MD5 {found} is not {canonical}" in text for text in texts)


def refused(variant: Variant, root: Path, message: str) -> str:
    with pytest.raises(ValueError, match=message) as caught:
        cifar.load(variant, root, verify=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_folders_and_files(tmp_path: Path) -> None:
    text = refused(CIFAR100, tmp_path, "holds neither cifar-100-python nor cifar-100-binary")
    assert str(tmp_path) in text and "--data-dir" in text
    for layout in LAYOUTS:
        root = tmp_path / layout
        root.mkdir()
        folder = write(CIFAR10, root, layout)
        gone = folder / ("data_batch_3" + (".bin" if layout == "binary" else ""))
        gone.unlink()
        assert str(gone) in refused(CIFAR10, root, "no such file")


RECORD = bytes([3]) + bytes(3072)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RECORD[:-1], "truncated or another file, 3072 bytes in records of 3073"),
        (RECORD * 2 + b"\0", "truncated"),
        (b"", "no samples"),
        (RECORD + bytes([10]) + bytes(3072), r"label 10 is outside 0\.\.9"),
    ],
)
def test_a_damaged_binary_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = write(CIFAR10, tmp_path, "binary") / "data_batch_2.bin"
    path.write_bytes(content)
    assert refused(CIFAR10, tmp_path, message).startswith(str(path))


IMAGES = np.zeros((2, 3072), dtype=np.uint8)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"data": IMAGES}, "no list of numbers 'labels'"),
        ({"data": IMAGES, "labels": ["1", "2"]}, "no list of numbers"),
        ({"data": IMAGES, "labels": [True, False]}, "no list of numbers"),
        ({"data": IMAGES, "fine_labels": [1, 2]}, "no list of numbers"),
        ({"data": IMAGES, "labels": [1, 2, 3]}, "2 images and 3 labels"),
        ({"data": IMAGES, "labels": [1, 10]}, "label 10 is outside"),
        ({"data": IMAGES, "labels": [-1, 1]}, "label -1 is outside"),
        ({"data": IMAGES, "labels": [1, 2**70]}, f"label {2**70} is outside"),
        ({"data": IMAGES, "labels": [-(2**70), 1]}, f"label -{2**70} is outside"),
        ({"data": IMAGES[:0], "labels": []}, "no samples"),
        ({"data": IMAGES[:, :784], "labels": [1, 2]}, "no 'data' of 3072 bytes"),
        ({"data": b"rubbish", "labels": [1, 2]}, "no 'data'"),
        ({"labels": [1, 2]}, "no 'data'"),
        ({"data": IMAGES.astype(np.float32), "labels": [1, 2]}, "no pickle of cifar10 .*f4"),
        ([1, 2], "no pickle of cifar10 .it holds a list"),
    ],
)
def test_a_wrong_pickle_is_named(tmp_path: Path, batch: Any, message: str) -> None:
    path = write(CIFAR10, tmp_path, "python") / "test_batch"
    path.write_bytes(pickle.dumps(batch, protocol=4))
    assert refused(CIFAR10, tmp_path, message).startswith(str(path))


def test_a_damaged_or_malicious_pickle_is_named(tmp_path: Path) -> None:
    path = write(CIFAR10, tmp_path, "python") / "data_batch_1"
    whole = path.read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 2], b"", b"<html>"):
        path.write_bytes(content)
        assert refused(CIFAR10, tmp_path, "no pickle of cifar10").startswith(str(path))
    path.write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    assert refused(CIFAR10, tmp_path, "calls posix.system").startswith(str(path))


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    path = write(CIFAR100, tmp_path, "binary") / "test.bin"
    path.unlink()
    path.mkdir()
    refused(CIFAR100, tmp_path, "test.bin: cannot be read")
