"""``HessianStatistics``: the spectrum along a run, and how the learners' disagreement lies in it.

Shapes: L learners held by this process, n in all, P elements of all parameters that are trained, k eigenvectors.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from ddpcore.diagnostics import passes, spectra
from ddpcore.diagnostics.hessian import Hessian
from ddpcore.diagnostics.passes import Loss
from ddpcore.diagnostics.spectra import Eigenvalues
from ddpcore.distributed.handle import Distributed, Observer
from ddpcore.distributed.hooks import HookedDistributed
from ddpcore.options.typed import check_range
from ddpcore.strategies.learner import Learner


@dataclass(frozen=True, kw_only=True)
class HessianRecord:
    """One measurement, at the mean ``w_a`` of the learners' weights before the step."""

    step: int  #: the step that follows, counted from 1
    largest: list[float]  #: the k largest eigenvalues of the Hessian of the loss (fewer: P - 1), descending; or NaN
    smallest: float  #: the smallest eigenvalue
    residuals: list[float]  #: ``|H v - lambda v|`` of the k largest, and of the smallest
    #: ``1/n sum_j |w_j - mean w|^2``, the trace of the covariance of the weights w_j at which the learners computed the
    #: gradients of the step; 0 if they are identical. With ``NoisySSGD(where="per_learner")`` it is the trace of the
    #: noise's covariance.
    distance: float
    #: the share of ``distance`` along each of the k top eigenvectors v, ``sum_j (v (w_j - mean w))^2 / sum_j |w_j -
    #: mean w|^2``; None if the learners are identical
    disagreement: list[float] | None
    #: ``1/2 tr(H C)``, with the covariance C of these weights: what their distance to the mean adds to the mean loss,
    #: to second order (2602.02899v2); NaN if the Hessian is not finite
    penalty: float
    #: ``1/n sum_j |g_j - g_a|^2`` of the gradients that the step gets, unscaled, and clipped if the loop clips; None if
    #: the strategy has averaged them, among all or in groups
    noise: float | None
    noise_shares: list[float] | None  #: the share of ``noise`` along each of the k top eigenvectors; None with it
    isotropic: float  #: ``1 / P``, with P of this step: the share along one direction if all were alike
    problem: str | None  #: why there are no eigenvalues; None if all is well
    seconds: float  #: the time of the measurement


_Share = tuple[float, list[float]]  # a variance, and the share of it along each eigenvector
_Apart = tuple[_Share, _Share | None, float]  # distance, noise and penalty
_ALIKE: _Apart = (0.0, []), None, 0.0  # of learners that are identical, and of one model


