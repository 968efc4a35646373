"""The list "The same bits" of ``docs/optimizers.md``, line by line, for drawn shapes, dtypes and options."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import torch
from torch import nn

from ddpcore import ops
from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD, Muon
from ddpcore.parameters.flat import FlatParameters
from helpers.each import each

KINDS: dict[str, Any] = {"sgd": FusedSGD, "adamw": FusedAdamW, "lars": FusedLARS, "lamb": FusedLAMB}
SHAPES: list[tuple[int, ...]] = [
    (), (1,), (3,), (16,), (17,), (4097,), (1, 9), (9, 1), (7, 3), (64, 65), (4, 3, 3, 3), (2, 0), (5, 4, 3), (130, 70),
]  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CASES = [(kind, seed) for kind in KINDS for seed in range(15)]


def options(kind: str, draw: random.Random) -> dict[str, Any]:
    """Options of one optimizer, in all of its forms."""
    some = [0.0, 0.01, 0.3]
    found: dict[str, Any] = {"lr": draw.choice([0.01, 0.3, torch.tensor(0.05)]), "weight_decay": draw.choice(some)}
    found |= {"maximize": draw.random() < 0.3, "max_grad_norm": draw.choice([None, None, 0.5])}
    if kind in ("adamw", "lamb"):
        found |= {"betas": (draw.choice([0.0, 0.9]), draw.choice([0.0, 0.99])), "eps": draw.choice([1e-8, 0.1])}
    if kind == "lamb":
        return found | {
            "variant": draw.choice(["paper", "nvlamb", "undebiased"]),
            "decay_mode": draw.choice(["in_update", "coupled", "decoupled"]),
            "trust_clip": draw.choice([None, 0.5, (0.9, 2.0)]),
            "weight_norm_clip": draw.choice([None, 1.0]),
        }
    found["decoupled_weight_decay"] = draw.random() < 0.5
    if kind == "adamw":
        return found
    found |= draw.choice([{"nesterov": True, "momentum": 0.9}, {"momentum": 0.9, "dampening": draw.choice(some)}, {}])
    if kind == "lars":
        found |= {
            "variant": draw.choice(["you2017", "scaled_grad", "scaled_lr"]),
            "trust_coefficient": draw.choice([0.001, 1.0]),
            "eps": draw.choice([0.0, 1e-8]),
            "always_adapt": draw.random() < 0.5,
        }
    return found


def drawn(kind: str, seed: int) -> tuple[random.Random, list[tuple[int, ...]], torch.dtype, dict[str, Any]]:
    """A source of further choices, shapes, a dtype and options."""
    draw = random.Random(f"{kind} {seed}")
    shapes = [draw.choice(SHAPES) for _ in range(draw.randint(1, 6))]
    dtype, given = draw.choice(DTYPES), options(kind, draw)
    given |= draw.choice([{}, {"master_weights": True}, {"state_dtype": "bfloat16"}])
    return draw, shapes, dtype, given


def weights(shapes: list[tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def grads_of(step: int, params: list[nn.Parameter], dtype: torch.dtype | None = None, factor: float = 1.0) -> None:
    """Gradients that depend on the step and the place, rounded to ``dtype``."""
    for index, param in enumerate(params):
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(1000 * step + index))
        param.grad = (grad.to(dtype or param.dtype) * factor).to(param.dtype)


def groups(given: list[nn.Parameter], cut: int) -> list[dict[str, Any]]:
    return [{"params": part} for part in (given[:cut], given[cut:]) if part]


def assert_alike(one: tuple[Any, list[nn.Parameter]], two: tuple[Any, list[nn.Parameter]]) -> None:
    """The same weights, and the same states of them."""
    for index, (left, right) in enumerate(zip(one[1], two[1], strict=True)):
        assert torch.equal(left, right), f"weight {index} of {tuple(left.shape)}"
        states = one[0].state.get(left, {}), two[0].state.get(right, {})
        assert states[0].keys() == states[1].keys()
        for name in states[0]:
            assert torch.equal(states[0][name], states[1][name]), f"{name} {index}"


@each(("kind", "seed"), CASES)
def test_a_list_and_a_flat_buffer(kind: str, seed: int) -> None:
    """Also in another order of the buffer, and in groups of equal options."""
    draw, shapes, dtype, given = drawn(kind, seed)
    plain, bound = weights(shapes, dtype), weights(shapes, dtype)
    cut = draw.randint(0, len(shapes))
    optimizers = [KINDS[kind](groups(params, cut), **given) for params in (plain, bound)]
    flat = FlatParameters([[(str(index), param) for index, param in enumerate(bound)]])
    optimizers[1].bind(flat)
    order = list(range(len(shapes)))
    for step in range(4):
        if step == 2:
            draw.shuffle(order)
            flat.reorder(order)
        for params, optimizer in zip((plain, bound), optimizers, strict=True):
            grads_of(step, params)
            optimizer.step()
        assert_alike((optimizers[0], plain), (optimizers[1], bound))


@each(("kind", "seed"), CASES)
def test_virtual_learners_and_optimizers(kind: str, seed: int) -> None:
    draw, shapes, dtype, given = drawn(kind, seed)
    num = draw.randint(2, 4)
    rows, alone = ([weights(shapes, dtype, learner) for learner in range(num)] for _ in range(2))
    flat = FlatParameters([[(str(index), param) for index, param in enumerate(row)] for row in rows])
    together = KINDS[kind]([param for row in rows for param in row], **given)
    together.bind(flat)
    singles = [KINDS[kind](row, **given) for row in alone]
    for step in range(3):
        for learner in range(num):
            grads_of(10 * step + learner, rows[learner])
            grads_of(10 * step + learner, alone[learner])
        for optimizer in (together, *singles):
            optimizer.step()
    for learner in range(num):
        assert_alike((together, rows[learner]), (singles[learner], alone[learner]))


@each(("kind", "seed"), CASES)
def test_a_run_that_is_saved_and_loaded(kind: str, seed: int) -> None:
    draw, shapes, dtype, given = drawn(kind, seed)
    straight = weights(shapes, dtype)
    optimizer = KINDS[kind](straight, **given)
    at = draw.randint(0, 3)
    for step in range(5):
        if step == at:
            file = io.BytesIO()
            torch.save([[param.detach() for param in straight], optimizer.state_dict()], file)
            tensors, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            resumed = [nn.Parameter(tensor) for tensor in tensors]
            again = KINDS[kind](resumed)
            again.load_state_dict(state)
        grads_of(step, straight)
        optimizer.step()
        if step >= at:
            grads_of(step, resumed)
            again.step()
    assert_alike((optimizer, straight), (again, resumed))


@each(("kind", "seed", "dtype"), [(*case, dtype) for case in CASES for dtype in DTYPES[2:]])
def test_master_weights_and_a_run_in_float32(kind: str, seed: int, dtype: torch.dtype) -> None:
    _, shapes, _, given = drawn(kind, seed)
    given.pop("state_dtype", None)
    given["master_weights"] = False
    exact, rounded = [nn.Parameter(one.detach().float()) for one in weights(shapes, dtype)], weights(shapes, dtype)
    optimizers = [KINDS[kind](exact, **given), KINDS[kind](rounded, **{**given, "master_weights": True})]
    for step in range(4):
        for params, optimizer in zip((exact, rounded), optimizers, strict=True):
            grads_of(step, params, dtype)
            optimizer.step()
    for index, (one, two) in enumerate(zip(exact, rounded, strict=True)):
        state = optimizers[1].state[two]
        assert torch.equal(state["master"], one) and torch.equal(two, one.to(dtype)), f"weight {index}"
        for name, value in optimizers[0].state[one].items():
            assert torch.equal(state[name], value), f"{name} {index}"


@each(("kind", "seed"), CASES)
def test_a_gradient_scale_that_is_a_power_of_two(kind: str, seed: int) -> None:
    draw, shapes, dtype, given = drawn(kind, seed)
    exponent = (
        draw.randint(0, 10) if dtype == torch.float16 else draw.randint(-20, 40)
    )  # so that no gradient is rounded
    plain, scaled = weights(shapes, dtype), weights(shapes, dtype)
    optimizers = [KINDS[kind](params, **given) for params in (plain, scaled)]
    for step in range(4):
        grads_of(step, plain)
        optimizers[0].step()
        grads_of(step, scaled, factor=2.0**exponent)
        optimizers[1].grad_scale = torch.tensor([2.0**exponent])
        optimizers[1].found_inf = torch.tensor([0.0])
        optimizers[1].step()
    assert_alike((optimizers[0], plain), (optimizers[1], scaled))


@each(("kind", "seed"), CASES)
def test_any_number_of_threads(kind: str, seed: int, set_threads: Any) -> None:
    draw, shapes, dtype, given = drawn(kind, seed)
    shapes += [(70_001,)]  # torch divides a sum of 32768 elements among threads
    dtype = torch.float64 if seed % 2 else dtype
    ends = []
    for threads in (1, draw.randint(2, 9)):
        set_threads(threads)
        params = weights(shapes, dtype)
        optimizer = KINDS[kind](params, **given)
        for step in range(2):
            grads_of(step, params)
            optimizer.step()
        ends.append((optimizer, params))
    assert_alike(*ends)


@pytest.mark.slow
@each(("kind", "seed"), [(kind, seed) for kind, seed in CASES if seed < 1])
def test_compiled_and_eager(kind: str, seed: int) -> None:
    """The compiler sees a kernel as one operator, so that "aot_eager" calls what its code generator would call."""
    _, shapes, _, given = drawn(kind, seed)
    dtype = torch.float32
    ends = []
    for compiled in (False, True):
        torch._dynamo.reset()
        params = weights(shapes, dtype)
        optimizer = KINDS[kind](params, **given)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for number in range(3):
            grads_of(number, params)
            step()
        ends.append((optimizer, params))
    assert_alike(*ends)


@each(("coupled", "seed"), [(coupled, seed) for coupled in (False, True) for seed in range(20)])
def test_lamb_with_a_ratio_of_one_is_adamw(coupled: bool, seed: int) -> None:
    """ "FusedLAMB(s, eps=1e-8, trust_clip=(1, 1), decay_mode=...)" and "FusedAdamW(s)": "bit for bit"."""
    _, shapes, dtype, given = drawn("adamw", seed)
    given |= {"eps": 1e-8, "decoupled_weight_decay": not coupled}
    theirs, ours = weights(shapes, dtype), weights(shapes, dtype)
    optimizers: list[Any] = [FusedAdamW(theirs, **given)]
    given.pop("decoupled_weight_decay")
    mode = "coupled" if coupled else "decoupled"
    optimizers.append(FusedLAMB(ours, **given, trust_clip=(1, 1), decay_mode=mode))
    for step in range(4):
        for params, optimizer in zip((theirs, ours), optimizers, strict=True):
            grads_of(step, params)
            optimizer.step()
    assert_alike((optimizers[0], theirs), (optimizers[1], ours))


@each("seed", range(30))
def test_groups_of_muon_with_adamw(seed: int) -> None:
    """ "Steps have the bits of FusedAdamW with adamw_betas, adamw_eps and adamw_lr"."""
    draw, shapes, dtype, given = drawn("adamw", seed)
    given = {name: given[name] for name in ("lr", "weight_decay", "betas", "eps")}
    cut = draw.randint(0, len(shapes))
    ours, theirs = weights(shapes, dtype), weights(shapes, dtype)
    for params in (ours, theirs):
        for index, param in enumerate(params):  # the same numbers in another order of memory
            if index % 2 and param.dim() == 2:
                param.data = param.data.T.contiguous().T
    matrix = [nn.Parameter(torch.ones(3, 2))] if draw.random() < 0.5 else []
    of_muon: dict[str, Any] = {"adamw_betas": given["betas"], "adamw_eps": given["eps"]}
    if isinstance(given["lr"], float):
        of_muon["adamw_lr"] = given["lr"]
    mine = [{**group, "rule": "adamw"} for group in groups(ours, cut)]
    mine += [{"params": matrix}] if matrix else []
    lr = 0.7 if "adamw_lr" in of_muon else given["lr"]
    muon = Muon(mine, lr=lr, weight_decay=given["weight_decay"], **of_muon)
    adamw = FusedAdamW(groups(theirs, cut), **given)
    for step in range(4):
        grads_of(step, ours)
        grads_of(step, theirs)
        grads_of(step, matrix)
        if step == 2 and len(ours) > 1:
            ours[0].grad = theirs[0].grad = None
        muon.step()
        adamw.step()
    assert_alike((muon, ours), (adamw, theirs))


@each(("kind", "seed"), CASES)
def test_an_average_in_the_pass_of_the_step(kind: str, seed: int) -> None:
    """ "Both ways give the same bits": one pass over memory, and two (``ddpcore/optim/weight_step.py``)."""
    draw, shapes, dtype, given = drawn(kind, seed)
    dtype = torch.bfloat16 if dtype == torch.float64 else dtype
    given.pop("master_weights", None)
    given.pop("state_dtype", None)
    ends = []
    peers, noise = draw.randint(1, ops.MAX_STEP_PEERS), draw.choice([None, ops.Noise(0.1, seed=seed, step=3)])
    elsewhere = draw.random() < 0.5
    for in_one in (True, False):
        params = weights(shapes, dtype)
        optimizer = KINDS[kind](params, **given)
        flat = FlatParameters([[(str(index), param) for index, param in enumerate(params)]])
        step = optimizer.bind(flat)
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            rows = [torch.randn(flat.numel, generator=generator).to(dtype) for _ in range(peers)]
            out = torch.zeros_like(flat.param_LP[0]) if elsewhere and in_one else None
            mixture = ops.Mixture(rows, 0.4, [0.6 / peers] * peers, noise, out)
            if in_one:
                step.average(mixture)
            else:
                mixture.apply_(flat.param_LP)
            grads_of(number, params)
            optimizer.step()
        ends.append((optimizer, params))
    assert_alike(*ends)
