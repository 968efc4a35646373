"""The parameter lists, compared with known numbers of parameters."""

from __future__ import annotations

import pytest
from implementations import LISTS, describe


@pytest.mark.parametrize(
    ("name", "parameters", "num_tensors"),
    [
        ("lenet5", 69_656, 10),
        ("resnet18", 11_689_512, 62),
        ("resnet50", 25_557_032, 161),
        ("vit-s", 22_050_664, 152),
        ("bert-base", 109_482_240, 199),
        ("bert-large", 335_141_888, 391),
    ],
)
def test_sizes(name: str, parameters: int, num_tensors: int) -> None:
    """The numbers of torchvision's ResNets, timm's vit_small_patch16_224 and transformers' BertModel (uncased)."""
    found = describe(name)
    assert (found["parameters"], found["num_tensors"]) == (parameters, num_tensors)


def test_lenet5_is_spelled_out() -> None:
    assert LISTS["lenet5"][1] == [
        (6, 3, 5, 5), (6,), (16, 6, 5, 5), (16,), (120, 400), (120,), (84, 120), (84,), (100, 84), (100,)
    ]  # fmt: skip


def test_parts_of_the_larger_ones() -> None:
    resnet, bert = LISTS["resnet18"][1], LISTS["bert-base"][1]
    assert sum(len(shape) == 4 for shape in resnet) == 20
    assert [shape for shape in resnet if shape[2:] == (1, 1)] == [(128, 64, 1, 1), (256, 128, 1, 1), (512, 256, 1, 1)]
    assert bert[:3] == [(30522, 768), (512, 768), (2, 768)]
    assert bert.count((3072, 768)) == bert.count((768, 3072)) == 12
    assert bert.count((768, 768)) == 12 * 4 + 1


def test_every_list_has_a_title() -> None:
    assert [title for title, _ in LISTS.values()] == [
        "LeNet-5", "ResNet-18", "ResNet-50", "ViT-S", "BERT-base", "BERT-large",
    ]  # fmt: skip
