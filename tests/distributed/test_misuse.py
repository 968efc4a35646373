"""Misuse of a distributed model, which must work or raise an error."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.utils import prune

import ddpcore
from ddpcore.optim import FusedSGD
from helpers.connection import connected

L = 2


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(handle: ddpcore.Distributed, optimizer: torch.optim.Optimizer, num_steps: int = 1) -> None:
    for step in range(num_steps):
        inputs = torch.randn(L, 4, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        handle.model(inputs).square().mean(dim=(1, 2)).sum().backward()
        optimizer.step()


def make(kind: Any = FusedSGD, strategy: Any = None, **rule: float) -> tuple[nn.Module, Any, ddpcore.Distributed]:
    model = net()
    optimizer = kind(model.parameters(), lr=0.1, **rule)
    return model, optimizer, ddpcore.distribute(model, optimizer, strategy or ddpcore.SSGD(), learners=L)


@pytest.mark.parametrize("kind", [FusedSGD, torch.optim.SGD])
def test_a_layer_frozen_later_stays(kind: Any) -> None:
    model, optimizer, handle = make(kind, momentum=0.9, weight_decay=0.1)
    train(handle, optimizer, 3)
    for one in handle.models:
        one[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    train(handle, optimizer, 3)
    for one in handle.models:
        assert torch.equal(one[0].weight, before)


@pytest.mark.parametrize("kind", [FusedSGD, torch.optim.SGD])
def test_a_layer_frozen_for_one_learner_is_refused(kind: Any) -> None:
    """SSGD's learners would go apart."""
    model, optimizer, handle = make(kind)
    train(handle, optimizer, 3)
    model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="is frozen here and has a gradient on another learner"):
        train(handle, optimizer)


@pytest.mark.parametrize("kind", [FusedSGD, torch.optim.SGD])
def test_a_layer_unfrozen_later_is_refused(kind: Any) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = kind(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=L)
    model[0].requires_grad_(True)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(RuntimeError, match="after distribute"):
        optimizer.step()
    assert handle.learner is not None


def test_weights_that_leave_the_flat_buffer_are_refused() -> None:
    model, optimizer, handle = make()
    train(handle, optimizer)
    model[2].bias.data = model[2].bias.data.clone()
    with pytest.raises(RuntimeError, match=r"2\.bias has left"):
        train(handle, optimizer)


SQUARE: dict[str, Callable[[Tensor], Any]] = {
    "t_": lambda tensor: tensor.t_(),
    "data": lambda tensor: setattr(tensor, "data", tensor.data.t()),
}


def square(kind: type[torch.optim.Optimizer], strategy: ddpcore.Strategy) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = kind(model.parameters(), lr=0.1)
    return model, optimizer, ddpcore.distribute(model, optimizer, strategy, learners=L)


@pytest.mark.parametrize("change", SQUARE)
def test_weights_that_are_transposed_in_the_flat_buffer_are_refused(change: str) -> None:
    """They keep address and size, and the buffer would be stepped in the old layout."""
    model, optimizer, handle = square(FusedSGD, ddpcore.LocalSGD(period=2))
    train(handle, optimizer)
    with torch.no_grad():
        SQUARE[change](model[0].weight)
    with pytest.raises(RuntimeError, match=r"0\.weight has left the flat buffer"):
        handle.evaluation_model()
    with pytest.raises(RuntimeError, match=r"0\.weight has left the flat buffer"):
        train(handle, optimizer)


@pytest.mark.parametrize("change", SQUARE)
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD])
@pytest.mark.parametrize("strategy", [ddpcore.SSGD, lambda: ddpcore.LocalSGD(period=3)])
def test_gradients_that_are_transposed_in_place_count(change: str, kind: Any, strategy: Any) -> None:
    weights = []
    for way in (SQUARE[change], lambda gradient: gradient.copy_(gradient.t().clone())):
        _, optimizer, handle = square(kind, strategy())
        for _ in range(2):
            optimizer.zero_grad()
            handle.backward([output.square().mean() for output in handle.model(torch.randn(L, 4, 5))])
            for model in handle.models:
                way(model[0].weight.grad)
            optimizer.step()
        weights.append(handle.learner.flat.param_LP.clone())
    torch.testing.assert_close(*weights)


