"""Random crops, flips and normalization of whole batches of images, on their device."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ddpcore.options.typed import check_range


@dataclass(frozen=True)
class Normalization:
    """Maps a pixel in 0..1 to (pixel - mean) / std, with one mean and one standard deviation a channel.

    ValueError if the numbers of means and of standard deviations differ, or a standard deviation is not above zero.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            found = f"{len(self.mean)} means and {len(self.std)} stds"
            raise ValueError(f"Normalization: {found}, give one of each a channel")
        check_range("Normalization: a std", min(self.std), above=0)

    def __call__(self, images: Tensor) -> Tensor:
        """Normalize images: uint8 ``[N, C, H, W]`` to float32."""
        scale, shift = _scale_and_shift(self, images.device)
        pixels = images.to(torch.float32, copy=True)  # one buffer: a product of mixed dtypes takes two
        return pixels.mul_(scale).add_(shift)  # never fused: the same bits for every batch size


@lru_cache(maxsize=16)
def _scale_and_shift(normalization: Normalization, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and shift float32 ``[C, 1, 1]`` for pixels 0..255; cached, so that no step copies them to the device."""
    both = (normalization.mean, normalization.std)
    mean, std = (torch.tensor(values, dtype=torch.float64, device="cpu") for values in both)
    scale, shift = (value.float()[:, None, None].to(device) for value in (1 / (255 * std), -mean / std))
    return scale, shift


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random crops of zero-padded images and random horizontal flips.

    The crop and the flip of a sample depend only on (seed, epoch, sample number), by a counter-based generator. So they
    are the same for any number of learners, any position in the batch, and after a restart.

    ``padding`` is the number of zeros on each side; with ``flip`` half of the images are mirrored. ValueError if the
    padding or the seed is negative.
    """

    padding: int = 4
    flip: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("padding", "seed"):
            check_range(f"Augmentation: {name}", getattr(self, name), least=0)

    def __call__(self, images: Tensor, samples: Tensor, epoch: int) -> Tensor:
        """Augment images uint8 ``[B, C, H, W]``; ``samples`` int64 ``[B]`` are their numbers in the data set."""
        bits_B = random_bits(self.seed, epoch, samples)
        num_places = 2 * self.padding + 1
        top_B, left_B = ((bits_B >> place & 0xFFFFF) * num_places >> 20 for place in (0, 20))
        if self.flip:
            both = torch.cat([images, images.flip(-1)])
            own = torch.arange(len(images), device=images.device)
            images = both.index_select(0, own + len(images) * (bits_B >> 40 & 1))
        return _crop(images, self.padding, top_B, left_B)


def _crop(images: Tensor, padding: int, top_B: Tensor, left_B: Tensor) -> Tensor:
    """Crop image i of ``[B, C, H, W]``, padded with zeros, at row ``top_B[i]`` and column ``left_B[i]``.

    A row of a crop is W adjacent elements in memory, so one index_select copies all rows. On a CPU this is much faster
    than indexing crops or pixels.
    """
    num_images, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    row_starts = padded.flatten().unfold(0, width, 1)  # a view: row i begins at element i
    planes_BC = torch.arange(num_images * channels, device=images.device).view(num_images, channels)
    rows_BCH = (planes_BC * padded.shape[2] + top_B[:, None])[:, :, None] + torch.arange(height, device=images.device)
    return row_starts.index_select(0, (rows_BCH * padded.shape[3] + left_B[:, None, None]).flatten()).view(images.shape)


def random_bits(seed: int, epoch: int, samples: Tensor) -> Tensor:
    """63 random bits for each sample number, int64 of the shape and on the device of ``samples``.

    SplitMix64 (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators"): sample i has output i of
    the stream whose initial state is a hash of (seed, epoch). int64 products wrap around like unsigned ones.
    """
    bits = samples * _signed(0x9E3779B97F4A7C15) + _stream(seed, epoch)
    bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    return (bits ^ _shifted(bits, 31)) & (1 << 63) - 1


@lru_cache(maxsize=4)
def _stream(seed: int, epoch: int) -> int:
    return _signed(int(np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(1, np.uint64)[0]))


def _signed(number: int) -> int:
    """The int64 that has the bits of a uint64."""
    return number - (1 << 64) if number >> 63 else number


def _shifted(bits: Tensor, places: int) -> Tensor:
    """The logical shift to the right; int64's own shift repeats the sign."""
    return bits >> places & (1 << 64 - places) - 1
