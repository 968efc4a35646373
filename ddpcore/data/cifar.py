"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), from the binary files or from the canonical Python pickles."""

import hashlib
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ddpcore.data.base import Dataset, Split
from ddpcore.data.transforms import Augmentation, Normalization
from ddpcore.storage.files import CIFAR_BYTES, find_packed, read_packed, shown

INPUT_SHAPE = (3, 32, 32)
IMAGE_BYTES = 3072  # a red, a green and a blue plane; each plane is stored row by row


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The files of CIFAR-10 or CIFAR-100. The names are those in the archives and in torchvision."""

    name: str
    num_classes: int
    python_folder: str
    binary_folder: str
    train: tuple[str, ...]  # files; the binary ones have .bin after these names
    test: str
    label_bytes: int  # before each image of a binary file; the last of these bytes is the label
    label_key: str  # of the labels in a pickle
    md5: Mapping[str, str]  # of the pickles, as torchvision publishes it; other pickles are not read
    normalization: Normalization

    @property
    def layouts(self) -> tuple[tuple[str, ...], ...]:
        """The files of the Python layout and of the binary layout, relative to data_dir. One layout is enough."""
        forms = (f"{self.python_folder}/{{}}", f"{self.binary_folder}/{{}}.bin")
        return tuple(tuple(form.format(name) for name in (*self.train, self.test)) for form in forms)


CIFAR10 = Variant(
    name="cifar10",
    num_classes=10,
    python_folder="cifar-10-batches-py",
    binary_folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test="test_batch",
    label_bytes=1,
    label_key="labels",
    md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    normalization=Normalization((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
)
CIFAR100 = Variant(
    name="cifar100",
    num_classes=100,
    python_folder="cifar-100-python",
    binary_folder="cifar-100-binary",
    train=("train",),
    test="test",
    label_bytes=2,  # the coarse label (20 classes), then the fine label (100 classes)
    label_key="fine_labels",
    md5={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    normalization=Normalization((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
)


def load(variant: Variant, data_dir: str | Path, *, max_bytes: int = CIFAR_BYTES) -> Dataset:
    """Read the training and the test split: images uint8 ``[N, 3, 32, 32]`` and the fine labels.

    The binary files are read if they are complete and a pickle is missing; otherwise the pickles are read. A pickle can
    run code when it is read. So its MD5 is compared first, always, and a pickle that is not the canonical one is an
    error. A file that takes more than ``max_bytes``, unpacked, is refused.

    ValueError, with the path: a file is missing, damaged, or not a file of this data set.
    """
    folder, transforms = _folder(variant, Path(data_dir)), (variant.normalization, Augmentation())
    train, test = (_split(variant, folder, names, max_bytes) for names in (variant.train, (variant.test,)))
    return Dataset(variant.name, train, test, variant.num_classes, INPUT_SHAPE, None, *transforms)


def load_cifar10(data_dir: str | Path, *, max_bytes: int = CIFAR_BYTES) -> Dataset:
    """CIFAR-10, see :func:`load`."""
    return load(CIFAR10, data_dir, max_bytes=max_bytes)


def load_cifar100(data_dir: str | Path, *, max_bytes: int = CIFAR_BYTES) -> Dataset:
    """CIFAR-100, see :func:`load`."""
    return load(CIFAR100, data_dir, max_bytes=max_bytes)


def _folder(variant: Variant, root: Path) -> Path:
    """The folder of the first complete layout; if none is complete, the first that exists."""
    complete = [names for names in variant.layouts if all(find_packed(root / name) for name in names)]
    if not (existing := [names for names in variant.layouts if (root / names[0]).parent.exists()]):
        advice = "set data_dir (--data-dir) to the folder that holds one of them"
        raise ValueError(f"{shown(root)}: holds neither {variant.python_folder} nor {variant.binary_folder}, {advice}")
    return (root / (complete or existing)[0][0]).parent


def _split(variant: Variant, folder: Path, names: tuple[str, ...], max_bytes: int) -> Split:
    read = _read_binary if folder.name == variant.binary_folder else _read_pickle
    parts = [read(variant, folder, name, max_bytes) for name in names]
    images, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    return Split(images.reshape(-1, *INPUT_SHAPE), labels.long())


def _read_binary(variant: Variant, folder: Path, name: str, max_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, 3072] and labels [N] of one binary file."""
    content, path = _read(folder / f"{name}.bin", max_bytes)
    size = variant.label_bytes + IMAGE_BYTES
    if len(content) % size:
        found = f"{len(content)} bytes in records of {size}"
        raise ValueError(f"{path}: truncated or another file, {found}, fetch it again")
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    labels = records[:, variant.label_bytes - 1]
    if len(labels) == 0:
        raise ValueError(f"{path}: it holds no samples, fetch it again")
    if labels.max() >= variant.num_classes:
        raise ValueError(f"{path}: label {labels.max()} is outside 0..{variant.num_classes - 1}, fetch it again")
    return records[:, variant.label_bytes :], labels


def _read_pickle(variant: Variant, folder: Path, name: str, max_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """The same of one pickle, which has the MD5 of the canonical file: so its content needs no checks."""
    content, path = _read(folder / name, max_bytes)
    found, canonical = hashlib.md5(content, usedforsecurity=False).hexdigest(), variant.md5[name]
    if found != canonical:
        why = f"its MD5 {found} is not {canonical}, the MD5 of the canonical file, and a pickle can run code"
        advice = f"fetch it again, or take the binary files, {variant.binary_folder}/*.bin"
        raise ValueError(f"{path}: {why}: {advice}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy 2.4 warns of how NumPy 1 has written the dtype
        batch = pickle.loads(content, encoding="latin1")
    return batch["data"], np.array(batch[variant.label_key])


def _read(path: Path, max_bytes: int) -> tuple[bytes, str]:
    """The content of a file, and its path for a message."""
    found, content = read_packed(path, f"unpack the whole archive into {shown(path.parent.parent)}", max_bytes)
    return content, shown(found)
