"""Muon: against torch.optim.Muon and AdamW, against the equations in float64, on ranks, and its refusals."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcore.models import MODELS
from ddpcore.optim import FusedAdamW, Muon, build_optimizer, newton_schulz, param_groups
from helpers import muon_ranks, ranks

CPU = torch.device("cpu")
SHAPES = [(32, 32), (32, 80), (80, 32), (32, 80), (7, 3), (1, 9)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    {"momentum": 0.8, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
]


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(step: int, *lists: list[nn.Parameter]) -> None:
    for params in lists:
        generator = torch.Generator().manual_seed(100 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_torch(setting, dtype, assert_same_bits):
    ours, theirs = parameters(SHAPES, dtype), parameters(SHAPES, dtype)
    mine = Muon(ours, lr=0.02, **setting)
    other = torch.optim.Muon(theirs, lr=0.02, **setting)
    for step in range(6):
        give_gradients(step, ours, theirs)
        for optimizer in (mine, other):
            optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
            optimizer.step()
    for left, right in zip(ours, theirs, strict=True):
        assert_same_bits(left, right)
        assert_same_bits(mine.state[left]["momentum_buffer"], other.state[right]["momentum_buffer"])


@pytest.mark.parametrize("seed", range(12))
def test_near_torch_for_any_shapes(seed):
    """Within a 64th of a step: batches and transposed matrices are summed in another order."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [tuple(torch.randint(1, 40, (2,), generator=generator).tolist()) for _ in range(4)]
    shapes += [(9, 2), shapes[0][::-1], (8, 4), (4, 8)]
    ours, theirs = parameters(shapes), parameters(shapes)
    mine, other = Muon(ours, lr=0.1), torch.optim.Muon(theirs, lr=0.1)
    for step in range(4):
        give_gradients(step, ours, theirs)
        mine.step()
        other.step()
        for left, right in zip(ours, theirs, strict=True):
            scale = math.sqrt(max(1.0, left.shape[0] / left.shape[1]))
            assert (left - right).abs().max() <= (step + 1) * 0.1 * scale / 64, left.shape


def test_equal_to_torch_without_nesterov(assert_same_bits):
    """In fp32: torch.optim.Muon divides a momentum of 16 bits by its norm in place, because it does not copy it."""
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    mine = Muon(ours, nesterov=False)
    other = torch.optim.Muon(theirs, nesterov=False)
    for step in range(3):
        give_gradients(step, ours, theirs)
        mine.step()
        other.step()
    for left, right in zip(ours, theirs, strict=True):
        assert_same_bits(left, right)


def test_float32_products_are_nearer_to_the_equations():
    """They differ from torch.optim.Muon by the rounding of 16 bits."""
    ours, theirs, exact = (parameters(SHAPES, dtype) for dtype in (torch.float32, torch.float32, torch.float64))
    optimizers = [Muon(ours, ns_dtype=torch.float32), torch.optim.Muon(theirs), Muon(exact)]
    give_gradients(0, ours, theirs, exact)
    for optimizer in optimizers:
        optimizer.step()
    for left, right, want in zip(ours, theirs, exact, strict=True):
        assert (left - want).abs().max() <= (right - want).abs().max()


