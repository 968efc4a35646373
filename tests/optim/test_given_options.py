"""Options that a config gives, where biases and norms are a group of their own."""

import pytest
from torch import nn

from ddpcore.optim.registry import build_optimizer


@pytest.mark.parametrize("given", [True, False, None])
def test_always_adapt_of_the_options_counts_for_all_groups(given):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    options = {"weight_decay": 0.1} if given is None else {"weight_decay": 0.1, "always_adapt": given}
    optimizer = build_optimizer("lamb", model, lr=0.1, options=options, two_groups=True)
    found = [(group["weight_decay"], group["always_adapt"]) for group in optimizer.param_groups]
    assert found == [(0.1, given), (0.0, False if given is None else given)]