def test_weights_that_change_while_neighbours_read_them_are_refused() -> None:
    model, optimizer, handle = make(strategy=ddpcore.DPSGD(ddpcore.Complete()))
    train(handle, optimizer)
    handle.model(torch.zeros(L, 1, 5))  # starts an exchange, but no step follows
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(RuntimeError, match="weights were changed"):
        train(handle, optimizer)


def test_an_embedding_that_changes_its_weights_in_a_pass_is_named() -> None:
    """``max_norm`` makes learners differ, and changes what neighbours read. The strategies of the advice work."""
    refused = [
        ddpcore.SSGD(),
        ddpcore.NoisySSGD(std=0.01),
        ddpcore.NoisySSGD(std=0.01, where="per_learner"),
        ddpcore.DPSGD(ddpcore.Complete()),
        ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Complete())),
        ddpcore.GradientTracking(ddpcore.Complete()),
    ]
    works = [ddpcore.LocalSGD(1), ddpcore.LocalSGD(2), ddpcore.DPSGD(ddpcore.Complete(), order="adapt_then_combine")]
    for strategy in refused + works:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(), nn.Linear(12, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, strategy, learners=L)
        advice = r": max_norm of an embedding .* LocalSGD or DPSGD\(order='adapt_then_combine'\)$"
        with pytest.raises(RuntimeError, match=advice) if strategy in refused else nullcontext():
            for _ in range(4):
                optimizer.zero_grad()
                handle.backward(handle.model(torch.randint(9, (L, 5, 3))).square().mean((1, 2)))
                optimizer.step()


def test_a_load_that_would_replace_parameters_is_refused() -> None:
    """By ``assign=True``, or by torch's option that swaps tensors. Nothing has changed then."""
    model, optimizer, handle = make(strategy=ddpcore.LocalSGD(2))
    state = {name: value * 2 for name, value in model.state_dict().items()}
    before = handle.learner.flat.param_LP.clone()
    with pytest.raises(RuntimeError, match=r"^load_state_dict\(assign=True\) would replace .*: leave it out$"):
        model.load_state_dict(state, assign=True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match=r"^.*set_swap_module_params_on_conversion\(True\) would .* it out$"):
            model.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert torch.equal(handle.learner.flat.param_LP, before)
    model.load_state_dict(state)
    train(handle, optimizer, 2)


def test_between_steps_weights_may_change() -> None:
    model, optimizer, handle = make(strategy=ddpcore.DPSGD(ddpcore.Complete()))
    train(handle, optimizer)
    with torch.no_grad():
        model[0].weight.zero_()
        handle.model(torch.zeros(L, 1, 5))
    train(handle, optimizer)
    assert model[0].weight.abs().max() > 0


def test_strategies_and_optimizers_serve_once() -> None:
    strategy = ddpcore.DPSGD(ddpcore.Complete())
    model, optimizer, _ = make(strategy=strategy)
    other = net()
    with pytest.raises(ValueError, match="the strategy already serves"):
        ddpcore.distribute(other, torch.optim.SGD(other.parameters(), lr=0.1), strategy, learners=L)
    with pytest.raises(ValueError, match="the model already serves"):
        ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=L)


@pytest.mark.parametrize("strategy", ["ssgd", ddpcore.SSGD, None])
def test_a_wrong_strategy_type_is_refused(strategy: Any) -> None:
    model = net()
    with pytest.raises(ValueError, match=r"strategy is .*: pass an instance, such as"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, learners=L)


