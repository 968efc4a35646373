"""Parameter groups: the role of a parameter by its module and by its use, whatever the order of registration."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

from ddpcore.models import MODELS
from ddpcore.optim import FusedLAMB, Muon, describe, param_groups

Roles = dict[str, tuple[str, float]]


def roles(model: nn.Module, rule: str | None = "muon") -> Roles:
    """The rule and the decay of each parameter."""
    return {
        name: (group.get("rule", ""), group["weight_decay"])
        for group in param_groups(model, 0.1, rule=rule)
        for name, _ in group["params"]
    }


def adamw(model: nn.Module) -> set[str]:
    """The names with weights of AdamW that decay: neither hidden matrices, nor biases and norms."""
    return {name for name, role in roles(model).items() if role == ("adamw", 0.1)}


def still(model: nn.Module, rule: str | None = "muon") -> set[str]:
    """The names without decay."""
    return {name for name, (_, decay) in roles(model, rule).items() if decay == 0.0}


class LlamaRMSNorm(nn.Module):
    """As in another library."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("rule", [None, "muon"])
def test_norms_of_several_dimensions_have_no_decay(rule):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.LayerNorm([4, 5, 5]),
        LlamaRMSNorm(5, 5),
        nn.RMSNorm([5, 5]),
        nn.Flatten(),
        nn.Linear(100, 3),
    )
    assert still(model, rule) == {"0.bias", "1.weight", "1.bias", "2.weight", "3.weight", "5.bias"}
    assert adamw(model) == {"5.weight"}


