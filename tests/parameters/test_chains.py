"""Chains of linear layers: one product a layer for all learners computes what each learner's model computes."""

import contextlib
import copy
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ddpcore.parameters import chains
from ddpcore.parameters.learner_models import LearnerModels
from helpers.learner_models import Scaled, learners

L, B = 3, 8  # samples of float64: aligned
Loop = Callable[[LearnerModels, Tensor], Any]


def tied() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 2))


def frozen(name: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 2))
    model.get_parameter(name).requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "activations": lambda: nn.Sequential(
        *(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.GELU("tanh"), nn.Linear(8, 8), nn.ELU(0.5)),
        *(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8), nn.Softplus(2.0), nn.Linear(8, 2), nn.LeakyReLU(0.3)),
    ),
    "without bias": lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 2)),
    "nested": lambda: nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 6), nn.Identity()), nn.Linear(6, 2)),
    "one layer": lambda: nn.Sequential(nn.Linear(4, 1)),
    "tied": tied,
    "frozen weight": lambda: frozen("0.weight"),
    "frozen bias": lambda: frozen("2.bias"),
}


def test_which_models_are_chains() -> None:
    for make in MODELS.values():
        assert learners(make(), L, None)._rules.chain is not None
    for model in (
        Scaled(),
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout()),
    ):
        assert learners(model, L, True)._rules.chain is None
    own = type("Own", (nn.Linear,), {"__call__": lambda self, values: nn.Linear.__call__(self, values)})
    assert not learners(nn.Sequential(own(4, 4)), 16, None).runs_together()


def plain(models: LearnerModels, inputs: Tensor) -> None:
    models(inputs).square().sum().backward()


def again(models: LearnerModels, inputs: Tensor) -> None:
    """Gradients are added over passes."""
    plain(models, inputs)
    plain(models, 2 * inputs)


def two_calls(models: LearnerModels, inputs: Tensor) -> None:
    """One backward pass of two forward passes."""
    (models(inputs).square().sum() + models(inputs - 1).sum()).backward()


def nested_calls(models: LearnerModels, inputs: Tensor) -> None:
    """The second pass takes what the first gives."""
    first = models(inputs)
    models(first.mean(dim=-1, keepdim=True) + inputs).square().sum().backward()


def penalty(models: LearnerModels, inputs: Tensor) -> None:
    loss = models(inputs).square().sum()
    (loss + sum((p * p).sum() for p in models.models[1].parameters() if p.requires_grad)).backward()


def another_layout(models: LearnerModels, inputs: Tensor) -> None:
    """The order of parameters in the flat buffer changes after the first step."""
    plain(models, inputs)
    models.zero_grad()
    models._flat.reorder(range(len(models._flat.segments))[::-1])
    plain(models, inputs)


def set_to_zero(models: LearnerModels, inputs: Tensor) -> None:
    plain(models, inputs)
    models.zero_grad(set_to_none=False)
    plain(models, inputs + 1)


def keep_gradients(models: LearnerModels, inputs: Tensor) -> list[Tensor]:
    """What the program keeps stays as it was."""
    plain(models, inputs)
    kept = [p.grad for p in models.parameters() if p.grad is not None]
    models.zero_grad()
    plain(models, inputs * 3)
    return kept


def calling(at: int, call: Callable[[], None]) -> Any:
    """A context: the backward pass of its graph calls a function when it reads its tensor number ``at``."""
    num = itertools.count()

    def read(saved: Tensor) -> Tensor:
        if next(num) == at:
            with torch.enable_grad():
                call()
        return saved

    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, read)


def after_an_error(models: LearnerModels, inputs: Tensor) -> None:
    """A backward pass that fails in the middle leaves nothing behind."""

    def fail() -> None:
        raise ValueError("in the middle")

    for at in range(5):
        with calling(at, fail):
            loss = models(inputs).square().sum()
        with contextlib.suppress(ValueError):
            loss.backward()
        models.zero_grad()
    plain(models, inputs)
    assert models._flat._lent_to == (0, -1)


