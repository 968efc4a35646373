"""Data sets by name, `build("mnist", data_dir=...)`, and the batches learners take from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from ddpcore.data import cifar, features, mnist, saddle, speech, synthetic
from ddpcore.data.base import Dataset, Split
from ddpcore.data.download import download as _download
from ddpcore.data.shards import SAMPLERS, ShardedBatches
from ddpcore.data.transforms import Augmentation, Normalization

__all__ = [
    "Augmentation",
    "Dataset",
    "Normalization",
    "SAMPLERS",
    "ShardedBatches",
    "Split",
    "build",
    "names",
    "option_types",
    "options",
]


@dataclass(frozen=True, kw_only=True)
class _Files:
    """Images that are read from the canonical files."""

    load: Callable[[Path, bool], Dataset]  # (data_dir, verify)
    folders: str
    input_shape: tuple[int, ...]
    num_classes: int
    normalization: Normalization
    augmentation: Augmentation


def _cifar(variant: cifar.Variant) -> _Files:
    return _Files(
        load=partial(cifar.load, variant),
        folders=f"{variant.python_folder} or {variant.binary_folder}",
        input_shape=cifar.INPUT_SHAPE,
        num_classes=variant.num_classes,
        normalization=variant.normalization,
        augmentation=Augmentation(),
    )


_FILES = {
    "mnist": _Files(
        load=mnist.load,
        folders="MNIST/raw",
        input_shape=mnist.INPUT_SHAPE,
        num_classes=mnist.NUM_CLASSES,
        normalization=mnist.NORMALIZATION,
        augmentation=Augmentation(flip=False),  # a mirrored digit is another sign
    ),
    "cifar10": _cifar(cifar.CIFAR10),
    "cifar100": _cifar(cifar.CIFAR100),
}
# The others: samples that are no images.
_LOADERS: dict[str, Callable[..., Dataset]] = {
    "synthetic": synthetic.load,
    "synthetic_speech": speech.load,
    "saddle": saddle.load,
    "features": features.load,
}


def names() -> tuple[str, ...]:
    """The names `build` knows."""
    return (*_LOADERS, *_FILES)


def options(name: str) -> dict[str, Any]:
    """What `build` takes for this data set alone, by name, with the defaults. ValueError lists the names."""
    if name not in names():
        raise ValueError(f"unknown data set '{name}': choose one of {', '.join(names())}")
    if name in _FILES:
        return {}
    parameters = inspect.signature(_LOADERS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in ("data_dir", "seed")}


def option_types(name: str) -> dict[str, Any]:
    """The types of these options, by name. ValueError lists the data sets."""
    known = options(name)
    return {option: hint for option, hint in get_type_hints(_LOADERS[name]).items() if option in known} if known else {}


def build(
    name: str,
    *,
    data_dir: str | Path | None = None,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
    seed: int = 0,
    normalize: bool = False,
    augment: bool = False,
    num_validation: int = 0,
    num_train: int | None = None,
    num_test: int | None = None,
    random_labels: bool = False,
    download: bool = False,
    verify: bool = True,
    **more: Any,
) -> Dataset:
    """The data set of a name, on the CPU.

    input_shape (of one sample), num_classes and more are for those data sets that have such `options`; the images that
    are read from data_dir have a shape and classes of their own. The seed decides synthetic samples, the augmentation
    and what is held out.

    normalize: subtract the channel's mean over the training set and divide by its standard deviation, all splits.
    augment: crop at random from a border of 4 pixels and, but for digits, mirror at random; the training split alone.
    num_validation: samples held out of the training set, see `Dataset.hold_out`; the test split is never touched.
    num_train, num_test: only so many samples of what is left, and of the test split, see `Dataset.limit`.
    random_labels: labels of the training split drawn from the seed: only the samples can be learned.
    download: fetch the files that are missing (needs pooch).
    verify: warn of files that are not the canonical ones.

    ValueError if the name is unknown, a file is missing or damaged, or the rest does not fit the name.
    """
    shape = {"input_shape": input_shape, "num_classes": num_classes}
    given = {option: value for option, value in shape.items() if value is not None} | more
    _check(name, more if name in _FILES else given)  # images of another shape are refused where they are read
    if name in _LOADERS:
        if normalize or augment:
            raise ValueError(f"{name} samples are no images: leave normalize and augment out")
        dataset = _load(name, data_dir, seed, given)
    else:
        dataset = _read(name, data_dir, input_shape, num_classes, download, verify)
        augmentation = replace(_FILES[name].augmentation, seed=seed)
        dataset = dataset.transformed(
            _FILES[name].normalization if normalize else None, augmentation if augment else None
        )
    if num_validation:
        dataset = dataset.hold_out(num_validation, seed)
    dataset = dataset.limit(num_train, num_test, seed)
    return dataset.with_random_labels(seed) if random_labels else dataset


def _check(name: str, given: dict[str, Any]) -> None:
    known = options(name)
    for option in given:
        if option not in known:
            advice = f"choose from {', '.join(known)}" if known else "it has none"
            raise ValueError(f"data set '{name}' has no option '{option}': {advice}")


def _load(name: str, data_dir: str | Path | None, seed: int, given: dict[str, Any]) -> Dataset:
    if name != "features":
        try:
            return _LOADERS[name](seed=seed, **given)
        except TypeError as error:  # an option of another kind
            raise ValueError(f"data set '{name}': {error}") from error
    if data_dir is None:
        raise ValueError("features are read from files: set data_dir (--data-dir) to the folder that holds train")
    return features.load(data_dir, **given)


def _read(
    name: str,
    data_dir: str | Path | None,
    input_shape: tuple[int, ...] | None,
    num_classes: int | None,
    download: bool,
    verify: bool,
) -> Dataset:
    known = _FILES[name]
    if data_dir is None:
        raise ValueError(
            f"{name} is read from files: set data_dir (--data-dir) to the folder that holds {known.folders}"
        )
    if input_shape is not None and tuple(input_shape) != known.input_shape:
        raise ValueError(
            f"{name} is {list(known.input_shape)} a sample, not {list(input_shape)}: leave input_shape out"
        )
    if num_classes is not None and num_classes != known.num_classes:
        raise ValueError(f"{name} has {known.num_classes} classes, not {num_classes}: leave num_classes out")
    if download:
        _download(name, data_dir)
    return known.load(Path(data_dir), verify)
