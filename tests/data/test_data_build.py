"""Data sets by name, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ddpcore import data, models
from helpers.models import small


def test_synthetic_passes_everything_on() -> None:
    built = data.build("synthetic", input_shape=(1, 28, 28), num_classes=10, seed=3)
    assert (built.input_shape, built.num_classes, len(built.train)) == ((1, 28, 28), 10, 1000)
    assert not torch.equal(built.train.labels, data.build("synthetic", num_classes=10, seed=4).train.labels)
    assert data.build("synthetic").input_shape == (10,)


@pytest.mark.parametrize("name", models.names())
def test_synthetic_serves_every_model(name: str) -> None:
    spec = models.spec(name)
    built = data.build("synthetic", input_shape=spec.input_shapes[0], num_classes=spec.num_classes)
    inputs, labels = built.train.batch(torch.arange(4))
    model = small(name, input_shape=built.input_shape, num_classes=built.num_classes)
    assert torch.nn.functional.cross_entropy(model(inputs), labels).isfinite()


def test_refusals() -> None:
    assert data.names() == ("synthetic", "synthetic_speech", "saddle", "features", "mnist", "cifar10", "cifar100")
    for ask in (data.build, data.options):
        with pytest.raises(
            ValueError, match="unknown data set 'imagenet': choose one of synthetic, synthetic_speech, sa"
        ):
            ask("imagenet")
    with pytest.raises(ValueError, match=r"set data_dir \(--data-dir\)"):
        data.build("mnist")
    with pytest.raises(ValueError, match=r"mnist is \[1, 28, 28\] a sample, not \[10\]"):
        data.build("mnist", data_dir="anywhere", input_shape=(10,))
    with pytest.raises(ValueError, match="mnist has 10 classes, not 2"):
        data.build("mnist", data_dir="anywhere", num_classes=2)
    with pytest.raises(ValueError, match="anywhere/MNIST/raw"):
        data.build("mnist", data_dir="anywhere", input_shape=(1, 28, 28), num_classes=10)


def test_an_option_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="data set 'synthetic': '>=' not supported between"):
        data.build("synthetic", num_classes="ten")
    with pytest.raises(ValueError, match="data set 'saddle': "):
        data.build("saddle", dimension="ten")


def test_options_of_each_data_set() -> None:
    assert data.options("mnist") == {}
    assert data.options("synthetic") == {"input_shape": (10,), "num_classes": 2}
    assert data.options("features") == {"num_classes": None}
    speech = {"num_classes": 32, "num_frames": 21, "num_features": 40, "num_samples": 10_000}
    assert data.options("synthetic_speech") == speech
    assert data.option_types("mnist") == {}
    assert data.option_types("synthetic") == {"input_shape": tuple[int, ...], "num_classes": int}
    assert data.option_types("features") == {"num_classes": int | None}
    assert data.option_types("saddle") == {"dimension": int, "num_samples": int, "slope": float, "coupling": float}
    with pytest.raises(ValueError, match="data set 'mnist' has no option 'num_frames': it has none"):
        data.build("mnist", data_dir="anywhere", num_frames=3)
    with pytest.raises(
        ValueError, match="'synthetic_speech' has no option 'input_shape': choose from num_classes, num_fr"
    ):
        data.build("synthetic_speech", input_shape=(3, 4))
    for name in ("synthetic", "synthetic_speech", "saddle", "features"):
        for option in ("normalize", "augment"):
            with pytest.raises(ValueError, match=f"{name} samples are no images: leave normalize and augment out"):
                data.build(name, data_dir="anywhere", **{option: True})
