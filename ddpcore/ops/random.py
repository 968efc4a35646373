"""A pure-torch twin of ``csrc/random.h``: standard normals from a counter, with the bits of the kernels.

Philox4x32-10 (Salmon et al. 2011), its 32-bit words held in int64, and Box and Muller's rule in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def _product(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of ``words * factor``; by halves of the factor, because 64 bits would be signed."""
    low = words * (factor & 0xFFFF)
    upper = words * (factor >> 16) + (low >> 16)
    return upper >> 16, ((upper & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four words a counter, all int64 from 0 to 2**32 - 1. ``key`` is its two words, low one first."""
    c0, c1, c2, c3 = counter
    for turn in range(10):
        k0, k1 = (key + turn * 0x9E3779B9) & _WORD, ((key >> 32) + turn * 0xBB67AE85) & _WORD
        (left_high, left_low), (right_high, right_low) = _product(c0, 0xD2511F53), _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = right_high ^ c1 ^ k0, right_low, left_high ^ c3 ^ k1, left_low
    return c0, c1, c2, c3


def _radius(words: Tensor) -> Tensor:
    uniform = ((words >> 1).float() + 0.5) * 2**-31
    bits = uniform.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    ratio = (mantissa - 1) / (mantissa + 1)
    square = ratio * ratio
    series = square * (0.33333388 + square * (0.19988766 + square * 0.14935999))
    radius_squared = exponent.float() * -1.38629436 - 4 * (ratio + ratio * series)
    return radius_squared.double().sqrt().float()  # torch's fp32 root may be one unit off, this one is rounded right


def _pair(radius_words: Tensor, angle_words: Tensor) -> tuple[Tensor, Tensor]:
    turned = (angle_words + (1 << 29)) & _WORD
    quarter = turned >> 30
    angle = ((turned & 0x3FFFFFFF) - (1 << 29)).float() * 1.46291808e-9
    square = angle * angle
    sine = angle + angle * (square * (-0.16666655 + square * (0.008332178 + square * -0.00019517234)))
    cosine = 1 - square * (0.5 - square * (0.041666646 + square * (-0.0013887367 + square * 2.4438375e-05)))
    radius, odd = _radius(radius_words), (quarter & 1) != 0
    x, y = torch.where(odd, sine, cosine), torch.where(odd, cosine, sine)
    return (
        radius * torch.where(((quarter + 1) & 2) != 0, -x, x),
        radius * torch.where((quarter & 2) != 0, -y, y),
    )


def normals(numel: int, seed: int, step: int, first: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Standard normals number ``first`` to ``first + numel - 1`` of a seed and a step, float32 ``[numel]``.

    A number depends on (seed, step, index) alone. None is beyond 6.66; that has a probability of 3e-11.
    """
    fours = torch.arange(first // 4, (first + numel + 3) // 4, device=device)
    steps = torch.full_like(fours, step & _WORD), torch.full_like(fours, step >> 32)
    words = philox((fours & _WORD, fours >> 32, *steps), seed)
    values = torch.stack([*_pair(words[0], words[1]), *_pair(words[2], words[3])], dim=1)
    return values.flatten()[first % 4 : first % 4 + numel]


def add_noise(
    mixed: Tensor, noise_std: float = 0.0, noise_seed: int = 0, noise_step: int = 0, noise_first: int = 0
) -> Tensor:
    """``mixed + std * normals``, in the dtype of ``mixed``; ``mixed`` itself where ``noise_std`` is 0 in fp32."""
    std = float(torch.tensor(noise_std, dtype=torch.float32))
    if std == 0:
        return mixed
    drawn = normals(mixed.numel(), noise_seed, noise_step, noise_first, mixed.device)
    return mixed + std * drawn.view(mixed.shape).to(mixed.dtype)
