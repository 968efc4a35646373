"""All state of a run through ``torch.distributed.checkpoint``, and into another number of learners."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils._pytree import tree_leaves

import ddpcore
from ddpcore import RunState
from ddpcore.distributed.saved import Lent, load_run_state, load_state, replaced, run_state, state_of
from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD, Muon
from helpers import ranks, saved_ranks
from helpers.saved_ranks import begin, flat, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_ranks_have_the_same_bits_and_take_the_average_of_other_learners() -> None:
    both = ranks.run("saved_ranks", 2)
    for found in (*both, *ranks.run("saved_ranks", 3)):  # three ranks may die
        assert torch.equal(found["whole"][0], found["resumed"][0])
    assert not torch.equal(both[0]["saved"][0], both[1]["saved"][0])
    mean = torch.stack(both[0]["three"]).double().mean(dim=0).float()
    for found in both:
        assert torch.equal(found["moved"][0], mean) and found["step"] == 3


def test_virtual_learners_have_the_same_bits(tmp_path: Path) -> None:
    for how in ("raise", "shrink"):
        found = saved_ranks.halves(tmp_path / how, 3, connection=ddpcore.Connection(on_failure=how))
        assert len(found["whole"]) == 3
        assert all(torch.equal(a, b) for a, b in zip(found["whole"], found["resumed"], strict=True))


def test_a_state_in_memory_is_that_of_its_step() -> None:
    """The program keeps it, trains on, and goes back: each learner, and none alone."""
    handle, optimizer = begin(3)
    train(handle, optimizer, 0, 3)
    state, then = run_state(handle), flat(handle)
    train(handle, optimizer, 3, 6)
    end = flat(handle)
    load_run_state(handle, [state])
    assert all(torch.equal(a, b) for a, b in zip(flat(handle), then, strict=True))
    train(handle, optimizer, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(flat(handle), end, strict=True))


class _Tabled(nn.Linear):
    """Its further state is a tensor and an array that it changes in place. A state of an old version counts twice."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.table, self.counts = torch.zeros(2), np.zeros(2)

    def get_extra_state(self) -> Any:
        return {"table": self.table, "counts": self.counts}

    def set_extra_state(self, state: Any) -> None:
        self.table, self.counts = state["table"], state["counts"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table += 1
        self.counts += 1
        return super().forward(x)


_ADAMW = partial(torch.optim.AdamW, lr=0.01)
OPTIMIZERS: dict[str, Any] = {
    "adamw": _ADAMW,
    "adamw, a tensor as rate": lambda parameters: _ADAMW(parameters, lr=torch.tensor(0.01)),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "asgd": partial(torch.optim.ASGD, lr=0.1, t0=0),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "radam": torch.optim.RAdam,
    "lbfgs": partial(torch.optim.LBFGS, lr=0.01, max_iter=3),
    "fused sgd": partial(FusedSGD, lr=0.1, momentum=0.9),
    "fused adamw": partial(FusedAdamW, lr=0.01),
    "fused lamb": partial(FusedLAMB, lr=0.01),
    "fused lars": partial(FusedLARS, lr=0.1, momentum=0.9),
    "muon": lambda parameters: Muon([{"params": [one], "rule": ("adamw", "muon")[one.ndim - 1]} for one in parameters]),
}


class _Run:
    """A training with an optimizer of this name."""

    def __init__(self, name: str, strategy: Any, learners: int) -> None:
        self.name, self.model = name, _Tabled()
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        options = {} if isinstance(strategy, ddpcore.Single) else {"learners": learners}
        self.handle = ddpcore.distribute(self.model, self.optimizer, copy.deepcopy(strategy), **options)

    def state(self) -> dict[str, Any]:
        return state_of(self.handle, self.model, self.optimizer)

    def load(self, state: dict[str, Any]) -> None:
        load_state(self.handle, self.model, self.optimizer, state)

    def train(self, steps: range) -> None:
        for self.step in steps:
            if self.name == "lbfgs":
                self.optimizer.step(self._loss)
            else:
                self._loss()
                self.optimizer.step()

    def _loss(self) -> torch.Tensor:
        inputs = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(self.step))
        self.optimizer.zero_grad()
        total = sum(one(x).square().mean() for one, x in zip(self.handle.models, inputs, strict=False))
        total.backward()
        return total


