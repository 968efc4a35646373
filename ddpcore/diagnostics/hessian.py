"""The Hessian of a loss, and the Gauss-Newton matrix: products with vectors, eigenvalues, trace and density.

Shapes: P elements of all parameters that need a gradient, K vectors.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcore.diagnostics import passes, spectra
from ddpcore.diagnostics.passes import Loss, add_, as_it_was, part_products, parts_of, slopes_of, twice_differentiable
from ddpcore.diagnostics.spectra import Eigenvalues, Estimate, SpectralDensity
from ddpcore.diagnostics.weights import DataLoss, WeightVector, sum_over
from ddpcore.options.typed import check_range


class Hessian:
    """The Hessian H of a loss at the model's current weights. It is never stored: only its products are computed.

    After each call weights, mode, buffers and random generators are as before, also after an exception. Each
    evaluation draws the same random numbers (dropout). Attention runs as matrix products, and no gradient hook runs.

    Args:
        model: the model; its mode (train or eval) is not changed. For learners, ``handle.evaluation_model()``.
        loss: computes the loss, or yields parts whose sum is the loss. :class:`DataLoss` is the mean over a data set.
        gauss_newton: take ``G = mean J^T (d^2 loss / d outputs^2) J`` in place of H, with J the derivative of the
            outputs (Schraudolph 2002). It has no negative eigenvalue if the loss is convex in the outputs. It requires
            a :class:`DataLoss` and a model that returns one tensor.
        group: a process group. The loss is the sum of all ranks' losses: give :class:`DataLoss` the same group. A
            product takes one all-reduce. All ranks must hold the same weights, and call the same methods.

    ValueError: no parameter needs a gradient, or the arguments do not fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | DataLoss,
        *,
        gauss_newton: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if gauss_newton and not isinstance(loss, DataLoss):
            raise ValueError("gauss_newton=True needs the outputs of the model: pass loss=DataLoss(...)")
        if isinstance(loss, DataLoss) and loss.group is not group:
            raise ValueError("DataLoss and Hessian have different process groups: pass the same group= to both")
        self.weights = WeightVector(model)
        self._model, self._loss, self._group, self._gauss_newton = model, loss, group, gauss_newton

    @property
    def numel(self) -> int:
        """P."""
        return self.weights.numel

    def product(self, vectors: Tensor) -> Tensor:
        """``H v`` of one vector ``[P]``, or of K vectors ``[K, P]``. One all-reduce if there is a group.

        The elements have the order of ``model.parameters()``, without those that need no gradient. ValueError: the
        shape is another one, or the loss is not one number with a graph.
        """
        if vectors.dim() not in (1, 2) or vectors.shape[-1] != self.numel:
            raise ValueError(f"vectors have the shape {list(vectors.shape)}: pass [{self.numel}] or [K, {self.numel}]")
        rows_KP = vectors.detach().reshape(-1, self.numel).to(self.weights.values_P)
        return sum_over(self._group, self._products(rows_KP)).view(vectors.shape)

    def eigenvalues(
        self, largest: int = 1, smallest: int = 1, *, seed: int = 0, tolerance: float = 1e-3, max_products: int = 1000
    ) -> Eigenvalues:
        """Eigenvalues and eigenvectors at both ends of the spectrum, with their residuals, by Lanczos's method.

        Args:
            largest: how many of the largest (not of the largest in magnitude).
            smallest: how many of the smallest, which are negative at a saddle point.
            seed: of the start vector.
            tolerance: the error at which the iteration ends, relative to the largest absolute eigenvalue.
            max_products: the largest number of products for one end.

        Raises:
            ValueError: a number is out of its range, or a product is not finite.
            RuntimeError: no convergence within ``max_products`` products.
        """
        check_range("largest", largest, least=0)
        check_range("smallest", smallest, least=0)
        check_range("largest + smallest", largest + smallest, least=1, most=self.numel)
        check_range("tolerance", tolerance, above=0)
        limits: dict[str, Any] = {"seed": seed, "tolerance": tolerance, "max_products": max_products}
        return spectra.extreme_eigenvalues(self.operator(), largest, smallest, **limits)

    def trace(self, num_products: int = 60, *, seed: int = 0) -> Estimate:
        """The trace by Hutch++ (Meyer et al. 2021), with its error. Exact if ``num_products`` is at least P.

        ValueError: ``num_products`` is below 6, or a product is not finite.
        """
        check_range("num_products", num_products, least=6)
        return spectra.trace(self.operator(), num_products, seed=seed)

    def density(self, num_probes: int = 4, num_steps: int = 64, *, seed: int = 0) -> SpectralDensity:
        """The density of all eigenvalues by stochastic Lanczos quadrature: ``num_probes * num_steps`` products.

        ValueError: a number is below 1, or a product is not finite.
        """
        check_range("num_probes", num_probes, least=1)
        check_range("num_steps", num_steps, least=1)
        return spectra.spectral_density(self.operator(), num_probes, num_steps, seed=seed)

    def operator(self) -> spectra.Operator:
        """The Hessian as an operator, for the functions of :mod:`ddpcore.diagnostics.spectra`."""
        return spectra.Operator(product=self.product, like=self.weights.values_P)

    def _products(self, rows_KP: Tensor) -> Tensor:
        if list(map(id, passes.trained(self._model))) != list(map(id, self.weights.parameters)):
            raise ValueError("other parameters are trained now than when this Hessian was made: make a new Hessian")
        results_KP, vectors = torch.zeros_like(rows_KP), self.weights.views(rows_KP)
        views = self.weights.views(results_KP)
        with as_it_was(self._model, rows_KP.device), torch.enable_grad(), twice_differentiable(self._model):
            if self._gauss_newton and isinstance(self._loss, DataLoss):
                for part in self._loss.weighted():
                    add_(views, self._gauss_newton_part(self._loss, *part, vectors))
            else:
                for loss in parts_of(self._loss):
                    add_(views, part_products(loss, self.weights.parameters, vectors))
        return results_KP

    def _gauss_newton_part(
        self, data: DataLoss, share: float, inputs: object, targets: object, vectors: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """``J^T (H_out (J v))``. J v is the derivative of ``J^T u`` with respect to u, so no forward mode is needed."""
        outputs, parameters = data.outputs(inputs), self.weights.parameters
        if not isinstance(outputs, Tensor):
            raise ValueError("gauss_newton=True: the model must return one tensor")
        dummy = torch.zeros_like(outputs, requires_grad=True)
        transposed = slopes_of(outputs, parameters, dummy)
        leaf = outputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(data.loss_fn(leaf, targets) * share, leaf, create_graph=True)
        if not slope.requires_grad:  # the loss is linear in the outputs
            return [None] * len(parameters)
        rows = []
        for index in range(len(vectors[0])):
            along = [passes.at_even(v[index]) for v, g in zip(vectors, transposed, strict=True) if g is not None]
            (change,) = torch.autograd.grad([g for g in transposed if g is not None], dummy, along, retain_graph=True)
            (curved,) = torch.autograd.grad(slope, leaf, change, retain_graph=True, allow_unused=True)
            curved = torch.zeros_like(outputs) if curved is None else curved
            rows.append(torch.autograd.grad(outputs, parameters, curved, retain_graph=True, allow_unused=True))
        return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]
