"""Synthetic speech: the states of a hidden Markov model, which emit correlated frames of features.

Like acoustic modelling, it is hard for large batches: classes are uneven, and the label depends on several frames. Its
source is known, and so the smallest error that any classifier can reach.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpcore.data.base import Dataset, Split, generator
from ddpcore.options.typed import check_range

TEST_SHARE = 0.2  # of the samples, the last ones
STAY = 0.75  # probability that a state lasts another frame: it lasts about four frames
LATENT = 8  # most dimensions of the latent space
SPREAD = 0.75  # standard deviation of the states' means in each dimension; the noise has 1
CORRELATION = 0.5  # of the noise of a frame with the noise of the previous frame


@dataclass(frozen=True, eq=False)
class Source:
    """A hidden Markov model with C states and frames of F features.

    The state s_t stays the same with probability STAY; otherwise a new state k is drawn with probability proportional
    to 1 / (k + 1) (Zipf's law). So this is the frequency of k at every frame. In a latent space of D dimensions a frame
    is m[s_t] + e_t, with noise e_t = r e_{t-1} + sqrt(1 - r^2) n_t, r = CORRELATION and n_t standard normal. A random
    matrix maps it to features of mean 0 and variance about 1.

    Attributes:
        prior_C: probabilities of the states.
        means_CD: m, one row a state.
        mixing_DF: from latent dimensions to features; D is at most F.
    """

    prior_C: Tensor
    means_CD: Tensor
    mixing_DF: Tensor

    @staticmethod
    def draw(num_classes: int, num_features: int, generator: torch.Generator) -> "Source":
        """Draw the means and the mixing matrix."""
        latent = min(LATENT, num_features)
        weights = 1 / torch.arange(1, num_classes + 1, dtype=torch.float64, device="cpu")
        prior = weights / weights.sum()
        means = SPREAD * torch.randn(num_classes, latent, generator=generator, dtype=torch.float64, device="cpu")
        means -= prior @ means
        mixing = torch.randn(latent, num_features, generator=generator, dtype=torch.float64, device="cpu")
        return Source(prior, means, mixing / math.sqrt(latent * (1 + SPREAD**2)))

    def sample(self, num_samples: int, num_frames: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw N independent sequences: frames float64 ``[N, frames, F]`` and states int64 ``[N, frames]``."""
        size = (num_samples, num_frames)
        states = self.prior_C.multinomial(num_samples * num_frames, replacement=True, generator=generator).view(size)
        stays = torch.rand(size, generator=generator, dtype=torch.float32, device="cpu") < STAY
        noise = torch.randn(*size, self.means_CD.shape[1], generator=generator, dtype=torch.float64, device="cpu")
        for t in range(1, num_frames):
            states[:, t] = torch.where(stays[:, t], states[:, t - 1], states[:, t])
            noise[:, t] = CORRELATION * noise[:, t - 1] + math.sqrt(1 - CORRELATION**2) * noise[:, t]
        return (self.means_CD[states] + noise) @ self.mixing_DF, states


def load(
    num_classes: int = 32, seed: int = 0, *, num_frames: int = 21, num_features: int = 40, num_samples: int = 10_000
) -> Dataset:
    """Samples float32 ``[frames, features]`` with the state of frame ``frames // 2``; the last fifth is the test split.

    The source is ``Source.draw(num_classes, num_features, ddpcore.data.base.generator(seed))``, and the same generator
    draws the samples; torch's global generator is not used. ValueError if there are fewer than 2 classes, 1 frame,
    1 feature or 5 samples, or the seed is negative.
    """
    sizes = {"num_classes": (num_classes, 2), "num_frames": (num_frames, 1), "num_features": (num_features, 1)}
    for name, (value, least) in {**sizes, "num_samples": (num_samples, 5), "seed": (seed, 0)}.items():
        check_range(f"synthetic_speech: {name}", value, least=least)
    random = generator(seed)
    inputs, states = Source.draw(num_classes, num_features, random).sample(num_samples, num_frames, random)
    samples, labels = inputs.float(), states[:, num_frames // 2].contiguous()
    num_train = num_samples - int(num_samples * TEST_SHARE)
    train, test = (Split(samples[part], labels[part]) for part in (slice(num_train), slice(num_train, None)))
    return Dataset("synthetic_speech", train, test, num_classes, (num_frames, num_features))
