"""Synchronous SGD with Gaussian weight noise."""

from __future__ import annotations

import hashlib
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.ops import Mixture, Noise, RowMixtures, WeightAverage
from ddpcore.strategies.base import Strategy, check_mixable
from ddpcore.strategies.learner import Learner
from ddpcore.strategies.ssgd import SSGD


class NoisySSGD(Strategy):
    r"""SSGD* (Zhang et al. 2020, section 2.1): synchronous SGD with isotropic weight noise of constant variance.

    - ``shared``: ``w(t+1) = w(t) + s x(t) - a/n sum_k g_k(w(t))``, one x for all, so the learners stay together. With
      FusedSGD noise and step are one pass.
    - ``per_learner``: ``w(t+1) = w(t) - a/n sum_k g_k(w(t) + s x_k(t))``: each learner looks a little way off, as the
      learners of dpsgd do, but the same way off everywhere; the noise does not stay in the weights. It comes with a
      forward pass that records gradients and goes with its backward pass: call them in turn, and evaluate under
      ``torch.no_grad()``.

    x is standard normal, from a counter-based generator keyed by (seed, step, place in the flat buffer): nothing is
    sent, and every rank, device and number of learners draws the same.

    Args:
        std: s; 0 is ssgd.
        seed: of the noise.
        where: ``shared`` or ``per_learner``.

    Raises:
        ValueError: an option is out of its range.
    """

    name: ClassVar[str] = "noisy_ssgd"
    averages_gradients: bool = True
    takes_closure: bool = False

    def __init__(self, std: float = 0.01, *, seed: int = 0, where: str = "shared") -> None:
        if not (math.isfinite(std) and std >= 0):
            raise ValueError(f"noisy_ssgd: std is {std}, it must be a number of at least 0")
        if not 0 <= seed < 2**62:
            raise ValueError(f"noisy_ssgd: seed is {seed}, it must be at least 0 and below 2^62")
        if where not in ("shared", "per_learner"):
            raise ValueError(f"noisy_ssgd: unknown where {where!r}: choose from shared, per_learner")
        self.std, self.seed, self.where = std, seed, where
        self._synchronous = SSGD()
        self._clean_LP: Tensor | None = None

    def __repr__(self) -> str:
        return f"NoisySSGD({self.std}, seed={self.seed}, where={self.where!r})"

    @property
    def fixed_layout(self) -> bool:
        """A place in the buffer is what the noise belongs to."""
        return True

    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        """Check the dtype."""
        check_mixable(self.name, dtype)

    def before_forward(self, learner: Learner) -> None:
        """Per learner: go a little way off, where it stays until gradients are averaged."""
        self._synchronous.before_forward(learner)
        if self.where == "per_learner" and self._clean_LP is None:
            self._clean_LP = learner.flat.param_LP.clone()
            for rank, row in zip(learner.comm.learners, learner.flat.param_LP, strict=True):
                noise = Noise(self.std, _seed_of(self.seed, rank), learner.step)
                ops.mix_(row, [], 1.0, [], noise=noise)
            torch.autograd.graph.increment_version(learner.flat.parameters)

    def gradients_at_mean(self, step: int) -> bool:
        """Not per learner: each looks a little way off."""
        return self.where == "shared"

    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        """As ssgd."""
        self._synchronous.bucket_ready(learner, columns)

    def after_backward(self, learner: Learner) -> None:
        """As ssgd. Per learner: come back."""
        self._synchronous.after_backward(learner)
        self.restore_weights(learner)

    def restore_weights(self, learner: Learner) -> None:
        """Come back, also where a forward pass had no backward pass."""
        if self._clean_LP is not None:
            learner.flat.param_LP.copy_(self._clean_LP)
            self._clean_LP = None
            torch.autograd.graph.increment_version(learner.flat.parameters)

    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        """What the weights were before the noise is no longer of interest: others have been loaded."""
        self._clean_LP = None

    def before_step(self, learner: Learner) -> WeightAverage | None:
        """Shared: add the noise."""
        if self.where == "per_learner":
            return None
        mixture = Mixture([], 1.0, [], Noise(self.std, self.seed, learner.step))
        num_rows = len(learner.flat.param_LP)
        return mixture if num_rows == 1 else RowMixtures([mixture] * num_rows)

    def after_step(self, learner: Learner) -> None:
        """Nothing: the weights agree."""

    def averages_weights_at(self, step: int) -> bool:
        """At every step: gradients are averaged."""
        return True


def _seed_of(seed: int, rank: int) -> int:
    """A stream of its own for each learner of each seed."""
    digest = hashlib.blake2b(f"{seed}, learner {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
