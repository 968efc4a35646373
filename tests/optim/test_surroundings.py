"""What surrounds a step changes nothing: memory layouts, modes of torch, schedulers, checkpoints in memory, hooks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD, Muon
from helpers.each import each

Make = Callable[..., torch.optim.Optimizer]


def muon(params: Any, **options: Any) -> torch.optim.Optimizer:
    return Muon(params, ns_dtype=torch.float32, **options)


def muon_adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return Muon([{"params": list(params), "rule": "adamw"}], **options)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params, **options: FusedSGD(params, **{"momentum": 0.9, "weight_decay": 0.1, **options}),
    "sgd clipped": lambda params, **options: FusedSGD(params, **{"momentum": 0.9, "max_grad_norm": 1.0, **options}),
    "lars": FusedLARS,
    "lamb": FusedLAMB,
    "adamw": FusedAdamW,
    "adamw bf16 states": lambda params, **options: FusedAdamW(params, state_dtype=torch.bfloat16, **options),
    "muon": muon,
    "muon, rule adamw": muon_adamw,
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


# ---- memory layouts ----

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "every other element": lambda t: torch.stack([t, torch.full_like(t, 7.0)], dim=-1)[..., 0],
    "rows apart": lambda t: torch.cat([t, torch.full_like(t, 7.0)], dim=3)[..., : t.shape[3]],
    "offset": lambda t: torch.cat([torch.full((3,), 7.0), t.flatten()])[3:].view(t.shape),
}
SHAPE = (4, 6, 3, 5)


def values(step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))


def steps_in_a_layout(name: str, of_weight: str | None, of_gradient: str | None) -> None:
    """Weights are those of contiguous tensors, and memory between the elements keeps its values."""

    def laid_out(value: Tensor, layout: str | None) -> Tensor:
        if layout == "negative bit":
            return torch.complex(value, -value).conj().imag
        return value if layout is None or layout == "expanded" else LAYOUTS[layout](value)

    def gradient(step: int, layout: str | None) -> Tensor:
        return values(step)[:1].expand(SHAPE) if of_gradient == "expanded" else laid_out(values(step), layout)

    weight, plain = nn.Parameter(laid_out(values(0), of_weight)), nn.Parameter(values(0))
    storage = torch.empty(0).set_(weight.untyped_storage())
    between = storage == 7.0
    optimizers = OPTIMIZERS[name]([weight], lr=0.1), OPTIMIZERS[name]([plain], lr=0.1)
    for step in (1, 2, 3):
        weight.grad, plain.grad = gradient(step, of_gradient), gradient(step, None).clone()
        for optimizer in optimizers:
            optimizer.step()
    # An element of a rounded state is rounded by its place in memory.
    atol = 0.02 if name == "adamw bf16 states" else 1e-6
    torch.testing.assert_close(weight, plain, rtol=1e-5, atol=atol, msg=lambda text: f"{of_gradient}: {text}")
    assert bool((storage[between] == 7.0).all()), of_gradient


@each_optimizer
@each("of_weight", [None, *LAYOUTS])
def test_a_step_ignores_the_layout(name, of_weight):
    for of_gradient in (None, *LAYOUTS, "expanded", "negative bit"):
        steps_in_a_layout(name, of_weight, of_gradient)


@each_optimizer
def test_a_state_of_another_layout(name):
    """The state of a contiguous model goes on in a model that is channels last, and in one in 16 bits and back."""
    plain = nn.Parameter(values(0))
    first = OPTIMIZERS[name]([plain], lr=0.1)
    plain.grad = values(1)
    first.step()
    last = nn.Parameter(plain.detach().contiguous(memory_format=torch.channels_last))
    second = OPTIMIZERS[name]([last], lr=0.1)
    second.load_state_dict(first.state_dict())
    plain.grad, last.grad = values(2), values(2)
    first.step()
    second.step()
    torch.testing.assert_close(plain, last, rtol=1e-5, atol=0.02 if name == "adamw bf16 states" else 1e-6)
    for dtype in (torch.bfloat16, torch.float32):
        plain.data, plain.grad = plain.data.to(dtype), None
        plain.grad = values(3).to(dtype)
        first.step()
        assert bool(plain.isfinite().all()), dtype


# ---- modes of torch ----


@contextmanager
def restored(getter: Callable[[], Any], setter: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = getter()
    setter(value)
    try:
        yield
    finally:
        setter(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "default dtype float64": lambda: restored(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device meta": lambda: torch.device("meta"),
    "deterministic": lambda: restored(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "gradients off": torch.no_grad,
    "gradients on": torch.enable_grad,
    "multithreading off": lambda: torch.autograd.set_multithreading_enabled(False),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "another seed": lambda: torch.random.fork_rng(),
}


def trained(name: str, mode: Callable[[], AbstractContextManager[Any]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(24, 100), (6, 5), (4, 9)]]
    optimizer: torch.optim.Optimizer | None = None
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for param in params:  # of low rank, as with a batch of two samples
            left, right = (torch.randn(n, 2, generator=generator) for n in param.shape)
            param.grad = (left @ right.T).to(dtype)
        with mode():
            if mode is MODES["another seed"]:
                torch.manual_seed(99)
            optimizer = optimizer or OPTIMIZERS[name](params, lr=0.1)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
    return [param.detach() for param in params]


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_step_in_a_mode_of_torch(name, dtype, assert_same_bits):
    expected = trained(name, nullcontext, dtype)
    for mode in MODES:
        for found, want in zip(trained(name, MODES[mode], dtype), expected, strict=True):
            assert_same_bits(found, want, mode)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_matrices_of_low_rank_in_any_precision(precision):
    """With "medium" a CPU rounds the factors of products to bfloat16, where the Gram form would diverge."""
    weight = nn.Parameter(torch.zeros(24, 100))
    generator = torch.Generator().manual_seed(0)
    weight.grad = torch.randn(24, 2, generator=generator) @ torch.randn(2, 100, generator=generator)
    with restored(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, precision):
        Muon([weight], lr=1.0, weight_decay=0.0, ns_dtype=torch.float32).step()
    assert 0.6 < float(torch.linalg.matrix_norm(weight.detach(), 2)) < 1.3


# ---- schedulers ----


def schedulers() -> dict[str, Callable[[torch.optim.Optimizer], Any]]:
    """Every scheduler of torch, with the arguments that it needs. A scheduler without an entry fails the test."""
    needed: dict[str, dict[str, Any]] = {
        "LambdaLR": {"lr_lambda": lambda step: 0.9**step},
        "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
        "StepLR": {"step_size": 2},
        "MultiStepLR": {"milestones": [2, 4]},
        "ConstantLR": {},
        "LinearLR": {},
        "ExponentialLR": {"gamma": 0.8},
        "PolynomialLR": {"total_iters": 6},
        "CosineAnnealingLR": {"T_max": 5},
        "CosineAnnealingWarmRestarts": {"T_0": 3},
        "CyclicLR": {"base_lr": 0.05, "max_lr": 0.2, "step_size_up": 2},
        "OneCycleLR": {"max_lr": 0.2, "total_steps": 9},
    }
    known = {
        name
        for name, member in vars(lr_scheduler).items()
        if inspect.isclass(member) and issubclass(member, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    others = {"LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"}  # made of others, or given a loss
    assert known - others == set(needed)
    return {name: lambda o, n=name: getattr(lr_scheduler, n)(o, **needed[n]) for name in needed}  # type: ignore[misc]


COUNTERPARTS: dict[str, tuple[Make, Make]] = {
    "sgd": (
        lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ),
    "lars": (
        lambda params: FusedLARS(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ),
    "adamw": (lambda params: FusedAdamW(params, lr=0.1), lambda params: torch.optim.AdamW(params, lr=0.1)),
    "lamb": (lambda params: FusedLAMB(params, lr=0.1), lambda params: torch.optim.AdamW(params, lr=0.1)),
    "muon": (lambda params: Muon(params, lr=0.1), lambda params: torch.optim.Muon(params, lr=0.1)),
}


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_schedulers_find_the_options_that_they_find_in_torch(name):
    for scheduler, schedule_of in schedulers().items():
        pairs = []
        for make in COUNTERPARTS[name]:
            weight = nn.Parameter(torch.ones(3, 3))
            optimizer = make([weight])
            pairs.append((weight, optimizer, schedule_of(optimizer)))
        for _ in range(6):
            for weight, optimizer, schedule in pairs:
                weight.grad = torch.ones(3, 3)
                optimizer.step()
                schedule.step()
            own, torchs = (optimizer.param_groups[0] for _, optimizer, _ in pairs)
            for option in ("lr", "momentum", "betas"):
                assert option not in torchs or own[option] == torchs[option], (scheduler, option)


# ---- checkpoints in memory ----


@each_optimizer
def test_a_checkpoint_in_memory_stays_as_it_is(name):
    """Neither the optimizer that gave it nor one that loaded it changes it, and two restores are equal."""
    weight = nn.Parameter(values(0))
    optimizer = OPTIMIZERS[name]([weight], lr=torch.tensor(0.1))
    weight.grad = values(1)
    optimizer.step()
    kept, start = optimizer.state_dict(), weight.detach().clone()
    before = copy.deepcopy(kept)
    ends = []
    for _ in range(2):
        with torch.no_grad():
            weight.copy_(start)
        optimizer.load_state_dict(kept)
        weight.grad = values(2)
        optimizer.step()
        optimizer.param_groups[0]["lr"].fill_(0.5)
        ends.append(weight.detach().clone())
    assert torch.equal(*ends)
    assert kept["param_groups"] == before["param_groups"]
    assert kept["state"].keys() == before["state"].keys() and len(kept["state"]) == 1
    for key, value in before["state"][0].items():
        assert torch.equal(kept["state"][0][key], value), key


@each_optimizer
def test_two_optimizers_that_share_a_checkpoint(name):
    """One moves on, and the other does not."""
    first, second = nn.Parameter(values(0)), nn.Parameter(values(0))
    one, two = OPTIMIZERS[name]([first], lr=0.1), OPTIMIZERS[name]([second], lr=0.1)
    first.grad = values(1)
    one.step()
    two.load_state_dict(one.state_dict())
    before = {key: value.clone() for key, value in two.state[second].items()}
    first.grad = values(2)
    one.step()
    assert before and all(torch.equal(two.state[second][key], value) for key, value in before.items())


@each_optimizer
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_states_go_to_the_names(name, prefix):
    """Another order of parameters in the file, and the names that a wrapper has prefixed."""
    make = OPTIMIZERS[name]
    shapes = {"a": (3, 4), "b": (3, 4), "c": (3, 4)}

    def model(order: str, prefix: str) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
        params = {key: nn.Parameter(torch.ones(shapes[key])) for key in order}
        return params, make([(f"{prefix}{key}", param) for key, param in params.items()], lr=0.1)

    one, first = model("abc", prefix)
    for index, key in enumerate(one):
        one[key].grad = torch.full((3, 4), 1.0 + index)
    first.step()
    other, second = model("cab", "")
    second.load_state_dict(first.state_dict())
    for key in shapes:
        for state, value in first.state[one[key]].items():
            assert torch.equal(second.state[other[key]][state], value), (key, state)
    assert second.param_groups[0]["param_names"] == ["c", "a", "b"]


def named_of(names: list[str], make: Make) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """An optimizer that has taken a step, whose gradients differ."""
    params = [nn.Parameter(torch.ones(3, 4)) for _ in names]
    optimizer = make(list(zip(names, params, strict=True)), lr=0.1)
    for index, param in enumerate(params):
        param.grad = torch.full((3, 4), 1.0 + index)
    optimizer.step()
    return optimizer, params


NAMES: list[tuple[list[str], list[str], list[int] | str]] = [  # in the file, of the optimizer, and their places there
    (["w", "b", "w", "b"], ["w", "b", "w", "b"], [0, 1, 2, 3]),
    (["module.w", "w", "module.w", "w"], ["w", "w", "w", "w"], "group 0 has no parameter w, but module.w"),
    (["w", "b", "w", "b"], ["w", "w", "b", "b"], "group 0 has names that are equal, reordered"),
    (["w", "x"], ["w", "w"], "group 0 has no parameter w, but x"),
    (["w", "w"], ["w", "x"], "group 0 has no parameter x, but w"),
    (["1.module.w", "1.w"], ["1.w", "1.module.w"], [1, 0]),
    (["module.1.module.w", "module.1.w"], ["1.w", "1.module.w"], [1, 0]),
    (["_orig_mod.module.module.w", "_orig_mod.module.w2"], ["w2", "w"], [1, 0]),
    (["a.module.w", "b.module._orig_mod.w"], ["module.b.w", "module.a.w"], [1, 0]),
    (["module.w", "w"], ["module.module.w", "module.w"], "group 0 has no parameter module.module.w, but w"),
    (["submodule.w", "w"], ["w", "submodule.w"], [1, 0]),
    (["module.a", "module.b"], ["c", "b"], "group 0 has no parameter c, but a: load"),
]


def test_names_that_are_equal_with_or_without_wrappers():
    """Equal names have the order of the file, and no two names become one because a module is called ``module``."""
    for make, (theirs, ours, places) in product(OPTIMIZERS.values(), NAMES):
        first, params = named_of(theirs, make)
        second, own = named_of(ours, make)
        if isinstance(places, str):
            with pytest.raises(ValueError, match=places):
                second.load_state_dict(first.state_dict())
            continue
        second.load_state_dict(first.state_dict())
        for param, place in zip(own, places, strict=True):
            for key, value in first.state[params[place]].items():
                assert torch.equal(second.state[param][key], value), (theirs, ours, key)


def test_groups_of_equal_names_or_such_that_a_wrapper_would_explain():
    """A group with the weight of a module called ``module``, and one with another of that name."""

    def make(*names: str) -> torch.optim.Optimizer:
        return FusedAdamW([{"params": [(name, nn.Parameter(torch.ones(3, 4)))]} for name in names])

    make("w", "w").load_state_dict(make("w", "w").state_dict())
    with pytest.raises(ValueError, match=r"group 0 has no parameter module\.w, but w"):
        make("module.w", "w").load_state_dict(make("w", "module.w").state_dict())


@each_optimizer
def test_states_of_other_names_are_refused(name):
    make = OPTIMIZERS[name]
    first = make([("a", nn.Parameter(torch.ones(3, 4))), ("b", nn.Parameter(torch.ones(3, 4)))], lr=0.1)
    second = make([("a", nn.Parameter(torch.ones(3, 4))), ("x", nn.Parameter(torch.ones(3, 4)))], lr=0.3)
    with pytest.raises(ValueError, match="state_dict: group 0 has no parameter x, but b: load"):
        second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 0.3
    unnamed = make([nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))], lr=0.3)
    second.load_state_dict(unnamed.state_dict())  # a file without names has an order only
    assert second.param_groups[0]["param_names"] == ["a", "x"]


@each_optimizer
def test_hooks_of_states_see_what_torch_shows_them(name):
    weight = nn.Parameter(values(0))
    optimizer = OPTIMIZERS[name]([weight], lr=0.1)
    weight.grad = values(1)
    optimizer.step()
    optimizer.register_state_dict_post_hook(lambda _, state: {"version": 1, "inner": state})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: state["inner"])
    saved = optimizer.state_dict()
    assert set(saved) == {"version", "inner"}
    optimizer.state.clear()
    optimizer.load_state_dict(saved)
    for key, value in saved["inner"]["state"][0].items():
        assert torch.equal(optimizer.state[weight][key].flatten(), value.flatten()), key


# ---- other inputs ----


@each_optimizer
def test_a_parameter_that_grows(name):
    """Its data is replaced: a parameter without a state steps on, and one with a state is refused by name."""
    weight = nn.Parameter(torch.ones(2, 5))
    optimizer = OPTIMIZERS[name]([weight], lr=0.1)
    weight.grad = torch.ones(2, 5)
    optimizer.step()
    weight.data, weight.grad = torch.ones(4, 1000), None
    weight.grad = torch.ones(4, 1000)
    with pytest.raises(
        RuntimeError, match=r"has shape \(2, 5\) and its parameter \(4, 1000\), whose data was replaced"
    ):
        optimizer.step()
    assert torch.equal(weight, torch.ones(4, 1000))
    optimizer.state.pop(weight)
    optimizer.step()
    assert bool((weight < 1).all())


@pytest.mark.parametrize(
    "make", [lambda p: FusedLARS(p, lr=0.1, momentum=0.0), lambda p: FusedSGD(p, lr=0.1, max_grad_norm=1.0)]
)
def test_a_parameter_without_a_state_grows(make):
    weight = nn.Parameter(torch.ones(10))
    optimizer = make([weight])
    for size in (10, 5000, 3):
        weight.data, weight.grad = torch.ones(size), None
        weight.grad = torch.ones(size)
        optimizer.step()
        assert weight.shape == (size,) and bool((weight < 1).all())


@each_optimizer
@pytest.mark.parametrize("lr", [0.1, pytest.param(torch.tensor(0.1), marks=pytest.mark.slow)], ids=["float", "tensor"])
def test_a_first_step_is_one_graph(name, lr):
    torch._dynamo.reset()
    weight, eager = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
    optimizer, other = OPTIMIZERS[name]([weight], lr=lr), OPTIMIZERS[name]([eager], lr=lr)
    weight.grad = eager.grad = torch.ones(3, 4)
    torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)()
    other.step()
    assert torch.equal(weight, eager)


@each_optimizer
def test_a_wrong_learning_rate_is_shown_with_its_type(name):
    for lr in ("1e-3", None, [0.1]):
        with pytest.raises(ValueError, match=r"lr is .*: it must be a finite number") as caught:
            OPTIMIZERS[name]([nn.Parameter(torch.ones(2, 2))], lr=lr)
        assert repr(lr) in str(caught.value)


@pytest.mark.parametrize("momentum", [torch.tensor(0.5), torch.tensor([0.5])])
def test_options_of_muon_may_be_tensors(momentum):
    one, two = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
    optimizers = Muon([one], lr=0.1, momentum=momentum), Muon([two], lr=0.1, momentum=0.5)
    for optimizer in optimizers:
        optimizer.param_groups[0]["params"][0].grad = torch.arange(12.0).view(3, 4)
        optimizer.step()
        optimizer.step()
    assert torch.equal(one, two)