@pytest.mark.parametrize("loads_elsewhere", [False, True])
def test_a_state_in_memory_does_not_change_and_loads_are_copies(loads_elsewhere: bool) -> None:
    """With optimizers of torch, too, whose own states share memory with what they save and load."""
    strategies = ddpcore.Single(), ddpcore.SSGD(), ddpcore.LocalSGD(2, outer=_ADAMW)
    for name, strategy in product(OPTIMIZERS, strategies):
        if name == "lbfgs" and isinstance(strategy, ddpcore.SSGD):
            continue  # it takes no closure
        learners, what = 1 if name == "lbfgs" else 2, f"{name}, {strategy!r}"
        torch.manual_seed(0)
        run = _Run(name, strategy, learners)
        run.train(range(3))
        state = run.state()
        then = copy.deepcopy(state)
        run.train(range(3, 6))
        _assert_equal(state, then, f"{what}: later steps change a state that the program keeps")
        end = [one.detach().clone() for one in run.model.parameters()]
        run = _Run(name, strategy, learners) if loads_elsewhere else run
        for _ in range(2):
            run.load(state)
            run.train(range(3, 6))
            _assert_equal(state, then, f"{what}: steps after a load change the program's state")
            assert all(map(torch.equal, run.model.parameters(), end)), what
        if learners == 2 and not isinstance(strategy, ddpcore.Single):
            more = _Run(name, strategy, 3)
            load_run_state(more.handle, [state])
            more.train(range(2))
            _assert_equal(state, then, f"{what}: more learners change the program's state")


def _assert_equal(state: Any, then: Any, message: str) -> None:
    for mine, theirs in zip(tree_leaves(state), tree_leaves(then), strict=True):
        same = torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else np.array_equal(mine, theirs)
        assert same, message


@pytest.mark.parametrize("moments", ["average", "reset"])
def test_another_number_of_learners(tmp_path: Path, moments: str) -> None:
    saved_ranks.halves(tmp_path / "saved", 3)
    three, _ = begin(3)
    dcp.load({"run": RunState(three, saved=tmp_path / "saved")}, checkpoint_id=tmp_path / "saved")
    five, optimizer = begin(5)
    state = RunState(five, saved=tmp_path / "saved", moments=moments)
    dcp.load({"run": state}, checkpoint_id=tmp_path / "saved")
    mean = torch.stack(flat(three)).double().mean(dim=0).float()
    assert all(torch.equal(one, mean) for one in flat(five)) and five.learner.step == 3
    for name in ("exp_avg", "exp_avg_sq"):
        for parameters in zip(*(model.parameters() for model in five.models), strict=True):
            own = [optimizer.state[parameter].get(name) for parameter in parameters]
            place = [id(parameter) for parameter in five.models[0].parameters()].index(id(parameters[0]))
            old = [three.learner.optimizer.state[[*model.parameters()][place]][name] for model in three.models]
            expected = torch.stack(old).double().mean(dim=0).float()
            assert expected.any()
            if moments == "reset":
                assert all(one is None or not one.any() for one in own)
            else:
                assert all(torch.equal(one, expected) for one in own)
    train(five, optimizer, 3, 5)
    assert five.consensus_distance() > 0


