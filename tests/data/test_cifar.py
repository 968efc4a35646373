"""CIFAR files made here, pickled and binary, whole and damaged."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpcore.data import Dataset, cifar, load_dataset
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


def known(variant: Variant, root: Path) -> Variant:
    """The variant whose canonical pickles are the files in a folder."""
    files = {name: root / variant.python_folder / name for name in file_names(variant)}
    return replace(variant, md5={n: hashlib.md5(p.read_bytes()).hexdigest() for n, p in files.items() if p.exists()})


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_of_both_sets(tmp_path: Path, variant: Variant, layout: str) -> None:
    write(variant, tmp_path, layout)
    check(variant, cifar.load(known(variant, tmp_path), tmp_path))
    check(variant, cifar.load(known(variant, tmp_path), str(tmp_path)))


def test_the_pickles_win(tmp_path: Path) -> None:
    write(CIFAR10, tmp_path, "python")
    for path in write(CIFAR10, tmp_path, "binary").iterdir():
        path.write_bytes(b"rubbish")
    check(CIFAR10, cifar.load(known(CIFAR10, tmp_path), tmp_path))


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_that_is_whole_is_taken(tmp_path: Path, layout: str, kept: int) -> None:
    """The folder of the other one may be empty, or lack files."""
    for other in LAYOUTS:
        for path in sorted(write(CIFAR10, tmp_path, other).iterdir())[kept:]:
            if other != layout:
                path.unlink()
    check(CIFAR10, cifar.load(known(CIFAR10, tmp_path), tmp_path))


def test_packed_files_make_a_layout_whole(tmp_path: Path) -> None:
    folder = write(CIFAR100, tmp_path, "python")
    variant = known(CIFAR100, tmp_path)
    for path in list(folder.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    write(CIFAR100, tmp_path, "binary").joinpath("train.bin").write_bytes(b"rubbish")
    check(CIFAR100, cifar.load(variant, tmp_path))


def test_where_no_layout_is_whole_the_pickle_is_missed(tmp_path: Path) -> None:
    for layout, gone in (("python", "data_batch_2"), ("binary", "test_batch.bin")):
        (write(CIFAR10, tmp_path, layout) / gone).unlink()
    assert "data_batch_2: no such file" in refused(known(CIFAR10, tmp_path), tmp_path, "no such file")


class Told:
    """A pickle of it runs code when it is read."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was read whose MD5 is another one",)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("content", [pickle.dumps(Told()), b"", b"<html>"], ids=["code", "empty", "page"])
@pytest.mark.parametrize("packed", [True, False])
def test_only_canonical_pickles_are_read(tmp_path: Path, verify: bool, content: bytes, packed: bool) -> None:
    """Others are refused before they are parsed, whatever else the caller allows; the error names the binary files."""
    path = write(CIFAR100, tmp_path, "python") / "train"
    path.unlink()
    path = path.with_name("train.gz") if packed else path
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ValueError, match="MD5") as caught:
        load_dataset("cifar100", data_dir=tmp_path, verify=verify)
    found, canonical = hashlib.md5(content).hexdigest(), CIFAR100.md5["train"]
    assert str(caught.value) == (
        f"data set cifar100: {path}: its MD5 {found} is not {canonical}, the MD5 of the canonical file, "
        "and a pickle can run code: fetch it again, or take the binary files, cifar-100-binary/*.bin"
    )


def test_pickles_as_python_2_has_written_them(tmp_path: Path) -> None:
    """The published files: text is bytes, and the dtype has an argument of which newer versions of NumPy warn."""
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    pixels_of = b"T" + (3072).to_bytes(4, "little") + pixels(0)[0].tobytes()
    state = b"(K\x01K\x01M\x00\x0c\x86" + dtype + b"\x89" + pixels_of + b"tb"
    content = b"\x80\x02}(U\x04data" + array + state + b"U\x0bfine_labels]K\x63aU\x06batch\xe9U\x01xu."
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in file_names(CIFAR100):
        (folder / name).write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = cifar.load(known(CIFAR100, tmp_path), tmp_path)
    assert data.train.inputs.numpy().tobytes() == pixels(0)[0].tobytes() and data.train.labels.tolist() == [99]


def refused(variant: Variant, root: Path, message: str) -> str:
    with pytest.raises(ValueError, match=message) as caught:
        cifar.load(variant, root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_folders_and_files(tmp_path: Path) -> None:
    text = refused(CIFAR100, tmp_path, "holds neither cifar-100-python nor cifar-100-binary")
    assert str(tmp_path) in text and "--data-dir" in text
    for layout in LAYOUTS:
        root = tmp_path / layout
        root.mkdir()
        folder = write(CIFAR10, root, layout)
        variant = known(CIFAR10, root)
        gone = folder / ("data_batch_3" + (".bin" if layout == "binary" else ""))
        gone.unlink()
        assert str(gone) in refused(variant, root, "no such file")


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


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    path = write(CIFAR100, tmp_path, "binary") / "test.bin"
    path.unlink()
    path.mkdir()
    refused(CIFAR100, tmp_path, "test.bin: cannot be read")
