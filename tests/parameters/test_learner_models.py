"""LearnerModels: one ordinary model per virtual learner, in turn and by vmap."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import pickle
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx

import ddpcore
from ddpcore.parameters.copies import copies_of
from helpers.learner_models import Scaled, learners


@pytest.mark.parametrize("vectorize", [True, False])
def test_each_learner_is_an_ordinary_model(vectorize: bool) -> None:
    """Outputs and gradients are those of copies that are trained by themselves."""
    torch.manual_seed(0)
    together = learners(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), 3, vectorize)
    alone = [copy.deepcopy(model) for model in together.models]
    inputs = torch.randn(3, 6, 4)
    outputs = together(inputs)
    outputs.square().sum().backward()
    for row, (ours, plain) in enumerate(zip(together.models, alone, strict=True)):
        expected = plain(inputs[row])
        torch.testing.assert_close(outputs[row], expected, rtol=1e-5, atol=1e-6)
        expected.square().sum().backward()
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours(inputs[row]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vectorize", [True, False])
def test_gradients_of_gradients_and_of_parameters(vectorize: bool) -> None:
    """``torch.autograd.grad`` by the learners' own parameters, and a second derivative."""
    together = learners(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), 2, vectorize)
    inputs = torch.randn(2, 6, 4)
    weights = [model[0].weight for model in together.models]
    first = torch.autograd.grad(together(inputs).square().sum(), weights, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), weights)
    for row, model in enumerate(together.models):
        grad = torch.autograd.grad(model(inputs[row]).square().sum(), model[0].weight, create_graph=True)
        torch.testing.assert_close(first[row], grad[0], rtol=1e-5, atol=1e-6)
        (expected,) = torch.autograd.grad(grad[0].square().sum(), model[0].weight)
        torch.testing.assert_close(second[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hook", [False, True])
def test_gradients_of_vmap_go_to_the_flat_buffer(hook: bool) -> None:
    """At once for all learners, unless a hook acts on one; added up over passes, and over calls of one pass."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
    together, apart = (learners(copy.deepcopy(model), 3, how) for how in (True, False))
    if hook:
        for models in (together, apart):
            models.models[1][0].weight.register_hook(lambda gradient: 2 * gradient)
    inputs = torch.randn(3, 6, 4)
    for models in (together, apart):
        (models(inputs).square().sum() + models(2 * inputs).sum()).backward()
        models(3 * inputs).square().sum().backward()
        models(inputs).sum().backward(inputs=list(models.models[0].parameters()))
    for ours, other, view in zip(
        together._flat.parameters, apart._flat.parameters, together._flat.grad_views, strict=True
    ):
        torch.testing.assert_close(ours.grad, other.grad)
        assert hook or ours.grad is view


def test_a_graph_of_older_weights_is_refused() -> None:
    together = learners(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)), 2, True)
    loss = together(torch.ones(2, 3, 4)).sum()
    together._flat.param_LP.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_buffers_are_each_learners_own() -> None:
    together = learners(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), 2, None)
    alone = [copy.deepcopy(model) for model in together.models]
    inputs = torch.randn(2, 8, 4) + torch.tensor([0.0, 5.0]).view(2, 1, 1)
    together(inputs)
    for row, (ours, plain) in enumerate(zip(together.models, alone, strict=True)):
        plain(inputs[row])
        assert torch.equal(ours[1].running_mean, plain[1].running_mean)
        assert torch.equal(ours[1].running_var, plain[1].running_var)
        assert ours[1].num_batches_tracked == 1
    together.eval()(inputs)
    assert together.models[1][1].num_batches_tracked == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_must_be_learners(rows: int) -> None:
    with pytest.raises(ValueError, match="for 2 learners"):
        learners(nn.Linear(4, 3), 2, None)(torch.zeros(rows, 8, 4))


class Pairs(nn.Module):
    """Takes and gives more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch: dict[str, Tensor], *, scale: float, shift: Tensor) -> tuple[Tensor, dict[str, Any]]:
        outputs = scale * self.layer(batch["x"]) + shift
        return outputs, {"mean": outputs.mean(), "scale": scale}


@pytest.mark.parametrize("vectorize", [True, False])
def test_arguments_and_outputs_of_any_structure(vectorize: bool) -> None:
    together = learners(Pairs(), 2, vectorize)
    inputs, shift = torch.randn(2, 6, 4), torch.randn(2, 1)
    outputs, found = together({"x": inputs}, scale=2.0, shift=shift)
    for row, model in enumerate(together.models):
        expected, more = Pairs.forward(model, {"x": inputs[row]}, scale=2.0, shift=shift[row])
        torch.testing.assert_close(outputs[row], expected)
        torch.testing.assert_close(found["mean"][row], more["mean"])
    assert found["scale"] == [2.0, 2.0]


class Listed(list[Any]):
    """A list that torch's pytree does not open."""


@dataclasses.dataclass
class Batch:
    x: Any


class Taking(nn.Module):
    """Takes a value that is no tensor."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 2), read

    def forward(self, batch: Any) -> Tensor:
        return self.layer(torch.as_tensor(self.read(batch)))


OBJECTS: dict[str, tuple[Any, Any]] = {
    "dataclass": (Batch, lambda batch: batch.x),
    "namespace": (lambda x: types.SimpleNamespace(x=x), lambda batch: batch.x),
    "nested": (lambda x: Batch(Batch([x])), lambda batch: batch.x.x[0]),
    "user_dict": (lambda x: collections.UserDict(x=x), lambda batch: batch["x"]),
    "subclass_of_dict": (lambda x: collections.Counter(x=x), lambda batch: batch["x"]),
    "subclass_of_list": (lambda x: Listed([x]), lambda batch: batch[0]),
    "array": (lambda x: x.numpy(), lambda batch: batch),
}


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("kind", OBJECTS)
def test_a_batch_in_an_object_is_refused(kind: str, vectorize: bool) -> None:
    """Every learner would get the samples of all: torch's pytree opens no such object."""
    pack, read = OBJECTS[kind]
    together = learners(Taking(read), 2, vectorize)
    with pytest.raises(ValueError, match="would go whole to each learner"):
        together(pack(torch.randn(2, 3, 4)))


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_that_holds_no_batch_is_shared(kind: str, vectorize: bool) -> None:
    """Of one shape for all learners, as a mask; and a module is an argument as any other."""
    pack, read = OBJECTS[kind]
    together, shared = learners(Taking(read), 2, vectorize), torch.randn(3, 4)
    outputs = together(pack(shared))
    for row, model in enumerate(together.models):
        torch.testing.assert_close(outputs[row], model.layer(shared))
    called = learners(Taking(lambda layer: layer(shared)), 2, vectorize)
    layer = nn.Linear(4, 4)
    layer.kept = torch.ones(2, 3)
    torch.testing.assert_close(called(layer)[1], called.models[1].layer(layer(shared)))


def test_values_that_are_not_tensors() -> None:
    """vmap gives one for each learner, as the models in turn do."""
    for vectorize in (True, False):
        assert learners(Scaled(), 2, vectorize)(torch.ones(2, 3, 4))[1] == [None, None]


@pytest.mark.parametrize("vectorize", [True, False])
def test_transforms_of_torch_func(vectorize: bool) -> None:
    together = learners(nn.Linear(4, 3), 2, vectorize)
    inputs = torch.randn(2, 3, 4)
    found = torch.func.grad(lambda x: together(x).square().sum())(inputs)
    wanted = inputs.clone().requires_grad_()
    together(wanted).square().sum().backward()
    torch.testing.assert_close(found, wanted.grad)
    outputs = together(inputs).square().sum((1, 2))
    weights = [model.weight for model in together.models]
    batched = torch.autograd.grad(outputs, weights, torch.eye(2), is_grads_batched=True)
    assert not batched[0][1].any() and not batched[1][0].any() and batched[1][1].any()


@pytest.mark.parametrize("vectorize", [True, False])
def test_weights_and_inputs_changed_before_the_backward_pass_are_refused(vectorize: bool) -> None:
    """Also inputs that a first layer has changed in place. Weights of a first trained layer may change."""
    for first, what in itertools.product((nn.Linear(4, 5), nn.ReLU(inplace=True)), ("weight", "input", "named input")):
        together = learners(nn.Sequential(first, nn.Linear(5 - isinstance(first, nn.ReLU), 1)), 2, vectorize)
        inputs = torch.ones(2, 3, 4)
        outputs = together(input=inputs) if what == "named input" else together(inputs)
        outputs.square().sum().backward(retain_graph=True)
        with torch.no_grad():
            together.models[1][1].weight.mul_(2) if what == "weight" else inputs.mul_(2)
        if what == "weight" and isinstance(first, nn.ReLU):
            outputs.square().sum().backward()
        else:
            with pytest.raises(RuntimeError, match="modified"):
                outputs.square().sum().backward()


class _Keeping(nn.Module):
    """Its output is no tensor: the loss is in a value that torch does not open, or in an attribute alone."""

    def __init__(self, first: nn.Module, returns: bool) -> None:
        super().__init__()
        self.first, self.layer, self.returns = first, nn.Linear(4, 2), returns

    def forward(self, x: Tensor) -> Any:
        self.loss = self.layer(self.first(x)).square().mean()
        return types.SimpleNamespace(loss=self.loss) if self.returns else None


@pytest.mark.parametrize("returns", [True, False])
def test_changed_inputs_of_a_model_that_returns_no_tensor_are_refused(returns: bool) -> None:
    """Else the gradients would be those of other inputs. Unchanged inputs have the gradients of each model alone."""
    for first in (nn.Linear(4, 4), nn.Dropout(0.0, inplace=True), nn.ReLU(inplace=True)):
        together, inputs = learners(_Keeping(first, returns), 2, False), torch.randn(2, 3, 4)
        alone, rows = copy.deepcopy(together.models), inputs.clone()
        for is_changed in (False, True):
            outputs = together(inputs)
            losses = [one.loss for one in (outputs if returns else together.models)]
            if is_changed:
                inputs.copy_(torch.randn(2, 3, 4))
                with pytest.raises(RuntimeError, match="modified"):
                    sum(losses).backward()
                continue
            sum(losses).backward()
            for one, plain, row in zip(together.models, alone, rows, strict=True):
                plain(row)
                plain.loss.backward()
                assert torch.equal(one.layer.weight.grad, plain.layer.weight.grad)


class _Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_on = nn.Linear(4, 2), False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.layer(inputs)
        return outputs + inputs.zero_().sum() if self.is_on else outputs


def test_inputs_that_a_learner_changes_after_saving_them_are_refused() -> None:
    for changed in ([0], [1], [0, 1]):
        together = learners(_Overwrites(), 2, False)
        for row in changed:
            together.models[row].is_on = True
        outputs = together(torch.randn(2, 3, 4))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outputs.square().sum().backward()


def test_a_first_layer_may_change_inputs_that_have_a_gradient() -> None:
    model, inputs = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 1)), torch.randn(2, 3, 4)
    prompts = torch.zeros(2, 4, requires_grad=True)
    together = learners(model, 2, False)
    together(inputs + prompts[0]).square().sum().backward()
    sum(one(row + prompts[1]).square().sum() for one, row in zip(together.models, inputs, strict=True)).backward()
    assert torch.allclose(prompts.grad[0], prompts.grad[1]) and prompts.grad[0].any()


