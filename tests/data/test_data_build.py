"""Data sets by name, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ddpcore.data import DATASETS, load_dataset
from ddpcore.models import MODELS
from helpers.models import small


def test_synthetic_passes_everything_on() -> None:
    built = load_dataset("synthetic", input_shape=(1, 28, 28), num_classes=10, seed=3)
    assert (built.input_shape, built.num_classes, len(built.train)) == ((1, 28, 28), 10, 1000)
    assert not torch.equal(built.train.labels, load_dataset("synthetic", num_classes=10, seed=4).train.labels)
    assert load_dataset("synthetic").input_shape == (10,)


@pytest.mark.parametrize("name", [name for name in MODELS.names() if not MODELS.spec(name).tokens])
def test_synthetic_serves_every_model(name: str) -> None:
    spec = MODELS.spec(name)
    built = load_dataset("synthetic", input_shape=spec.input_shapes[0], num_classes=spec.num_classes)
    inputs, labels = built.train.batch(torch.arange(4))
    model = small(name, input_shape=built.input_shape, num_classes=built.num_classes)
    assert torch.nn.functional.cross_entropy(model(inputs), labels).isfinite()


def test_refusals() -> None:
    synthetic = ("synthetic", "synthetic_speech", "saddle")
    assert DATASETS.names() == ("digits", "python_text", *synthetic, "features", "mnist", "cifar10", "cifar100")
    for ask in (load_dataset, DATASETS.options):
        with pytest.raises(
            ValueError, match="unknown data set 'imagenet': choose from digits, python_text, synthetic, syn"
        ):
            ask("imagenet")
    with pytest.raises(ValueError, match=r"set data_dir \(--data-dir\)"):
        load_dataset("mnist")
    for option, value in (("input_shape", (10,)), ("num_classes", 2)):
        with pytest.raises(ValueError, match=f"data set mnist has no option '{option}': choose from max_bytes"):
            load_dataset("mnist", data_dir="anywhere", **{option: value})
    with pytest.raises(ValueError, match="anywhere/MNIST/raw"):
        load_dataset("mnist", data_dir="anywhere")


def test_an_option_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="data set synthetic: num_classes is 'ten': it must be a whole number"):
        load_dataset("synthetic", num_classes="ten")
    with pytest.raises(ValueError, match="data set saddle: dimension is 'ten'"):
        load_dataset("saddle", dimension="ten")


def test_options_of_each_data_set() -> None:
    assert DATASETS.options("mnist") == {"max_bytes": 64 * 2**20}
    assert DATASETS.options("synthetic") == {"input_shape": (10,), "num_classes": 2}
    assert DATASETS.options("features") == {"num_classes": None, "max_bytes": 4 * 2**30}
    speech = {"num_classes": 32, "num_frames": 21, "num_features": 40, "num_samples": 10_000}
    assert DATASETS.options("synthetic_speech") == speech
    assert DATASETS.hints("mnist") == {"max_bytes": int}
    assert DATASETS.hints("synthetic") == {"input_shape": tuple[int, ...], "num_classes": int}
    assert DATASETS.hints("features") == {"num_classes": int | None, "max_bytes": int}
    assert DATASETS.hints("saddle") == {"dimension": int, "num_samples": int, "slope": float, "coupling": float}
    with pytest.raises(ValueError, match="data set mnist has no option 'num_frames': choose from max_bytes"):
        load_dataset("mnist", data_dir="anywhere", num_frames=3)
    with pytest.raises(ValueError, match="synthetic_speech has no option 'input_shape': did you mean 'num_samples'"):
        load_dataset("synthetic_speech", input_shape=(3, 4))
    for name in ("synthetic", "synthetic_speech", "saddle"):
        for option in ("normalize", "augment"):
            with pytest.raises(
                ValueError, match=f"{name} does not say how to {option} its samples: leave {option} out"
            ):
                load_dataset(name, **{option: True})