@pytest.mark.parametrize("make_strategy", [ddpcore.DPSGD, ddpcore.PushSum])
@pytest.mark.parametrize("topology", ["ring", ddpcore.Ring])
def test_a_wrong_topology_type_is_refused(make_strategy: Any, topology: Any) -> None:
    with pytest.raises(ValueError, match=r"topology is .*: pass an instance, such as"):
        make_strategy(topology)


@pytest.mark.parametrize("second", [ddpcore.LocalSGD, ddpcore.DDP, ddpcore.Single])
def test_models_serve_once(second: Any) -> None:
    """The hooks of the first call would run beside those of the second, also for a part of the model."""
    model, optimizer, handle = make(strategy=ddpcore.SSGD())
    train(handle, optimizer)
    for one in (model, model[2], nn.Sequential(model)):
        options: Any = {"learners": L} if second is ddpcore.LocalSGD else {}
        with pytest.raises(ValueError, match=r"the model already serves.*evaluation_model"):
            ddpcore.distribute(one, torch.optim.SGD(one.parameters(), lr=0.1), second(), **connected(**options))
    train(handle, optimizer)


def test_a_run_goes_on_under_another_strategy_with_the_averaged_copy() -> None:
    _, optimizer, handle = make(strategy=ddpcore.SSGD())
    train(handle, optimizer)
    model = handle.evaluation_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(period=1000), learners=L)
    train(local, optimizer)
    assert local.consensus_distance() > 0, "the hooks of the first strategy still run"


def test_a_model_is_refused_after_its_handle_is_gone() -> None:
    """Its parameters are still stacks."""
    model, optimizer, handle = make()
    del optimizer, handle
    gc.collect()
    with pytest.raises(ValueError, match="the model already serves"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.SSGD(), learners=L)


@pytest.mark.parametrize("make_strategy", [ddpcore.SSGD, ddpcore.NoisySSGD, partial(ddpcore.LocalSGD, switch_step=9)])
def test_handles_are_freed(make_strategy: Any) -> None:
    """Although parameters hold hooks of gradients, and Python collects no cycle through them."""
    model, optimizer, handle = make(strategy=make_strategy())
    train(handle, optimizer, 2)
    known = weakref.ref(handle), weakref.ref(handle.learner.flat)
    del model, optimizer, handle
    gc.collect()
    assert [reference() for reference in known] == [None, None]


@pytest.mark.parametrize(
    ("make_strategy", "options", "message"),
    [
        (lambda: ddpcore.DPSGD(ddpcore.Hypercube()), {}, "power of two"),
        (lambda: ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Hypercube())), {}, "power of two"),
        (lambda: ddpcore.PushSum(ddpcore.Hypercube()), {}, "power of two"),
        (ddpcore.SSGD, {"policies": ddpcore.Policies(momentum="gossip")}, "gossip needs neighbours"),
        (ddpcore.SSGD, {"vectorize": "fast"}, "unknown vectorize"),
        (
            ddpcore.SSGD,
            {"transport": "shm", "timeout": 1.0},
            r"leave connection=Connection\(transport=, timeout=\) out",
        ),
        (ddpcore.SSGD, {"timeout": 1.0}, r"no ranks: leave connection=Connection\(timeout=\) out"),
        (
            ddpcore.SSGD,
            {"link": ddpcore.comm.Link.parse("10Gb/s,50us")},
            r"no ranks: leave connection=Connection\(link=\) out",
        ),
        (ddpcore.SSGD, {"bucket_bytes": -1}, "bucket"),
    ],
)
def test_a_refused_call_changes_nothing(make_strategy: Any, options: dict[str, Any], message: str) -> None:
    """Model, strategy and optimizer can be used in another call."""
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    optimizer, strategy = FusedSGD(model.parameters(), lr=0.1), make_strategy()
    before = [(tensor.shape, tensor.data_ptr()) for tensor in (*model.parameters(), *model.buffers())]
    with pytest.raises(ValueError, match=message):
        ddpcore.distribute(model, optimizer, strategy, learners=3, **connected(**options))
    assert [(tensor.shape, tensor.data_ptr()) for tensor in (*model.parameters(), *model.buffers())] == before
    assert not model._forward_pre_hooks
    handle = ddpcore.distribute(model, optimizer, strategy, learners=4)
    handle.model(torch.zeros(4, 6, 5)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("make_baseline", [ddpcore.DDP, ddpcore.Single])
@pytest.mark.parametrize(
    "options",
    [{"bucket_bytes": 1}, {"first_bucket_bytes": 1}, {"timeout": 5.0}, {"vectorize": True}, {"transport": "pg"}],
)
def test_baselines_refuse_options(options: dict[str, Any], make_baseline: Any) -> None:
    model = net()
    name = next(iter(options))
    found = f"{name}=" if name == "vectorize" else rf"connection=Connection\({name}=\)"
    with pytest.raises(ValueError, match=f"does not use these options: leave {found} out"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), make_baseline(), **connected(**options))
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="leave learners=, scaler= out"):
        ddpcore.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), make_baseline(), learners=2, scaler=scaler
        )


