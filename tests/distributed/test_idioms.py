"""Ordinary idioms of PyTorch around ``distribute``: the weights of the plain loop, or an error that names the cause."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch

from helpers import ranks
from helpers.idioms.run import STRATEGIES, execute
from helpers.idioms.table import IDIOMS

AWAITS_MODELS = (
    "a_layer_frozen_for_some_steps",
    "a_lazy_layer_after_a_first_pass",
    "accumulate_hook",
    "activation_checkpointing",
    "backward_hook",
    "backward_pre_hook",
    "between_steps",
    "clip_grad_norm",
    "custom_autograd_function",
    "frozen_layers",
    "gradients_centralized",
    "gradients_of_samples_set_as_gradients",
    "hook_of_the_accumulation_node",
    "hook_on_an_activation",
    "later",
    "model_a_scripted_layer",
    "model_attention",
    "model_bilinear",
    "model_embedding",
    "model_gru",
    "model_lstm",
    "model_old",
    "model_one_layer_twice_in_a_list",
    "model_orthogonal",
    "model_pruned",
    "model_rnn",
    "model_spectral_norm",
    "model_torch_compile",
    "model_transformer",
    "model_weight_norm",
    "optimizer_adafactor",
    "optimizer_adagrad",
    "optimizer_adam_fused",
    "optimizer_adamw_fused",
    "optimizer_sgd_fused",
    "parametrizations_cached",
    "tensor_hook_that",
    "two_models_in_turn",
    "weights_swapped_for_evaluation",
)
CASES = [
    pytest.param(name, strategy, world, id=f"{name}-{strategy}-{world}")
    for name, one in IDIOMS.items()
    for strategy in STRATEGIES
    for world in one.worlds
    if world == "ranks" or not name.startswith(AWAITS_MODELS)
]


@pytest.fixture(scope="module")
def seen() -> list[dict[Any, Any]]:
    return ranks.run("idiom_ranks", 2)


@pytest.mark.parametrize(("name", "strategy", "world"), CASES)
def test_idiom(name: str, strategy: str, world: str, seen: list[dict[Any, Any]]) -> None:
    one = IDIOMS[name]
    plain = [rank[name, strategy, "plain"] for rank in seen]
    if world == "ranks":
        results = [rank[name, strategy, world] for rank in seen]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = [execute(one, strategy, world)]
    message = one.message(strategy)
    if message is not None:
        for result in results:
            assert re.search(message, result.get("error", "no error")), result.get("error", "no error")
            assert len(result["error"]) < 300
        return
    for result in (*plain, *results):
        assert "error" not in result, result["error"]
    if world == "virtual":
        rows = [[stack[j] for stack in results[0]["weights"]] for j in range(2)]
        results = [{"weights": row, "mean": results[0]["mean"]} for row in rows]
    for result, expected in zip(results, plain, strict=True):
        for kind in ("weights", "mean"):
            assert len(result[kind]) == len(expected[kind])
            for ours, theirs in zip(result[kind], expected[kind], strict=True):
                size = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
                torch.testing.assert_close(ours, theirs, rtol=0, atol=size * 10.0**-one.digits, msg=f"{kind} of {name}")