def test_a_copy_is_a_copy_of_the_models_alone() -> None:
    model = nn.Linear(4, 3)
    handle = ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.SSGD(), learners=2)
    handle.model(torch.ones(2, 3, 4)).sum().backward()
    for copied in (copy.deepcopy(handle.model), pickle.loads(pickle.dumps(handle.model))):
        assert torch.equal(copied(torch.ones(2, 3, 4)), handle.model(torch.ones(2, 3, 4)))
        assert not copied._flat.on_gradients


def test_nothing_to_train() -> None:
    together = learners(nn.Linear(4, 3), 2, True)
    together.requires_grad_(False)
    assert not together(torch.ones(2, 3, 4)).requires_grad


def test_other_weights_for_one_call() -> None:
    """``functional_call`` on all learners' models, which may be copied after it."""
    together = learners(nn.Sequential(nn.Linear(4, 2)), 2, None)
    inputs, weight = torch.randn(2, 3, 4), 2 * together.models[0][0].weight
    outputs = torch.func.functional_call(together, {"models.0.0.weight": weight}, (inputs,))
    torch.testing.assert_close(outputs[0], inputs[0] @ weight.T + together.models[0][0].bias)
    torch.testing.assert_close(outputs[1], together.models[1](inputs[1]))
    torch.testing.assert_close(copy.deepcopy(together)(inputs), together(inputs))