def inside_another(models: LearnerModels, inputs: Tensor) -> list[Tensor]:
    """A backward pass runs inside another one, as reentrant checkpoints do."""
    kept = []
    one: Callable[[], None] = lambda: models.models[1](inputs[1]).square().sum().backward()  # noqa: E731
    calls = [*(one, lambda: plain(models, inputs - 2))] * (4 if len(models.models[0]) > 1 else 2)
    for num, call in enumerate(calls):
        with calling(num // 2, call):
            loss = models(inputs + num).square().sum()
        models.zero_grad()
        loss.backward()
        kept += [p.grad for p in models.parameters() if p.grad is not None]
    return kept


def with_a_graph(models: LearnerModels, inputs: Tensor) -> list[Tensor]:
    models(inputs).pow(3).sum().backward(create_graph=True)
    trained = [p for p in models.parameters() if p.requires_grad]
    found = torch.autograd.grad(sum(p.grad.square().sum() for p in trained if p.grad is not None), trained)
    for p in trained:
        p.grad = None
    return list(found)


def some_learners(models: LearnerModels, inputs: Tensor) -> None:
    for (part,) in models.split(inputs, at_once=2):
        models(part).square().sum().backward()


def a_hook(models: LearnerModels, inputs: Tensor) -> None:
    next(p for p in models.parameters() if p.requires_grad).register_hook(lambda gradient: 2 * gradient)
    plain(models, inputs)


def frozen_later(models: LearnerModels, inputs: Tensor) -> None:
    outputs = models(inputs)
    for model in models.models:
        [*model.parameters()][-1].requires_grad_(False)
    plain(models, inputs)
    outputs.sum().backward()


def unfrozen(models: LearnerModels, inputs: Tensor) -> None:
    """As the layers of a GAN that are frozen in the forward pass alone."""
    frozen = [next(p for p in reversed([*model.parameters()]) if p.requires_grad) for model in models.models]
    for p in frozen:
        p.requires_grad_(False)
    outputs = models(inputs)
    for p in frozen:
        p.requires_grad_(True)
    outputs.sum().backward()
    assert all(p.grad is None for p in frozen)


def gradients_alone(models: LearnerModels, inputs: Tensor) -> list[Tensor]:
    """``torch.autograd.grad`` writes no ``.grad``."""
    trained = [p for p in models.parameters() if p.requires_grad]
    found = torch.autograd.grad(models(inputs).square().sum(), trained)
    assert all(p.grad is None for p in trained)
    return list(found)


def second_derivatives(models: LearnerModels, inputs: Tensor) -> list[Tensor]:
    trained = [p for p in models.parameters() if p.requires_grad]
    found = torch.autograd.grad(models(inputs).pow(3).sum(), trained, create_graph=True)
    sum(one.square().sum() for one in found).backward()
    return [one.detach() for one in found]


def many_gradients(models: LearnerModels, inputs: Tensor) -> list[Tensor]:
    """Several vectors at once."""
    trained = [p for p in models.parameters() if p.requires_grad]
    outputs = models(inputs).sum(dim=(1, 2))
    return list(torch.autograd.grad(outputs, trained, torch.eye(L).double(), is_grads_batched=True))


def of_the_inputs(models: LearnerModels, inputs: Tensor) -> list[Tensor]:
    first = inputs.clone().requires_grad_()
    models(first).square().sum().backward()
    assert first.grad is not None
    return [first.grad]


def some_inputs_only(models: LearnerModels, inputs: Tensor) -> None:
    trained = [p for p in models.parameters() if p.requires_grad]
    models(inputs).square().sum().backward(inputs=trained[:2])


LOOPS: list[Loop] = [
    *(
        plain,
        again,
        another_layout,
        two_calls,
        nested_calls,
        penalty,
        set_to_zero,
        keep_gradients,
        after_an_error,
        inside_another,
    ),
    *(some_learners, a_hook, frozen_later, gradients_alone, second_derivatives, many_gradients, of_the_inputs),
    *(with_a_graph, some_inputs_only, unfrozen),
]


@pytest.mark.parametrize("part", range(4))
def test_as_in_turn(part: int) -> None:
    """Outputs and gradients are those of models that run in turn, whatever the loop does with autograd."""
    for name, loop in itertools.product(MODELS, LOOPS[part::4]):
        compare(name, loop)


def compare(name: str, loop: Loop) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    together, apart = (learners(copy.deepcopy(model), L, how) for how in (None, False))
    inputs = torch.randn(L, B, 4, dtype=torch.float64)
    torch.testing.assert_close(together(inputs), apart(inputs), rtol=1e-12, atol=1e-14)
    assert together.runs_together()
    found, expected = loop(together, inputs), loop(apart, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    for mine, other in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("part", range(4))
def test_the_bits_of_each_learner(part: int) -> None:
    """Outputs and gradients of any shapes, in float32 and float64, have the bits of models that run in turn."""
    for seed in range(10 * part, 10 * part + 10):
        check_bits(seed)


def check_bits(seed: int) -> None:
    draw = random.Random(seed)
    num, batch, dtype = (
        draw.choice([2, 3, 5]),
        draw.choice([7, 16, 32, 48]),
        draw.choice([torch.float32, torch.float64]),
    )
    widths = [draw.choice([1, 2, 5, 10, 33, 64, 300, 784]) for _ in range(4)]
    torch.manual_seed(seed)
    kinds = [nn.ReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh, nn.LeakyReLU]
    pairs = itertools.pairwise(widths)
    layers = [[nn.Linear(*pair, bias=draw.random() < 0.8), draw.choice(kinds)()] for pair in pairs]
    model = nn.Sequential(*itertools.chain(*layers)).to(dtype)
    inputs = torch.randn(num, batch, widths[0], dtype=dtype)
    results = []
    for how in (None, False):
        models = learners(copy.deepcopy(model), num, how)
        outputs = models(inputs)
        outputs.square().sum().backward()
        results.append([outputs.detach(), *(p.grad for p in models.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *results)) and len(results[0]) > 1


def test_batches_that_are_not_aligned() -> None:
    """They run in turn, because bits of products depend on it; many small models run together in any case."""
    for num, width, batch, together in [(4, 64, 16, True), (4, 64, 6, False), (64, 8, 6, True)]:
        models = learners(nn.Sequential(nn.Linear(4, width), nn.Tanh()), num, None)
        assert models.choice == "together: one product a layer for all learners"
        nodes = str(models(torch.randn(num, batch, 4)).grad_fn)
        assert ("TanhBackward" in nodes) == together and ("StackBackward" in nodes) == (not together)


class Residual(nn.Sequential):
    vectorizes = True

    def forward(self, values: Tensor) -> Tensor:
        return values + super().forward(values)


class Doubled(nn.Linear):
    vectorizes = True

    def forward(self, values: Tensor) -> Tensor:
        return 2 * super().forward(values)


class Centered(nn.Identity):
    vectorizes = True

    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0)


class Called(nn.Linear):
    vectorizes = True

    def __call__(self, values: Tensor) -> Tensor:
        return 2 * super().__call__(values)


class Reversed(nn.Sequential):
    vectorizes = True

    def __iter__(self) -> Any:
        return reversed(self._modules.values())


class Mode(TorchFunctionMode):
    """Changes what each layer returns, and each learner alike."""

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = call(*args, **(kwargs or {}))
        return 2 * found if call is nn.functional.linear else found


OWN = [Residual(nn.Linear(4, 4)), Doubled(4, 4), Centered(), Called(4, 4), Reversed(nn.Linear(4, 4), nn.Tanh())]


@pytest.mark.parametrize("layer", OWN[:3], ids=lambda one: type(one).__name__)
def test_a_forward_of_its_own_is_called(layer: nn.Module) -> None:
    """A subclass of a layer of torch is no layer of a chain, and a function mode sees each learner's layers."""
    torch.manual_seed(0)
    for parameter in (one for own in (layer, *OWN[3:]) for one in own.parameters()):
        nn.init.normal_(parameter, std=0.3)
    for vectorize, own, mode in itertools.product((None, True), (layer, *OWN[3:]), (Mode, contextlib.nullcontext)):
        models = learners(nn.Sequential(nn.Linear(4, 4), own), 16, vectorize)
        inputs = torch.randn(16, 16, 4)
        with mode(), torch.device("cpu"):
            expected = torch.stack([model(one) for model, one in zip(models.models, inputs, strict=True)])
            torch.testing.assert_close(models(inputs), expected, rtol=1e-5, atol=1e-6)
    with torch.device("cpu"):  # is a mode that changes no layer
        assert "TanhBackward" in str(learners(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 16, None)(inputs).grad_fn)


def test_two_passes_of_threads_in_one_backward_pass() -> None:
    """Their layers run between each other, and only one of them may write its gradients where they end."""
    for shift in range(0, 24, 4):
        check_threads(shift)


def check_threads(shift: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) if place % 2 == 0 else nn.Tanh() for place in range(13))).double()
    together, apart = (learners(copy.deepcopy(model), L, how) for how in (None, False))
    batches = [torch.randn(L, 8, 4, dtype=torch.float64), torch.randn(L, 8, 3, 4, dtype=torch.float64)]
    for models in (together, apart):
        losses: list[Tensor] = []

        def run(inputs: Tensor, num: int, models: LearnerModels = models, losses: list[Tensor] = losses) -> None:
            one = torch.zeros(1, requires_grad=True)
            for _ in range(shift * num):  # numbers of nodes are a thread's own, and nodes more shift them
                one = one + 1
            losses.append(models(inputs).square().sum())

        for num, inputs in enumerate(batches):
            thread = threading.Thread(target=run, args=(inputs, num))
            thread.start()
            thread.join()
        sum(losses).backward()
    for mine, other in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-11, atol=1e-13)


