"""The reference implementation of ``csrc/random.h``: random numbers from a counter, bitwise as in the kernels.

Philox4x32-10 (Salmon et al. 2011) on 32-bit words stored as int64, the Box-Muller transform in fp32, and stochastic
rounding to bfloat16.
"""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def _product(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of ``words * factor``. The factor is split because the product may overflow int64."""
    low = words * (factor & 0xFFFF)
    upper = words * (factor >> 16) + (low >> 16)
    return upper >> 16, ((upper & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four random words per counter, int64 below 2**32. ``key`` is two such words, low word first."""
    c0, c1, c2, c3 = counter
    for turn in range(10):
        k0, k1 = (key + turn * 0x9E3779B9) & _WORD, ((key >> 32) + turn * 0xBB67AE85) & _WORD
        (left_high, left_low), (right_high, right_low) = _product(c0, 0xD2511F53), _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = right_high ^ c1 ^ k0, right_low, left_high ^ c3 ^ k1, left_low
    return c0, c1, c2, c3


def _radius(words: Tensor) -> Tensor:
    bits = (((words >> 1).float() + 0.5) * 2**-31).view(torch.int32)  # of a uniform number
    exponent = (bits - 0x3F3504F3) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    ratio = (mantissa - 1) / (mantissa + 1)
    square = ratio * ratio
    series = square * (0.33333388 + square * (0.19988766 + square * 0.14935999))
    radius_squared = exponent.float() * -1.38629436 - 4 * (ratio + ratio * series)
    return radius_squared.double().sqrt().float()  # torch's fp32 root is not always rounded correctly


def _pair(radius_words: Tensor, angle_words: Tensor) -> tuple[Tensor, Tensor]:
    turned = (angle_words + (1 << 29)) & _WORD
    quarter = turned >> 30
    angle = ((turned & 0x3FFFFFFF) - (1 << 29)).float() * 1.46291808e-9
    square = angle * angle
    sine = angle + angle * (square * (-0.16666655 + square * (0.008332178 + square * -0.00019517234)))
    cosine = 1 - square * (0.5 - square * (0.041666646 + square * (-0.0013887367 + square * 2.4438375e-05)))
    radius, odd = _radius(radius_words), (quarter & 1) != 0
    x, y = torch.where(odd, sine, cosine), torch.where(odd, cosine, sine)
    return radius * torch.where(((quarter + 1) & 2) != 0, -x, x), radius * torch.where((quarter & 2) != 0, -y, y)


def normals(numel: int, seed: int, step: int, first: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """The numbers ``first`` to ``first + numel - 1`` of a seed's and a step's sequence, float32 ``[numel]``.

    A number depends only on seed, step and index. Its absolute value is at most 6.66, which a true normal number
    exceeds with a probability of 3e-11.
    """
    drawn = _fours(numel, seed, step, first, device)
    values = torch.stack([*_pair(drawn[0], drawn[1]), *_pair(drawn[2], drawn[3])], dim=1)
    return values.flatten()[first % 4 : first % 4 + numel]


def words(numel: int, seed: int, step: int, first: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """The random words of the indices ``first`` to ``first + numel - 1``: int64 ``[numel]``, below 2**32."""
    return torch.stack(_fours(numel, seed, step, first, device), dim=1).flatten()[first % 4 : first % 4 + numel]


def _fours(
    numel: int, seed: int, step: int, first: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The words of each counter that has one of the indices."""
    fours = torch.arange(first // 4, (first + numel + 3) // 4, device=device)
    steps = torch.full_like(fours, step & _WORD), torch.full_like(fours, step >> 32)
    return philox((fours & _WORD, fours >> 32, *steps), seed)


def round_to_bf16(values: Tensor, random: Tensor) -> Tensor:
    """Round float32 to bfloat16, away from zero with a probability of the dropped 16 bits over 2**16.

    So the mean of the result is the value. A bfloat16 number, an infinity and NaN stay what they are. A finite value
    stays finite: beyond the largest bfloat16 number it becomes that. ``random`` has 16 bits for each, int64.
    """
    bits = values.view(torch.int32).long() & _WORD
    magnitude = bits & 0x7FFFFFFF
    special = torch.where(magnitude > 0x7F800000, (bits >> 16) | 0x40, bits >> 16)
    rounded = torch.where(magnitude >= 0x7F7F0000, special, (bits + random) >> 16)
    return ((rounded ^ 0x8000) - 0x8000).to(torch.int16).view(torch.bfloat16)


def memory_order(tensor: Tensor) -> Tensor:
    """The index of each element in memory: int64, of the tensor's shape. One with gaps is numbered as a dense copy."""
    index = torch.arange(tensor.numel(), device=tensor.device)
    expected, dense = 1, True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        dense = dense and (size == 1 or stride == expected)
        expected *= size
    return index.as_strided(tensor.shape, tensor.stride()) if dense and index.numel() > 0 else index.view(tensor.shape)


def add_noise(
    mixed: Tensor, noise_std: float = 0.0, noise_seed: int = 0, noise_step: int = 0, noise_first: int = 0
) -> Tensor:
    """``mixed + std * normals``, in the dtype of ``mixed``. Returns ``mixed`` itself if ``noise_std`` is 0 in fp32."""
    std = float(torch.tensor(noise_std, dtype=torch.float32, device="cpu"))
    if std == 0:
        return mixed
    drawn = normals(mixed.numel(), noise_seed, noise_step, noise_first, mixed.device)
    return mixed + std * drawn.view(mixed.shape).to(mixed.dtype)