@pytest.mark.parametrize("rule", [None, "muon"])
def test_gains_of_weight_norm_have_no_decay(rule):
    model = nn.Sequential(
        old_weight_norm(nn.Conv1d(2, 4, 3)),
        parametrizations.weight_norm(nn.Conv1d(4, 4, 3)),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    gains = {"0.weight_g", "1.parametrizations.weight.original0"}
    assert still(model, rule) == gains | {"0.bias", "1.bias", "3.bias"}
    found = roles(model, "muon")
    assert found["1.parametrizations.weight.original1"][0] == "muon"
    assert found["0.weight_v"][0] == "muon"


class HeadFirst(nn.Module):
    """The head is registered first, and so are positions and tokens that are no factors."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.positions = nn.Parameter(torch.zeros(5, 8))
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.table = nn.Parameter(torch.zeros(11, 8))
        self.own = nn.Parameter(torch.zeros(8, 8))
        self.gain = nn.Parameter(torch.ones(5, 8))
        self.body = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        random.random()
        x = F.embedding(x, self.table) + self.positions
        x = x if mask is None else x * mask
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)[:, 1:]
        x = x @ self.own.t() * self.gain
        return self.head(self.body(x).relu())


def test_use_in_the_forward_pass():
    model = HeadFirst()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    state, seeds = random.getstate(), torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert adamw(model) == {"head.weight", "positions", "token", "table", "gain"}
    assert {name for name, role in roles(model).items() if role[0] == "muon"} == {"own", "body.weight"}
    assert model.calls == 0 and not calls  # only a copy is traced
    assert random.getstate() == state and torch.equal(torch.get_rng_state(), seeds)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class ByTable(nn.Module):
    """The table of an embedding is the last factor, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden = nn.Parameter(torch.randn(9, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.hidden(F.embedding(x, self.table)), self.table)


class ReadEarly(nn.Module):
    """The head is read before the hidden layer, and used after it; so is a table that is no head."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.hidden = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 4))
        self.table = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        head, table = self.head.t(), self.table
        x = F.linear(F.embedding(x, table), self.hidden).relu()
        return F.linear(x, table).sum(-1, keepdim=True) + x @ head


class LooksUp(nn.Module):
    """Rows of a table go into a product, in which positions are added; experts are matrices."""

    def __init__(self, take: Any) -> None:
        super().__init__()
        self.table, self.hidden = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(4, 4))
        self.experts, self.positions = nn.Parameter(torch.randn(2, 4, 4)), nn.Parameter(torch.randn(5, 4))
        self.take, self.head = take, nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.inner(self.take(self.table, x), self.hidden)
        return self.head(torch.addmm(self.positions, rows, self.experts[x[0]]))


class Permutes(nn.Module):
    """A hidden matrix whose columns a fixed index permutes, and experts that are rows of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden = nn.Embedding(9, 4), nn.Parameter(torch.randn(4, 4))
        self.experts, self.head = nn.Parameter(torch.randn(8, 4)), nn.Linear(4, 9)
        self.register_buffer("index", torch.randperm(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x) @ self.hidden[:, self.index]
        return self.head(torch.tanh(rows @ self.experts.view(2, 4, 4)[x[0] % 2]))


class Takes(nn.Module):
    """A hidden matrix of which ``take`` makes a factor."""

    def __init__(self, take: Any) -> None:
        super().__init__()
        self.hidden, self.head, self.take = nn.Parameter(torch.randn(16, 4)), nn.Linear(4, 9), take
        self.register_buffer("index", torch.randperm(4))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.head(self.take(self, x, index))


MATRICES = [
    lambda m, x, i: x @ m.hidden.index_select(1, i),
    lambda m, x, i: nn.functional.linear(x, m.hidden[m.index]),
    lambda m, x, i: x @ m.hidden.view(4, 4, 4).transpose(1, 2)[i],
    lambda m, x, i: x @ m.hidden.view(4, 4, 4).float()[i],
    lambda m, x, i: x @ torch.stack(m.hidden.chunk(4))[i],
]


def test_columns_constant_rows_and_experts_are_no_tables() -> None:
    for take in MATRICES:
        assert adamw(Takes(take)) == {"head.weight"}


def test_use_is_where_a_product_is_and_not_where_a_parameter_is_read():
    for take in (lambda w, x: w[x], lambda w, x: w.float()[x, :], lambda w, x: w.index_select(0, x)):
        assert adamw(LooksUp(take)) == {"table", "positions", "head.weight"}
    assert adamw(Permutes()) == {"table.weight", "head.weight"}
    assert adamw(ByTable()) == {"table"}
    assert adamw(ReadEarly()) == {"head", "table"}


class Named(nn.Module):
    """Prompts that enter a layer, whose name the program chooses."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.prompts, self.name = nn.Parameter(torch.randn(4, 8)), name
        self.add_module(name, nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.prompts.expand(x.shape[0], -1, -1), x], dim=1)
        return self.head((F.linear(x, self.F.weight) if self.name == "F" else getattr(self, self.name)(x)).mean(1))


@pytest.mark.parametrize("name", ["proj", "linear", "mm", "einsum", "F"])
def test_the_name_of_a_layer_says_nothing(name: str) -> None:
    assert adamw(Named(name)) == {"prompts", "head.weight"}


def _standardized(w: Tensor) -> Tensor:
    return (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5)


class Changed(nn.Module):
    """A product with a weight that is changed first."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.positions, self.change = nn.Parameter(torch.randn(4, 8)), change
        self.register_buffer("mask", torch.ones(8, 8))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, self.positions.shape[0], 8) + self.positions * 0.02
        return self.head(F.linear(x, self.change(self, x)))


@pytest.mark.parametrize(
    "change",
    [
        lambda net, x: _standardized(net.weight),
        lambda net, x: net.weight * 0.25 * net.mask,
        lambda net, x: net.weight.bfloat16().mT,
        lambda net, x: net.weight.to(x.dtype).double().type_as(x),
        lambda net, x: net.drop(F.normalize(net.weight)),
        lambda net, x: torch.cat([net.weight.to(x.dtype)[:4], net.weight.to(x.dtype)[4:]]),
    ],
)
def test_weights_that_are_changed_before_their_product_are_factors(change: Any) -> None:
    assert adamw(Changed(change)) == {"positions", "head.weight"}


def test_a_diagonal_is_no_matrix() -> None:
    assert adamw(Changed(lambda net, x: torch.diag(net.other[0]) @ net.weight)) == {"positions", "head.weight", "other"}


class Opaque(nn.Module):
    """A forward pass that cannot be traced, because it depends on values."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x) if x.sum() > 0 else -x
        return x


def test_a_forward_pass_that_cannot_be_traced():
    """Then the last layer is the one registered last, or what a transformers model says."""
    model = Opaque(first=nn.Linear(4, 4), second=nn.Linear(4, 4), third=nn.Linear(4, 4))
    assert adamw(model) == {"third.weight"}
    model.get_output_embeddings = lambda: model.second
    assert adamw(model) == {"second.weight"}


def test_layers_of_torch_with_layers_inside():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(9, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 9)
    )
    assert adamw(model) == {"0.weight", "2.weight"}
    groups = param_groups(model, 0.1, rule="muon")
    joint = {name: group.get("split", 1) for group in groups for name, _ in group["params"] if "in_proj_weight" in name}
    assert set(joint.values()) == {3} and len(joint) == 2


def test_a_parametrized_layer_is_a_factor():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 3))
    assert roles(model)["0.parametrizations.weight.original"] == ("muon", 0.1)
    assert adamw(model) == {"2.weight"}


def test_a_tied_head_and_frozen_weights():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.hidden = nn.Embedding(9, 6), nn.Linear(6, 6)
            self.head = nn.Linear(6, 9, bias=False)
            self.head.weight = self.words.weight
            self.frozen = nn.Linear(6, 6).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.hidden(self.words(x)))

    assert adamw(Tied()) == {"words.weight"}
    assert set(roles(Tied())) == {"words.weight", "hidden.weight", "hidden.bias"}


@pytest.mark.parametrize("name", ["lenet5", "vit", "byte_transformer"])
def test_models_of_the_package(name):
    """Traced or not, the head and the embeddings have AdamW."""
    model = MODELS.build(name)
    found = adamw(model)
    last = [key for key, p in model.named_parameters() if p.ndim > 1][-1]
    assert last in found
    assert {key for key in roles(model) if "position" in key or "token" in key} <= found | still(model)


# ---- joint projections ----


@pytest.mark.parametrize("option", ["split", "num_heads"])
def test_parts_of_a_parameter_are_matrices_of_their_own(option: str):
    """``split=3`` gives the weights of three parameters, and so do three heads."""
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(12, 5, generator=generator), torch.randn(4, 12, 5, generator=generator)
    joint = nn.Parameter(start.clone())
    apart = [nn.Parameter(part.clone()) for part in start.chunk(3)]
    for ns_dtype in (torch.bfloat16, torch.float32):
        together = Muon([{"params": [joint], option: 3}], lr=0.1, ns_dtype=ns_dtype)
        each = Muon(apart, lr=0.1, ns_dtype=ns_dtype)
        for grad in grads:
            joint.grad = grad.clone()
            for part, piece in zip(apart, grad.chunk(3), strict=True):
                part.grad = piece.clone()
            together.step()
            each.step()
        torch.testing.assert_close(joint.detach(), torch.cat([p.detach() for p in apart]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("split", "message"),
    [(5, "parameter w has 12 rows, which split=5 does not divide"), (0, "split is 0"), ("3", "split is '3'")],
)
def test_splits_that_do_not_fit_are_refused(split: Any, message: str):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [("w", nn.Parameter(torch.ones(12, 5)))], "split": split}])


def test_heads_and_parts_are_one_option():
    joint = nn.Parameter(torch.ones(12, 5))
    optimizer = Muon([{"params": [joint], "num_heads": 4}])
    assert optimizer.param_groups[0]["split"] == 4
    assert "num_heads" not in optimizer.state_dict()["param_groups"][0]
    with pytest.raises(ValueError, match="a group has split= and num_heads=: give one"):
        Muon([{"params": [joint], "num_heads": 4, "split": 3}])


def test_groups_are_those_of_a_whole_model_after_fully_shard(tmp_path: Path) -> None:
    """FSDP2 forbids copies of its modules, and the forward pass of a copy is traced."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = HeadFirst()
        expected, mesh = roles(model), init_device_mesh("cpu", (1,))
        for name, part in [*model.named_children(), ("", model)]:
            fully_shard(part, mesh=mesh)
            assert roles(model) == expected, name
            assert isinstance(part, FSDPModule), "the model has lost FSDP2's class"
        assert roles(model) == expected
        assert {role for role, _ in expected.values()} == {"muon", "adamw"}
    finally:
        dist.destroy_process_group()


# ---- the table ----


def test_the_table_shows_every_parameter():
    groups = param_groups(HeadFirst(), 0.1, rule="muon")
    text = describe(groups)
    lines = text.splitlines()
    assert lines[0].split() == ["group", "rule", "weight_decay", "shape", "parameter"]
    assert len(lines) == 1 + len(list(HeadFirst().parameters()))
    assert any(line.split() == ["1", "adamw", "0.1", "3x8", "head.weight"] for line in lines)
    named = describe(FusedLAMB(param_groups(nn.Linear(2, 3), 0.1), lr=0.5)).splitlines()
    assert named[1].split() == ["0", "0.1", "0.5", "3x2", "weight"]
    assert describe(FusedLAMB([nn.Parameter(torch.ones(()))], lr=0.5)).splitlines()[1].split()[-2:] == ["scalar", "0"]


def test_describe_takes_what_optimizers_take() -> None:
    """One tensor in a group is one parameter. What an optimizer could not read again is refused."""
    model = nn.Sequential(nn.Linear(2, 3))
    plain = describe(list(model.parameters()))
    assert plain.splitlines()[1:] == ["0      3x2    0", "0      3      1"]
    assert describe(model.parameters()) == describe([{"params": list(model.parameters())}]) == plain
    named = describe(FusedLAMB(model.named_parameters()))
    for groups in (model.named_parameters(), [{"params": list(model.named_parameters())}]):
        assert [row.split()[-2:] for row in describe(groups).splitlines()] == [
            r.split()[-2:] for r in named.splitlines()
        ]
    for one in (model[0].weight, {"params": model[0].weight}):
        assert describe(one).splitlines()[1:] == describe([one]).splitlines()[1:] == ["0      3x2    0"]
    with pytest.raises(ValueError, match=r"params of group 1 can be read only once, .*: make them a list"):
        describe([{"params": list(model.parameters())}, {"params": model.parameters()}])
    for wrong in (model, [{"params": [model]}], ["weight"], [{"params": list(model.parameters())}, model[0].weight]):
        with pytest.raises(TypeError, match=r"group 0 has a .*, no parameter: pass its parameters"):
            describe(wrong)


def test_a_lazy_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0.weight has no shape yet \(lazy module\): run one forward pass before"):
        param_groups(nn.Sequential(nn.LazyLinear(3)), 0.1)
