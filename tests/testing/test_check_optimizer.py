"""``check_optimizer`` passes what is right and names what is wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from ddpcore.testing import check_optimizer
from helpers import own_parts


@pytest.mark.parametrize(
    "factory",
    [
        partial(FusedSGD, lr=0.1, momentum=0.9, weight_decay=0.01),
        partial(FusedAdamW, lr=0.01, weight_decay=0.1),
        partial(FusedLARS, lr=0.5, momentum=0.9),
        partial(FusedLAMB, lr=0.01, weight_decay=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        partial(torch.optim.AdamW, lr=0.01),
        own_parts.SignSGD,
    ],
    ids=["sgd", "fused_adamw", "lars", "lamb", "torch_sgd", "adamw", "own"],
)
def test_right_ones_pass(factory: Any) -> None:
    check_optimizer(factory)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (own_parts.WithoutLoss, r"WithoutLoss: step\(closure\) returned None, the loss is"),
        (own_parts.HiddenState, "HiddenState: a run resumed after step 1 ends with other weights"),
        (own_parts.NormOfAll, "NormOfAll: virtual learner 0 of 3 that never average differs from a plain loop by"),
        (partial(own_parts.SignSGD, lr=0.0), "SignSGD: 6 steps changed nothing"),
    ],
)
def test_what_is_wrong_is_named(factory: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says) as caught:
        check_optimizer(factory)
    assert "\n" not in str(caught.value)