def test_what_autograd_permits() -> None:
    """A bias, or the weight of a first layer, may change before the backward pass, because the graph needs neither."""
    for shape in [(L, 16, 4), (L, 16, 3, 4)]:
        models = learners(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), L, None)
        outputs = models(torch.randn(shape))
        with torch.no_grad():
            models.models[1][0].weight.add_(1)
            models.models[2][2].bias.add_(1)
        outputs.sum().backward()
        assert all(p.grad is not None for p in models.parameters())


@pytest.mark.parametrize("how", ["sparse", "dual", "traced", "fake", "named"])
def test_what_runs_in_turn(how: str) -> None:
    models, inputs = learners(nn.Sequential(nn.Linear(4, 2), nn.Tanh()), L, None), torch.randn(L, 16, 4)
    expected = torch.stack([one(x) for one, x in zip(models.models, inputs, strict=True)])
    if how == "sparse":
        found = models(inputs.to_sparse())
    elif how == "dual":
        with torch.autograd.forward_ad.dual_level():
            found = models(torch.autograd.forward_ad.make_dual(inputs, inputs))
            found = torch.autograd.forward_ad.unpack_dual(found).primal
    elif how == "traced":
        found = torch.jit.trace(models, inputs)(inputs)
    elif how == "named":
        found = models(input=inputs)
    else:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert models(mode.from_tensor(inputs)).shape == expected.shape
        found = models(inputs)
    torch.testing.assert_close(found, expected)


