r"""Flatness of the training loss around a solution, by measures that do not depend on the scale of the weights.

A network with ReLU computes the same function if the weights and biases of a layer are multiplied by c and the weights
of the next layer are divided by c. This can give the Hessian H any eigenvalue (Dinh et al. 2017, section 4). So the
weights w are perturbed in proportion to their own size, ``w + diag|w| e``, as ASAM does with the normalization operator
``T_w = diag|w|`` (Kwon et al. 2021, sections 3 and 4). To second order this adds ``1/2 e^T A e`` to the loss, with
``A = diag|w| H diag|w|``, which the rescaling does not change:

    relative_eigenvalue = max_i lambda_i(A)                  the worst direction
    relative_trace      = tr A = sum_k w_k^2 H_kk            all directions: noise of strength s adds s^2 / 2 tr A
    loss_increase       = E_x L(w (1 + s x)) - L(w)          x standard normal; the same without the approximation

The last one is the expected sharpness of PAC-Bayesian bounds with noise in proportion to the weights (Neyshabur et al.
2017a, section 2.3). ``hessian_eigenvalue = max_i lambda_i(H)``, the usual one (Keskar et al. 2016), depends on scale.

Shapes: P elements of all parameters that need a gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddpcore.diagnostics import spectra
from ddpcore.diagnostics.hessian import Hessian
from ddpcore.diagnostics.passes import Loss, twice_differentiable

STRENGTH = 0.1  # s
NUM_PROBES = 16  # random vectors for the trace, and for the noise
TOLERANCE = 1e-3  # of eigenvalues, relative: far below the differences between seeds
MOST_PRODUCTS = 100_000  # of an eigenvalue, so that an iteration that does not converge ends


@dataclass(frozen=True, kw_only=True)
class Flatness:
    """The quantities of the equations above."""

    loss: float  #: L(w)
    hessian_eigenvalue: float  #: the largest of H
    relative_eigenvalue: float  #: the largest of A
    relative_trace: float  #: tr A, by Hutchinson's estimate
    relative_trace_error: float  #: its standard error
    loss_increase: float  #: mean over NUM_PROBES draws of x
    loss_increase_error: float  #: its standard error


def flatness(model: nn.Module, loss: Loss, *, seed: int = 0) -> Flatness:
    """Measure a model. Weights, buffers and global random generators are restored, also after an exception.

    Costs about 100 Hessian-vector products, each about three passes over the samples of the loss.

    Args:
        model: has second derivatives; its mode (train or eval) is not changed. If it draws random numbers, as dropout
            does in training mode, every evaluation of the loss uses the same ones, from the current global state.
        loss: computes the loss with the model's current weights, or yields parts whose sum is the loss.
        seed: of probes and noise.

    The measures are NaN if the loss or its curvature is not finite. ValueError: no parameter needs a gradient, or the
    loss is not one number with a graph. RuntimeError: an eigenvalue needs more than 100,000 products.
    """
    hessian = Hessian(model, loss)
    weights_P, loss_at = hessian.weights.values_P, hessian.weights.loss_at
    sizes_P = weights_P.abs()

    def relative(vector_P: Tensor) -> Tensor:
        return sizes_P * hessian.product(sizes_P * vector_P)

    draw: Any = {"size": sizes_P.shape, "generator": torch.Generator().manual_seed(seed), "device": "cpu"}
    with twice_differentiable(model):  # also the losses: fused kernels of attention have other bits
        signs = [(torch.randint(2, **draw) * 2.0 - 1).to(sizes_P) for _ in range(NUM_PROBES)]
        traces = [float(sign_P.double() @ relative(sign_P).double()) for sign_P in signs]
        before = loss_at(weights_P, loss)
        noises = [torch.randn(**draw, dtype=torch.float32).to(sizes_P) for _ in range(NUM_PROBES)]
        increases = [loss_at(weights_P + STRENGTH * sizes_P * x_P, loss) - before for x_P in noises]
        return Flatness(
            loss=before,
            hessian_eigenvalue=_largest_eigenvalue(hessian.product, weights_P, seed),
            relative_eigenvalue=_largest_eigenvalue(relative, sizes_P, seed),
            relative_trace=float(np.mean(traces)),
            relative_trace_error=float(np.std(traces, ddof=1) / NUM_PROBES**0.5),
            loss_increase=float(np.mean(increases)),
            loss_increase_error=float(np.std(increases, ddof=1) / NUM_PROBES**0.5),
        )


def _largest_eigenvalue(product: Callable[[Tensor], Tensor], like_P: Tensor, seed: int) -> float:
    """The largest eigenvalue (not the largest in magnitude), by the Lanczos method of ARPACK."""
    operator = spectra.Operator(product=product, like=like_P)
    try:
        found = spectra.extreme_eigenvalues(operator, 1, 0, seed=seed, tolerance=TOLERANCE, max_products=MOST_PRODUCTS)
    except spectra.NotFinite:
        return float("nan")
    return float(found.values[0])
