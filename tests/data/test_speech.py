"""Synthetic speech: frequencies, correlations, and a posterior that is the source's own."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from ddpcore.data import load_dataset, speech
from ddpcore.data.base import generator
from ddpcore.data.speech import CORRELATION, STAY, Source
from ddpcore.models import MODELS


def source(num_classes: int, num_features: int, seed: int = 0) -> tuple[Source, torch.Generator]:
    random = generator(seed)
    return Source.draw(num_classes, num_features, random), random


def test_defaults() -> None:
    built = load_dataset("synthetic_speech")
    assert (built.name, built.num_classes, built.input_shape) == ("synthetic_speech", 32, (21, 40))
    assert built.test is not None and (len(built.train), len(built.test)) == (8000, 2000)
    inputs, labels = built.train.batch(torch.arange(6).view(2, 3))
    assert inputs.shape == (2, 3, 21, 40) and inputs.dtype == torch.float32 and labels.shape == (2, 3)
    # The variance over all classes is random, through 8 latent dimensions of 32 means.
    assert abs(float(built.train.inputs.mean())) < 0.05 and 0.7 < float(built.train.inputs.var()) < 1.3


def test_options_reach_the_samples() -> None:
    built = load_dataset("synthetic_speech", num_classes=5, num_frames=3, num_features=2, num_samples=12, seed=4)
    assert (built.num_classes, built.input_shape, len(built.train), len(built.test)) == (5, (3, 2), 10, 2)


def test_classes_follow_zipfs_law_and_states_last() -> None:
    made, generator = source(6, 4)
    _, states = made.sample(4000, 8, generator)
    harmonic = sum(1 / k for k in range(1, 7))
    for t in (0, 7):
        shares = states[:, t].bincount(minlength=6) / 4000
        for k in range(6):
            expected = 1 / ((k + 1) * harmonic)
            deviation = math.sqrt(expected * (1 - expected) / 4000)
            assert abs(float(shares[k]) - expected) < 5 * deviation, (t, k)
    # A state stays, or is drawn anew and happens to be the same.
    again = float(made.prior_C.square().sum())
    expected = STAY + (1 - STAY) * again
    share = float((states[:, 1:] == states[:, :-1]).double().mean())
    assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / 28_000)


def test_frames_are_means_and_correlated_noise_through_the_matrix() -> None:
    made, generator = source(5, 3)
    frames, states = made.sample(4000, 4, generator)
    assert made.mixing_DF.shape == (3, 3)
    noise = torch.linalg.solve(made.mixing_DF.T, frames.flatten(0, 1).T).T.view(4000, 4, 3) - made.means_CD[states]
    # 12000 numbers and more: the deviation of a mean is 0.009, of a product's mean as well
    for t in range(4):
        assert abs(float(noise[:, t].mean())) < 0.046 and abs(float(noise[:, t].var()) - 1) < 0.065
    for lag in (1, 2, 3):
        correlation = float((noise[:, lag:] * noise[:, :-lag]).mean())
        assert abs(correlation - CORRELATION**lag) < 0.055
    torch.testing.assert_close(made.prior_C @ made.means_CD, torch.zeros(3, dtype=torch.float64))


def brute_force(made: Source, frames: torch.Tensor) -> torch.Tensor:
    """The posterior of the middle state by the sum over all sequences of states, for one sample."""
    classes, length = len(made.prior_C), len(frames)
    latent = frames @ torch.linalg.pinv(made.mixing_DF)
    total = torch.zeros(classes, dtype=torch.float64)
    for chosen in itertools.product(range(classes), repeat=length):
        states = torch.tensor(chosen)
        weight = float(made.prior_C[states[0]])
        noise = latent - made.means_CD[states]
        exponent = -0.5 * float(noise[0].square().sum())
        for t in range(1, length):
            weight *= STAY * float(states[t] == states[t - 1]) + (1 - STAY) * float(made.prior_C[states[t]])
            innovation = (noise[t] - CORRELATION * noise[t - 1]) / math.sqrt(1 - CORRELATION**2)
            exponent -= 0.5 * float(innovation.square().sum())
        total[states[length // 2]] += weight * math.exp(exponent)
    return total / total.sum()


@pytest.mark.parametrize(("num_frames", "num_features"), [(1, 2), (2, 3), (5, 2), (4, 12)])
def test_the_posterior_is_the_sum_over_all_sequences(num_frames: int, num_features: int) -> None:
    made, generator = source(3, num_features)
    frames, _ = made.sample(3, num_frames, generator)
    found = log_posterior(made, frames).exp()
    for one, row in zip(frames, found, strict=True):
        torch.testing.assert_close(row, brute_force(made, one), rtol=1e-9, atol=1e-12)


def test_the_posterior_knows_how_often_it_is_wrong_and_context_helps() -> None:
    made, generator = source(8, 12)
    frames, states = made.sample(1500, 7, generator)
    labels = states[:, 3]

    def error(logs: torch.Tensor) -> float:
        highest, choice = logs.exp().max(dim=1)
        wrong = (choice != labels).double()
        deviation = float((highest * (1 - highest)).sum().sqrt()) / len(labels)
        assert abs(float(wrong.mean()) - float((1 - highest).mean())) < 4 * deviation
        return float(wrong.mean())

    whole, alone = error(log_posterior(made, frames)), error(log_posterior(made, frames[:, 3:4]))
    majority = float((labels != 0).double().mean())
    assert 0.05 < whole < alone - 0.05 < majority - 0.1


def test_a_small_lstm_learns_more_than_frequencies_and_less_than_everything() -> None:
    shape = {"num_classes": 8, "num_frames": 7, "num_features": 12, "seed": 0}
    built = load_dataset("synthetic_speech", **shape, num_samples=5000)
    torch.manual_seed(0)
    model = MODELS.build("speech_lstm", input_shape=(7, 12), num_classes=8, depth=1, width=16, bottleneck=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(150):
        inputs, labels = built.train.batch(torch.arange(64) + 64 * step % (len(built.train) - 64))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    assert built.test is not None
    inputs, labels = built.test.batch(torch.arange(1000))
    with torch.no_grad():
        error = float((model(inputs).argmax(dim=1) != labels).double().mean())
    posterior = log_posterior(source(8, 12)[0], inputs)
    best = float((posterior.argmax(dim=1) != labels).double().mean())
    majority = float((labels != 0).double().mean())
    assert best < error < majority - 0.2, (best, error, majority)


def test_the_seed_decides_and_the_global_generator_rests() -> None:
    state = torch.get_rng_state()
    one, same, other = (speech.load(4, seed, num_frames=3, num_features=5, num_samples=20) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.train.inputs, same.train.inputs) and torch.equal(one.train.labels, same.train.labels)
    assert not torch.equal(one.train.inputs, other.train.inputs)


@pytest.mark.parametrize(
    ("option", "least"),
    [("num_classes", 2), ("num_frames", 1), ("num_features", 1), ("num_samples", 5), ("seed", 0)],
)
def test_impossible_arguments(option: str, least: int) -> None:
    with pytest.raises(ValueError, match=f"synthetic_speech: {option} is {least - 1}: it must be at least {least}"):
        load_dataset("synthetic_speech", **{option: least - 1})


def log_posterior(source: Source, inputs: Tensor) -> Tensor:
    """Log probabilities float64 ``[N, C]`` of the middle frame's state, given all frames ``[N, frames, F]``.

    Exact, by the forward-backward recursion: the largest one is the Bayes classifier. Takes memory for N C^2
    numbers.
    """
    latent = inputs.double() @ torch.linalg.pinv(source.mixing_DF)
    middle = latent.shape[1] // 2
    forward = source.prior_C.log() - 0.5 * _squares(latent[:, 0, None] - source.means_CD)
    for t in range(1, middle + 1):
        forward = torch.logsumexp(forward[:, :, None] + _log_step(source, latent, t), dim=1)
    backward = torch.zeros_like(forward)
    for t in range(latent.shape[1] - 1, middle, -1):
        backward = torch.logsumexp(_log_step(source, latent, t) + backward[:, None, :], dim=2)
    return torch.log_softmax(forward + backward, dim=1)


def _log_step(source: Source, latent: Tensor, t: int) -> Tensor:
    """Log density of state j and frame t, given state i and frame t - 1: ``[N, C, C]``, up to a constant."""
    move = (1 - STAY) * source.prior_C.expand(len(source.prior_C), -1) + STAY * torch.eye(
        len(source.prior_C), dtype=torch.float32, device="cpu"
    )
    before = CORRELATION * (latent[:, t - 1, None] - source.means_CD)
    now = latent[:, t, None] - source.means_CD
    return move.log() - _squares(now[:, None, :] - before[:, :, None]) / (2 * (1 - CORRELATION**2))


def _squares(vectors: Tensor) -> Tensor:
    return vectors.square().sum(dim=-1)
