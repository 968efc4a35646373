"""Data sets in the memory of one device, and their batches."""

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
    """Samples and their labels on one device.

    Attributes:
        inputs: images uint8 ``[N, C, H, W]``, floating samples ``[N, ...]``, or tokens int64 ``[N, T]``, which are
            class numbers as labels are.
        labels: int64 ``[N]``, or ``[N, T]`` for samples with a label at each of T places.
        normalization: applied to each batch of images; None: pixels are scaled to 0..1.
        augmentation: applied to each batch of images before the normalization.

    ValueError for other dtypes or shapes, or if samples that are no images are normalized or augmented.
    """

    inputs: Tensor
    labels: Tensor
    normalization: Normalization | None = None
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        if self.inputs.dtype != torch.uint8 and not self.inputs.is_floating_point() and not self.has_tokens:
            kinds = "uint8 images, floating samples or int64 tokens"
            raise ValueError(f"Split: inputs are {self.inputs.dtype}, they must be {kinds}")
        if self.labels.dtype != torch.int64:
            raise ValueError(f"Split: labels are {self.labels.dtype}, they must be int64 class numbers")
        given, fits = (self.inputs.ndim, self.labels.ndim), self.labels.shape[:1] == self.inputs.shape[:1]
        if given[0] < 2 or given[1] not in (1, 2) or not fits or self.labels.numel() == 0:
            shapes = f"inputs {list(self.inputs.shape)} and labels {list(self.labels.shape)}"
            raise ValueError(f"Split: {shapes} must be [N, ...] and [N] or [N, T], N and T at least 1")
        if self.has_tokens and given[0] != 2:
            raise ValueError(f"Split: inputs are int64 {list(self.inputs.shape)}, tokens must be [N, T]")
        images = self.inputs.dtype == torch.uint8 and self.inputs.ndim == 4
        if not images and (self.normalization is not None or self.augmentation is not None):
            raise ValueError("Split: only uint8 images [N, C, H, W] can be normalized or augmented, leave both out")
        if self.normalization is not None and len(self.normalization.mean) != self.inputs.shape[1]:
            channels = f"{len(self.normalization.mean)} channels for images of {self.inputs.shape[1]}"
            raise ValueError(f"Split: the normalization has {channels}, give one mean and std a channel")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def has_tokens(self) -> bool:
        """Whether the inputs are class numbers, not images or floating samples."""
        return self.inputs.dtype == torch.int64

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs float32 ``[*I, ...]`` and labels int64 ``[*I]`` of the samples with these numbers, int64 of shape I.

        Tokens are int64 ``[*I, T]``, and labels at each place ``[*I, T]``.
        Only the augmentation depends on the epoch, which is counted from 0.
        """
        where = indices.to(self.inputs.device)
        inputs = self.inputs.index_select(0, where.flatten())  # faster than indexing
        if self.augmentation is not None:
            inputs = self.augmentation(inputs, where.flatten(), epoch)
        if self.normalization is not None:
            inputs = self.normalization(inputs)
        elif inputs.dtype == torch.uint8:
            inputs = inputs.float().div_(255)
        return (inputs if self.has_tokens else inputs.float()).unflatten(0, where.shape), self.labels[where]

    def take(self, indices: Tensor) -> "Split":
        """A copy of the samples of these numbers, int64 ``[M]`` with M >= 1, in that order."""
        where = indices.to(self.inputs.device)
        return replace(self, inputs=self.inputs[where], labels=self.labels[where])

    def to(self, device: torch.device | str) -> "Split":
        """The same split on another device; its batches are made there."""
        return replace(self, inputs=self.inputs.to(device), labels=self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training, test and validation split of one task.

    Attributes:
        name: of the data set.
        train: the training split.
        test: the test split, if the data set has one.
        num_classes: labels and tokens are from 0 to ``num_classes - 1``.
        input_shape: of one sample.
        validation: what :meth:`hold_out` took from the training split, for choices between models.
        normalization: what suits the samples, if they are images; :meth:`transformed` applies it.
        augmentation: likewise, of the training split.

    ValueError: a split has samples of another shape, a label or token outside the classes, or alone has tokens.
    """

    name: str
    train: Split
    test: Split | None
    num_classes: int
    input_shape: tuple[int, ...]
    validation: Split | None = None
    normalization: Normalization | None = None
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        for split in self.splits().values():
            shape = tuple(split.inputs.shape[1:])
            if shape != self.input_shape:
                other = f"input_shape must be the same, not {self.input_shape}"
                raise ValueError(f"{self.name}: samples are {list(shape)}, {other}")
            if split.has_tokens != self.has_tokens:
                raise ValueError(f"{self.name}: some splits have tokens and others have none: give all the same dtype")
            for what, numbers in (("label", split.labels), *([("token", split.inputs)] if split.has_tokens else [])):
                if int(numbers.min()) < 0 or int(numbers.max()) >= self.num_classes:
                    raise ValueError(f"{self.name}: a {what} is outside 0..{self.num_classes - 1}, raise num_classes")

    @property
    def has_tokens(self) -> bool:
        """See :attr:`Split.has_tokens`."""
        return self.train.has_tokens

    def splits(self) -> dict[str, Split]:
        """The splits that exist, by name: train, validation, test."""
        every = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: split for name, split in every.items() if split is not None}

    def digest(self) -> str:
        """Hexadecimal hash of the splits' shapes, labels, images and tokens.

        Floating samples count by shape and labels only: synthetic ones may be rounded differently on other machines.
        """
        digest = hashlib.blake2b(f"{self.num_classes} classes".encode(), digest_size=16)
        for name, split in self.splits().items():
            digest.update(f"{name} {list(split.inputs.shape)} {split.inputs.dtype}".encode())
            for tensor in (split.labels, split.inputs):
                if not tensor.is_floating_point():
                    digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()

    def to(self, device: torch.device | str) -> "Dataset":
        """The same data set on another device."""
        moved: dict[str, Any] = {name: split.to(device) for name, split in self.splits().items()}
        return replace(self, **moved)

    def transformed(self, normalization: Normalization | None, augmentation: Augmentation | None) -> "Dataset":
        """The same samples; the normalization (or none) is for every split, the augmentation only for training."""
        changed: dict[str, Any] = {k: replace(split, normalization=normalization) for k, split in self.splits().items()}
        changed["train"] = replace(changed["train"], augmentation=augmentation)
        return replace(self, **changed)

    def hold_out(self, num_samples: int, seed: int = 0) -> "Dataset":
        """Move the last samples of a random order of the training split into a validation split without augmentation.

        The seed decides the order. ValueError if no sample would be moved, or none would be left for training.
        """
        total = len(self.train)
        if not 1 <= num_samples < total:
            what = f"{num_samples} of {total} training samples"
            raise ValueError(f"{self.name}: cannot hold out {what}, take 1 to {total - 1}")
        order = torch.from_numpy(permutation(total, seed, 0, 0, 0).copy())  # a key that no ShardedBatches uses
        validation = replace(self.train.take(order[-num_samples:]), augmentation=None)
        return replace(self, train=self.train.take(order[:-num_samples]), validation=validation)

    def limit(self, num_train: int | None = None, num_test: int | None = None, seed: int = 0) -> "Dataset":
        """Keep so many random samples of the training and of the test split; None keeps all.

        The seed decides the training samples; the test samples are the same for every seed, so that runs are
        comparable. ValueError if a split does not have so many samples, or there is no test split.
        """
        splits = self.splits()
        changed: dict[str, Split] = {}
        for name, wanted, key in (("train", num_train, (seed, 0, 0, 0, 1)), ("test", num_test, (0, 0, 0, 0, 2))):
            if wanted is None:
                continue
            total = len(splits[name]) if name in splits else 0
            if not 1 <= wanted <= total:
                raise ValueError(f"{self.name}: cannot take {wanted} of {total} {name} samples")
            changed[name] = splits[name].take(torch.from_numpy(permutation(total, *key).copy())[:wanted])
        return replace(self, **changed)  # type: ignore[arg-type]

    def with_random_labels(self, seed: int = 0) -> "Dataset":
        """Replace the training labels by uniformly random ones: a model can only memorize (Zhang et al. 2017)."""
        labels = torch.randint(self.num_classes, self.train.labels.shape, generator=generator(seed, 1), device="cpu")
        return replace(self, train=replace(self.train, labels=labels.to(self.train.labels.device)))


def generator(seed: int, *key: int) -> torch.Generator:
    """A CPU generator whose stream depends on (seed, key).

    ``torch.manual_seed(seed)``, which initializes the weights, has other numbers. torch's CPU generator uses only
    32 bits of a seed, so this seeds it with a hash of all bits.
    """
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]) >> 1)
