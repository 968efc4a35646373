"""Large-batch data-parallel training for PyTorch: fused optimizers, gossip, local steps, and what they cost."""

import sys
from importlib.util import find_spec
from pathlib import PurePath

if find_spec("torch") is None:
    _ADVICE = "in a checkout run make install and source .venv/bin/activate, elsewhere pip install torch"
    _REASON = f"ddpcore: {sys.executable} has no torch: {_ADVICE}"
    if PurePath(sys.argv[0]).name in ("-m", "ddpcore"):  # a command prints one line, without a traceback
        raise SystemExit(_REASON)
    raise ModuleNotFoundError(_REASON, name="torch")

from ddpcore.comm.connect import Connection
from ddpcore.distributed.distribute import distribute, join
from ddpcore.distributed.handle import Distributed
from ddpcore.distributed.saved import RunState
from ddpcore.distributed.state_sync import Policies
from ddpcore.runtime.version import VERSION
from ddpcore.strategies.adpsgd import ADPSGD
from ddpcore.strategies.base import ALL, Plan, Strategy, Traits
from ddpcore.strategies.baselines import DDP, Single
from ddpcore.strategies.dpsgd import DPSGD, AdaptiveConsensus
from ddpcore.strategies.exact_diffusion import ExactDiffusion
from ddpcore.strategies.gasloc import GASLoC
from ddpcore.strategies.gradient_tracking import GradientTracking
from ddpcore.strategies.learner import NonFinite, NonFiniteError
from ddpcore.strategies.local_sgd import LocalSGD
from ddpcore.strategies.noisy_ssgd import NoisySSGD
from ddpcore.strategies.noloco import NoLoCo
from ddpcore.strategies.push_sum import PushSum
from ddpcore.strategies.registry import STRATEGIES
from ddpcore.strategies.slowmo import SlowMo
from ddpcore.strategies.ssgd import SSGD
from ddpcore.topology.base import Topology
from ddpcore.topology.given import FromGraph, FromMatrix
from ddpcore.topology.pairs import Matching, RandomPair
from ddpcore.topology.registry import TOPOLOGIES
from ddpcore.topology.regular import Complete, Hypercube, OnePeerExponential, Ring, Star, StaticExponential, Torus2D
from ddpcore.topology.rounds import Round
from ddpcore.topology.schedule import Milestones
from ddpcore.topology.wrapped import Hierarchical, Scheduled, Weighted

__version__ = VERSION

__all__ = [
    "ADPSGD", "ALL", "DDP", "DPSGD", "GASLoC", "SSGD", "AdaptiveConsensus", "Complete", "Connection", "Distributed",
    "ExactDiffusion", "FromGraph", "FromMatrix", "GradientTracking", "Hierarchical", "Hypercube", "LocalSGD",
    "Matching", "Milestones", "NoLoCo", "NoisySSGD", "NonFinite", "NonFiniteError", "Plan", "OnePeerExponential",
    "Policies", "PushSum", "RandomPair", "Ring", "Round", "RunState", "STRATEGIES", "Scheduled", "Single", "SlowMo",
    "Star", "StaticExponential", "Strategy", "TOPOLOGIES", "Topology", "Torus2D", "Traits", "Weighted", "distribute",
    "join",
]  # fmt: skip