@pytest.mark.parametrize("learners", [2, 5])
def test_each_from_the_nearest_old_learner(learners: int) -> None:
    """Learner j of m starts from learner 3 j // m: its weights, buffers and moments, of which it may have some."""
    three, old = begin(3)
    train(three, old, 0, 3)
    lacking, *full = (next(model.parameters()) for model in three.models)
    del old.state[lacking]
    other, optimizer = begin(learners)
    load_run_state(other, [run_state(three)])
    for name in ("exp_avg", "exp_avg_sq"):
        expected = torch.stack([old.state[one][name] for one in full]).double().sum(0).div(3).float()
        for model in other.models:
            torch.testing.assert_close(optimizer.state[next(model.parameters())][name], expected)
            assert int(optimizer.state[next(model.parameters())]["step"]) == 3
    other, optimizer = begin(learners)
    load_run_state(other, [run_state(three)], weights="nearest")
    sources = [0, 1] if learners == 2 else [0, 0, 1, 1, 2]
    for model, source in zip(other.models, sources, strict=True):
        for name, value in three.models[source].state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        for parameter, its in zip(model.parameters(), three.models[source].parameters(), strict=True):
            assert its is not lacking or not any(map(torch.any, optimizer.state.get(parameter, {}).values()))
            for name in ("exp_avg", "exp_avg_sq") if its is not lacking else ():
                assert old.state[its][name].any() and torch.equal(
                    optimizer.state[parameter][name], old.state[its][name]
                )
    assert other.learner.step == 3 and (learners == 2 or torch.equal(*flat(other)[:2]))
    train(other, optimizer, 3, 5)
    assert not torch.equal(*flat(other)[:2])


def test_named_parameters_of_another_number_of_learners() -> None:
    three, old = begin(3, named=True)
    train(three, old, 0, 3)
    for learners, sources in ((2, [0, 1]), (5, [0, 0, 1, 1, 2])):
        other, optimizer = begin(learners, named=True)
        load_run_state(other, [run_state(three)], weights="nearest")
        for model, source in zip(other.models, sources, strict=True):
            for mine, its in zip(model.parameters(), three.models[source].parameters(), strict=True):
                assert torch.equal(optimizer.state[mine]["exp_avg"], old.state[its]["exp_avg"])


def test_refusals(tmp_path: Path) -> None:
    handle, optimizer = begin(3)
    train(handle, optimizer, 0, 1)
    state = run_state(handle)
    other, _ = begin(3, ddpcore.SSGD())
    with pytest.raises(ValueError, match="use the same strategy"):
        load_run_state(other, [state])
    fewer, _ = begin(2, ddpcore.SSGD())
    before = flat(fewer)
    with pytest.raises(ValueError, match="use the same strategy"):
        load_run_state(fewer, [state])
    with pytest.raises(ValueError, match="moments is 'keep': choose from average, reset"):
        load_run_state(begin(2)[0], [state], moments="keep")
    with pytest.raises(ValueError, match="weights is 'own': choose from average, nearest"):
        load_run_state(begin(2)[0], [state], weights="own")
    train(handle, optimizer, 1, 2)
    with pytest.raises(ValueError, match=r"the states are of different moments, step 1 of .* and step 2 of"):
        load_run_state(begin(2)[0], [state, run_state(handle)])
    assert all(torch.equal(a, b) for a, b in zip(before, flat(fewer), strict=True))
    pushed, _ = begin(3, ddpcore.PushSum(ddpcore.OnePeerExponential()))
    with pytest.raises(ValueError, match="no plain average here: resume with as many learners"):
        load_run_state(begin(2, ddpcore.PushSum(ddpcore.OnePeerExponential()))[0], [run_state(pushed)])
    dcp.save({"weights": torch.ones(3)}, checkpoint_id=tmp_path / "plain")
    with pytest.raises(ValueError, match=r"holds no state of ddpcore: save RunState\(handle\) into it"):
        RunState(handle, saved=tmp_path / "plain")


