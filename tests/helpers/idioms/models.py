"""Layers, structures and kinds of models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from helpers.idioms.run import Run, add, idiom, net, one_step, sgd, start, train

RANKS = ("ranks",)
BOTH = ("ranks", "virtual")


class Apply(nn.Module):
    """A model of parts, with a function as its forward pass."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(self, inputs)


def tied() -> nn.Module:
    first, last = nn.Linear(5, 5), nn.Linear(5, 5)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last)


def embedded() -> nn.Module:
    table, head = nn.Embedding(6, 3), nn.Linear(3, 6, bias=False)
    head.weight = table.weight
    return Apply(lambda m, x: m.head(m.table((x.abs() * 2).long().clamp(max=5)).mean(dim=-2)), table=table, head=head)


def transposed() -> nn.Module:
    model = net()
    model[0].weight = nn.Parameter(torch.randn(5, 7).t())
    return model


def channels_last() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(-3))
    model = Apply(lambda m, x: m.body(x.unsqueeze(-2).unsqueeze(-2).expand(*x.shape[:-1], 1, 4, 5)), body=body)
    return model.to(memory_format=torch.channels_last)


def last_output(layer: nn.Module) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(5)
        rnn = layer(5, 4, batch_first=True)
        return Apply(lambda m, x: m.head(m.rnn(x.unsqueeze(-2))[0].squeeze(-2)), rnn=rnn, head=nn.Linear(4, 3))

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "layer_norm": (lambda: nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)), BOTH),
    "group_norm": (lambda: nn.Sequential(nn.Linear(5, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3)), BOTH),
    "batch_norm": (lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)), BOTH),
    "batch_norm_without_statistics": (
        lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7, track_running_stats=False), nn.Linear(7, 3)),
        BOTH,
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)), RANKS),
    "channels_last": (channels_last, BOTH),
    "conv1d": (
        lambda: Apply(lambda m, x: m.conv(x.unsqueeze(-2)).mean(dim=-1), conv=nn.Conv1d(1, 3, 3)),
        BOTH,
    ),
    "lstm": (last_output(nn.LSTM), BOTH),
    "gru": (last_output(nn.GRU), BOTH),
    "rnn": (last_output(nn.RNN), BOTH),
    "attention": (
        lambda: Apply(
            lambda m, x: m.head(m.attention(x, x, x, need_weights=False)[0]),
            attention=nn.MultiheadAttention(5, 1),
            head=nn.Linear(5, 3),
        ),
        BOTH,
    ),
    "transformer": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0), nn.Linear(5, 3)),
        BOTH,
    ),
    "embedding": (
        lambda: Apply(
            lambda m, x: m.head(m.table((x.abs() * 2).long().clamp(max=5)).flatten(-2)),
            table=nn.Embedding(6, 3, padding_idx=0),
            head=nn.Linear(15, 3),
        ),
        BOTH,
    ),
    "embedding_bag": (
        lambda: Apply(lambda m, x: m.bag((x.abs() * 2).long().clamp(max=5)), bag=nn.EmbeddingBag(6, 3, mode="mean")),
        BOTH,
    ),
    "tied_embedding": (embedded, BOTH),
    "tied_layers": (tied, BOTH),
    "one_layer_used_twice": (
        lambda: Apply(lambda m, x: m.layer(m.layer(x).tanh()), layer=nn.Linear(5, 5)),
        BOTH,
    ),
    "one_layer_twice_in_a_list": (
        lambda: (lambda layer: Apply(lambda m, x: m.all[1](m.all[0](x)), all=nn.ModuleList([layer] * 2)))(
            nn.Linear(5, 5)
        ),
        BOTH,
    ),
    "parameter_list": (
        lambda: Apply(lambda m, x: x @ m.p[0] + m.p[1], p=nn.ParameterList([torch.randn(5, 3), torch.zeros(3)])),
        BOTH,
    ),
    "parameter_dict": (
        lambda: Apply(lambda m, x: x @ m.p["w"], p=nn.ParameterDict({"w": torch.randn(5, 3)})),
        BOTH,
    ),
    "scalar_parameter": (
        lambda: Apply(lambda m, x: m.body(x) * m.scale, body=net(), scale=nn.Parameter(torch.tensor(2.0))),
        BOTH,
    ),
    "empty_parameter": (
        lambda: Apply(lambda m, x: m.body(x) + m.none.sum(), body=net(), none=nn.Parameter(torch.zeros(0))),
        BOTH,
    ),
    "transposed_parameter": (transposed, BOTH),
    "an_unused_layer": (lambda: Apply(lambda m, x: m.body(x), body=net(), other=nn.Linear(2, 2)), BOTH),
    "prelu": (lambda: nn.Sequential(nn.Linear(5, 7), nn.PReLU(), nn.Linear(7, 3)), BOTH),
    "bilinear": (lambda: Apply(lambda m, x: m.b(x, x), b=nn.Bilinear(5, 5, 3)), BOTH),
    "module_dict": (
        lambda: Apply(
            lambda m, x: m.d["b"](m.d["a"](x)), d=nn.ModuleDict({"b": nn.Linear(4, 3), "a": nn.Linear(5, 4)})
        ),
        BOTH,
    ),
    "weight_norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 3))), BOTH),
    "spectral_norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 3))), BOTH),
    "orthogonal": (lambda: nn.Sequential(nn.Linear(5, 4), parametrizations.orthogonal(nn.Linear(4, 4))), BOTH),
    "old_weight_norm": (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 3))), BOTH),
    "old_spectral_norm": (lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 3))), BOTH),
    "pruned": (lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(5, 3), "weight", 0.3)), BOTH),
    "torch_compile": (lambda: torch.compile(net(), backend="eager"), BOTH),
    "fx": (lambda: torch.fx.symbolic_trace(net()), BOTH),
    "a_scripted_layer": (lambda: nn.Sequential(torch.jit.script(nn.Linear(5, 7)), nn.Tanh(), nn.Linear(7, 3)), BOTH),
    "data_parallel": (lambda: nn.DataParallel(net()), RANKS),
}


