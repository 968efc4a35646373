"""The byte transformer: causal, by its formula, with a parameter count by hand; other samples are refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ddpcore.data import load_dataset
from ddpcore.models import MODELS
from ddpcore.models.transformers import ByteTransformer, SelfAttention
from ddpcore.optim import param_groups
from ddpcore.training import TrainConfig
from ddpcore.training.build import check_parts


def test_parameter_count() -> None:
    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    block = 2 * 2 * 64 + linear(64, 3 * 64) + linear(64, 64) + linear(64, 256) + linear(256, 64)
    by_hand = (256 + 64) * 64 + 2 * block + 2 * 64 + linear(64, 256)
    assert sum(parameter.numel() for parameter in ByteTransformer((64,), 256).parameters()) == by_hand == 137216


def test_causal_attention_by_its_formula() -> None:
    attention = SelfAttention(width=6, num_heads=2, causal=True)
    tokens = torch.randn(2, 4, 6)
    query, key, value = attention.query_key_value(tokens).split(6, dim=-1)
    later, heads = torch.ones(4, 4).triu(1).bool(), []
    for head in (slice(0, 3), slice(3, 6)):
        weights = query[..., head] @ key[..., head].transpose(1, 2) / math.sqrt(3)
        heads.append(weights.masked_fill(later, -math.inf).softmax(dim=-1) @ value[..., head])
    torch.testing.assert_close(attention(tokens), attention.project(torch.cat(heads, dim=-1)))


def test_a_place_sees_what_is_before_it_and_itself() -> None:
    model = ByteTransformer((8,), 10)
    inputs = torch.arange(8)[None]
    logits = model(inputs)
    assert logits.shape == (1, 10, 8)
    for place in range(8):
        changed = inputs.clone()
        changed[0, place] = 9
        differs = (model(changed) - logits).abs().amax(dim=1)[0] > 1e-6
        assert differs.tolist() == [place <= other for other in range(8)]
    torch.testing.assert_close(model(inputs[:, :3]), logits[..., :3])  # a shorter text


@pytest.mark.parametrize("context", [1, 4])
def test_a_longer_text_than_the_context_is_refused(context: int) -> None:
    model = ByteTransformer((context,), 10)
    assert model(torch.zeros(2, context, dtype=torch.int64)).shape == (2, 10, context)
    with pytest.raises(ValueError, match=f"^byte_transformer: inputs have 5 places and the context is {context}: take"):
        model(torch.zeros(2, 5, dtype=torch.int64))


def test_muon_steps_neither_embeddings_nor_the_head() -> None:
    found = param_groups(ByteTransformer((64,), 256), 0.1, rule="muon")[:2]
    groups = {group["rule"]: dict(group["params"]) for group in found}
    assert groups["adamw"].keys() == {"embed.weight", "positions.weight", "head.weight"}
    assert len(groups["muon"]) == 2 * 4, "attention has two weights, and the linear layers of a block are two"


def test_how_it_starts() -> None:
    torch.manual_seed(0)
    model = ByteTransformer((64,), 256, width=128)
    for weight in (model.embed.weight, model.positions.weight):
        assert 0.019 < weight.std().item() < 0.021 and abs(weight.mean().item()) < 0.001
    assert 0.9 / 11.3 < model.head.weight.max().item() < 1 / 11.3, "uniform up to 1 / sqrt(128), as linear layers are"


def test_equal_bytes_differ_by_their_position() -> None:
    logits = ByteTransformer((8,), 10)(torch.full((1, 8), 3))
    assert (logits[..., 1:] != logits[..., :-1]).any(dim=1).all()


def test_it_learns_to_repeat() -> None:
    """The label is the byte before: one head that looks back by one place solves it."""
    torch.manual_seed(0)
    model = ByteTransformer((8,), 8, width=16, depth=1, num_heads=2, mlp_width=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(200):
        inputs = torch.randint(8, (32, 8))
        loss = F.cross_entropy(model(inputs)[..., 1:], inputs[:, :-1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5 < math.log(8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "width is 64, it must be a multiple of num_heads, 3"),
        ({"depth": 0}, "must be at least 1"),
    ],
)
def test_impossible_sizes(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ByteTransformer((64,), 256, **options)


@pytest.mark.parametrize(
    ("model", "dataset", "message"),
    [
        ("byte_transformer", "synthetic", r"takes tokens and does not fit images or floating samples of 64: models"),
        ("byte_transformer", "digits", r"takes tokens and does not fit .* 1x8x8: models that do: mlp"),
        ("mlp", "python_text", r"mlp takes images or .* fit tokens of 64: models that do: byte_transformer$"),
    ],
)
def test_samples_of_another_kind(model: str, dataset: str, message: str) -> None:
    config = TrainConfig.from_dict({"model": model, "data": {"name": dataset, "batch_size": 4}, "run": {"steps": 1}})
    spec = MODELS.spec(model)
    sizes = {"input_shape": spec.input_shapes[0], "num_classes": spec.num_classes} if dataset == "synthetic" else {}
    with pytest.raises(ValueError, match=message):
        check_parts(config, load_dataset(dataset, **sizes))