def test_where_batches_of_products_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each learner's products are computed alone then, and written to the same place."""
    monkeypatch.setattr(chains, "_exact", lambda *shape: [False] * 4)
    for name in MODELS:
        for loop in (plain, again, keep_gradients, second_derivatives):
            compare(name, loop)


def test_inputs_of_any_shape() -> None:
    together, apart = (learners(nn.Sequential(nn.Linear(4, 6), nn.Tanh()).double(), L, how) for how in (True, False))
    apart.load_state_dict(together.state_dict())
    for shape in [(L, 4), (L, B, 4), (L, B, 2, 4), (L, B, 2, 3, 4), (L, 0, 4)]:
        inputs = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(together(inputs), apart(inputs), rtol=1e-12, atol=1e-14)


def test_inputs_with_a_gradient_under_no_grad() -> None:
    models = learners(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double(), L, None)
    inputs = torch.randn(L, B, 3, 4, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        outputs = models(inputs)
        assert torch.equal(outputs, torch.stack([one(row) for one, row in zip(models.models, inputs, strict=True)]))


def test_flatten() -> None:
    for dims in [(1, -1), (1, 2), (2, -1), (-2, -1)]:
        model = nn.Sequential(nn.Flatten(*dims), nn.Linear(24, 2))
        together, apart = (learners(copy.deepcopy(model), L, how) for how in (True, False))
        inputs = torch.randn((L, B, 4, 6) if dims != (2, -1) else (L, B, 3, 4, 6))
        expected = functional_call(apart, dict(together.named_parameters()), inputs)
        torch.testing.assert_close(together(inputs), expected, rtol=1e-5, atol=1e-6)


def test_autocast() -> None:
    """Layers compute in the dtype of autocast, gradients of float32 weights are float32."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    together, apart = (learners(copy.deepcopy(model), L, how) for how in (None, False))
    inputs = torch.randn(L, B, 4)
    for models in (together, apart):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = models(inputs)
        assert outputs.dtype == torch.bfloat16
        outputs.float().square().sum().backward()
    for mine, other in zip(together.parameters(), apart.parameters(), strict=True):
        assert mine.grad is not None and mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, other.grad, rtol=2e-2, atol=2e-2)


def test_a_changed_weight_is_refused() -> None:
    """A graph of older weights is refused, as autograd does."""
    for shape, first in [((L, 16, 4), nn.Identity()), ((L, 16, 3, 4), nn.Identity()), ((L, 1, 4), nn.Flatten(0))]:
        together = learners(nn.Sequential(first, nn.Linear(4, 6), nn.Linear(6, 2)), L, True)
        outputs = together(torch.randn(shape))
        with torch.no_grad():
            together.models[1][2].weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|inplace)"):
            outputs.sum().backward()
