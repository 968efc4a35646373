"""Checks of your own strategies, topologies and optimizers, for use in your tests."""

from ddpcore.testing.optimizer import check_optimizer
from ddpcore.testing.strategy import Scenario, check_strategy
from ddpcore.testing.topology import check_topology

__all__ = ["Scenario", "check_optimizer", "check_strategy", "check_topology"]