class Counting(nn.Module):
    """Keeps Python state in its forward pass."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(4, 2), where
        self.count, self.last, self.seen = 0, None, []

    def forward(self, inputs: Tensor) -> Any:
        outputs = self.layer(inputs)
        if self.where == "number":
            self.count += 1
        elif self.where == "tensor":
            self.last = outputs.detach()
        elif self.where == "list":
            self.seen.append(outputs.detach())
        return (outputs, "text") if self.where == "text" else outputs


@pytest.mark.parametrize("where", ["number", "tensor", "list", "text"])
def test_a_model_with_state_runs_in_turn(where: str) -> None:
    together = learners(Counting(where), 2, None)
    inputs = torch.randn(2, 3, 4)
    for step in range(2):
        outputs = together(inputs)
        for row, model in enumerate(together.models):
            expected = model.layer(inputs[row])
            assert torch.equal((outputs[0] if where == "text" else outputs)[row], expected)
            if where == "number":
                assert model.count == step + 1
            elif where == "tensor":
                assert torch.equal(model.last, expected)
            elif where == "list":
                assert len(model.seen) == step + 1 and torch.equal(model.seen[-1], expected)
            else:
                assert outputs[1] == ["text", "text"]


class Warm(nn.Module):
    """Computes by Python state that its forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count, self.lengths = nn.Linear(4, 2), 0, [0]

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        self.lengths.append(len(inputs))
        return self.layer(inputs) * self.count * len(self.lengths)


