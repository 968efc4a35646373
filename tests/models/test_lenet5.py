"""LeNet-5: LeCun's widths, normalization after each convolution, dropout after the first two linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.models.small import LeNet5


@pytest.mark.parametrize(
    ("input_shape", "num_classes", "num_parameters"),
    [((1, 28, 28), 10, 61750), ((3, 32, 32), 10, 62050), ((3, 32, 32), 100, 69700)],
)
def test_parameter_count(input_shape: tuple[int, ...], num_classes: int, num_parameters: int) -> None:
    model = LeNet5(input_shape, num_classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert model(torch.randn(2, *input_shape)).shape == (2, num_classes)


def test_widths() -> None:
    model = LeNet5((3, 32, 32), 100, widths=(32, 64, 256, 128))
    assert sum(parameter.numel() for parameter in model.parameters()) == 509540
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 100)
    for wrong in ((6, 16, 120), (6, 16, 0, 84)):
        with pytest.raises(ValueError, match="widths is"):
            LeNet5((1, 28, 28), 10, widths=wrong)


def test_order_of_the_layers() -> None:
    block = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d]
    dense = [nn.Linear, nn.ReLU, nn.Dropout]
    model = LeNet5((1, 28, 28), 10)
    assert [type(layer) for layer in model.features] == block * 2
    assert [type(layer) for layer in model.classifier] == [nn.Flatten, *dense * 2, nn.Linear]


def test_small_images_are_padded_to_lecuns_size() -> None:
    model = LeNet5((1, 28, 28), 10).eval()
    padded = LeNet5((1, 32, 32), 10).eval()
    padded.load_state_dict(model.state_dict())
    images = torch.randn(2, 1, 28, 28)
    torch.testing.assert_close(model(images), padded(nn.functional.pad(images, (2, 2, 2, 2))))


def test_dropout_and_normalization_rest_in_evaluation() -> None:
    model = LeNet5((1, 28, 28), 10)
    images = torch.randn(4, 1, 28, 28)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))
    torch.testing.assert_close(model(images)[:1], model(images[:1]))
