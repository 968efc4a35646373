"""Models that each learner prunes by itself: what their average computes, and the masks that learners keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import ddpcore
from ddpcore import ADPSGD, DPSGD, LocalSGD, Policies, Ring
from ddpcore.distributed.saved import load_run_state, run_state

STRATEGIES = {
    "dpsgd": lambda: DPSGD(Ring()),
    "weighted": lambda: LocalSGD(100, weights=(1.0, 2.0, 3.0, 6.0)),
    "adpsgd": lambda: ADPSGD(Ring()),
}


def started(strategy: Any, learners: int = 4, **options: Any) -> tuple[Any, Any]:
    model = nn.Sequential(prune.identity(nn.Linear(8, 4), "weight"), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, ddpcore.distribute(model, optimizer, strategy, learners=learners, **options)


def train(optimizer: Any, handle: Any, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = handle.model(torch.randn(len(handle.models), 4, 8))
        (outputs - torch.randn_like(outputs)).square().sum().backward()
        optimizer.step()


def pruned(strategy: Any, names: Any = ("weight", "bias"), **options: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    """Learners that differ, each pruned by the size of its own weights; and their masks."""
    optimizer, handle = started(strategy, **options)
    train(optimizer, handle)
    for one in handle.models:
        for name in names:  # the weight has a mask from the start
            prune.l1_unstructured(one[0], name, amount=0.5)
    masks = [one[0].weight_mask.clone() for one in handle.models]
    assert not torch.equal(masks[0], masks[1])
    train(optimizer, handle)
    return optimizer, handle, masks


@pytest.mark.parametrize("batch_norm", ["average", "local"])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_the_average_is_that_of_what_learners_compute_with(strategy: Any, batch_norm: str) -> None:
    """A mean of masks kept a quarter of the mean of weights, where one learner of four kept its own."""
    _, handle, masks = pruned(made := strategy())
    rows = handle.learner.weights()
    weights = torch.stack([view for view in handle.learner.flat.views_of(rows) if view.shape == (4, 8)])
    shares = torch.tensor(made.traits.weights if isinstance(made.traits.weights, tuple) else (1.0,) * 4)
    expected = torch.einsum("l,lij->ij", shares / shares.sum(), weights * torch.stack(masks))
    result = handle.evaluation_model(batch_norm=batch_norm)
    layer: Any = result[0]
    torch.testing.assert_close(layer.weight_orig * layer.weight_mask, expected)
    assert torch.equal(layer.weight_mask, torch.stack(masks).amax(0))
    inputs = torch.randn(3, 8)
    torch.testing.assert_close(layer(inputs), inputs @ expected.T + layer.bias)
    assert all(torch.equal(one[0].weight_mask, mask) for one, mask in zip(handle.models, masks, strict=True))


def test_equal_masks_stay_as_they_are() -> None:
    optimizer, handle = started(DPSGD(Ring()))
    mask = torch.rand(4, 8)  # torch takes any numbers
    for one in handle.models:
        one[0].weight_mask.copy_(mask)
    train(optimizer, handle)
    layer: Any = handle.evaluation_model()[0]
    assert torch.equal(layer.weight_mask, mask)
    originals = torch.stack([one[0].weight_orig.detach() for one in handle.models])
    torch.testing.assert_close(layer.weight_orig.detach(), originals.mean(0))


@pytest.mark.parametrize("policy", ["average", "gossip", "reset"])
def test_policies_leave_masks_to_their_learners(policy: str) -> None:
    _, handle, masks = pruned(DPSGD(Ring()), policies=Policies(batch_norm=policy))
    assert all(torch.equal(one[0].weight_mask, mask) for one, mask in zip(handle.models, masks, strict=True))


@pytest.mark.parametrize("batch_norm", ["average", "local"])
def test_a_pruned_learner_beside_others_has_no_average(batch_norm: str) -> None:
    _, handle = started(DPSGD(Ring()))
    prune.l1_unstructured(handle.models[1][0], "bias", amount=0.5)
    with pytest.raises(RuntimeError, match="buffers differ in names, sizes or dtypes between learners"):
        handle.evaluation_model(batch_norm=batch_norm)


def test_another_number_of_learners_takes_no_mean_of_masks() -> None:
    """A mean of masks is no mask, so a state of learners with different ones needs ``weights="nearest"``."""
    _, handle, masks = pruned(DPSGD(Ring()), ["weight"])
    saved = run_state(handle)
    _, other = started(DPSGD(Ring()), learners=2)
    with pytest.raises(ValueError, match=r"0.weight_mask .* differs between learners: .*weights='nearest'"):
        load_run_state(other, [saved])
    load_run_state(other, [saved], weights="nearest")
    assert all(torch.equal(one[0].weight_mask, mask) for one, mask in zip(other.models, masks[::2], strict=True))
