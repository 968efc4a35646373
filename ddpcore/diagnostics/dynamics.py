r"""How the mean of all learners moves, and what their distance does to it.

After section 2 of "Why does decentralized training outperform synchronous training in the large batch setting?" (Zhang
et al. 2020). The mean weights w_a move by ``a g_a``, a the learning rate, g_a the mean of the learners' gradients. With
g the gradient of the full loss at w_a this is ``a_e g`` and a rest that stands upright on g:

    a_e = a g_a.g / |g|^2            D = a^2 |g_a|^2 - a_e^2 |g|^2

k_j is learner j's gradient of the same mini-batch at w_a, k their mean, and ``d = g_a - k`` what the learners' distance
adds. ``D_S = a^2 |k|^2 - (a k.g / |g|)^2`` is the noise that synchronous SGD would have had, and ``D2 = a^2 |d|^2``
the landscape-dependent noise. A part of d lies along g, and is what lowers a_e; the rest, ``D2 - (a d.g / |g|)^2``,
stands upright on g as D does. Over many mini-batches it and D_S make up D; in one step a mixed term is left.

With H_j the Hessian of learner j's mini-batch, of mean H, and ``x_j = w_j - w_a``, d is ``1/n sum_j (H_j - H) x_j`` to
first order, since the x_j add up to zero. Mini-batches that are drawn independently have
``E D2 = a^2 / n^2 sum_j E |(H_j - H) x_j|^2``. Equation 4 has ``a^2 tr(H C H) = a^2 / n^2 sum_j |H x_j|^2``, with
``C = n^-2 sum_j x_j x_j^T``: the same where a mini-batch's Hessian scatters by its own size, ``E (H_j - H)^2 = H^2``.
It is too large where all H_j are alike, and too small where they scatter by more.

There H is the Hessian of the full loss, of which each learner has a share: a product with H is the mean of all shares'
products with one vector. (Squares of each share's product with its learner's own x_j would hold the shares' scatter.)
The x_j add up to zero, so n - 1 mixtures of them say all: with u_k orthonormal and upright on the vector of ones,
``sum_j |H x_j|^2 = sum_k |H sum_j u_kj x_j|^2``. Of fewer, K drawn evenly, ``(n - 1) / K`` times the sum has that mean.

Shapes: L learners held by this process, n in all, P elements of a learner's row, K directions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddpcore.comm.base import Communicator
from ddpcore.diagnostics.passes import noise_sums

GATHERED = 2**18  # elements of a row that are gathered at a time
MOST_PRODUCTS = 8  # of the full loss's Hessian and a vector, in a measured step


@dataclass(frozen=True, kw_only=True)
class Dynamics:
    """The equations above, of one step.

    Attributes:
        lr: a.
        full_loss: the loss that g is the gradient of, at w_a.
        effective_lr: a_e.
        noise: D.
        ssgd_noise: D_S.
        landscape_noise: D2.
        landscape_upright: what of D2 stands upright on g; the rest lies along it.
        hessian_noise: a^2 tr(H C H), of more than nine learners an estimate without bias; None unless it was asked for.
        grad_squared: ``|g|^2``.
        mean_grad_squared: ``|g_a|^2``.
        full_gradient: what g is the gradient of.
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
        eigenvalues: the largest of C, descending; as many as were asked for.
    """

    consensus_distance: float
    trace: float
    eigenvalues: tuple[float, ...]


def dynamics(
    products: Tensor,
    lr: float,
    full_loss: float,
    hessian_squares: float | None,
    num_learners: int,
    full_gradient: str,
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
    """``[K, n]`` of float64, ``sqrt((n - 1) / K) u_k`` of the equations above; K is n - 1, MOST_PRODUCTS at most.

    A function of the step, so every rank and every resumed run draws the same.
    """
    num = min(num_learners - 1, MOST_PRODUCTS)
    generator = torch.Generator().manual_seed(step)
    normal_nK = torch.randn(num_learners, num, generator=generator, dtype=torch.float64, device="cpu")
    basis_nK, _ = torch.linalg.qr(normal_nK - normal_nK.mean(dim=0))
    return basis_nK.T * ((num_learners - 1) / num) ** 0.5


def covariance_products(weights_LP: Tensor, mean_P: Tensor, comm: Communicator) -> Tensor:
    """Inner products float64 ``[n, n]`` of all learners' ways from the mean, alike on every rank. Collective.

    Every rank receives all rows, GATHERED columns at a time.
    """
    products = torch.zeros(comm.num_learners, comm.num_learners, dtype=torch.float64, device=weights_LP.device)
    for begin in range(0, weights_LP.shape[1], GATHERED):
        rows = comm.gather(weights_LP[:, begin : begin + GATHERED].contiguous())
        origin = mean_P[begin : begin + GATHERED]
        products += noise_sums(list(rows.unbind()), [0, len(origin)], origin)[0]
    return products


def directions(weights_LP: Tensor, mean_P: Tensor, comm: Communicator, num: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues ``[K]`` of C, descending, and their unit directions ``[K, P]``. Collective.

    C has the nonzero eigenvalues of the learners' inner products over n^2; an eigenvector u of those gives the
    direction ``sum_j u_j (w_j - w_a)``. A direction that C does not have is zero.
    """
    n = comm.num_learners
    products = covariance_products(weights_LP, mean_P, comm)
    values, vectors = torch.linalg.eigh(products)
    values, vectors = values.flip(0)[:num].clamp_min(0.0), vectors.flip(1)[:, :num]
    values[n - 1 :] = 0.0  # the ways add up to zero: what is left of a further one is rounding
    ways_LP = weights_LP - mean_P
    result = ways_LP.new_zeros((len(values), ways_LP.shape[1]))
    for k, (value, vector) in enumerate(zip(values.tolist(), vectors.T, strict=True)):
        if value <= 0.0:
            continue
        share = vector[list(comm.learners)].to(ways_LP) * n
        rows_LP = share[:, None] * ways_LP
        comm.average_(rows_LP).wait()
        result[k] = rows_LP[0] / rows_LP[0].norm().clamp_min(torch.finfo(rows_LP.dtype).tiny)
    return values / n**2, result