class _Cached(nn.Module):
    """A buffer that grows with the batch, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.cache):
            self.cache.data = self.cache.new_zeros(len(x), 4)
        return self.norm(self.layer(x)) + self.cache[: len(x)]


def _trained(strategy: Any, model: nn.Module | None = None) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = model or _Cached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=2)

    def step() -> None:
        for one in handle.models:
            one(torch.randn(2, 4, dtype=next(one.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, handle, step


@pytest.mark.parametrize("what", ["larger buffer", "other dtype", "inside of another"])
def test_an_evaluation_leaves_the_learner_in_training(what: str) -> None:
    model, handle, step = _trained(ddpcore.LocalSGD(1))
    own = model.layer.weight.detach().clone()
    with replaced(handle), torch.no_grad():
        if what == "larger buffer":
            model(torch.ones(5, 4))
        elif what == "other dtype":
            model.to(torch.bfloat16)(torch.ones(2, 4, dtype=torch.bfloat16))
        else:
            with replaced(handle):
                assert torch.equal(handle.evaluation_model().layer.weight, model.layer.weight)
    assert torch.equal(model.layer.weight, own)
    assert {one.dtype for one in model.state_dict().values()} == {torch.float32, torch.int64}
    before = handle.learner.step
    step()
    assert handle.learner.step == before + 1
    assert torch.equal(*(one.layer.weight for one in handle.models))


def test_gradients_of_an_evaluation_are_averaged_with_nothing() -> None:
    """As those that a prediction takes with respect to its inputs."""
    model, handle, _ = _trained(ddpcore.SSGD())
    with replaced(handle):
        inputs = torch.randn(2, 4, requires_grad=True)
        model.eval()(inputs).sum().backward()
    assert inputs.grad.any()
    assert not handle._watch.has_average
    assert handle._buckets.num_paused


class _Counted(nn.Module):
    """Its forward pass may put another tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.kind = nn.Linear(4, 4), nn.BatchNorm1d(4), torch.float32
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = (self.total + len(x)).to(self.kind)
        return self.norm(self.layer(x))


def _counted() -> tuple[_Counted, Any, dict[str, torch.Tensor]]:
    """A model of one of two learners, whose evaluation model differs; and its own state."""
    model, handle, _ = _trained(ddpcore.DPSGD(ddpcore.RandomPair()), _Counted())
    with torch.no_grad():
        for one in handle.models[1].parameters():
            one += 1
        handle.models[1].norm.running_mean += 1
    return model, handle, copy.deepcopy(model.state_dict())


def test_weights_that_an_evaluation_takes_and_puts_back_are_the_learners() -> None:
    """As a callback of Lightning does, whose hooks run before the weights are lent, and before they are given back."""
    model, handle, own = _counted()
    kept = [one.detach().clone() for one in model.parameters()]
    for one in model.parameters():
        one.data.mul_(0.5)
    with replaced(handle):
        for one, value in zip(model.parameters(), kept, strict=True):
            one.data.copy_(value)
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    handle._watch.check_parameters()


def test_a_row_that_an_evaluation_changes_leaves_the_others_alone() -> None:
    """As the padding of a table, also if the average comes again."""
    model, handle, own = _counted()
    lent = Lent(handle)
    with torch.no_grad():
        model.layer.weight[1].zero_()
    for _ in range(2):
        lent.swap()
        own["layer.weight"][1] = 0
        assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
        lent.swap()
    lent.swap()


def test_elements_of_16_bits_that_an_evaluation_changes_leave_the_others_alone() -> None:
    """As of a bias, of a column and by a mask. A state that is loaded stays whole, also its equal numbers."""
    model, handle, _ = _trained(ddpcore.DPSGD(ddpcore.RandomPair()), nn.Linear(4, 4).bfloat16())
    with torch.no_grad():
        handle.models[1].weight += 1
        handle.models[1].bias += 1
        for _ in range(2):  # a state that was loaded before an evaluation changes nothing
            own = copy.deepcopy(model)
            with replaced(handle):
                for one in (model, own):
                    one.bias[0] = 1
                    one.weight[:, 0] = 0
                    one.weight.mul_(torch.arange(16).view(4, 4) % 3 != 0)
            assert all(torch.equal(*pair) for pair in zip(model.parameters(), own.parameters(), strict=True))
            model.load_state_dict(model.state_dict())
        with replaced(handle):
            state = model.weight.clone()
            state[:, 0] += 1  # most numbers are equal by chance
            model.load_state_dict({"weight": state}, strict=False)
    assert torch.equal(model.weight, state)


def test_a_direction_that_an_evaluation_adds_and_subtracts_changes_nothing() -> None:
    """But for rounding errors, with which the average would take the place of the learner's weights."""
    model, handle, own = _counted()
    with replaced(handle), torch.no_grad():
        before = [one.clone() for one in model.parameters()]
        directions = [torch.randn_like(one) for one in before]
        for sign in (1, -1):
            for one, direction in zip(model.parameters(), directions, strict=True):
                one.add_(direction, alpha=0.5 * sign)
        assert not all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())


