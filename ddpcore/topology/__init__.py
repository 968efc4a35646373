"""Who averages with whom at a step, as pure data: no tensors, no communication, no state.

A topology answers one question, `round(step, rank, num_learners)`: whose weights does this learner read, and how much
does each count? Seen together, the rounds of a step are the mixing matrix W of decentralized SGD (Lian et al. 2017,
Algorithm 1), with W[j, k] the weight that learner j gives to learner k. W is doubly stochastic: rows sum to one, so a
learner holds an average; columns sum to one, so averaging never moves the mean over learners. On a directed graph only
the columns do: that is for push-sum, and ordinary gossip refuses it.

What a topology costs is linear in its edges; a matrix [n, n] is formed only by `matrix()`.
"""

from .base import Matrix, Round, Topology
from .describe import Description, describe
from .given import FromGraph, FromMatrix
from .hierarchical import Hierarchical
from .names import build, names, options
from .pairs import Matching, RandomPair
from .regular import Complete, Hypercube, OnePeerExponential, Ring, Star, StaticExponential, Torus2D

__all__ = [
    "Complete",
    "Description",
    "FromGraph",
    "FromMatrix",
    "Hierarchical",
    "Hypercube",
    "Matching",
    "Matrix",
    "OnePeerExponential",
    "RandomPair",
    "Ring",
    "Round",
    "Star",
    "StaticExponential",
    "Topology",
    "Torus2D",
    "build",
    "describe",
    "names",
    "options",
]
