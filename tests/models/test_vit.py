"""The vision transformer: patches, attention by its formula, what is dropped, and the parameter count by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ddpcore.models.transformers import DropPath, PatchEmbedding, SelfAttention, ViT


def count_by_hand(channels: int, side: int, patch: int, width: int, depth: int, mlp: int, num_classes: int) -> int:
    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    tokens = (side // patch) ** 2 + 1
    embedding = linear(channels * patch**2, width) + width + tokens * width
    block = 2 * 2 * width + linear(width, 3 * width) + linear(width, width) + linear(width, mlp) + linear(mlp, width)
    return embedding + depth * block + 2 * width + linear(width, num_classes)


def test_parameter_counts() -> None:
    def count(model: ViT) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    assert count(ViT((3, 32, 32), 10)) == count_by_hand(3, 32, 4, 128, 6, 256, 10) == 811146
    other = ViT((1, 28, 28), 7, patch_size=7, width=24, depth=2, num_heads=3, mlp_width=40)
    assert count(other) == count_by_hand(1, 28, 7, 24, 2, 40, 7)


def test_patches_are_squares_of_the_image_in_reading_order() -> None:
    embed = PatchEmbedding(channels=3, patch_size=2, num_patches=6, width=5, dropout=0.0)
    images = torch.randn(2, 3, 4, 6)
    tokens = embed(images)
    assert tokens.shape == (2, 7, 5)
    for token in range(6):
        row, column = divmod(token, 3)
        patch = images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten(1)
        expected = embed.project(patch) + embed.positions[0, 1 + token]
        torch.testing.assert_close(tokens[:, 1 + token], expected)
    expected = embed.class_token[0, 0] + embed.positions[0, 0]
    assert torch.equal(tokens[0, 0], expected) and torch.equal(tokens[1, 0], expected)


def test_attention_by_its_formula() -> None:
    attention = SelfAttention(width=6, num_heads=2)
    tokens = torch.randn(2, 4, 6)
    query, key, value = attention.query_key_value(tokens).split(6, dim=-1)
    heads = []
    for head in (slice(0, 3), slice(3, 6)):
        weights = (query[..., head] @ key[..., head].transpose(1, 2) / math.sqrt(3)).softmax(dim=-1)
        heads.append(weights @ value[..., head])
    torch.testing.assert_close(attention(tokens), attention.project(torch.cat(heads, dim=-1)))


def test_only_the_class_token_gives_the_logits_and_it_sees_every_patch() -> None:
    model = ViT((3, 32, 32), 10, depth=1).eval()
    images = torch.randn(1, 3, 32, 32)
    logits = model(images)
    for corner in ((0, 0), (0, 31), (31, 0), (31, 31)):
        changed = images.clone()
        changed[0, 0, corner[0], corner[1]] += 10
        assert not torch.allclose(model(changed), logits)
    tokens = model.blocks(model.embed(images))
    torch.testing.assert_close(logits, model.head(model.norm(tokens[:, 0])))


def test_drop_path_keeps_the_expectation_and_rests_in_evaluation() -> None:
    torch.manual_seed(0)
    drop = DropPath(0.25)
    branch = torch.randn(4000, 3, 2)
    out = drop(branch)
    kept = (out != 0).flatten(1).any(dim=1)
    torch.testing.assert_close(out[kept], branch[kept] / 0.75)
    assert (out[~kept] == 0).all()
    assert abs(float(kept.float().mean()) - 0.75) < 0.035  # deviation 0.007
    assert torch.equal(drop.eval()(branch), branch)
    assert torch.equal(DropPath(0.0)(branch), branch)


def test_drop_path_grows_with_depth() -> None:
    shares = [block.drop_path.share for block in ViT((3, 32, 32), 10, depth=5, stochastic_depth=0.2).blocks]
    assert shares == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert ViT((3, 32, 32), 10, depth=1, stochastic_depth=0.2).blocks[0].drop_path.share == 0


def test_dropout_rests_in_evaluation() -> None:
    model = ViT((3, 32, 32), 10, dropout=0.5, stochastic_depth=0.5, depth=2)
    images = torch.randn(4, 3, 32, 32)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 5}, "patch_size is 5, it must divide the image of 32x32"),
        ({"num_heads": 3}, "width is 128, it must be a multiple of num_heads, 3"),
        ({"depth": 0}, "must be at least 1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"stochastic_depth": -0.1}, "stochastic_depth is -0.1"),
    ],
)
def test_impossible_sizes(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViT((3, 32, 32), 10, **options)
