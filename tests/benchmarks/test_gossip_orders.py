"""The experiment of docs/gossip.md: who diverges, and how far apart the learners stay."""

from __future__ import annotations

import math

import gossip_orders
import numpy as np
import pytest

from ddpcore import Ring
from ddpcore.strategies.dpsgd import ORDERS


@pytest.mark.slow
def test_average_while_computing_diverges_where_the_others_do_not() -> None:
    lowest = np.linalg.eigvalsh(Ring().matrix(0, 16))[0]
    assert lowest == pytest.approx(-1 / 3)
    below, above = 1 + lowest - 0.05, 1 + lowest + 0.05
    for order in ORDERS:
        calm = gossip_orders.distances(order, 16, below, 200)
        assert calm["consensus"] == pytest.approx(calm["consensus_halfway"], rel=0.02)
        wild = gossip_orders.distances(order, 16, above, 200)
        grows = wild["consensus"] > 10 * wild["consensus_halfway"]
        assert grows == (order == "average_while_computing")
    assert math.isnan(gossip_orders.distances("average_while_computing", 16, 1.71, 200)["consensus"])
    for order in ORDERS[1:]:
        steady = gossip_orders.distances(order, 16, 1.71, 200)
        assert steady["mean_error"] < 1e-6
        assert steady["consensus"] == pytest.approx(steady["consensus_halfway"], rel=1e-3)
