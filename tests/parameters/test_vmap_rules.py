"""When virtual learners run in vmap: only where all models compute alike, also after a model has changed."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import ddpcore
from ddpcore.optim import FusedSGD
from helpers.learner_models import Scaled, learners

N = 8  # learners, for which vmap pays with these small models


def takes_vmap(model: nn.Module, change: Any = lambda models: None, **options: Any) -> bool:
    together = learners(model, N, options.get("vectorize"))
    counts: list[int] = []
    together._together = lambda *args: counts.append(1)  # type: ignore[method-assign]
    change(together.models)
    together(torch.ones(N, 3, 4))
    return bool(counts)


class Plain(nn.Module):
    """A class of a user that says that vmap computes the same."""

    vectorizes = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs).tanh()


class Changed(Plain):
    """A subclass with a ``forward`` of its own says nothing."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs * 2 if outputs.requires_grad else outputs


def test_plain_models_run_together() -> None:
    """Also if they share a layer without weights."""
    act = nn.GELU()
    assert takes_vmap(nn.Sequential(nn.Linear(4, 4), act, nn.LayerNorm(4), act))
    assert takes_vmap(Plain())


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        lambda: nn.Sequential(nn.Linear(4, 4), type("Own", (nn.Linear,), {"forward": lambda self, x: x})(4, 4)),
        Changed,
    ],
)
def test_other_models_run_in_turn_unless_asked(make: Any) -> None:
    assert not takes_vmap(make())
    assert takes_vmap(make(), vectorize=True)


def test_compiled_models_run_in_turn() -> None:
    for vectorize in (None, True):
        assert not takes_vmap(torch.compile(nn.Linear(4, 4), backend="eager"), vectorize=vectorize)


def swap_weights(models: Any) -> None:
    models[1][0].weight.data = torch.zeros(4, 4)


@pytest.mark.parametrize("vectorize", [None, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda models: models[1][0].register_forward_hook(lambda *args: None),
        lambda models: models[0][0].register_full_backward_hook(lambda *args: None),
        lambda models: models[1].register_forward_pre_hook(lambda *args: None),
        lambda models: parametrizations.weight_norm(models[1][0]),
        lambda models: models[1].append(nn.Tanh()),
        lambda models: models[1].compile(backend="eager"),
        swap_weights,
    ],
)
def test_what_differs_between_learners_runs_in_turn(change: Any, vectorize: bool | None) -> None:
    """Also if one is changed after the first passes."""
    assert not takes_vmap(nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU()), change, vectorize=vectorize)
    together = learners(nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU()), N, vectorize)
    together(torch.ones(N, 3, 4))
    change(together.models)
    inputs = torch.randn(N, 3, 4)
    expected = [model(x) for model, x in zip(together.models, inputs, strict=True)]
    assert torch.equal(together(inputs), torch.stack(expected))


@pytest.mark.parametrize(
    "change",
    [
        lambda models: setattr(models[1][1], "negative_slope", 0.5),
        lambda models: models[1].__setitem__(1, nn.ReLU()),
        lambda models: setattr(models[1][0], "forward", lambda x: x),
        lambda models: models[1].eval(),
    ],
)
def test_options_that_differ_between_learners_run_in_turn(change: Any) -> None:
    assert not takes_vmap(nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU()), change)


def swap_layers(models: Any) -> None:
    models[1].first, models[1].last = models[1].last, models[1].first


def swap_between_learners(models: Any) -> None:
    models[0].first, models[1].first = models[1].first, models[0].first


@pytest.mark.parametrize("vectorize", [None, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda models: setattr(models[1], "scale", 3.0),
        lambda models: [setattr(model, "scale", scale) for model, scale in zip(models, range(1, N + 1), strict=True)],
        lambda models: setattr(models[1], "act", torch.relu),
        swap_layers,
        swap_between_learners,
    ],
)
def test_attributes_and_layers_that_change_later(change: Any, vectorize: bool | None) -> None:
    together = learners(Scaled(), N, vectorize)
    together(torch.ones(N, 3, 4))
    change(together.models)
    inputs = torch.randn(N, 3, 4)
    expected = [model(x)[0] for model, x in zip(together.models, inputs, strict=True)]
    torch.testing.assert_close(together(inputs)[0], torch.stack(expected))


@pytest.mark.parametrize(
    ("widths", "num", "together"),
    [((10, 50, 2), 256, True), ((64, 128, 10), 16, True), ((64, 128, 10), 4, False), ((64, 1024, 1024, 10), 16, False)],
)
def test_number_and_size_choose(widths: tuple[int, ...], num: int, together: bool) -> None:
    """Many small models run in vmap; few, and large ones, in turn. The choice and its reason can be read."""
    layers = [nn.Sequential(nn.Linear(*pair), nn.Softmax(-1)) for pair in pairwise(widths)]
    model = nn.Sequential(*layers)
    handle = ddpcore.distribute(model, FusedSGD(model.parameters(), lr=0.1), ddpcore.LocalSGD(), learners=num)
    per_layer = sum(p.numel() for p in model.parameters()) // len(layers)
    expected = f"{'together' if together else 'in turn'}: {per_layer} weights a layer, and vmap of {num} learners"
    assert handle.learners_run.startswith(expected)
    ran: list[str] = []
    for name in ("_together", "_in_turn"):
        setattr(handle.model, name, lambda *args, name=name: ran.append(name))
    handle.model(torch.ones(num, 2, widths[0]))
    assert ran == ["_together" if together else "_in_turn"]
    model.register_forward_hook(lambda *args: None)
    assert handle.learners_run.startswith("in turn")


