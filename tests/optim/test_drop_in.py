"""The fused optimizers as drop-in replacements: schedulers, closures, hooks, unusual tensors, errors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedOptimizer, FusedSGD, param_groups
from helpers.each import each

MAKES: dict[str, Any] = {
    "sgd": lambda p, **more: FusedSGD(p, **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **more}),
    "adamw": lambda p, **more: FusedAdamW(p, **{"lr": 0.1, "weight_decay": 0.01, **more}),
    "lars": lambda p, **more: FusedLARS(p, **{"lr": 0.1, "weight_decay": 0.01, "trust_coefficient": 0.5, **more}),
    "lamb": lambda p, **more: FusedLAMB(p, **{"lr": 0.1, "weight_decay": 0.01, **more}),
}
every = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2)).to(dtype)


def give(params: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param)


def assert_same(left: Any, right: Any) -> None:
    assert all(torch.equal(one, two) for one, two in zip(left, right, strict=True))


def test_no_scheduler_of_torch_is_forgotten():
    kinds = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, lr_scheduler.LRScheduler) and kind.__name__[0] != "_"]
    abstract = {"LRScheduler", "SWALR"}  # SWALR lives in torch.optim.swa_utils
    assert {kind.__name__ for kind in kinds} - abstract == set(SCHEDULERS)


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@each("name", SCHEDULERS)
@every
def test_schedulers(make, name, tensor):
    """A step uses the rate that the scheduler has set: the same bits as an optimizer with this rate as its option."""
    model, other_model = net(), net()
    # CyclicLR and OneCycleLR move the momentum, or the first beta, as well.
    optimizer = make(model.parameters(), lr=torch.tensor(0.1) if tensor else 0.1)
    other = make(other_model.parameters())
    torchs = torch.optim.SGD(net().parameters(), lr=torch.tensor(0.1) if tensor else 0.1, momentum=0.9)
    schedulers = [SCHEDULERS[name](optimizer), SCHEDULERS[name](torchs)]
    rates = set()
    for step in range(6):
        rate = float(optimizer.param_groups[0]["lr"])
        assert rate == float(torchs.param_groups[0]["lr"])
        other.param_groups[0]["lr"] = rate
        for option in ("momentum", "betas"):
            if option in optimizer.defaults:
                other.param_groups[0][option] = optimizer.param_groups[0][option]
        for params, stepped in ((model.parameters(), optimizer), (other_model.parameters(), other)):
            give(list(params), step)
            stepped.step()
        torchs.step()
        rates.add(rate)
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len(rates) > 1
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor) == tensor or name == "ReduceLROnPlateau"
    assert_same(model.parameters(), other_model.parameters())


@every
def test_closures_names_and_hooks(make):
    model = net()
    optimizer = make(model.named_parameters())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "extra": 1})

    def closure() -> Tensor:
        seen.append("closure")
        optimizer.zero_grad()
        loss = model(torch.ones(3, 6)).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[2] < losses[0]
    assert seen == ["before", "closure", "after"] * 3
    assert optimizer.state_dict()["extra"] == 1
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]
    if isinstance(optimizer, (FusedLARS, FusedLAMB)):
        assert list(optimizer.trust_ratios()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("word", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"fused": False}], ids=str)
@every
def test_words_of_torch_change_nothing(make, word):
    models = [net(), net()]
    capturable = {} if make is MAKES["sgd"] else {"capturable": True}
    for model, more in zip(models, ({}, {**word, **capturable}), strict=True):
        optimizer = make(model.parameters(), **more)
        give(model.parameters(), 0)
        optimizer.step()
    assert_same(models[0].parameters(), models[1].parameters())


def odd_tensors() -> dict[str, tuple[Tensor, Tensor]]:
    """Weights and gradients of equal shapes and different layouts."""
    wide = torch.randn(8, 12)
    image = torch.randn(4, 3, 5, 5)
    return {
        "scalar": (torch.randn(()), torch.randn(())),
        "empty": (torch.randn(0, 3), torch.randn(0, 3)),
        "columns": (wide[:, ::2], torch.randn(8, 6)),
        "transposed": (torch.randn(5, 7).t(), torch.randn(7, 5)),
        "channels last": (image.to(memory_format=torch.channels_last), torch.randn(4, 3, 5, 5)),
        "gradient of channels last": (image.clone(), image.clone(memory_format=torch.channels_last)),
        "one number as gradient": (torch.randn(6), torch.randn(1).expand(6)),
        "gradient by columns": (torch.randn(4, 3), torch.randn(3, 4).t()),
        "misaligned": (torch.randn(40)[3:36], torch.randn(40)[5:38]),
        "float64": (torch.randn(9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)),
        "bfloat16": (torch.randn(9).bfloat16(), torch.randn(9).bfloat16()),
        "float16": (torch.randn(9).half(), torch.randn(9).half()),
    }


@every
def test_tensors_of_all_kinds_in_one_optimizer(make):
    """Each gets the step that it gets alone and contiguous, and keeps its strides."""
    tensors = odd_tensors()
    params = {name: nn.Parameter(weight) for name, (weight, _) in tensors.items()}
    plain = {
        name: nn.Parameter(weight.clone(memory_format=torch.contiguous_format)) for name, (weight, _) in tensors.items()
    }
    strides = {name: param.stride() for name, param in params.items()}
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = make([*params.values(), frozen])
    alone = {name: make([param]) for name, param in plain.items()}
    for _ in range(3):
        for name, (_, grad) in tensors.items():
            params[name].grad = grad
            plain[name].grad = grad.clone(memory_format=torch.contiguous_format)
            alone[name].step()
        optimizer.step()
    for name, param in params.items():
        if name in ("transposed", "channels last", "gradient by columns", "gradient of channels last"):
            # Norms are summed in another order, so that a ratio may round to its neighbour: an ULP a step.
            torch.testing.assert_close(param, plain[name], rtol=0, atol=8 * torch.finfo(torch.float32).eps)
        else:
            assert torch.equal(param, plain[name]), name
        assert param.stride() == strides[name]
    assert torch.equal(frozen, torch.ones(3))


@every
def test_gradients_with_the_negative_bit(make):
    """Autograd gives them to parameters without dimensions behind ``conj()``, here in the first and the third step."""

    def run(make: Any, resolve: bool, dtype: torch.dtype) -> list[Tensor]:
        params = [nn.Parameter(torch.tensor(value, dtype=dtype)) for value in (0.5, 0.7)]
        optimizer = make(params)
        for is_negative in (True, False, True):
            optimizer.zero_grad()
            number = torch.complex(*params)
            number = number.conj() if is_negative else number
            (number.abs() ** 2 + (number * (1 + 2j)).imag).backward()
            assert params[1].grad.is_neg() == is_negative
            for param in params:
                param.grad = param.grad.resolve_neg() if resolve else param.grad
            optimizer.step()
        return [param.detach() for param in params]

    torchs = {MAKES["sgd"]: torch.optim.SGD, MAKES["adamw"]: torch.optim.AdamW}
    for dtype, more in product((torch.float32, torch.float64), ({}, {"max_grad_norm": 0.5})):
        clipped = partial(make, **more)
        assert_same(run(clipped, False, dtype), run(clipped, True, dtype))
    if make in torchs:
        options = {"momentum": 0.9} if make is MAKES["sgd"] else {}
        theirs = run(partial(torchs[make], lr=0.1, weight_decay=0.01, **options), False, torch.float32)
        torch.testing.assert_close(run(make, False, torch.float32), theirs)


@every
def test_what_is_refused_in_a_step(make):
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = make(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="needs dense gradients"):
        optimizer.step()
    param = nn.Parameter(torch.zeros(1).expand(5))
    param.grad = torch.ones(5)
    with pytest.raises(RuntimeError):
        make([param]).step()


@every
def test_parameters_that_are_none(make):
    with pytest.raises(ValueError, match="params is empty"):
        make([])
    with pytest.raises(TypeError, match="params argument"):
        make(nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        make([nn.Parameter(torch.zeros(3)) * 2])
    with pytest.raises(ValueError, match=r"complex64: pass torch.view_as_real"):
        make([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="differentiable is True"):
        make([nn.Parameter(torch.zeros(3))], differentiable=True)


NUMBERS: dict[str, tuple[tuple[str, ...], list[Any]]] = {
    "lr": (tuple(MAKES), [-0.1, math.nan, math.inf, "0.1", None, torch.tensor(-1.0), torch.tensor(1j)]),
    "weight_decay": (tuple(MAKES), [-0.1, math.nan, math.inf, "0", None]),
    "max_grad_norm": (tuple(MAKES), [-0.1, 0.0, math.nan, math.inf, "1"]),
    "momentum": (("sgd", "lars"), [-0.1, math.nan, math.inf, None]),
    "dampening": (("sgd", "lars"), [math.nan, math.inf, None]),
    "trust_coefficient": (("lars",), [-0.1, math.nan, math.inf, None]),
    "eps": (("adamw", "lars", "lamb"), [-0.1, math.nan, math.inf, None]),
    "variant": (("lars", "lamb"), ["best", None, ["paper"]]),
    "always_adapt": (("lars", "lamb"), ["yes", 0.5]),
    "decay_mode": (("lamb",), ["none", None]),
    "decoupled_weight_decay": (("sgd", "adamw", "lars"), ["yes", 0.5]),
    "amsgrad": (("adamw",), [True]),
    "betas": (("adamw", "lamb"), [0.9, (0.9,), (1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan), ("a", 0.9)]),
    "trust_clip": (("lamb",), [0.0, -1.0, math.nan, (2.0, 1.0), (-1.0, 1.0), (0.0, 0.0), (1.0,), (1, 2, 3), "x"]),
    "weight_norm_clip": (("lamb",), [0.0, math.nan, (math.inf, math.inf), (0.0, math.nan), (None, 1.0)]),
    "master_weights": (tuple(MAKES), ["yes"]),
    "maximize": (tuple(MAKES), ["yes"]),
}
CASES = [(kind, name, value) for name, (kinds, values) in NUMBERS.items() for kind in kinds for value in values]


@each(("kind", "name", "value"), CASES)
def test_bad_options_are_named_with_their_values(kind, name, value):
    """At construction, in a group, and in an added group; the existing groups do not change."""
    message = rf"{name}.* is "
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    with pytest.raises(ValueError, match=message):
        MAKES[kind](params, **{name: value})
    with pytest.raises(ValueError, match=message):
        MAKES[kind]([{"params": params, name: value}])
    optimizer = MAKES[kind](params[:1])
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.add_param_group({"params": params[1:], name: value})
    shown = value[0] if isinstance(value, tuple) and name == "betas" else value
    assert isinstance(value, (tuple, list, Tensor)) or str(shown) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params[1:]})


@pytest.mark.parametrize("make", [MAKES["sgd"], MAKES["lars"]], ids=["sgd", "lars"])
@pytest.mark.parametrize("more", [{"momentum": 0.0}, {"dampening": 0.1}])
def test_nesterov_needs_undampened_momentum(make, more):
    with pytest.raises(ValueError, match=r"nesterov is True with momentum .* it needs momentum > 0 and dampening 0"):
        make([nn.Parameter(torch.zeros(1))], nesterov=True, **more)


def test_a_tensor_of_two_rates_is_refused():
    with pytest.raises(ValueError, match="lr is a tensor of 2 elements"):
        FusedLAMB([nn.Parameter(torch.zeros(1))], lr=torch.ones(2))


def test_a_rate_of_float64_keeps_its_bits_where_the_weights_do():
    param = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    FusedSGD([param], lr=torch.tensor(0.1, dtype=torch.float64)).step()
    assert torch.equal(param, torch.full_like(param, -0.1))


@every
def test_autograd_hears_of_a_step(make):
    """A graph that still needs the old weights must not be run backwards with the new ones."""
    model = net()
    optimizer: FusedOptimizer = make(model.parameters())
    loss = model(torch.ones(2, 6)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


ROSENBROCK = {"sgd": {"lr": 1e-3}, "adamw": {"lr": 0.05}, "lars": {"lr": 0.02}, "lamb": {"lr": 0.05}}


@every
def test_rosenbrocks_valley_is_followed(make):
    """The path avoids the origin, where steps of LAMB and LARS vanish with the weights."""
    name = next(key for key, value in MAKES.items() if value is make)
    point = nn.Parameter(torch.tensor([2.0, 1.0]))
    options = {"weight_decay": 0.0, **ROSENBROCK[name]}
    optimizer = make([point], **options)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 800)
    for _ in range(800):
        optimizer.zero_grad()
        x, y = point
        ((1 - x) ** 2 + 100 * (y - x * x) ** 2).backward()
        torch.nn.utils.clip_grad_norm_([point], 10.0)
        optimizer.step()
        scheduler.step()
    assert (1 - point[0]) ** 2 < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every
def test_a_small_classification_is_learned(make, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3)).to(dtype)
    centres = 3 * torch.eye(3, 4)
    labels = torch.arange(3).repeat(40)
    inputs = (centres[labels] + 0.5 * torch.randn(120, 4)).to(dtype)
    options = {"lr": 0.05, "master_weights": dtype == torch.bfloat16}
    optimizer = make(param_groups(model, 1e-4) if make is not MAKES["sgd"] else model.parameters(), **options)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs).float(), labels).backward()
        optimizer.step()
    assert (model(inputs).argmax(1) == labels).float().mean() > 0.95
    assert copy.deepcopy(optimizer).state_dict().keys() == {"state", "param_groups"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@every
def test_a_model_may_become_of_another_dtype(make, dtype):
    """As with torch.optim: `model.to(dtype)` after a step, and the step goes on with what it has."""
    model = net()
    optimizer = make(model.parameters())
    give(model.parameters(), 0)
    optimizer.step()
    before = [param.detach().clone().double() for param in model.to(dtype).parameters()]
    give(model.parameters(), 1)
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.dtype == dtype and not torch.equal(param.double(), old)
        buffers = [value for name, value in optimizer.state[param].items() if name != "step"]
        assert buffers and all(value.abs().max() > 0 for value in buffers)


@every
def test_masters_come_and_go(make):
    model = net(torch.bfloat16)
    optimizer = make(model.parameters())
    for step, (masters, dtype) in enumerate([(False, None), (True, None), (True, torch.float32)]):
        model.to(dtype)
        optimizer.param_groups[0]["master_weights"] = masters
        give(model.parameters(), step)
        optimizer.step()
        found = ["master" in state for state in optimizer.state.values()]
        assert found == [masters and dtype is None] * len(found)


@every
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.ones(1).expand(3), "a parameter overlaps itself in memory: pass a clone of it"),
        (torch.ones(3).as_strided((2, 2), (1, 1)), "a parameter overlaps itself in memory: pass a clone of it"),
        (torch.ones(3, dtype=torch.complex64).conj().imag, r"negative bit, .* call resolve_neg\(\)"),
    ],
)
def test_a_refused_step_has_not_begun(make, wrong, message):
    """An error for one parameter is raised before others have changed."""
    fine, wrong = torch.ones(3, requires_grad=True), wrong.detach().requires_grad_()
    optimizer = make([fine, wrong])
    fine.grad, wrong.grad = torch.ones(3), torch.ones_like(wrong)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert torch.equal(fine, torch.ones(3))