def test_a_state_that_an_evaluation_loads_stays() -> None:
    """Also of the weights, and if the average comes again, as while a checkpoint is saved."""
    model, handle, _ = _counted()
    lent = Lent(handle)
    state = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    lent.swap()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    lent.swap()
    state["layer.weight"] = model.layer.weight.detach().fill_(4).clone()
    lent.swap()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    handle._watch.check_parameters()


def test_a_state_that_a_part_of_the_model_loads_in_an_evaluation_is_whole() -> None:
    """Also one inside of a compiled model, in any dtype. Elements that the program changes elsewhere are no state."""
    for kind in (torch.bfloat16, torch.float32):
        for how in ("compiled", "parts", "scripted", "frozen", "some", "parametrized"):
            first, second = nn.Linear(4, 4).to(kind), nn.Linear(4, 4).to(kind).requires_grad_(how != "frozen")
            raw = nn.Sequential(torch.jit.script(first) if how == "scripted" else first, second)
            model = torch.compile(raw, backend="eager") if how == "compiled" else raw
            _, handle, _ = _trained(ddpcore.DPSGD(ddpcore.RandomPair()), model)
            for one in handle.models if how == "parametrized" else ():
                register_parametrization(one[0], "weight", nn.Identity())  # it keeps the parameter
            with torch.no_grad():
                for one in handle.models[1].parameters():
                    one += 1
            own = copy.deepcopy(raw.state_dict())
            with replaced(handle), torch.no_grad():
                state = {name: value.clone() for name, value in raw.state_dict().items()}
                for value in state.values():
                    value[..., 0] += 1  # most numbers are those of the average
                if how == "compiled":
                    raw.load_state_dict(state)
                elif how == "some":
                    raw[1].load_state_dict({"bias": state["1.bias"]}, strict=False)
                    for name, one in raw.named_parameters():
                        one[..., 0] = state[name][..., 0]
                else:
                    for index in (0, 1):
                        raw[index].load_state_dict({key[2:]: state[key] for key in state if key[0] == str(index)})
            for name, value in raw.state_dict().items():
                own[name][..., 0] = state[name][..., 0]
                is_whole = how != "some" or name == "1.bias"
                assert torch.equal(value, (state if is_whole else own)[name]), (kind, how, name)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16])
@pytest.mark.parametrize("back", [True, False])
def test_a_model_that_is_cast_in_an_evaluation_gets_its_own_values_back(kind: torch.dtype, back: bool) -> None:
    model, handle, own = _counted()
    with replaced(handle):
        model.to(kind)
        if back:
            model.float()
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    assert {one.dtype for one in model.state_dict().values()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("cast", [True, False])
def test_buffers_that_a_forward_pass_sets_in_another_dtype_keep_the_change(cast: bool) -> None:
    """With the dtype of before if the whole model was cast."""
    model, handle, own = _counted()
    model.kind = torch.float64
    with replaced(handle), torch.no_grad():
        (model.eval().double() if cast else model.eval())(torch.ones(3, 4, dtype=torch.float64 if cast else None))
    assert model.total == 2 + 3
    assert model.total.dtype == (torch.float32 if cast else torch.float64)
    assert torch.equal(model.norm.running_mean, own["norm.running_mean"])


def test_an_evaluation_refuses_steps_and_states() -> None:
    """All of them would meet the averages in the place of the learner's weights."""
    model, handle, step = _trained(ddpcore.DPSGD())
    state, own = run_state(handle), model.layer.weight.detach().clone()
    with replaced(handle):
        model.eval()(torch.ones(2, 4)).sum().backward()
        for call, advice in (
            (handle.learner.optimizer.step, r"step after the evaluation"),
            (lambda: run_state(handle), "save the state after"),
            (lambda: load_run_state(handle, [state]), "load the state after"),
            (lambda: handle.load_state_dict(state["handle"]), "load the state after"),
        ):
            with pytest.raises(RuntimeError, match=f"averaged weights while it is evaluated: {advice}"):
                call()
    assert torch.equal(model.layer.weight, own)
    model.train()
    step()
