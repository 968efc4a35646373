"""For any shapes, groups and options, kernels equal their references, and irrelevant changes change no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcore.ops import reference
from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from ddpcore.optim.batch import Batch

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed: pip install -e .[dev]")
st = hypothesis.strategies

KINDS = {"sgd": FusedSGD, "adamw": FusedAdamW, "lars": FusedLARS, "lamb": FusedLAMB}
# The same examples in every run: bits are compared, and a rare rounding difference would make the tests random.
fixed = hypothesis.settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
numbers = st.sampled_from([0.0, 0.01, 0.1, 0.5])
sizes = st.lists(st.sampled_from([0, 1, 3, 15, 16, 17, 100, 4095, 4097]), min_size=1, max_size=6)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def rules(draw: Any, kind: str) -> dict[str, Any]:
    """Options of the optimizer."""
    options: dict[str, Any] = {"lr": draw(numbers), "weight_decay": draw(numbers), "maximize": draw(st.booleans())}
    if kind in ("adamw", "lamb"):
        options["betas"] = draw(st.sampled_from([0.0, 0.9])), draw(st.sampled_from([0.0, 0.99]))
        options["eps"] = draw(st.sampled_from([1e-6, 0.1]))
    if kind == "adamw":
        return options | {"decoupled_weight_decay": draw(st.booleans())}
    if kind == "lamb":
        options |= {
            "variant": draw(st.sampled_from(["paper", "nvlamb", "undebiased"])),
            "decay_mode": draw(st.sampled_from(["in_update", "coupled", "decoupled"])),
            "trust_clip": draw(st.sampled_from([None, 0.5, (0.9, 2.0)])),
            "weight_norm_clip": draw(st.sampled_from([None, 1.0])),
        }
        return options
    nesterov = draw(st.booleans())
    options |= {"nesterov": nesterov, "momentum": 0.9 if nesterov else draw(st.sampled_from([0.0, 0.9]))}
    options |= {"dampening": 0.0 if nesterov else draw(numbers), "decoupled_weight_decay": draw(st.booleans())}
    if kind == "lars":
        options |= {
            "variant": draw(st.sampled_from(["you2017", "scaled_grad", "scaled_lr"])),
            "trust_coefficient": draw(st.sampled_from([0.001, 1.0])),
            "eps": draw(st.sampled_from([0.0, 1e-8, 1.0])),
            "always_adapt": draw(st.booleans()),
        }
    return options


def weights(shapes: list[int], dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in shapes]


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 3) -> list[Tensor]:
    """Steps with gradients that depend only on the parameters' positions."""
    for step in range(steps):
        for index, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + index)
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return [param.detach() for param in params]


def same(left: list[Tensor], right: list[Tensor]) -> None:
    for index, (one, two) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(one, two), f"tensor {index} differs by {(one.double() - two.double()).abs().max():.3e}"


@pytest.mark.parametrize("kind", KINDS)
@fixed
@hypothesis.given(data=st.data(), shapes=sizes, dtype=dtypes, masters=st.booleans(), clip=st.booleans())
def test_kernels_equal_their_references(kind, data, shapes, dtype, masters, clip):
    more = {"master_weights": masters, "max_grad_norm": 0.5 if clip else None}
    groups = [data.draw(rules(kind)) for _ in range(2)]
    ends = []
    for kernels in (None, reference):
        params = weights(shapes, dtype)
        split = [{"params": params[:1], **groups[0]}, {"params": params[1:], **groups[1]}]
        with pytest.MonkeyPatch.context() as patch:
            if kernels is not None:
                patch.setattr(Batch, "kernels", kernels)
            optimizer = KINDS[kind]([group for group in split if group["params"]], **more)
            ends.append(run(optimizer, params))
    same(*ends)


@pytest.mark.parametrize("kind", KINDS)
@fixed
@hypothesis.given(data=st.data(), shapes=sizes, dtype=dtypes)
def test_order_and_groups_of_equal_options_change_no_bit(kind, data, shapes, dtype):
    options = data.draw(rules(kind))
    order = data.draw(st.permutations(range(len(shapes))))
    cut = data.draw(st.integers(0, len(shapes)))
    ends = []
    for way in ("straight", "permuted", "in groups", "one by one"):
        params = weights(shapes, dtype)
        given: list[Any] = params
        if way == "permuted":
            given = [params[index] for index in order]
        elif way == "in groups":
            given = [{"params": part} for part in (params[:cut], params[cut:]) if part]
        elif way == "one by one":
            given = [{"params": [param]} for param in params]
        ends.append(run(KINDS[kind](given, **options), params))
    for end in ends[1:]:
        same(ends[0], end)


@pytest.mark.parametrize("kind", KINDS)
@fixed
@hypothesis.given(data=st.data(), shapes=sizes, exponent=st.integers(-3, 3))
def test_a_rate_of_twice_the_size_is_a_first_step_of_twice_the_length(kind, data, shapes, exponent):
    """Exactly, for powers of two: from weights of zero, where nothing is added to the step and R = 1."""
    options = {**data.draw(rules(kind)), "lr": 0.125}
    ends = []
    for factor in (1.0, 2.0**exponent):
        params = [nn.Parameter(torch.zeros(size)) for size in shapes]
        ends.append(run(KINDS[kind](params, **{**options, "lr": 0.125 * factor}), params, steps=1))
    same([end * 2.0**exponent for end in ends[0]], ends[1])


@pytest.mark.parametrize("kind", KINDS)
@fixed
@hypothesis.given(data=st.data(), shapes=sizes)
def test_ascent_along_a_gradient_is_descent_along_its_negative(kind, data, shapes):
    options = data.draw(rules(kind))
    ends = []
    for sign in (1.0, -1.0):
        params = weights(shapes, torch.float32)
        optimizer = KINDS[kind](params, **{**options, "maximize": sign < 0})
        for step in range(3):
            for index, param in enumerate(params):
                grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + index))
                param.grad = sign * grad
            optimizer.step()
        ends.append([param.detach() for param in params])
    same(*ends)


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_gives_the_same_bits(kind, threads, set_threads):
    ends = []
    for number in (1, threads):
        set_threads(number)
        params = weights([5, 70000, 4096, 1, 30001], torch.float32)
        ends.append(run(KINDS[kind](params, lr=0.1, weight_decay=0.1, max_grad_norm=1.0), params))
    same(*ends)