def expected(weight: Tensor, grads: list[Tensor], lr: float) -> Tensor:
    """Muon by the equations, for the defaults and a matrix or convolution."""
    momentum = torch.zeros_like(weight)
    for grad in grads:
        momentum = 0.95 * momentum + 0.05 * grad
        x = (0.05 * grad + 0.95 * momentum).reshape(len(weight), -1)
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        rows, columns = x.shape
        weight = (1 - lr * 0.1) * weight - lr * math.sqrt(max(1.0, rows / columns)) * x.view_as(weight)
    return weight


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (6, 3, 2, 2), (40, 3, 3, 3), (4, 90)])
def test_equations_in_float64(shape):
    (param,) = parameters([shape], torch.float64)
    start, grads = param.detach().clone(), []
    optimizer = Muon([param], lr=0.1)
    for step in range(3):
        give_gradients(step, [param])
        grads.append(param.grad.clone())
        optimizer.step()
    torch.testing.assert_close(param.detach(), expected(start, grads, 0.1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gram_form_is_the_direct_form(dtype, monkeypatch):
    """Also for singular values over six orders of magnitude, which the Gram form squares."""
    generator = torch.Generator().manual_seed(1)
    left, _ = torch.linalg.qr(torch.randn(24, 24, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(100, 24, generator=generator, dtype=torch.float64))
    matrices = (left * torch.logspace(0, -6, 24, dtype=torch.float64)) @ right.T
    options: dict[str, Any] = {"steps": 5, "coefficients": newton_schulz.COEFFICIENTS, "eps": 1e-7}
    assert newton_schulz.takes_gram(24, 100, 5, dtype, CPU)
    by_gram = newton_schulz.orthogonalize(matrices[None].to(dtype), dtype=dtype, **options)
    monkeypatch.setattr(newton_schulz, "takes_gram", lambda *_: False)
    exact = newton_schulz.orthogonalize(matrices[None], dtype=torch.float64, **options)
    bound = 1e-3 if dtype == torch.float32 else 1e-11
    assert (by_gram.double() - exact).abs().max() < bound * exact.abs().max()


def test_the_gram_form_where_it_is_cheaper():
    assert not newton_schulz.takes_gram(64, 64, 5, torch.float32, CPU)
    assert not newton_schulz.takes_gram(64, 96, 5, torch.float32, CPU)
    assert newton_schulz.takes_gram(64, 100, 5, torch.float32, CPU)
    assert not newton_schulz.takes_gram(64, 4096, 5, torch.bfloat16, CPU)
    assert not newton_schulz.takes_gram(64, 4096, 0, torch.float32, CPU)


def test_a_batch_is_its_matrices(monkeypatch, assert_same_bits):
    """Split batches of one shape, as for matrices that do not fit together."""
    sizes = []
    real = newton_schulz.orthogonalize
    monkeypatch.setattr(
        "ddpcore.optim.matrices.orthogonalize", lambda m, **more: (sizes.append(len(m)), real(m, **more))[1]
    )
    together, apart = parameters([(6, 9)] * 5 + [(9, 6)]), parameters([(6, 9)] * 5 + [(9, 6)])
    give_gradients(0, together, apart)
    Muon(together).step()
    assert sizes == [6]
    monkeypatch.setattr("ddpcore.optim.matrices.MAX_BATCH", 2 * 54)
    Muon(apart).step()
    assert sizes == [6, 2, 2, 2]
    for left, right in zip(together, apart, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


def test_adamw_is_fused_adamw(assert_same_bits):
    ours, theirs = parameters([(5,), (4, 3), ()]), parameters([(5,), (4, 3), ()])
    options: dict[str, Any] = {"weight_decay": 0.2}
    mine = Muon([{"params": ours, "rule": "adamw"}], adamw_lr=0.3, adamw_eps=1e-6, adamw_betas=(0.8, 0.95), **options)
    other = FusedAdamW(theirs, lr=0.3, eps=1e-6, betas=(0.8, 0.95), **options)
    for step in range(4):
        give_gradients(step, ours, theirs)
        mine.step()
        other.step()
    for left, right in zip(ours, theirs, strict=True):
        assert_same_bits(left, right)


class Network(nn.Module):
    """Embeddings, a convolution, a norm, two hidden layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.conv = nn.Conv1d(6, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 9)


def test_parameter_groups():
    groups = param_groups(Network(), 0.3, rule="muon")
    found = [([name for name, _ in group["params"]], group["rule"], group["weight_decay"]) for group in groups]
    assert found == [
        (["conv.weight", "hidden.weight"], "muon", 0.3),
        (["words.weight", "head.weight"], "adamw", 0.3),
        (["conv.bias", "norm.weight", "norm.bias", "hidden.bias", "head.bias"], "adamw", 0.0),
    ]
    with pytest.raises(ValueError, match="rule is 'moun': it must be None or 'muon'"):
        param_groups(Network(), 0.3, rule="moun")


def test_the_positions_of_a_vision_transformer_get_adamw():
    """They have one row: there is nothing to orthogonalize."""
    groups = param_groups(MODELS.build("vit", depth=1), 0.3, rule="muon")
    others = {name for name, _ in groups[1]["params"]}
    assert others == {"embed.class_token", "embed.positions", "head.weight"}


def test_the_registry_makes_the_groups():
    optimizer = build_optimizer("muon", Network(), lr=0.1, options={"weight_decay": 0.2, "adamw_lr": 0.01})
    assert isinstance(optimizer, Muon)
    assert [(group["rule"], group["lr"]) for group in optimizer.param_groups] == [
        ("muon", 0.1), ("adamw", 0.01), ("adamw", 0.01),
    ]  # fmt: skip


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"params": [("bias", nn.Parameter(torch.ones(3)))]},
        "parameter bias has 1 dimensions, and Muon needs a matrix: put",
    ),
    ({"params": [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(()))]}, "parameter 1 has 0 dimensions"),
    ({"params": [nn.Parameter(torch.ones(3, 2) + 0j)]}, "a parameter is torch.complex64: pass torch.view_as_real"),
    ({"momentum": 1.0}, "momentum is 1.0"),
    ({"lr": -1.0}, "lr is -1.0"),
    ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients is .*: it must be 3 numbers"),
    ({"ns_steps": 100}, "ns_steps is 100: it must be an integer from 0 to 99"),
    ({"adjust_lr_fn": "moonshot"}, "adjust_lr_fn"),
    ({"adamw_betas": (0.9, 1.0)}, r"adamw_betas\[1\] is 1.0"),
    ({"ns_dtype": torch.int32}, "ns_dtype is torch.int32"),
    ({"adamw_lr": -0.1}, "adamw_lr is -0.1"),
    (
        {"params": [{"params": parameters([(6, 4)]), "split": (4, 1)}]},
        r"has 6 rows, which split=\(4, 1\) does not divide",
    ),
    (
        {"params": [{"params": parameters([(6, 4)]), "split": (6, 0)}]},
        r"split is \(6, 0\): it must be an integer from 1",
    ),
    ({"params": [{"params": parameters([(6, 4)]), "period": 0}]}, "period is 0: it must be an integer from 1 on"),
    ({"params": [{"params": parameters([(6, 4)]), "period": 2, "split": 2}]}, "period is 2: .*, and above 1 it goes"),
    ({"params": [{"params": parameters([(6, 4)]), "block_lr": -1.0}]}, "block_lr is -1.0"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        Muon(**{"params": parameters([(3, 2)]), **arguments})


def test_a_refused_group_changes_nothing():
    optimizer = Muon(parameters([(3, 2)]))
    with pytest.raises(ValueError, match="has 1 dimensions"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    twice = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match="parameter 1 is twice in its group"), pytest.warns(UserWarning):
        optimizer.add_param_group({"params": [twice, twice]})
    with pytest.raises(ValueError, match="rule"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "rule": "sgd"})
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_changes_nothing():
    params = parameters([(3, 2), (3, 2)])
    before = copy.deepcopy(params)
    give_gradients(0, params)
    params[1].grad = params[1].grad.to_sparse()
    with pytest.raises(RuntimeError, match="dense gradients"):
        Muon(params).step()
    assert all(torch.equal(left, right) for left, right in zip(params, before, strict=True))


def test_states(assert_same_bits):
    """A state continues with the same bits; that of torch.optim.Muon too; one of another rule is refused."""
    model = Network()
    optimizer = Muon(param_groups(model, 0.1, rule="muon"))
    trained = [p for p in model.parameters() if p.requires_grad]
    give_gradients(0, trained)
    optimizer.step()
    twin = copy.deepcopy(model)
    loaded = Muon(param_groups(twin, 0.1, rule="muon"), lr=5.0)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    others = [p for p in twin.parameters() if p.requires_grad]
    give_gradients(1, trained, others)
    optimizer.step()
    loaded.step()
    for left, right in zip(trained, others, strict=True):
        assert_same_bits(left, right)

    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    foreign, mine = torch.optim.Muon(theirs, lr=0.02), Muon(ours)
    give_gradients(0, theirs)
    foreign.step()
    for left, right in zip(ours, theirs, strict=True):
        left.data.copy_(right)
    mine.load_state_dict(copy.deepcopy(foreign.state_dict()))
    give_gradients(1, ours, theirs)
    foreign.step()
    mine.step()
    for left, right in zip(ours, theirs, strict=True):
        assert_same_bits(left, right)
    torch.optim.Muon(theirs).load_state_dict(mine.state_dict())

    adam = torch.optim.AdamW(theirs)
    adam.step()
    before = copy.deepcopy(mine.state_dict())
    with pytest.raises(ValueError, match="parameter 0 has exp_avg, exp_avg_sq, of another optimizer"):
        mine.load_state_dict(adam.state_dict())
    assert_same_bits(mine.state_dict()["state"][0]["momentum_buffer"], before["state"][0]["momentum_buffer"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_goes_on_with_the_same_bits(copied, assert_same_bits):
    """It has the options that no group holds, too."""
    optimizer = Muon(parameters([(3, 2), (4, 4)]), lr=0.02, adamw_lr=0.5, ns_dtype=torch.float32)
    bias = nn.Parameter(torch.ones(3))
    give_gradients(0, params := optimizer.param_groups[0]["params"])
    optimizer.step()
    other = copied(optimizer)
    others = other.param_groups[0]["params"]
    for one in (optimizer, other):
        one.add_param_group({"params": [copy.deepcopy(bias)], "rule": "adamw"})
        assert one.param_groups[1]["lr"] == 0.5
    give_gradients(1, params, others)
    optimizer.step()
    other.step()
    for left, right in zip(params, others, strict=True):
        assert left is not right
        assert_same_bits(left, right)


def test_a_file_with_groups_in_another_order_is_refused():
    bias, matrix = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 3))
    saved = Muon([{"params": [matrix]}, {"params": [bias], "rule": "adamw"}]).state_dict()
    optimizer = Muon([{"params": [bias], "rule": "adamw"}, {"params": [matrix]}])
    with pytest.raises(ValueError, match="parameter 0 has 1 dimensions, and Muon needs a matrix"):
        optimizer.load_state_dict(saved)
    assert [group["rule"] for group in optimizer.param_groups] == ["adamw", "muon"]


def test_owners_share_the_work():
    assert newton_schulz.owners_of([5, 1, 1, 1, 1, 1], 2) == [0, 1, 1, 1, 1, 1]
    assert newton_schulz.owners_of([2, 3, 2, 3], 2) == [0, 0, 1, 1]
    assert newton_schulz.owners_of([1], 3) == [0]


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return ranks.run("muon_ranks", 2)


@pytest.mark.parametrize("way", ["shm", "pg", "ddp"])
def test_ranks_share_the_matrices(way, seen, assert_same_bits):
    """Each of the four matrices is computed once in a step, and the weights are those of ranks that compute all."""
    for rank in seen:
        assert rank[way]["group"]
        for name, weight in rank["each"]["weights"].items():
            assert_same_bits(rank[way]["weights"][name], weight, f"{way} {name}")
    counts = [rank[way]["counts"] for rank in seen]
    assert sum(counts) == 4 * muon_ranks.STEPS and min(counts) > 0
    assert [rank["each"]["counts"] for rank in seen] == [4 * muon_ranks.STEPS] * 2


def test_muloco_is_the_same_on_ranks_and_virtual_learners(seen):
    """Batches of both learners' matrices may round otherwise than those of one."""
    for rank, learner in zip(seen, muon_ranks.virtual(), strict=True):
        assert not rank["muloco"]["group"]
        for name, weight in rank["muloco"]["weights"].items():
            torch.testing.assert_close(learner[name], weight, rtol=1e-4, atol=1e-5)


def test_learners_that_differ_do_not_share(seen):
    for rank in seen:
        assert "Muon has a process_group" in rank["refusal"]


@pytest.mark.parametrize("split", [4, (8, 4, 4)])
def test_a_split_parameter_is_its_matrices(split, assert_same_bits):
    """Heads, or projections of other numbers of rows, whose scales differ."""
    (ours,) = parameters([(16, 6)], torch.float64)
    parts = ours.detach().chunk(split) if split == 4 else ours.detach().split(split)
    theirs = [nn.Parameter(part.clone()) for part in parts]
    mine, other = Muon([{"params": [ours], "split": split, "period": 1}], lr=0.1), Muon(theirs, lr=0.1)
    for step in range(3):
        give_gradients(step, [ours])
        cut = ours.grad.chunk(split) if split == 4 else ours.grad.split(split)
        for param, grad in zip(theirs, cut, strict=True):
            param.grad = grad.clone()
        mine.step()
        other.step()
    assert_same_bits(ours.detach(), torch.cat([param.detach() for param in theirs]))


@pytest.mark.parametrize("batched", [True, False])
def test_three_dimensions_are_what_the_group_says(batched):
    ours, theirs = parameters([(4, 6, 5)]), parameters([(4, 6, 5)])
    flat = [nn.Parameter(part.detach().clone()) for part in (theirs[0].unbind() if batched else [theirs[0].flatten(1)])]
    mine, other = Muon([{"params": ours, "batched": batched}], lr=0.1), Muon(flat, lr=0.1)
    for step in range(3):
        give_gradients(step, ours)
        grads = ours[0].grad.unbind() if batched else [ours[0].grad.flatten(1)]
        for param, grad in zip(flat, grads, strict=True):
            param.grad = grad.clone()
        mine.step()
        other.step()
    assert torch.equal(ours[0], torch.stack(list(flat)) if batched else flat[0].view(4, 6, 5))


def test_three_dimensions_without_a_word_are_refused():
    with pytest.raises(ValueError, match="three dimensions: give its group batched=True if it is 4 matrices"):
        Muon(parameters([(4, 6, 5)]), lr=0.1)
    with pytest.raises(ValueError, match="has 2 dimensions; batched=True takes"):
        Muon([{"params": parameters([(4, 6)]), "batched": True}], lr=0.1)
    with pytest.raises(ValueError, match="batched is True: it must be"):
        Muon([{"params": parameters([(4, 6, 5)]), "batched": True, "split": 2}], lr=0.1)
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2))
    model.register_parameter("experts", nn.Parameter(torch.ones(2, 3, 3)))
    groups = param_groups(model, 0.1, rule="muon")
    assert groups[0]["batched"] is False and "0.weight" in dict(groups[0]["params"])
    assert all("experts" not in dict(group["params"]) for group in groups if "batched" in group)
