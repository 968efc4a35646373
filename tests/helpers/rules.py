"""LARS and LAMB as their equations say, with a bound on the rounding errors of any kernel that computes them.

Written from the papers, for one tensor at a time; nothing here is shared with the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    """Half an ULP relative to the value, and half the smallest number."""

    unit: float
    tiny: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Format:
        info = torch.finfo(dtype)
        return cls(info.eps / 2, info.smallest_normal * info.eps / 2)


class Rounded:
    """Numbers with a bound on the error that arithmetic in a given format has made so far.

    ``value`` is what exact arithmetic gives (float64 stands for it), ``error`` bounds how far from it the same
    operations in the format may be: each operation carries on the errors of its operands and adds half a unit in the
    last place of its own result (or half the smallest subnormal).
    """

    def __init__(self, value: Tensor, error: Tensor, arithmetic: Format) -> None:
        self.value, self.error, self.arithmetic = value, error, arithmetic

    @classmethod
    def exact(cls, value: Tensor, arithmetic: Format) -> Rounded:
        return cls(value.double(), torch.zeros_like(value, dtype=torch.float64), arithmetic)

    def constant(self, value: float) -> Rounded:
        """A hyperparameter: held in the format, so off by up to half an ULP."""
        exact = torch.tensor(value, dtype=torch.float64)
        return Rounded(exact, self.arithmetic.unit * exact.abs(), self.arithmetic)

    def rounded_to(self, kind: Format) -> Rounded:
        """Stored in another format."""
        return Rounded(
            self.value, self.error + kind.unit * (self.value.abs() + self.error) + kind.tiny, self.arithmetic
        )

    def _result(self, value: Tensor, carried: Tensor) -> Rounded:
        return Rounded(value, carried, self.arithmetic).rounded_to(self.arithmetic)

    def __add__(self, other: Rounded) -> Rounded:
        return self._result(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Rounded) -> Rounded:
        return self._result(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Rounded) -> Rounded:
        carried = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return self._result(self.value * other.value, carried)

    def __truediv__(self, other: Rounded) -> Rounded:
        value = self.value / other.value
        carried = (self.error + value.abs() * other.error) / (other.value.abs() - other.error)
        return self._result(value, carried)

    def sqrt(self) -> Rounded:
        root = self.value.sqrt()
        below = root - (self.value - self.error).clamp(min=0).sqrt()
        above = (self.value + self.error).sqrt() - root
        return self._result(root, torch.maximum(below, above))

    def norms(self, owner: Tensor) -> Rounded:
        """For each element the norm of its tensor, in float64: it carries errors on and makes none that is seen."""
        parts = (
            torch.zeros(len(owner)).double().index_add(0, owner, x.square()).sqrt() for x in (self.value, self.error)
        )
        value, error = (part[owner] for part in parts)
        return Rounded(value, error, Format.of(torch.float64))

    def bounded(self, low: float, high: float) -> Rounded:
        """Between two numbers, which brings no error."""
        return Rounded(self.value.clamp(low, high), self.error, self.arithmetic)

    def where(self, condition: Tensor, other: float) -> Rounded:
        """These where the condition holds, else a number."""
        nothing = torch.zeros_like(self.error)
        value = torch.where(condition, self.value, torch.full_like(self.value, other))
        return Rounded(value, torch.where(condition, self.error, nothing), self.arithmetic)

    def split(self, sizes: Sequence[int]) -> list[Rounded]:
        """One for each tensor."""
        parts = zip(self.value.split(list(sizes)), self.error.split(list(sizes)), strict=True)
        return [Rounded(value, error, self.arithmetic) for value, error in parts]

    def check(self, actual: Tensor, what: str) -> None:
        """Raise AssertionError where ``actual`` is farther from the value than its bound."""
        assert actual.shape == self.value.shape, f"{what}: {actual.shape} is not {self.value.shape}"
        own = 2 if self.arithmetic == Format.of(torch.float64) else 1  # then ``value`` has made such errors as well
        excess = (actual.detach().cpu().double() - self.value).abs() - own * self.error
        if actual.numel() and not bool((excess <= 0).all()):
            at = int(excess.flatten().nan_to_num(torch.inf).argmax())
            raise AssertionError(
                f"{what}: element {at} is {actual.detach().flatten()[at].item()!r}, exact is "
                f"{self.value.flatten()[at].item()!r} with an error of at most {self.error.flatten()[at].item():.2e}"
            )


def clip_factor(grads: Sequence[Tensor], max_grad_norm: float | None) -> float:
    """What ``torch.nn.utils.clip_grad_norm_`` multiplies all gradients by."""
    norm = float(torch.stack([grad.double().norm() for grad in grads]).norm())
    return 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))


class Problem:
    """Tensors of one dtype laid end to end, and the gradients of their steps."""

    def __init__(
        self, weights: Sequence[Tensor], grads: Sequence[Sequence[Tensor]], factors: Sequence[float], maximize: bool
    ) -> None:
        dtype = weights[0].dtype
        self.arithmetic = Format.of(torch.float64 if dtype == torch.float64 else torch.float32)
        self.storage = Format.of(dtype)
        self.sizes = [weight.numel() for weight in weights]
        self.owner = torch.arange(len(weights)).repeat_interleave(torch.tensor(self.sizes))
        self.weight = self._joined(weights)
        self._grads, self._factors, self._sign = list(zip(*grads, strict=True)), factors, -1.0 if maximize else 1.0
        self.num_steps = len(self._grads)

    def _joined(self, tensors: Sequence[Tensor]) -> Rounded:
        return Rounded.exact(torch.cat([tensor.detach().flatten() for tensor in tensors]), self.arithmetic)

    def grad(self, step: int) -> Rounded:
        """Of a step: scaled, with the sign of the descent."""
        grad = self._joined(self._grads[step])
        if self._factors and self._factors[step] != 1.0:
            grad = grad * grad.constant(self._factors[step])
        return Rounded(self._sign * grad.value, grad.error, self.arithmetic)

    def result(self, weight: Rounded, ratio: Tensor) -> list[tuple[Rounded, float]]:
        """Of each tensor: weight and last ratio."""
        ratios = [part[0].item() if len(part) else 1.0 for part in ratio.split(self.sizes)]
        return list(zip(weight.split(self.sizes), ratios, strict=True))


def lars(
    weights: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    *,
    lr: float | Sequence[float] = 1e-3,
    momentum: float = 0.9,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    trust_coefficient: float = 0.001,
    eps: float = 1e-8,
    variant: str = "you2017",
    always_adapt: bool = True,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
    factors: Sequence[float] = (),
) -> list[tuple[Rounded, float]]:
    """Each tensor's weight and last ratio after its gradients. ``factors``: what multiplies those of each step."""
    problem = Problem(weights, grads, factors, maximize)
    w, m = problem.weight, None
    ratio = Rounded.exact(torch.ones_like(w.value), Format.of(torch.float64))
    for step in range(problem.num_steps):
        g, rate = problem.grad(step), w.constant(lr if isinstance(lr, float) else lr[step])
        decay = w.constant(0.0 if decoupled_weight_decay else weight_decay)
        if always_adapt:
            size, slope = w.norms(problem.owner), g.norms(problem.owner)
            ratio = size * w.constant(trust_coefficient) / (slope + size * decay + w.constant(eps))
            ratio = ratio.where((size.value != 0) & (slope.value != 0), 1.0)
        narrow = (ratio * rate if variant != "scaled_grad" else ratio).rounded_to(problem.arithmetic)
        direction = g if float(decay.value) == 0 else g + decay * w
        if variant != "scaled_lr":
            direction = narrow * direction
        if momentum != 0:
            moving = direction
            if m is not None:
                moving = w.constant(momentum) * m + w.constant(1 - dampening) * direction
            m = moving.rounded_to(problem.storage)
            direction = direction + w.constant(momentum) * m if nesterov else moving
        outer = {"you2017": w.constant(1.0), "scaled_grad": rate, "scaled_lr": narrow}[variant]
        kept = w.constant(1.0 - float(rate.value) * weight_decay) * w if decoupled_weight_decay else w
        w = (kept - outer * direction).rounded_to(problem.storage)
    return problem.result(w, ratio.value)