def test_global_hooks_run_in_turn() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert not takes_vmap(nn.Sequential(nn.Linear(4, 4)), vectorize=True)
    finally:
        handle.remove()


def trained(model: nn.Module, strategy: Any, **options: Any) -> tuple[Any, list[Tensor]]:
    """The handle after three steps of N learners, and the outputs and weights of all."""
    torch.manual_seed(1)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=N, **options)
    inputs, outputs = torch.randn(N, 5, 4), torch.zeros(0)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = handle.model(inputs)
        outputs.square().sum().backward()
        optimizer.step()
    return handle, [outputs.detach(), *(value for one in handle.models for value in one.state_dict().values())]


class Aliased(nn.Module):
    """It computes with tensors that a dict has, too."""

    vectorizes = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.eye(4)), nn.Parameter(torch.ones(4))
        self.register_buffer("sums", torch.zeros(4))
        self.all = {"weights": [self.first, self.second], "sums": self.sums}

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs @ self.all["weights"][0] * self.second
        self.sums.add_(outputs.detach().sum(0))
        return outputs


class Growing(nn.Linear):
    """Its buffer is as large as the batch."""

    vectorizes = True

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("seen", torch.zeros(1, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        self.seen = outputs.detach()[: 5 - len(self.seen) % 3]
        return outputs


def repeated() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.LayerNorm(4), nn.Tanh(), layer, nn.Linear(4, 2))


def test_models_that_keep_a_module_or_tensor_twice() -> None:
    """They are right however learners run, step after step: also buffers that change their shape."""
    makes: list[Any] = [repeated, Aliased, Growing]
    for make, strategy in product(makes, (ddpcore.SSGD, ddpcore.LocalSGD)):
        torch.manual_seed(0)
        model = make()
        _, wanted = trained(copy.deepcopy(model), strategy(), vectorize=False)
        for vectorize in (None, True):
            handle, found = trained(copy.deepcopy(model), strategy(), vectorize=vectorize)
            assert all(isinstance(one, nn.Parameter) for one in handle.models[0].parameters())
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, msg=f"{make.__name__}, {vectorize}")


class Counting(Plain):
    """Counts its passes, and begins with small outputs."""

    vectorizes, num = True, 0

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.num += 1
        return super().forward(inputs) * min(1.0, self.num / 10)


def test_python_state_is_each_learners_own() -> None:
    """A counter in a class that vectorizes: the first learner alone ran it."""
    together, inputs = learners(Counting(), N, True), torch.randn(N, 3, 4)
    alone = [copy.deepcopy(model) for model in together.models]
    for step in range(1, 5):
        expected = torch.stack([model(row) for model, row in zip(alone, inputs, strict=True)])
        torch.testing.assert_close(together(inputs), expected)
        assert [model.num for model in together.models] == [step] * N


def test_autocast_has_the_dtypes_of_a_model_alone() -> None:
    together = learners(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), N, None)
    inputs = torch.randn(N, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = together(inputs)
        alone = torch.stack([model(row) for model, row in zip(together.models, inputs, strict=True)])
    assert (found.dtype, alone.dtype) == (torch.bfloat16, torch.bfloat16) and torch.equal(found, alone)


def test_hooks_of_saved_tensors_see_those_of_a_model_alone() -> None:
    """vmap saves other tensors, so that activations kept in bfloat16 would give other gradients."""
    model = Plain()
    model.layer = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    together, inputs = learners(model, N, None), torch.randn(N, 3, 4)
    assert together.runs_together()
    gradients = []
    for run in (together, lambda rows: torch.stack([one(row) for one, row in zip(together.models, rows, strict=True)])):
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one.bfloat16(), lambda one: one.float()):
            loss = run(inputs).square().sum()
        gradients.append(torch.autograd.grad(loss, [*together.models.parameters()]))
    assert all(map(torch.equal, *gradients))


