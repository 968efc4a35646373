"""Large-batch data-parallel training for PyTorch: fused optimizers, gossip, local steps, and what they cost."""

from ddpcore.distributed.distribute import distribute
from ddpcore.distributed.hooks import Distributed
from ddpcore.distributed.state_sync import Policies
from ddpcore.runtime.version import VERSION
from ddpcore.strategies import DDP, DPSGD, SSGD, LocalSGD, NoisySSGD, PushSum, Single, SlowMo
from ddpcore.topology import (
    Complete,
    FromGraph,
    FromMatrix,
    Hierarchical,
    Hypercube,
    Matching,
    OnePeerExponential,
    RandomPair,
    Ring,
    Star,
    StaticExponential,
    Topology,
    Torus2D,
)

__version__ = VERSION

__all__ = [
    "DDP",
    "DPSGD",
    "SSGD",
    "Complete",
    "Distributed",
    "FromGraph",
    "FromMatrix",
    "Hierarchical",
    "Hypercube",
    "LocalSGD",
    "Matching",
    "NoisySSGD",
    "OnePeerExponential",
    "Policies",
    "PushSum",
    "RandomPair",
    "Ring",
    "Single",
    "SlowMo",
    "Star",
    "StaticExponential",
    "Topology",
    "Torus2D",
    "distribute",
]