def train_model(run: Run, make: Callable[[], nn.Module]) -> None:
    start(run, make())
    train(run)


for name, (make, worlds) in MODELS.items():
    add(f"model_{name}", partial(train_model, make=make), worlds=worlds, digits=5)


@idiom(worlds=RANKS)
def model_compiled_in_place(run: Run) -> None:
    model = net()
    model.compile(backend="eager")
    start(run, model)
    train(run)


@idiom(worlds=RANKS, digits=2)
def model_bfloat16(run: Run) -> None:
    start(run, net().bfloat16())
    for step in range(2):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(inputs.bfloat16()), labels))
        run.step()


@idiom(worlds=RANKS)
def model_that_returns_a_dictionary(run: Run) -> None:
    class Named(nn.Sequential):
        def forward(self, *, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
            hidden = self[0](x)
            return {"logits": self[2](hidden), "others": (hidden, [hidden])}

    start(run, Named(*net()))
    for step in range(4):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(run.loss(run.model(x=inputs)["logits"], labels))
        run.step()


class Counting(nn.Module):
    """State of Python and buffers that a forward pass changes, assigns anew and registers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls, self.mean = net(), 0, torch.zeros(3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.body(inputs)
        self.calls += 1
        self.count = self.count + 1
        self.hidden = 0.9 * self.hidden + 0.1 * outputs.detach().mean(dim=0)
        if self.calls == 2:
            self.register_buffer("late", torch.ones(3))
        self.mean = self.mean + outputs.detach().mean(dim=0)
        return outputs + 0.1 * self.hidden + 0.01 * self.calls


@idiom(worlds=RANKS)
def model_with_state(run: Run) -> None:
    start(run, Counting())
    train(run)
    run.tensors += [run.inner.count, run.inner.hidden, run.inner.mean]


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def _later(run: Run, change: Callable[[Any], Any]) -> None:
    """Change the model after two steps, and go on."""
    start(run)
    train(run, steps=2)
    for model in run.models:
        change(model)
    train(run, first=2, steps=2)


def reset(model: Any) -> None:
    with torch.no_grad():
        model[2].weight.normal_(generator=torch.Generator().manual_seed(1))


ADDED = "parameter {} was added or replaced after distribute"
LATER: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "parametrization": (lambda m: parametrize.register_parametrization(m[0], "weight", Scaled()), None),
    "pruning": (lambda m: prune.l1_unstructured(m[0], "weight", 0.3), None),
    "weight_norm": (
        lambda m: parametrizations.weight_norm(m[0]),
        ADDED.format("0.parametrizations.weight.original0"),
    ),
    "old_weight_norm": (lambda m: nn.utils.weight_norm(m[0]), ADDED.format("0.weight_g")),
    "old_spectral_norm": (lambda m: (torch.manual_seed(4), nn.utils.spectral_norm(m[0])), None),
    "spectral_norm": (lambda m: parametrizations.spectral_norm(m[0]), None),
    "a_new_layer": (lambda m: m.append(nn.Linear(3, 3)), ADDED.format("3.weight")),
    "another_layer": (lambda m: m.__setitem__(2, nn.Linear(7, 3)), ADDED.format("2.weight")),
    "another_parameter": (lambda m: setattr(m[2], "bias", nn.Parameter(torch.ones(3))), ADDED.format("2.bias")),
    "a_frozen_weight": (lambda m: m[0].requires_grad_(False), None),
    "a_new_activation": (lambda m: m.__setitem__(1, nn.ReLU()), None),
    "a_weight_reset_in_place": (reset, None),
    "load_state_dict": (lambda m: m.load_state_dict({n: v * 0.5 for n, v in m.state_dict().items()}), None),
    "load_state_dict_assign": (
        lambda m: m.load_state_dict({n: v * 0.5 for n, v in m.state_dict().items()}, assign=True),
        r"load_state_dict\(assign=True\) would replace parameters in training",
    ),
    "to_the_same_dtype": (lambda m: m.float().to("cpu"), None),
    "to_another_dtype": (lambda m: m.double().float(), "parameter 2.bias has left the flat buffer"),
    "to_another_memory_format": (lambda m: m.to(memory_format=torch.channels_last), None),
    "vector_to_parameters": (
        lambda m: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(m.parameters()) * 0.5, m.parameters()),
        "has left the flat buffer",
    ),
    "a_smaller_layer": (
        lambda m: setattr(m[2].bias, "data", m[2].bias.data[:1]),
        r"parameter 2.bias has left the flat buffer|assign a gradient of size .* to a tensor of size",
    ),
    "share_memory": (lambda m: m.share_memory(), "the memory of the (parameters|gradients) has moved .share_memory"),
    "weights_clamped": (lambda m: [p.data.clamp_(-0.1, 0.1) for p in m.parameters()], None),
    "reset_parameters": (lambda m: (torch.manual_seed(9), m[2].reset_parameters()), None),
    "in_eval_mode": (lambda m: m.eval(), None),
    "torch_compile": (lambda m: torch.compile(m, backend="eager"), None),
    "a_wrapped_layer": (lambda m: m.__setitem__(0, nn.Sequential(m[0])), None),
}
for name, (change, message) in LATER.items():
    add(f"later_{name}", partial(_later, change=change), **({"refused": message} if message else {}))


@idiom()
def later_without_a_layer(run: Run) -> None:
    """An auxiliary head that is dropped."""
    model = Apply(lambda m, x: m.body(x) if m.aux is None else m.body(x) + m.aux(x), body=net(), aux=nn.Linear(5, 3))
    run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(run, steps=2)
    for one in run.models:
        one.aux = None
    train(run, first=2, steps=2)


@idiom()
def parametrizations_cached(run: Run) -> None:
    model = net()
    parametrize.register_parametrization(model[0], "weight", Scaled())
    start(run, model)
    for step in range(4):
        with parametrize.cached():
            one_step(run, step)


def _parametrization_removed(run: Run, *, keep: bool) -> None:
    model = net()
    parametrize.register_parametrization(model[0], "weight", Scaled())
    start(run, model)
    train(run, steps=2)
    for one in run.models:
        parametrize.remove_parametrizations(one[0], "weight", leave_parametrized=keep)
    train(run, first=2, steps=2)


add("parametrization_removed", partial(_parametrization_removed, keep=False))
add(
    "parametrization_removed_and_value_kept",
    partial(_parametrization_removed, keep=True),
    refused="parameter 0.(parametrizations.weight.original|weight) (has left the flat buffer|was added or replaced)",
)


@idiom()
def a_buffer_of_two_modules(run: Run) -> None:
    """It stays one: each learner's passes change it, whichever module does."""

    class Counted(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            self.count += 1
            return super().forward(inputs) / self.count.sqrt()

    first, last = Counted(5, 7), Counted(7, 3)
    for layer in (first, last):
        layer.register_buffer("count", torch.zeros(()))
    last.count = first.count
    start(run, nn.Sequential(first, nn.Tanh(), last))
    train(run)


@idiom()
def frozen_layers(run: Run) -> None:
    model = net()
    model[0].requires_grad_(False)
    run.distribute(model, sgd(model))
    train(run)


@idiom()
def a_layer_frozen_for_some_steps(run: Run) -> None:
    start(run)
    train(run, steps=2)
    for model in run.models:
        model[0].requires_grad_(False)
    train(run, first=2, steps=2)
    for model in run.models:
        model[0].requires_grad_(True)
    train(run, first=4, steps=2)


@idiom()
def a_lazy_layer_after_a_first_pass(run: Run) -> None:
    model = nn.Sequential(nn.LazyLinear(7), nn.Tanh(), nn.Linear(7, 3))
    model(torch.zeros(1, 5))
    start(run, model)
    train(run)


@idiom(worlds=RANKS, refused={"ssgd": "a gradient is sparse and flat buffers are dense"})
def sparse_gradients(run: Run) -> None:
    """Where gradients are not averaged and the optimizer is torch's."""
    table = nn.Embedding(6, 3, sparse=True)
    run.distribute(table, torch.optim.SGD(table.parameters(), lr=0.1))
    for step in range(4):
        inputs, labels = run.batch(step)
        run.optimizer.zero_grad()
        run.backward(F.cross_entropy(table((inputs.abs() * 2).long().clamp(max=5)).mean(dim=1), labels))
        run.step()
