"""Features from files made here, whole and damaged."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpcore.data import load_dataset


def arrays(num_samples: int, seed: int = 0, frames: int = 3, num_features: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((num_samples, frames, num_features)).astype(np.float32)
    return {"inputs": inputs, "labels": np.arange(num_samples, dtype=np.int64) % 5}


def write(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **values)


def test_files_of_a_folder_follow_each_other_by_name(tmp_path: Path) -> None:
    second, first, test = arrays(2, 1), arrays(7, 2), arrays(3, 3)
    write(tmp_path / "train" / "b.npz", second)
    write(tmp_path / "train" / "a.npz", first)
    write(tmp_path / "test" / "only.npz", test)
    (tmp_path / "train" / "notes.txt").write_text("not a file of features")
    built = load_dataset("features", data_dir=tmp_path)
    assert (built.name, built.num_classes, built.input_shape) == ("features", 5, (3, 4))
    assert built.test is not None
    expected = np.concatenate([first["inputs"], second["inputs"]])
    np.testing.assert_array_equal(built.train.inputs.numpy(), expected)
    np.testing.assert_array_equal(built.train.labels.numpy(), [0, 1, 2, 3, 4, 0, 1, 0, 1])
    np.testing.assert_array_equal(built.test.inputs.numpy(), test["inputs"])
    assert built.train.inputs.dtype == torch.float32 and built.train.labels.dtype == torch.int64


def test_without_a_test_folder_there_is_no_test_split_and_more_classes_may_be_named(tmp_path: Path) -> None:
    write(tmp_path / "train" / "a.npz", arrays(4))
    built = load_dataset("features", data_dir=str(tmp_path), num_classes=9, num_validation=1)
    assert built.test is None and built.num_classes == 9 and built.validation is not None
    with pytest.raises(ValueError, match="there is a label 3 for 3 classes, raise num_classes"):
        load_dataset("features", data_dir=tmp_path, num_classes=3)


def refused(root: Path, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_dataset("features", data_dir=root)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_missing_folders(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path / "train"), "holds no .npz file", "--data-dir")
    write(tmp_path / "train" / "a.npz", arrays(4))
    (tmp_path / "test").mkdir()
    refused(tmp_path, str(tmp_path / "test"), "holds no .npz")
    with pytest.raises(ValueError, match=r"set data_dir \(--data-dir\)"):
        load_dataset("features")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "holds no array 'labels', save inputs and labels"),
        ({"inputs": None}, "holds no array 'inputs'"),
        ({"inputs": np.zeros((4, 3, 4))}, "inputs are float64 [4, 3, 4], they must be float32 [N, frames, features]"),
        ({"inputs": np.zeros((4, 3), np.float32)}, "inputs are float32 [4, 3], they must be"),
        ({"labels": np.zeros(4, np.int32)}, "labels are int32 [4], they must be int64 [N]"),
        ({"labels": np.zeros((4, 1), np.int64)}, "labels are int64 [4, 1], they must be int64 [N]"),
        ({"labels": np.zeros(3, np.int64)}, "[4, 3, 4] inputs and 3 labels, save as many"),
        ({"labels": np.array([0, 1, -1, 2])}, "there is a label -1, number the classes from 0"),
        ({"inputs": np.full((4, 3, 4), np.nan, np.float32)}, "not finite, leave those samples out"),
        ({"inputs": np.zeros((0, 3, 4), np.float32), "labels": np.zeros(0, np.int64)}, "at least one"),
    ],
)
def test_wrong_arrays_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    values = {name: value for name, value in (arrays(4) | change).items() if value is not None}
    path = tmp_path / "train" / "a.npz"
    write(path, values)
    refused(tmp_path, f"{path}: ", message)


@pytest.mark.parametrize("content", [b"", b"rubbish that is no archive", None])
def test_damaged_files_are_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "train" / "a.npz"
    write(path, arrays(4))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    refused(tmp_path, f"{path}: cannot be read (", "write it again")


def test_archives_that_only_look_whole(tmp_path: Path) -> None:
    path = tmp_path / "train" / "a.npz"
    write(path, arrays(4))
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    refused(tmp_path, f"{path}: cannot be read (no zip archive)")
    np.savez_compressed(path, **arrays(4))
    spoiled = bytearray(path.read_bytes())
    name_length, extra_length = struct.unpack_from("<HH", spoiled, 26)
    spoiled[30 + name_length + extra_length] = 0x07  # a reserved block type where the first array begins
    path.write_bytes(spoiled)
    refused(tmp_path, f"{path}: cannot be read (", "invalid block type", "write it again")


def test_pickles_in_an_archive_are_not_run(tmp_path: Path) -> None:
    path = tmp_path / "train" / "a.npz"
    write(path, arrays(4) | {"labels": np.array([print], dtype=object)})
    refused(tmp_path, f"{path}: labels are object [1], they must be int64 [N]")


def test_samples_of_different_sizes(tmp_path: Path) -> None:
    write(tmp_path / "train" / "a.npz", arrays(4))
    write(tmp_path / "train" / "b.npz", arrays(4, frames=2))
    refused(tmp_path, "b.npz: samples are [2, 4], the samples of a.npz [3, 4], make them equal")
    write(tmp_path / "train" / "b.npz", arrays(4))
    write(tmp_path / "test" / "c.npz", arrays(4, num_features=5))
    refused(tmp_path, "train has samples of [3, 4], test of [3, 5], make them equal")


@pytest.mark.parametrize("name", ["b.h5", "b.hdf5"])
def test_hdf5_is_refused_and_not_left_out(tmp_path: Path, name: str) -> None:
    write(tmp_path / "train" / "a.npz", arrays(4))
    (tmp_path / "train" / name).write_bytes(b"")
    refused(tmp_path, f"{tmp_path / 'train' / name}: HDF5 is not read, save its arrays by numpy.savez")
