"""Data sets by name."""

from dataclasses import replace
from inspect import Parameter
from pathlib import Path
from typing import Any

from ddpcore.data import built_in, cifar, features, mnist, speech
from ddpcore.data.base import Dataset
from ddpcore.data.download import SOURCES
from ddpcore.data.download import download as download_files
from ddpcore.options.registry import Registry

DATASETS: Registry[Dataset] = Registry("data set", "ddpcore.datasets", Dataset, {
    "digits": built_in.load_digits, "python_text": built_in.load_python_text,
    "synthetic": built_in.load_synthetic, "synthetic_speech": speech.load, "saddle": built_in.load_saddle,
    "features": features.load, "mnist": mnist.load, "cifar10": cifar.load_cifar10, "cifar100": cifar.load_cifar100,
}, reserved=("data_dir", "seed", "verify"))  # fmt: skip


def load_dataset(
    name: str,
    *,
    data_dir: str | Path | None = None,
    seed: int = 0,
    normalize: bool = False,
    augment: bool = False,
    num_validation: int = 0,
    num_train: int | None = None,
    num_test: int | None = None,
    random_labels: bool = False,
    download: bool = False,
    verify: bool = True,
    **options: Any,
) -> Dataset:
    """The data set of a name, on the CPU.

    Args:
        name: of ``DATASETS``; a user's own is a function that returns a :class:`Dataset`, called with
            ``data_dir``, ``seed`` and ``verify``, if it has these parameters.
        data_dir: the folder of its files.
        seed: of synthetic samples, of augmentation, and of the samples that are held out.
        normalize: subtract the channel's mean over the training set and divide by its standard deviation, all splits.
        augment: crop at random from a border of 4 pixels and, but for digits, mirror at random; training split only.
        num_validation: training samples to hold out, see :meth:`Dataset.hold_out`; the test split stays whole.
        num_train, num_test: keep this many samples of the training split that is left, and of the test split, see
            :meth:`Dataset.limit`.
        random_labels: draw the labels of the training split from the seed: only the samples can be learned.
        download: fetch the files that are missing (needs pooch).
        verify: warn of files of MNIST that are not the canonical ones. Pickles of CIFAR are always compared.
        options: of the data set, see ``DATASETS.options(name)``.

    Raises:
        ValueError: the name is unknown, a file is missing or damaged, or the rest does not fit the name.
    """
    DATASETS.check_options(name, options)
    folder = DATASETS.parameters(name).get("data_dir")
    if folder is not None and folder.default is Parameter.empty and data_dir is None:
        raise ValueError(f"{name} is read from files: set data_dir (--data-dir) to the folder that holds them")
    if download and name in SOURCES and data_dir is not None:
        download_files(name, data_dir)
    given = {"seed": seed, "verify": verify, **({} if data_dir is None else {"data_dir": data_dir})}
    dataset = DATASETS.build(name, **given, **options)
    normalization = dataset.normalization if normalize else None
    augmentation = replace(dataset.augmentation, seed=seed) if augment and dataset.augmentation is not None else None
    for flag, wanted, there in (("normalize", normalize, normalization), ("augment", augment, augmentation)):
        if wanted and there is None:
            raise ValueError(f"data set {name} does not say how to {flag} its samples: leave {flag} out")
    dataset = dataset.transformed(normalization, augmentation)
    if num_validation:
        dataset = dataset.hold_out(num_validation, seed)
    dataset = dataset.limit(num_train, num_test, seed)
    return dataset.with_random_labels(seed) if random_labels else dataset
