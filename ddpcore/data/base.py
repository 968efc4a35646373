"""Samples that live whole in one place, and the batches made of them there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpcore.data.shards import permutation
from ddpcore.data.transforms import Augmentation, Normalization


@dataclass(frozen=True, eq=False)
class Split:
    """Inputs uint8 images [N, C, H, W] or floating samples [N, ...], with labels int64 [N], on one device.

    Images stay uint8; normalization and augmentation, where there are any, happen to each batch.
    """

    inputs: Tensor
    labels: Tensor
    normalization: Normalization | None = None
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        if self.inputs.dtype != torch.uint8 and not self.inputs.is_floating_point():
            raise ValueError(f"Split: inputs are {self.inputs.dtype}, they must be uint8 images or floating features")
        if self.labels.dtype != torch.int64:
            raise ValueError(f"Split: labels are {self.labels.dtype}, they must be int64 class numbers")
        if self.inputs.ndim < 2 or self.labels.shape != self.inputs.shape[:1] or len(self.labels) == 0:
            shapes = f"inputs {list(self.inputs.shape)} and labels {list(self.labels.shape)}"
            raise ValueError(f"Split: {shapes} must be [N, ...] and [N], N at least 1")
        images = self.inputs.dtype == torch.uint8 and self.inputs.ndim == 4
        if not images and (self.normalization is not None or self.augmentation is not None):
            raise ValueError("Split: only uint8 images [N, C, H, W] are normalized and augmented, leave both out")
        if self.normalization is not None and len(self.normalization.mean) != self.inputs.shape[1]:
            channels = f"{len(self.normalization.mean)} channels for images of {self.inputs.shape[1]}"
            raise ValueError(f"Split: the normalization has {channels}, give one mean and std a channel")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs float32 [*I, ...] and labels int64 [*I] for int64 indices of shape I.

        uint8 is scaled to 0..1 or normalized; the epoch (from 0) matters to augmentation alone.
        """
        where = indices.to(self.inputs.device)
        inputs = self.inputs.index_select(0, where.flatten())  # whole samples: faster than indexing
        if self.augmentation is not None:
            inputs = self.augmentation(inputs, where.flatten(), epoch)
        if self.normalization is not None:
            inputs = self.normalization(inputs)
        elif inputs.dtype == torch.uint8:
            inputs = inputs.float().div_(255)
        return inputs.float().unflatten(0, where.shape), self.labels[where]

    def take(self, indices: Tensor) -> Split:
        """A copy of some samples, int64 [M] >= 1, in that order."""
        where = indices.to(self.inputs.device)
        return replace(self, inputs=self.inputs[where], labels=self.labels[where])

    def to(self, device: torch.device | str) -> Split:
        """The same split on a device, so that batches are made there."""
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named training split, a test split if there is one, the number of classes and the shape of one sample.

    The validation split, for choices made during or after training, is there once `hold_out` made it.
    """

    name: str
    train: Split
    test: Split | None
    num_classes: int
    input_shape: tuple[int, ...]
    validation: Split | None = None

    def __post_init__(self) -> None:
        for split in self.splits().values():
            shape = tuple(split.inputs.shape[1:])
            if shape != self.input_shape:
                raise ValueError(
                    f"{self.name}: samples are {list(shape)}, input_shape must say so, not {self.input_shape}"
                )
            if int(split.labels.min()) < 0 or int(split.labels.max()) >= self.num_classes:
                raise ValueError(f"{self.name}: a label is outside 0..{self.num_classes - 1}, raise num_classes")

    def splits(self) -> dict[str, Split]:
        """Those that there are, of train, validation and test."""
        every = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in every.items() if split is not None}

    def digest(self) -> str:
        """Hexadecimal, of the splits' shapes, labels and images: other samples have another one.

        Of floating samples only shapes and labels count: where they are computed, machines may round otherwise.
        """
        digest = hashlib.blake2b(f"{self.num_classes} classes".encode(), digest_size=16)
        for name, split in self.splits().items():
            digest.update(f"{name} {list(split.inputs.shape)} {split.inputs.dtype}".encode())
            for tensor in (split.labels, split.inputs):
                if not tensor.is_floating_point():
                    digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()

    def to(self, device: torch.device | str) -> Dataset:
        """The same data set on a device."""
        moved: dict[str, Any] = {name: split.to(device) for name, split in self.splits().items()}
        return replace(self, **moved)

    def transformed(self, normalization: Normalization | None, augmentation: Augmentation | None) -> Dataset:
        """The same samples, every split normalized and the training split alone augmented; None leaves it out."""
        changed: dict[str, Any] = {
            name: replace(split, normalization=normalization) for name, split in self.splits().items()
        }
        changed["train"] = replace(changed["train"], augmentation=augmentation)
        return replace(self, **changed)

    def hold_out(self, num_samples: int, seed: int = 0) -> Dataset:
        """The last num_samples of a random order of the training set become the validation split, never augmented.

        The test split is left alone. The order follows from the seed; ValueError unless samples are left to train on.
        """
        total = len(self.train)
        if not 1 <= num_samples < total:
            raise ValueError(
                f"{self.name}: cannot hold out {num_samples} of {total} training samples, take 1 to {total - 1}"
            )
        order = torch.from_numpy(permutation(total, seed, 0, 0, 0).copy())  # a key that no ShardedBatches uses
        validation = replace(self.train.take(order[-num_samples:]), augmentation=None)
        return replace(self, train=self.train.take(order[:-num_samples]), validation=validation)

    def limit(self, num_train: int | None = None, num_test: int | None = None, seed: int = 0) -> Dataset:
        """A random part of the training and of the test split; None leaves one whole.

        The training part follows from the seed; the test part is the same for every seed, so that runs are comparable.
        ValueError for more samples than there are, and for a test split that is not there.
        """
        splits = self.splits()
        changed: dict[str, Split] = {}
        for name, wanted, key in (("train", num_train, (seed, 0, 0, 0, 1)), ("test", num_test, (0, 0, 0, 0, 2))):
            if wanted is None:
                continue
            total = len(splits[name]) if name in splits else 0
            if not 1 <= wanted <= total:
                raise ValueError(f"{self.name}: cannot take {wanted} of {total} {name} samples")
            order = torch.from_numpy(permutation(total, *key).copy())
            changed[name] = splits[name].take(order[:wanted])
        return replace(self, **changed)  # type: ignore[arg-type]

    def with_random_labels(self, seed: int = 0) -> Dataset:
        """Training labels drawn uniformly, so that only the samples can be learned (Zhang et al. 2017, section 2)."""
        labels = torch.randint(self.num_classes, (len(self.train),), generator=generator(seed, 1))
        return replace(self, train=replace(self.train, labels=labels.to(self.train.labels.device)))


def generator(seed: int, *key: int) -> torch.Generator:
    """Random numbers of (seed, key) that are not those of ``torch.manual_seed(seed)``, of which weights are made.

    torch's generator on the CPU takes 32 bits of a seed: these are of a hash of all.
    """
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)