def test_ranks_take_no_vectorize() -> None:
    model = net()
    for vectorize in ("nonsense", True, False):
        with pytest.raises(ValueError, match="vectorize= is for virtual learners"):
            ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.SSGD(), vectorize=vectorize)


@pytest.mark.parametrize(
    ("make_strategy", "name"),
    [
        (ddpcore.DPSGD, "dpsgd"),
        (partial(ddpcore.DPSGD, staleness=1), "dpsgd"),
        (lambda: ddpcore.SlowMo(ddpcore.DPSGD()), "dpsgd"),
        (lambda: ddpcore.PushSum(ddpcore.Ring()), "push_sum"),
        (ddpcore.NoisySSGD, "noisy_ssgd"),
    ],
)
def test_float64_is_refused_where_kernels_mix(make_strategy: Any, name: str) -> None:
    """By distribute(), not by the first step. Strategies that only average accept float64."""
    model = net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"^{name} mixes float32, .* parameters are float64: call model\.float\(\)"):
        ddpcore.distribute(model, optimizer, make_strategy(), learners=L)
    imaginary = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"parameters are complex64: keep their real and imaginary parts apart$"):
        ddpcore.distribute(imaginary, torch.optim.SGD(imaginary.parameters(), lr=0.1), make_strategy(), learners=L)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(2), learners=L)
    handle.model(torch.zeros(L, 3, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()


def test_autograd_refuses_a_graph_of_old_weights() -> None:
    layer = nn.Linear(4, 4)
    optimizer = FusedSGD(layer.parameters(), lr=0.1)
    inputs = torch.ones(2, 4, requires_grad=True)
    loss = layer(inputs).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_handle_trains_nothing(copied: Any) -> None:
    """Its hooks stay behind, so no strategy would average. A module that holds the handle can be copied."""
    holder = nn.Linear(2, 2)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    holder.handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
    one = copied(holder)
    assert torch.equal(one.weight, holder.weight)
    for name in ("model", "learner", "backward", "state_dict", "strategy"):
        with pytest.raises(RuntimeError, match="this is a copy of a handle"):
            getattr(one.handle, name)
    assert copy.copy(holder.handle) is holder.handle


def test_copies_and_saved_models_call_no_strategy() -> None:
    _, optimizer, handle = make(strategy=ddpcore.DPSGD(ddpcore.Complete()))
    train(handle, optimizer)
    learner = handle.learner
    assert learner is not None
    sent = learner.comm.bytes_sent
    copy.deepcopy(handle.model)(torch.zeros(L, 1, 5))
    file = io.BytesIO()
    torch.save(handle.model, file)
    file.seek(0)
    torch.load(file, weights_only=False)(torch.zeros(L, 1, 5))
    assert learner.comm.bytes_sent == sent


def test_second_derivatives_of_averaged_gradients_are_refused() -> None:
    """They are kept where gradients are not averaged."""
    _, _, handle = make()
    with pytest.raises(RuntimeError, match=r"create_graph=True: the averaged gradient has no graph.*autograd\.grad"):
        handle.model(torch.ones(L, 1, 5)).square().sum().backward(create_graph=True)
    _, _, handle = make(strategy=ddpcore.LocalSGD(4))
    handle.model(torch.ones(L, 1, 5)).square().sum().backward(create_graph=True)
    assert all(one[0].weight.grad.requires_grad for one in handle.models)


def test_sparse_gradients_are_refused() -> None:
    """If they must be copied to the flat buffer. Gossip with an optimizer that supports them does not need that."""
    weights = []
    for build, strategy, is_sparse in [
        (FusedSGD, ddpcore.DPSGD(ddpcore.Complete()), True),
        (torch.optim.SGD, ddpcore.DPSGD(ddpcore.Complete()), True),
        (torch.optim.SGD, ddpcore.DPSGD(ddpcore.Complete()), False),
    ]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 3, sparse=True))
        optimizer = build(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, strategy, learners=2)
        for one, gradient in zip(handle.models, torch.arange(36.0).view(2, 6, 3), strict=True):
            one[0].weight.grad = gradient.to_sparse(1) if is_sparse else gradient
        if build is FusedSGD:
            with pytest.raises(RuntimeError, match="sparse"):
                optimizer.step()
            continue
        optimizer.step()
        weights.append(torch.stack([one[0].weight.detach() for one in handle.models]))
    assert torch.equal(*weights)


