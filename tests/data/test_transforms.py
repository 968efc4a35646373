"""Crops, flips and normalization of whole batches: what they do, and that only (seed, epoch, sample) decides it."""

from __future__ import annotations

import pytest
import torch

from ddpcore.data import SAMPLERS, Augmentation, Normalization, ShardedBatches, Split
from ddpcore.data.transforms import _stream, random_bits

NORM = Normalization((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def images(num_samples: int, height: int = 12, width: int = 9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_samples)
    return torch.randint(1, 256, (num_samples, 3, height, width), generator=generator).to(torch.uint8)


def split(num_samples: int = 64, seed: int = 5) -> Split:
    return Split(images(num_samples), torch.arange(num_samples) % 10, NORM, Augmentation(seed=seed))


def crops_of(image: torch.Tensor, padding: int) -> dict[tuple[int, int, bool], torch.Tensor]:
    """Every crop and flip of [C, H, W], the plain way."""
    _, height, width = image.shape
    padded = torch.zeros(image.shape[0], height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    padded[:, padding : padding + height, padding : padding + width] = image
    every = {}
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[:, top : top + height, left : left + width]
            every[top, left, False] = crop
            mirrored = padded.flip(2)[:, top : top + height, left : left + width]
            every[top, left, True] = mirrored
    return every


def places(augmentation: Augmentation, epochs: range, num_samples: int = 30) -> list[tuple[int, int, bool]]:
    """Which crop and flip each sample got, epoch by epoch: exactly one fits, as the pixels are random."""
    pixels = images(num_samples, 7, 6)
    found = []
    every = [crops_of(image, augmentation.padding) for image in pixels]
    for epoch in epochs:
        for out, crops in zip(augmentation(pixels, torch.arange(num_samples), epoch), every, strict=True):
            fitting = [place for place, crop in crops.items() if torch.equal(out, crop)]
            assert len(fitting) == 1
            found += fitting
    return found


def test_every_output_is_a_crop_of_the_padded_image_or_of_its_mirror_image() -> None:
    found = places(Augmentation(padding=2), range(40))
    tops, lefts, flips = zip(*found, strict=True)
    assert set(tops) == set(lefts) == set(range(5)) and set(flips) == {False, True}
    assert len(set(found)) == 50, "all of them turn up"
    # 1200 draws: each of 50 places 24 times, deviation 4.9; flips 600, deviation 17
    assert all(4 < found.count(place) < 49 for place in set(found))
    assert 500 < sum(flips) < 700


def test_no_padding_and_no_flip_change_nothing() -> None:
    pixels = images(8)
    assert torch.equal(Augmentation(padding=0, flip=False)(pixels, torch.arange(8), 3), pixels)
    assert not any(flip for _, _, flip in places(Augmentation(padding=1, flip=False), range(3)))
    either = Augmentation(padding=0)(pixels, torch.arange(8), 0)
    assert all(torch.equal(e, p) or torch.equal(e, p.flip(-1)) for e, p in zip(either, pixels, strict=True))
    assert not torch.equal(either, pixels)


def test_epoch_seed_and_sample_each_decide() -> None:
    pixels = images(1).expand(64, -1, -1, -1)
    samples = torch.arange(64)
    one = Augmentation(seed=1)(pixels, samples, 0)
    assert torch.equal(one, Augmentation(seed=1)(pixels, samples, 0))
    assert not torch.equal(one, Augmentation(seed=2)(pixels, samples, 0))
    assert not torch.equal(one, Augmentation(seed=1)(pixels, samples, 1))
    assert not torch.equal(one, Augmentation(seed=1)(pixels, samples + 64, 0))
    assert len(one.flatten(1).unique(dim=0)) > 32, "samples of a batch differ from each other"
    backwards = Augmentation(seed=1)(pixels, samples.flip(0), 0)
    assert torch.equal(backwards.flip(0), one), "the place in the batch does not matter"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sample_looks_the_same_for_any_number_of_learners_and_after_a_restart(sampler: str) -> None:
    """World 1, 2 and 4, stacked and one by one: each sample of an epoch has the same bits everywhere."""
    data = split()
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for learners in (1, 2, 4):
        batches = ShardedBatches(64, 16, learners, seed=9, sampler=sampler)
        for step in (6, 1, 7, 0, 5, 4, 2, 3):  # any order: nothing is carried from step to step
            indices, epoch = batches.indices(step), batches.epoch(step)
            stacked, labels = data.batch(indices, epoch)
            assert stacked.shape == (learners, 16 // learners, 3, 12, 9)
            assert torch.equal(labels, data.labels[indices])
            for learner in range(learners):
                alone, _ = data.batch(indices[learner], epoch)
                assert torch.equal(alone, stacked[learner])
            for sample, pixels in zip(indices.flatten().tolist(), stacked.flatten(0, 1), strict=True):
                assert torch.equal(seen.setdefault((epoch, sample), pixels), pixels)
    assert len(seen) == 128


def test_global_batches_are_bitwise_equal_for_worlds_1_2_and_4() -> None:
    data = split()
    for step in range(8):
        whole = data.batch(ShardedBatches(64, 16, 1).indices(step), step // 4)[0].flatten(0, 1)
        for learners in (2, 4):
            shards = data.batch(ShardedBatches(64, 16, learners).indices(step), step // 4)[0]
            assert torch.equal(shards.flatten(0, 1), whole)


def test_augmentation_leaves_the_stored_images_and_the_global_generator_alone() -> None:
    data = split()
    before, state = data.inputs.clone(), torch.get_rng_state()
    data.batch(torch.arange(64), 2)[0].zero_()
    assert data.inputs.dtype == torch.uint8 and torch.equal(data.inputs, before)
    assert torch.equal(torch.get_rng_state(), state)


def splitmix64(state: int) -> int:
    """The output function of SplitMix64 in Python's own integers."""
    mask = 2**64 - 1
    state &= mask
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    return state ^ (state >> 31)


def test_random_bits_are_splitmix64() -> None:
    # Published outputs for state 0: https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64 for 1234567.
    assert [splitmix64(1234567 + i * 0x9E3779B97F4A7C15) for i in (1, 2)] == [6457827717110365317, 3203168211198807973]
    samples = torch.tensor([[0, 1, 2], [50_000, 2**31, 2**62]])
    for seed, epoch in [(0, 0), (3, 1), (2**61, 300)]:
        start = _stream(seed, epoch)
        expected = [splitmix64(start + i * 0x9E3779B97F4A7C15) % 2**63 for i in samples.flatten().tolist()]
        assert random_bits(seed, epoch, samples).flatten().tolist() == expected
    starts = {_stream(seed, epoch) for seed in range(8) for epoch in range(8)}
    assert len(starts) == 64 and min(starts) < 0 < max(starts)


def test_normalization_by_hand() -> None:
    pixels = images(50, 8, 8)
    found = NORM(pixels)
    assert found.dtype == torch.float32
    expected = (pixels.double() / 255 - torch.tensor(NORM.mean).view(3, 1, 1)) / torch.tensor(NORM.std).view(3, 1, 1)
    # values within +-3 are rounded at most three times in float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3 * 3 * 2**-24)


def test_impossible_arguments() -> None:
    with pytest.raises(ValueError, match="2 means and 1 stds"):
        Normalization((0.1, 0.2), (1.0,))
    with pytest.raises(ValueError, match="0 means"):
        Normalization((), ())
    with pytest.raises(ValueError, match=r"a std is 0.0"):
        Normalization((0.1,), (0.0,))
    with pytest.raises(ValueError, match="padding is -1"):
        Augmentation(padding=-1)
    with pytest.raises(ValueError, match="seed is -2"):
        Augmentation(seed=-2)
