r"""The motion of the mean of all learners, and the effect of their distances on it.

Section 2 of "Why does decentralized training outperform synchronous training in the large batch setting?" (Zhang et al.
2020). The mean weights w_a move by ``a g_a``, with the learning rate a and the mean g_a of the learners' gradients. Let
g be the gradient of the full loss at w_a. The motion is ``a_e g`` plus a vector orthogonal to g of squared norm D:

    a_e = a g_a.g / |g|^2            D = a^2 |g_a|^2 - a_e^2 |g|^2

k_j is the gradient of learner j's mini-batch at w_a, k the mean of the k_j, and ``d = g_a - k`` the effect of the
learners' distances. ``D_S = a^2 |k|^2 - (a k.g / |g|)^2`` is the noise of synchronous SGD, and ``D2 = a^2 |d|^2`` the
landscape-dependent noise. The part of d along g reduces a_e; the part orthogonal to g, ``D2 - (a d.g / |g|)^2``, adds
noise. Over many mini-batches D is the sum of this part and D_S; in a single step there is a mixed term too.

With H_j the Hessian of learner j's mini-batch, H the mean of the H_j, and ``x_j = w_j - w_a``, d is
``1/n sum_j (H_j - H) x_j`` to first order, because the x_j sum to zero. For independent mini-batches
``E D2 = a^2 / n^2 sum_j E |(H_j - H) x_j|^2``. Equation 4 is ``a^2 tr(H C H) = a^2 / n^2 sum_j |H x_j|^2``, with
``C = n^-2 sum_j x_j x_j^T``. Both are equal if ``E (H_j - H)^2 = H^2``; equation 4 is too large if the H_j vary less,
and too small if they vary more.

In equation 4, H is the Hessian of the full loss. Each learner computes a share of that loss, so a product with H is the
mean over all shares of their products with the same vector. (The product of a share with its learner's own x_j would
also contain the variation between shares.) The x_j sum to zero, so n - 1 mixtures of them suffice: with u_k orthonormal
and orthogonal to the vector of ones, ``sum_j |H x_j|^2 = sum_k |H sum_j u_kj x_j|^2``. With K random mixtures,
``(n - 1) / K`` times the sum is an unbiased estimate.

Shapes: L learners held by this process, n in all, P elements of a learner's row, K directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddpcore.comm.base import Communicator
from ddpcore.diagnostics.passes import noise_sums

GATHERED = 2**18  # elements of a row in one gather
MOST_PRODUCTS = 8  # Hessian-vector products of the full loss in a measured step


@dataclass(frozen=True, kw_only=True)
class Dynamics:
    """The quantities of the equations above, of one step.

    Attributes:
        lr: a.
        full_loss: the full loss at w_a.
        effective_lr: a_e.
        noise: D.
        ssgd_noise: D_S.
        landscape_noise: D2.
        landscape_upright: the part of D2 that is orthogonal to g.
        hessian_noise: a^2 tr(H C H), with more than nine learners an unbiased estimate; None with ``hessian=False``.
        grad_squared: ``|g|^2``.
        mean_grad_squared: ``|g_a|^2``.
        full_gradient: description of the samples of the full loss.
    """

    lr: float
    full_loss: float
    effective_lr: float
    noise: float
    ssgd_noise: float
    landscape_noise: float
    landscape_upright: float
    hessian_noise: float | None
    grad_squared: float
    mean_grad_squared: float
    full_gradient: str


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far the learners' weights are from their mean.

    Attributes:
        consensus_distance: ``sqrt(1/n sum_j |w_j - w_a|^2)`` (Kong et al. 2021).
        trace: of C, ``n^-2 sum_j |w_j - w_a|^2``.
        eigenvalues: the largest ``directions`` eigenvalues of C, descending.
    """

    consensus_distance: float
    trace: float
    eigenvalues: tuple[float, ...]


