"""Models by name: the defaults, the shapes they fit, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ddpcore.models import MODELS
from helpers.models import awake, idle, random_batch, small


@pytest.mark.parametrize("name", MODELS.names())
def test_every_model_takes_every_shape_it_names(name: str) -> None:
    spec = MODELS.spec(name)

    def check(model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor, num_classes: int) -> None:
        logits = model(inputs)
        assert logits.shape == (3, num_classes, *labels.shape[1:])
        assert torch.nn.functional.cross_entropy(logits, labels).isfinite()

    for shape in spec.input_shapes:
        MODELS.check_input(name, shape)
        for num_classes in (2, 7):
            batch = random_batch(spec, 3, input_shape=shape, num_classes=num_classes)
            check(small(name, input_shape=shape, num_classes=num_classes), *batch, num_classes)
    check(small(name), *random_batch(spec, 3), spec.num_classes)


@pytest.mark.parametrize("name", MODELS.names())
def test_the_seed_decides_the_weights_and_all_of_them_learn(name: str) -> None:
    def make(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return small(name)

    one, same, other = (torch.nn.utils.parameters_to_vector(make(seed).parameters()) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    model = awake(make(0))
    skipped = idle(model)
    model(random_batch(MODELS.spec(name), 8)[0]).square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter_name in skipped or parameter.grad.abs().sum() > 0, parameter_name


def test_a_shape_that_does_not_fit_names_the_models_that_do() -> None:
    with pytest.raises(
        ValueError, match=r"mlp takes samples of 1x28x28 or 784 .* fit 10: models that do: simplenet, saddle$"
    ):
        MODELS.build("mlp", input_shape=(10,))
    with pytest.raises(ValueError, match=r"models that do: mlp, lenet5, mnist_cnn, simple_cnn, resnet, resnet18, vit$"):
        MODELS.check_input("simplenet", (1, 28, 28))
    with pytest.raises(ValueError, match="does not fit 3x64x64: no model does"):
        MODELS.check_input("lenet5", (3, 64, 64))


def test_unknown_names_and_class_counts() -> None:
    for ask in (MODELS.build, MODELS.spec, lambda name: MODELS.check_input(name, (10,))):
        with pytest.raises(ValueError, match="unknown model 'vgg': did you mean 'vgg19'"):
            ask("vgg")
    with pytest.raises(ValueError, match="num_classes is 1"):
        MODELS.build("mlp", num_classes=1)


def test_options_reach_the_model() -> None:
    small = MODELS.build("resnet", blocks=(1,), widths=(8,))
    assert len(small.blocks) == 1
    assert MODELS.build("vit", depth=2, num_classes=3, input_shape=(1, 28, 28))(torch.randn(2, 1, 28, 28)).shape == (
        2,
        3,
    )
    assert MODELS.options("lenet5") == {"widths": (6, 16, 120, 84), "dropout": 0.5}
    assert MODELS.options("resnet18") == {}
    images = torch.randn(2, 1, 28, 28)
    undropped = MODELS.build("lenet5", dropout=0.0)
    assert torch.equal(undropped(images), undropped(images))


def test_unknown_and_impossible_options() -> None:
    with pytest.raises(ValueError, match=r"model vit has no option 'patchsize': did you mean 'patch_size'\?"):
        MODELS.build("vit", patchsize=4)
    with pytest.raises(ValueError, match="model resnet has no option 'x': choose from blocks, widths"):
        MODELS.build("resnet", x=4)
    with pytest.raises(ValueError, match="model simplenet has no option 'dropout': it takes none"):
        MODELS.build("simplenet", dropout=0.1)
    with pytest.raises(ValueError, match="model vit: patch_size is 5"):
        MODELS.build("vit", patch_size=5)
    with pytest.raises(ValueError, match=r"model lenet5: .*dropout"):
        MODELS.build("lenet5", dropout=2.0)