def lamb(
    weights: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    *,
    lr: float | Sequence[float] = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    trust_clip: tuple[float, float] = (0.0, float("inf")),
    weight_norm_clip: tuple[float, float] = (0.0, float("inf")),
    adapt: bool = True,
    debias: bool = True,
    decay_mode: str = "in_update",
    maximize: bool = False,
    factors: Sequence[float] = (),
) -> list[tuple[Rounded, float]]:
    """As :func:`lars`. Moments are kept in the format of the arithmetic."""
    problem = Problem(weights, grads, factors, maximize)
    w = problem.weight
    m = v = Rounded.exact(torch.zeros_like(w.value), problem.arithmetic)
    ratio = Rounded.exact(torch.ones_like(w.value), Format.of(torch.float64))
    decay = w.constant(weight_decay)
    for step in range(problem.num_steps):
        g, rate = problem.grad(step), w.constant(lr if isinstance(lr, float) else lr[step])
        if decay_mode == "coupled" and weight_decay != 0:
            g = g + decay * w
        m = w.constant(betas[0]) * m + w.constant(1 - betas[0]) * g
        v = w.constant(betas[1]) * v + w.constant(1 - betas[1]) * (g * g)
        m_hat, v_hat = m, v
        if debias:
            m_hat = w.constant(1 / (1 - betas[0] ** (step + 1))) * m
            v_hat = w.constant(1 / (1 - betas[1] ** (step + 1))) * v
        update = m_hat / (v_hat.sqrt() + w.constant(eps))
        if decay_mode == "in_update" and weight_decay != 0:
            update = update + decay * w
        if adapt:
            size, length = w.norms(problem.owner), update.norms(problem.owner)
            # The bounds are held in fp32.
            ratio = (size.bounded(*weight_norm_clip).rounded_to(problem.arithmetic) / length).bounded(*trust_clip)
            ratio = ratio.rounded_to(problem.arithmetic).where((size.value != 0) & (length.value != 0), 1.0)
        kept = w.constant(1.0 - float(rate.value) * weight_decay) * w if decay_mode == "decoupled" else w
        w = (kept - (ratio * rate).rounded_to(problem.arithmetic) * update).rounded_to(problem.storage)
    return problem.result(w, ratio.value)
