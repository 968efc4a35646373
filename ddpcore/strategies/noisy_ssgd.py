"""Synchronous SGD with Gaussian weight noise."""

import hashlib
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore import ops
from ddpcore.ops import Mixture, Noise, RowMixtures, WeightAverage
from ddpcore.options.typed import check_choice, check_range, typed
from ddpcore.strategies.base import ALL, Plan, Traits, check_mixable
from ddpcore.strategies.learner import Learner
from ddpcore.strategies.ssgd import SSGD


class NoisySSGD(SSGD):
    r"""SSGD* (Zhang et al. 2020, section 2.1): synchronous SGD with isotropic weight noise of constant variance.

    - ``shared``: ``w(t+1) = w(t) + s x(t) - a/n sum_k g_k(w(t))``, with the same x for all, so the learners stay
      identical. With FusedSGD one kernel adds the noise and steps.
    - ``per_learner``: ``w(t+1) = w(t) - a/n sum_k g_k(w(t) + s x_k(t))``: each learner computes its gradient at some
      distance from the mean, as the learners of dpsgd do, but the same distance in every direction. The noise is in the
      weights from a forward pass that records gradients to its backward pass. So call the two in turn, and evaluate
      under ``torch.no_grad()``. A change of weights in between, other than a loaded state, is an error.

    x is standard normal, from a counter-based generator keyed by (seed, step, position in the flat buffer). Nothing is
    sent. Every rank draws the same numbers, on any device and for any number of learners.

    Args:
        std: s, the standard deviation of the noise; 0 is ssgd.
        seed: of the noise.
        where: ``shared`` or ``per_learner``.

    ValueError: an option is out of its range.
    """

    name: ClassVar[str] = "noisy_ssgd"

    def __init__(self, std: float = 0.01, *, seed: int = 0, where: str = "shared") -> None:
        super().__init__()
        check_range("noisy_ssgd: std", typed("noisy_ssgd: std", std, float), least=0)
        check_range("noisy_ssgd: seed", seed, least=0, below=2**62)
        check_choice("noisy_ssgd: where", where, ("shared", "per_learner"))
        self.std, self.seed, self.where = std, seed, where
        self._clean_LP: Tensor | None = None  # the weights without the noise, while they hold it
        self._versions: list[int] = []  # of the parameters with the noise

    def __repr__(self) -> str:
        return f"NoisySSGD({self.std}, seed={self.seed}, where={self.where!r})"

    @property
    @override
    def traits(self) -> Traits:
        return Traits(
            averages_gradients=True,
            stays_identical=True,
            takes_closure=False,
            acts_in_forward=self.where == "per_learner",
            no_shards="the noise of a weight depends on its place in the whole model: take ssgd",
            fixed_layout=True,  # the noise of an element depends on its position in the buffer
        )

    @override
    def plan(self, step: int) -> Plan:
        return Plan(ALL, shifted=self.where == "per_learner")

    @override
    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        check_mixable(self.name, dtype)

    @override
    def before_forward(self, learner: Learner) -> None:
        """With ``per_learner``, add its own noise to the weights of each learner."""
        super().before_forward(learner)
        if self.where == "per_learner" and self._clean_LP is None:
            self._clean_LP = learner.flat.param_LP.clone()
            self._add_noise(learner, learner.flat.param_LP)
            torch.autograd.graph.increment_version(learner.flat.parameters)
            self._versions = [parameter._version for parameter in learner.flat.parameters]

    def _add_noise(self, learner: Learner, weights_LP: Tensor) -> None:
        for one, row in zip(learner.comm.ids, weights_LP, strict=True):
            ops.mix_(row, [], 1.0, [], noise=Noise(self.std, _seed_of(self.seed, one), learner.step))

    @override
    def gradient_weights(self, learner: Learner) -> Tensor:
        if self.where == "shared" or self._clean_LP is not None:
            return learner.flat.param_LP
        noisy_LP = learner.flat.param_LP.clone()
        self._add_noise(learner, noisy_LP)
        return noisy_LP

    @override
    def after_backward(self, learner: Learner) -> None:
        super().after_backward(learner)
        self.restore_weights(learner)

    @override
    def restore_weights(self, learner: Learner) -> None:
        """``per_learner``: remove the noise, also after a forward pass without a backward pass.

        Raises:
            RuntimeError: the program has changed the weights meanwhile, which this would undo.
        """
        if self._clean_LP is None:
            return
        clean_LP, self._clean_LP = self._clean_LP, None
        if self._versions != [parameter._version for parameter in learner.flat.parameters]:
            what = f"{self.name}: weights were changed after a forward pass and before its backward pass"
            advice = learner.advice("change them after a step, or run other forward passes under torch.no_grad()")
            raise RuntimeError(f"{what}, while they hold noise: {advice}")
        learner.flat.param_LP.copy_(clean_LP)
        torch.autograd.graph.increment_version(learner.flat.parameters)

    @override
    def before_step(self, learner: Learner) -> WeightAverage | None:
        """``shared``: return the weights plus the noise."""
        if self.where == "per_learner":
            return None
        mixture = Mixture([], 1.0, [], Noise(self.std, self.seed, learner.step))
        num_rows = len(learner.flat.param_LP)
        return mixture if num_rows == 1 else RowMixtures([mixture] * num_rows)

    @override
    def after_step(self, learner: Learner) -> None:
        if self.where == "shared":  # an optimizer without the kernel got the noise in whole rows
            learner.flat.clear_padding()


def _seed_of(seed: int, rank: int) -> int:
    """A different stream for each learner and each seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}, learner {rank}".encode(), digest_size=8).digest(), "little") >> 1