def dynamics_of(
    products: Tensor, lr: float, full_loss: float, hessian_squares: float | None, num_learners: int, full_gradient: str
) -> Dynamics:
    """From the inner products ``[3, 3]`` of g_a, k and g (float64), and ``1/n sum_j |H (w_j - w_a)|^2``."""
    (aa, ak, ag), (_, kk, kg), (_, _, gg) = products.tolist()
    square = lr * lr
    effective = lr * ag / gg if gg > 0 else float("nan")
    apart = max(0.0, aa - 2 * ak + kk)
    return Dynamics(
        lr=lr,
        full_loss=full_loss,
        effective_lr=effective,
        noise=square * aa - effective * effective * gg,
        ssgd_noise=square * (kk - kg * kg / gg) if gg > 0 else float("nan"),
        landscape_noise=square * apart,
        landscape_upright=square * max(0.0, apart - (ag - kg) ** 2 / gg) if gg > 0 else float("nan"),
        hessian_noise=None if hessian_squares is None else square * hessian_squares / num_learners,
        grad_squared=gg,
        mean_grad_squared=aa,
        full_gradient=full_gradient,
    )


def mixtures(num_learners: int, step: int) -> Tensor:
    """``sqrt((n - 1) / K) u_k`` of the equations above, float64 ``[K, n]``; K is n - 1, at most MOST_PRODUCTS.

    A function of the step, so that all ranks and a resumed run draw the same.
    """
    num = min(num_learners - 1, MOST_PRODUCTS)
    generator = torch.Generator().manual_seed(step)
    normal_nK = torch.randn(num_learners, num, generator=generator, dtype=torch.float64, device="cpu")
    basis_nK, _ = torch.linalg.qr(normal_nK - normal_nK.mean(dim=0))
    return basis_nK.T * ((num_learners - 1) / num) ** 0.5


def covariance_products(weights_LP: Tensor, mean_P: Tensor, comm: Communicator) -> Tensor:
    """Inner products float64 ``[n, n]`` of all learners' deviations from the mean, on every rank. Collective.

    Every rank receives all rows, GATHERED columns at a time.
    """
    products = torch.zeros(comm.num_learners, comm.num_learners, dtype=torch.float64, device=weights_LP.device)
    for begin in range(0, weights_LP.shape[1], GATHERED):
        rows = comm.gather(weights_LP[:, begin : begin + GATHERED].contiguous())
        origin = mean_P[begin : begin + GATHERED]
        products += noise_sums(list(rows.unbind()), [0, len(origin)], origin)[0]
    return products


def directions(weights_LP: Tensor, mean_P: Tensor, comm: Communicator, num: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues ``[K]`` of C, descending, and their unit eigenvectors ``[K, P]``. Collective.

    The nonzero eigenvalues of C are those of the matrix of the learners' inner products, divided by n^2; an
    eigenvector u of that matrix gives the direction ``sum_j u_j (w_j - w_a)``. It is zero for an eigenvalue of zero.
    """
    n = comm.num_learners
    products = covariance_products(weights_LP, mean_P, comm)
    values, vectors = torch.linalg.eigh(products)
    values, vectors = values.flip(0)[:num].clamp_min(0.0), vectors.flip(1)[:, :num]
    values[n - 1 :] = 0.0  # deviations sum to zero: further eigenvalues are rounding errors
    deviation_LP = weights_LP - mean_P
    result = deviation_LP.new_zeros((len(values), deviation_LP.shape[1]))
    for k, (value, vector) in enumerate(zip(values.tolist(), vectors.T, strict=True)):
        if value <= 0.0:
            continue
        share = vector[list(comm.learners)].to(deviation_LP) * n
        rows_LP = share[:, None] * deviation_LP
        comm.average_(rows_LP).wait()
        result[k] = rows_LP[0] / rows_LP[0].norm().clamp_min(torch.finfo(rows_LP.dtype).tiny)
    return values / n**2, result