class HessianStatistics(Observer):
    """Measures the ends of the Hessian's spectrum every few steps, and what share of the disagreement lies there.

    Create it after ``distribute``. It does not change one bit of the training: passes at the mean weights use other
    memory, and buffers and random generators are restored. A measurement takes some tens of Hessian-vector products of
    ``loss``, and one for each learner, each with one average over the learners.

    Args:
        handle: what ``distribute`` returned; or a model that one device trains, with its optimizer.
        loss: computes the loss on all data or on a large fixed batch, each rank its share, with virtual learners the
            sum over learners: ``lambda: loss_fn(handle.model(x), y)``, as ``full_loss`` of
            :class:`ddpcore.diagnostics.NoiseStatistics`. It may yield parts whose sum is the loss.
        optimizer: of a model without learners, whose steps are counted; it is not needed for a strategy.
        every: steps from one record to the next.
        top: k, the number of largest eigenvalues and of eigenvectors.
        seed: of the start vectors.
        tolerance: the error at which an iteration ends, relative to the largest absolute eigenvalue.
        max_products: the largest number of products for one end. A record without convergence says so.

    Attributes:
        records: of type :class:`HessianRecord`, one per measurement.
        num_steps: of a model without learners: the steps so far. Set it in a loop that goes on at a later step.

    ValueError: the arguments do not fit the loop.
    """

    def __init__(
        self,
        handle: Distributed | nn.Module,
        loss: Loss,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = 50,
        top: int = 5,
        seed: int = 0,
        tolerance: float = 1e-3,
        max_products: int = 500,
    ) -> None:
        for name, value in (("every", every), ("top", top), ("max_products", max_products)):
            check_range(name, value, least=1)
        check_range("tolerance", tolerance, above=0)
        self._handle, self._model, self._loss = handle, passes.model_of(handle), loss
        self.every, self.top = every, top
        self._limits: dict[str, Any] = {"seed": seed, "tolerance": tolerance, "max_products": max_products}
        self.records: list[HessianRecord] = []
        self.num_steps, self._hook = 0, None
        if isinstance(handle, HookedDistributed):
            if handle.learner.flat.shards is not None:
                raise ValueError("learners are sharded, and Hessian products need whole models: use a small model")
            if no_mean := handle.strategy.traits.no_mean:
                raise ValueError(f"{no_mean}: take dpsgd")
            passes.check_equal_weights(handle, loss)
            check_range("top", top, most=sum(segment.numel for segment in handle.learner.flat.segments) - 1)
            handle.observers.append(self)
        else:
            if optimizer is None:
                raise ValueError("a model without learners: pass optimizer=, whose steps are counted")
            check_range("top", top, most=Hessian(self._model, loss).numel - 1)
            self._hook = optimizer.register_step_pre_hook(self._before_call)

    def close(self) -> None:
        """Stop measuring."""
        if self._hook is not None:
            self._hook.remove()
        elif isinstance(self._handle, HookedDistributed) and self in self._handle.observers:
            self._handle.observers.remove(self)

    @override
    def before_step(self, learner: Learner) -> None:
        if (learner.step + 1) % self.every == 0:
            begin, mean_LP = time.perf_counter(), learner.average_of(learner.flat.param_LP)
            self._measure(learner.step + 1, begin, self._operator(learner, mean_LP), learner)

    def _before_call(self, *_: Any) -> None:
        """Before a step of a model without learners."""
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            self._measure(self.num_steps, time.perf_counter(), Hessian(self._model, self._loss).operator())

    def _measure(self, step: int, begin: float, operator: spectra.Operator, learner: Learner | None = None) -> None:
        """Add a record. Where the eigenvalues cannot be computed, they are NaN, and their vectors zeros."""
        top, problem = min(self.top, operator.numel - 1), ""
        try:
            found = spectra.extreme_eigenvalues(operator, top, 1, **self._limits)
        except (spectra.NotFinite, spectra.NotConverged) as error:
            unknown, problem = np.full(top + 1, np.nan), str(error)
            zeros_kP = operator.like.new_zeros(top + 1, operator.numel)
            found = Eigenvalues(values=unknown, residuals=unknown, vectors=zeros_kP)
        distance, noise, penalty = _ALIKE if learner is None else self._apart(learner, operator, found.vectors[:-1])
        values, is_known = found.values.tolist(), not problem
        record = HessianRecord(
            step=step,
            largest=values[:-1],
            smallest=values[-1],
            residuals=found.residuals.tolist(),
            distance=distance[0],
            disagreement=distance[1] if is_known and distance[0] else None,
            penalty=penalty,
            noise=None if noise is None else noise[0],
            noise_shares=noise[1] if is_known and noise is not None and noise[0] else None,
            isotropic=1 / found.vectors.shape[1],
            problem=problem or None,
            seconds=time.perf_counter() - begin,
        )
        self.records.append(record)

    def _apart(self, learner: Learner, operator: spectra.Operator, top_kP: Tensor) -> _Apart:
        """How far the learners' weights and gradients are apart, also along the eigenvectors."""
        assert isinstance(self._handle, HookedDistributed)
        distance, noise, penalty = _ALIKE
        weights_LP = self._handle.strategy.gradient_weights(learner)
        learner.comm.broadcast_(first_LP := weights_LP.clone())
        are_first_L = (first_LP == weights_LP).all(dim=1)
        if not learner.comm.gather(are_first_L.double()).all():  # else the rounding of their average would count
            apart_LP = weights_LP - learner.average_of(weights_LP)
            distance = self._shares(learner, apart_LP, top_kP)
            rows_n1P = learner.comm.gather(_real(learner, apart_LP)).unsqueeze(1)
            penalty = sum((operator.product(row) @ row.T).item() for row in rows_n1P) / (2 * len(rows_n1P))
        if not self._handle.strategy.plan(learner.step).averages_gradients:
            own_LP = passes.local_gradients(learner) / passes.scale_left(learner.optimizer)
            noise = self._shares(learner, own_LP - learner.average_of(own_LP), top_kP)
        return distance, noise, penalty

    def _operator(self, learner: Learner, mean_LP: Tensor) -> spectra.Operator:
        """The Hessian of the mean of all learners' losses at the mean weights, without the padding of the rows."""
        like = _real(learner, mean_LP[:1])[0]

        def product(vectors_KP: Tensor) -> Tensor:
            rows = []
            for vector_P in vectors_KP:
                padded_LP = torch.zeros_like(mean_LP)
                stacks = _stacks(learner, padded_LP)
                for stack, part in zip(stacks, vector_P.split([one[0].numel() for one in stacks]), strict=True):
                    stack.copy_(part.view(stack.shape[1:]))
                product_LP = passes.hessian_product(self._model, learner, self._loss, mean_LP, padded_LP)
                rows.append(_real(learner, product_LP[:1])[0])
            return torch.stack(rows)

        return spectra.Operator(product=product, like=like)

    @staticmethod
    def _shares(learner: Learner, apart_LP: Tensor, vectors_kP: Tensor) -> _Share:
        """The mean over learners of ``|d_j|^2``, and the share of it along each vector."""
        rows_LP = _real(learner, apart_LP).double()
        along_Lk = (rows_LP @ vectors_kP.double().T).square()
        sums = torch.cat([rows_LP.square().sum(dim=1, keepdim=True), along_Lk], dim=1)
        total, *along = learner.average_of(sums)[0].tolist()
        return total, [value / total if total else 0.0 for value in along]


def _stacks(learner: Learner, rows_LP: Tensor) -> list[Tensor]:
    """The segments of a flat buffer that are trained now, ``[L, *S]``, in the order of ``model.parameters()``.

    ValueError: there is none.
    """
    own = map(id, learner.flat.parameters)  # of which those of learner 0 come first
    stacks = dict(zip(own, learner.flat.stacks_of(rows_LP), strict=False))
    return [stacks[id(parameter)] for parameter in passes.trained(learner.models[0]) if id(parameter) in stacks]


def _real(learner: Learner, rows_LP: Tensor) -> Tensor:
    """Rows ``[L, P]`` without the padding of the buffer, and without what is frozen."""
    return torch.cat([stack.reshape(len(rows_LP), -1) for stack in _stacks(learner, rows_LP)], dim=1)