def test_an_error_in_vmap_says_how_models_run_in_turn() -> None:
    class Asks(Plain):
        vectorizes = True

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) if inputs.sum().item() else inputs

    class Full(Plain):
        def forward(self, inputs: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("vmap needs more memory")

    class Flat(Plain):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs[None, None].contiguous(memory_format=torch.channels_last)[0, 0])

    class Slopes(Plain):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.autograd.grad(super().forward(inputs).sum(), [self.layer.weight])[0]

    class Own(Plain):
        def __init__(self, kind: type[Exception]) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, inputs: Tensor) -> Tensor:
            raise self.kind("too long.\nTake less.")

    hint = r"\(in torch.func.vmap; learners run in turn with vectorize=False\)(\nTake less.)?$"
    for make in (Flat, Slopes, lambda: Own(RuntimeError), lambda: Own(NotImplementedError)):
        with pytest.raises(RuntimeError, match=hint) as caught:
            learners(make(), N, True)(torch.ones(N, 3, 4))
        assert caught.value.__cause__ is not None and type(caught.value) is type(caught.value.__cause__)
        lines = zip(str(caught.value).splitlines(), str(caught.value.__cause__).splitlines(), strict=True)
        assert all(line.startswith(own.removesuffix(".")) for line, own in lines)
    with pytest.raises(ValueError, match=r"^too long.\nTake less.$"):
        learners(Own(ValueError), N, True)(torch.ones(N, 3, 4))
    with pytest.raises(torch.OutOfMemoryError, match=r"more memory$"):  # a program may take a smaller batch then
        learners(Full(), N, True)(torch.ones(N, 3, 4))
    together = learners(Asks(), N, True)
    with pytest.raises(RuntimeError, match=r"vmap.*; learners run in turn with vectorize=False\)$"):
        together(torch.ones(N, 3, 4))


class Running(Plain):
    """Has a buffer of another dtype from its first pass on."""

    vectorizes = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + inputs.mean()
        return super().forward(inputs) * self.mean


def test_buffers_that_change_their_dtype_in_a_pass() -> None:
    """They were truncated. Learners whose buffers are of two dtypes run in turn, and so do two shapes."""
    together = learners(Running(), N, True)
    alone = [copy.deepcopy(model) for model in together.models]
    for step in range(4):
        inputs = torch.randn(N, 3, 4)
        expected = torch.stack([model(row) for model, row in zip(alone, inputs, strict=True)])
        torch.testing.assert_close(together(inputs), expected)
        for one, other in zip(together.models, alone, strict=True):
            torch.testing.assert_close(one.mean, other.mean)
        for models in (alone, together.models):
            models[1].mean = (torch.tensor(2), torch.ones(2), torch.ones(()), torch.ones(()))[step]


class Keeping(Plain):
    """Keeps the mean of its outputs, and computes by that of the last pass."""

    vectorizes = True

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        if where in ("later", "whole"):
            self.register_buffer(where, None if where == "later" else torch.zeros(2))
        else:
            setattr(self, where, {"last": None, "tensor": torch.zeros(2), "list": [], "dict": {}}[where])

    def forward(self, inputs: Tensor) -> Tensor:
        kept = getattr(self, self.where)
        last = kept[-1] if isinstance(kept, list) and kept else kept.get("mean") if isinstance(kept, dict) else kept
        outputs = super().forward(inputs) + (last if isinstance(last, Tensor) else 0)
        mean = outputs.detach().mean(0)
        if isinstance(kept, list):
            kept.append(mean)
        elif isinstance(kept, dict):
            kept["mean"] = mean
        else:
            setattr(self, self.where, mean)
        return outputs


def test_tensors_that_a_model_keeps_are_named() -> None:
    """In vmap only a buffer that begins with a value has one for each learner; in turn all have."""
    places = ("last", "later", "whole", "tensor", "list", "dict")
    for where, vectorize in product(places, (None, True, False)):
        together, inputs = learners(Keeping(where), N, vectorize), torch.randn(N, 3, 4)
        alone = [copy.deepcopy(model) for model in together.models]
        advice = rf"^Keeping.{where} keeps a tensor .* buffer that begins with a value, or pass vectorize=False$"
        assert together.runs_together() == (vectorize is True or (vectorize is None and where in places[:3]))
        is_void = where != "whole" and together.runs_together()
        with pytest.raises(RuntimeError, match=advice) if is_void else nullcontext():
            for _ in range(3):
                expected = torch.stack([model(x) for model, x in zip(alone, inputs, strict=True)])
                torch.testing.assert_close(together(inputs), expected)
    part = learners(Keeping("last"), N, True)
    with pytest.raises(RuntimeError, match=r"Keeping.last keeps"):
        for (rows,) in part.split(torch.randn(N, 3, 4), at_once=1):
            part(rows)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_attributes_that_cannot_be_compared() -> None:
    """Models that have tensors of their own that are sparse, nested or on the meta device run in turn."""
    parts = [torch.ones(2), torch.ones(3)]
    makes: list[Any] = [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.nested.nested_tensor(parts),
        lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
        lambda: torch.ones(3, device="meta"),
        lambda: torch.ones(3),
    ]
    for make in makes:
        together, inputs = learners(Plain(), 2, True), torch.randn(2, 3, 4)
        for model in together.models:
            model.constant = make()
        expected = torch.stack([model(x) for model, x in zip(together.models, inputs, strict=True)])
        torch.testing.assert_close(together(inputs), expected)
        assert together.runs_together() == (make is makes[-1])