@pytest.mark.parametrize("at_once", [None, 2, 1])
def test_state_that_a_pass_in_vmap_changes(at_once: int | None) -> None:
    """The pass runs one model, and each learner has the state."""
    together = learners(Warm(), 4, True)
    alone = [copy.deepcopy(model) for model in together.models]
    for _ in range(3):
        inputs = torch.randn(4, 3, 4)
        assert together.runs_together()
        expected = torch.stack([model(x) for model, x in zip(alone, inputs, strict=True)])
        outputs = torch.cat([together(part) for (part,) in together.split(inputs, at_once=at_once)])
        torch.testing.assert_close(outputs, expected)
        assert [(one.count, one.lengths) for one in together.models] == [(one.count, one.lengths) for one in alone]
    assert together.models[0].lengths is not together.models[1].lengths


class Shifted(nn.Module):
    """Has buffers that come later, by the program or in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("later", None)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.later is None:
            self.later = torch.ones(4)
        return self.layer(inputs * self.later) + getattr(self, "shift", 0)


def test_buffers_that_come_later() -> None:
    together, inputs = learners(Shifted(), 3, True), torch.randn(3, 5, 4)
    for _ in range(2):
        expected = torch.stack([copy.deepcopy(model)(x) for model, x in zip(together.models, inputs, strict=True)])
        torch.testing.assert_close(together(inputs), expected)
    together.models[1].register_buffer("shift", torch.ones(2))
    expected[1] += 1
    torch.testing.assert_close(together(inputs), expected)


def test_hooks_count_each_learner() -> None:
    seen: list[int] = []
    together = learners(nn.Sequential(nn.Linear(4, 4)), 3, True)
    for row, model in enumerate(together.models):
        model[0].register_full_backward_hook(lambda *args, row=row: seen.append(row))
    together(torch.ones(3, 2, 4)).sum().backward()
    assert sorted(seen) == [0, 1, 2]


@pytest.mark.parametrize("padding_idx", [0, 3])
@pytest.mark.parametrize("vectorize", [True, None])
def test_padding_has_no_gradient(vectorize: bool | None, padding_idx: int) -> None:
    """In vmap torch gives it one of all learners but one, so such a model runs in turn."""
    together = learners(nn.Sequential(nn.Embedding(4, 4, padding_idx=padding_idx), nn.Linear(4, 2)), 3, vectorize)
    inputs = torch.arange(4).repeat(3, 1)
    together(inputs).square().sum().backward()
    for model in together.models:
        (embedding, layer), gradient = model, model[0].weight.grad
        expected = torch.autograd.grad(layer(embedding(inputs[0])).square().sum(), embedding.weight)[0]
        torch.testing.assert_close(gradient, expected)
        assert not gradient[padding_idx].any() and gradient.any()


def test_dropout_differs_between_learners() -> None:
    for vectorize in (True, False):
        together = learners(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)), 2, vectorize)
        outputs = together(torch.ones(2, 1, 4))
        assert not torch.equal(outputs[0] == 0, outputs[1] == 0)


def test_copies_have_gradients_of_the_dtype_that_the_model_has() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)).bfloat16()
    model[0].weight.grad_dtype, model[1].weight.grad_dtype = torch.float32, None
    model[0].weight.grad = torch.ones(2, 4)
    for one in copies_of(model, 3):
        one(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
        assert one[0].weight.grad.dtype == torch.float32 and one[0].bias.grad.dtype == torch.bfloat16
        assert one[1].weight.grad_dtype is None


def test_copies_share_what_is_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model[2].register_buffer("same", model[2].running_mean)
    first, second = copies_of(model, 2)
    assert first is model
    assert second[0].bias is not model[0].bias and not second[0].bias.requires_grad
    assert second[1].weight is second[0].weight and second[0].weight is not model[0].weight
    assert second[2].same is second[2].running_mean and second[2].same is not model[2].same


@pytest.mark.parametrize("vectorize", [False, True])
def test_a_call_registers_no_module(vectorize: bool) -> None:
    """Else the checks of a loop would read the structure of all learners again in each step."""
    models, seen = learners(nn.Linear(4, 2), 3, vectorize), []
    hook = nn.modules.module.register_module_module_registration_hook(lambda *given: seen.append(given))
    try:
        models(torch.ones(3, 1, 4)).sum().backward()
    finally:
        hook.remove()
    assert not seen


class Slotted:
    __slots__ = ("function",)

    def __init__(self, function: Any) -> None:
        self.function = function


HIDDEN: dict[str, Any] = {
    "deque": lambda function: collections.deque([function]),
    "slots": Slotted,
    "iterator": lambda function: itertools.cycle([function]),
    "attribute of a list": lambda function: types.SimpleNamespace(kept=Listed([{1: function}])),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_function_that_holds_the_model_is_found_wherever_it_is(kind: str) -> None:
    """Else all learners would compute with the weights of the first."""
    model = nn.Linear(4, 2)
    model.kept = HIDDEN[kind](lambda inputs: inputs * model.weight.mean())
    with pytest.raises(ValueError, match="kept is or has a function that holds the model itself"):
        copies_of(model, 2)
    model.kept = HIDDEN[kind](lambda inputs: 2 * inputs)
    assert copies_of(model, 2)[1].kept is not model.kept


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_copies_of_a_model_that_learns_its_quantization() -> None:
    """torch.ao keeps functions that hold the model, in ``qconfig`` and in graphs. They ask it for its device alone."""
    model, inputs = nn.Sequential(nn.Linear(4, 2)), torch.ones(1, 4)
    mapping = quantization.get_default_qat_qconfig_mapping("fbgemm")
    graph = quantize_fx.prepare_qat_fx(copy.deepcopy(model), mapping, (inputs,))
    model.qconfig = mapping.global_qconfig
    for first, second in (copies_of(quantization.prepare_qat(model), 2), copies_of(graph, 2)):
        second(inputs)
        seen = [dict(one.named_modules())["0.weight_fake_quant"].activation_post_process for one in (first, second)]
        assert [one.max_val.isfinite().all().item() and one.max_val.numel() > 0 for one in seen] == [False, True]
