r"""The motion of the learners' mean weights, and the effect of the distances between learners on this motion.

The equations are from section 2 of "Why does decentralized training outperform synchronous training in the large batch
setting?" (Zhang et al. 2020); docs/noise_statistics.md discusses them. The mean weights w_a move by ``a g_a``: a is the
learning rate, and g_a the mean of the learners' gradients. g is the gradient of the full loss at w_a. The motion is the
sum of ``a_e g`` and a vector that is orthogonal to g and has squared norm D:

    a_e = a g_a.g / |g|^2            D = a^2 |g_a|^2 - a_e^2 |g|^2

k_j is the gradient of learner j's mini-batch at w_a, k the mean of the k_j, and ``d = g_a - k`` the effect of the
learners' distances. ``D_S = a^2 |k|^2 - (a k.g / |g|)^2`` is the noise of synchronous SGD, and ``D2 = a^2 |d|^2`` the
landscape-dependent noise. Averaged over many mini-batches, D is D_S plus ``D2 - (a d.g / |g|)^2``.

Equation 4 is ``a^2 tr(H C H) = a^2 / n^2 sum_j |H x_j|^2``, with the Hessian H of the full loss,
``x_j = w_j - w_a`` and ``C = n^-2 sum_j x_j x_j^T``. A product with H is the mean over all shares of the loss,
each of the same vector. The x_j sum to zero, so n - 1 combinations of them suffice: if the n - 1 vectors u_k are
orthonormal and orthogonal to the vector of ones, ``sum_j |H x_j|^2 = sum_k |H sum_j u_kj x_j|^2``. If K of the
combinations are drawn at random, the sum over them times ``(n - 1) / K`` is an unbiased estimate.

Shapes: this process holds L of n learners; a learner's row has P elements; there are K directions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddpcore.comm.base import Communicator
from ddpcore.diagnostics.passes import noise_sums

GATHERED = 2**18  # largest number of elements of each row in one gather
MOST_PRODUCTS = 8  # largest number of Hessian-vector products of the full loss in a measured step


@dataclass(frozen=True, kw_only=True)
class Dynamics:
    """The quantities of the module's equations at one step."""

    lr: float  #: the learning rate a
    full_loss: float  #: the full loss at w_a
    effective_lr: float  #: a_e
    noise: float  #: D
    ssgd_noise: float  #: D_S
    landscape_noise: float  #: D2
    landscape_upright: float  #: ``D2 - (a d.g / |g|)^2``, the part of D2 that is orthogonal to g
    #: ``a^2 tr(H C H)``; an unbiased estimate for more than nine learners; None for ``hessian=False``
    hessian_noise: float | None
    grad_squared: float  #: ``|g|^2``
    mean_grad_squared: float  #: ``|g_a|^2``
    full_gradient: str  #: a description in words of the samples of the full loss


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far the learners' weights are from their mean."""

    consensus_distance: float  #: ``sqrt(1/n sum_j |w_j - w_a|^2)`` (Kong et al. 2021)
    trace: float  #: the trace of C, ``n^-2 sum_j |w_j - w_a|^2``
    eigenvalues: tuple[float, ...]  #: the largest ``directions`` eigenvalues of C, descending


def dynamics_of(
    products: Tensor, lr: float, full_loss: float, hessian_squares: float | None, num_learners: int, full_gradient: str
) -> Dynamics:
    """The quantities of one step, from the inner products of g_a, k and g, float64 ``[3, 3]``.

    ``hessian_squares`` is ``1/n sum_j |H (w_j - w_a)|^2``; None if it was not measured.
    """
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
    """The vectors ``sqrt((n - 1) / K) u_k`` of the module's equations, float64 ``[K, n]``.

    K is n - 1, but at most MOST_PRODUCTS. The seed is the step, so all ranks and a resumed run draw the same vectors.
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

    The matrix of the inner products of the learners' deviations has the nonzero eigenvalues of C, times n^2. An
    eigenvector u of this matrix gives the direction ``sum_j u_j (w_j - w_a)``. That of an eigenvalue of zero is zeros.
    """
    n = comm.num_learners
    values, vectors = torch.linalg.eigh(covariance_products(weights_LP, mean_P, comm))
    values, vectors = values.flip(0)[:num].clamp_min(0.0), vectors.flip(1)[:, :num]
    values[n - 1 :] = 0.0  # the deviations sum to zero, so the other eigenvalues are rounding errors
    deviation_LP = weights_LP - mean_P
    result = deviation_LP.new_zeros((len(values), deviation_LP.shape[1]))
    for k, (value, vector) in enumerate(zip(values.tolist(), vectors.T, strict=True)):
        if value <= 0.0:
            continue
        rows_LP = (vector[list(comm.learners)].to(deviation_LP) * n)[:, None] * deviation_LP
        comm.average_(rows_LP).wait()
        result[k] = rows_LP[0] / rows_LP[0].norm().clamp_min(torch.finfo(rows_LP.dtype).tiny)
    return values / n**2, result