def test_gradients_that_nothing_has_averaged() -> None:
    """Gradients that are set by hand would let learners diverge without an error."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with pytest.raises(
        RuntimeError,
        match=r"ssgd: gradients were set .*without a backward pass.*call backward\(\).*learner 1 has no gradient",
    ):
        optimizer.step()


def test_torch_names_the_states_of_all_virtual_learners() -> None:
    """``get_state_dict`` of one learner's model ended in a ``KeyError``, because the optimizer has all states."""
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), learners=2)
    handle.backward(handle.model(torch.randn(2, 5, 4)).square().mean(dim=(1, 2)))
    optimizer.step()
    for one in handle.models:
        with pytest.raises(RuntimeError, match=r"states of 2 learners: pass handle\.model to get_state_dict"):
            get_optimizer_state_dict(one, optimizer)
    found = get_optimizer_state_dict(handle.model, optimizer)["state"]
    for number, one in enumerate(handle.models):
        for name, parameter in one.named_parameters():
            own = found[f"models.{number}.{name}"]["momentum_buffer"]
            assert own.any() and torch.equal(own, optimizer.state[parameter]["momentum_buffer"])
    assert len(optimizer.state_dict()["state"]) == 4


@pytest.mark.parametrize("strategy", [ddpcore.SSGD, ddpcore.LocalSGD])
def test_another_dtype_is_refused_before_a_pass(strategy: Any) -> None:
    """Under ``SSGD`` torch refused the gradient of the backward pass, and named no cause."""
    model = nn.Linear(4, 3)
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, strategy(), learners=2)
    for one in handle.models:
        one.double()
    with pytest.raises(RuntimeError, match="has left the flat buffer"):
        handle.model(torch.randn(2, 5, 4, dtype=torch.float64))


def test_an_end_of_pruning_is_named() -> None:
    """``prune.remove`` makes a new parameter, which no learner reads."""
    model = nn.Sequential(prune.l1_unstructured(nn.Linear(5, 3), "weight", 0.3))
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
    for one in handle.models:
        prune.remove(one[0], "weight")
    handle.backward(handle.model(torch.ones(2, 2, 5)).square().mean(dim=(1, 2)))
    with pytest.raises(RuntimeError, match=r"parameter 0.weight_orig has left the flat buffer \(.* prune.remove "):
        optimizer.step()
