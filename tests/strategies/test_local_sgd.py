"""Local SGD against its equation: local steps, and the mean of the weights after every H-th."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore import LocalSGD
from ddpcore.parameters.flat import FlatParameters
from ddpcore.strategies.compression import BFloat16, Codec, Int4, Int8, SparseTopK
from ddpcore.strategies.outer import parts_of
from helpers import training


@pytest.mark.parametrize("period", [1, 2, 3, 10])
def test_the_equation(period: int) -> None:
    """With local momentum, against the equation in float64."""
    n = 3
    torch.manual_seed(0)
    inputs, targets = torch.randn(n, 6, 4), torch.randn(n, 6, 2)
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, LocalSGD(period), learners=n, vectorize=False)
    w = training.rows_of(handle, "weight").double()
    momentum = torch.zeros_like(w)
    for step in range(7):
        optimizer.zero_grad()
        (0.5 * (handle.model(inputs) - targets).square()).sum().backward()
        optimizer.step()
        gradients = torch.einsum(
            "jbo,jbi->joi", torch.einsum("jbi,joi->jbo", inputs.double(), w) - targets.double(), inputs.double()
        )
        momentum = 0.9 * momentum + gradients
        w = w - 0.01 * momentum
        if (step + 1) % period == 0:
            w = w.mean(dim=0).expand_as(w).clone()
        torch.testing.assert_close(training.rows_of(handle, "weight").double(), w, rtol=1e-5, atol=1e-5)
        averaged = torch.equal(handle.models[0].weight, handle.models[1].weight)
        assert averaged == ((step + 1) % period == 0)
    assert handle.learner.comm.bytes_sent == (7 // period) * 2 * 16 * 4  # gathered: two others, 16 floats


def test_passes_of_a_step_that_renormalize_an_embedding() -> None:
    """``max_norm`` changes weights in each forward pass: also with many passes in one step, as for a model alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(0, 1), nn.Linear(4, 2))
    alone = [copy.deepcopy(model) for _ in range(2)]
    handle = ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), LocalSGD(8), learners=2)
    inputs = torch.randint(9, (4, 9, 2, 5, 3))  # steps, passes, learners
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in alone]
    for passes in inputs:
        for optimizer in (handle.learner.optimizer, *optimizers):
            optimizer.zero_grad()
        for batch in passes:
            handle.model(batch).square().sum().backward()
            for one, own in zip(alone, batch, strict=True):
                one(own).square().sum().backward()
        for optimizer in (handle.learner.optimizer, *optimizers):
            optimizer.step()
    for one, plain in zip(handle.models, alone, strict=True):
        for mine, theirs in zip(one.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_sharpness_aware_minimization_with_micro_batches() -> None:
    """The weights move once between the passes of a step: no step by hand, and the learners are those alone."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    alone = [copy.deepcopy(model) for _ in range(2)]
    handle = ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), LocalSGD(9), learners=2)
    sides = [(list(handle.models), [handle.learner.optimizer])]
    sides.append((alone, [torch.optim.SGD(one.parameters(), lr=0.1) for one in alone]))
    for batches in torch.randn(4, 3, 2, 5, 4):  # steps, micro-batches, learners
        for models, optimizers in sides:
            before = [copy.deepcopy(one.state_dict()) for one in models]
            for _ in range(2):
                for batch in batches:
                    sum(one(x).square().sum() for one, x in zip(models, batch, strict=True)).backward()
                with torch.no_grad():
                    for parameter in (parameter for one in models for parameter in one.parameters()):
                        parameter.add_(parameter.grad, alpha=0.01)
            with torch.no_grad():
                for one, state in zip(models, before, strict=True):
                    for name, parameter in one.named_parameters():
                        parameter.copy_(state[name])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for one, plain in zip(handle.models, alone, strict=True):
        torch.testing.assert_close(one.weight, plain.weight)


def test_a_pass_of_another_thread_inside_of_a_step() -> None:
    """As an actor that plays while a learner trains. The step is whole, and averages."""
    for strategy in (ddpcore.SSGD(), LocalSGD(2), ddpcore.DPSGD(), ddpcore.PushSum(ddpcore.Ring())):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, strategy, learners=2)

        def plays(*args: Any, handle: Any = handle) -> None:
            with torch.no_grad():
                handle.models[0](torch.ones(1, 4))

        def starts(*args: Any, plays: Any = plays) -> None:
            thread = threading.Thread(target=plays)
            thread.start()
            thread.join()

        optimizer.register_step_pre_hook(starts)
        for step in range(1, 5):
            handle.model(torch.randn(2, 3, 4)).square().sum().backward()
            optimizer.step()
            assert handle.learner.step == step


@pytest.mark.parametrize("period", [0, -1])
def test_impossible_periods(period: int) -> None:
    with pytest.raises(ValueError, match=f"period is {period}"):
        LocalSGD(period)


class Run:
    """Three learners on least squares. ``plain_step`` steps the equation in float64."""

    def __init__(self, strategy: LocalSGD, n: int = 3, outputs: int = 2) -> None:
        torch.manual_seed(0)
        self.inputs, self.targets = torch.randn(n, 6, 4), torch.randn(n, 6, outputs)
        self.model = nn.Linear(4, outputs, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.handle = ddpcore.distribute(self.model, self.optimizer, strategy, learners=n, vectorize=False)
        self.w = self.weights()

    def weights(self) -> torch.Tensor:
        return training.rows_of(self.handle, "weight").double()

    def gradients(self) -> torch.Tensor:
        x, y = self.inputs.double(), self.targets.double()
        return torch.einsum("jbo,jbi->joi", torch.einsum("jbi,joi->jbo", x, self.w) - y, x)

    def step(self) -> None:
        self.optimizer.zero_grad()
        (0.5 * (self.handle.model(self.inputs) - self.targets).square()).sum().backward()
        self.optimizer.step()

    def check(self) -> None:
        torch.testing.assert_close(self.weights(), self.w, rtol=1e-5, atol=1e-5)


def test_post_local() -> None:
    """Three steps of ssgd, then an average every two local ones, counted from the switch."""
    run = Run(LocalSGD(2, switch_step=3))
    for step in range(8):
        gradients = run.gradients()
        run.step()
        run.w = run.w - 0.01 * (gradients.mean(0) if step < 3 else gradients)
        if step in (4, 6):
            run.w = run.w.mean(0).expand_as(run.w).clone()
        run.check()
    assert not torch.equal(run.handle.models[0].weight, run.handle.models[1].weight)


def test_warm_up_doubles_the_period() -> None:
    """A period of 8 over a warm-up of 12 steps: 1 in the first four, then 2, then 4, and 8 after it."""
    strategy = LocalSGD(8, warmup_steps=12)
    averaged = [step for step in range(1, 33) if strategy.plan(step - 1).weights]
    assert averaged == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    run = Run(strategy)
    for step in range(1, 17):
        run.step()
        assert torch.equal(run.handle.models[0].weight, run.handle.models[1].weight) == (step in averaged)


def test_outer_optimizer_is_diloco() -> None:
    """Nesterov outer steps along the mean change of the learners, against the equation in float64."""
    run = Run(LocalSGD(3, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)))
    anchor, momentum = run.w[0].clone(), torch.zeros_like(run.w[0])
    for step in range(9):
        gradients = run.gradients()
        run.step()
        run.w = run.w - 0.01 * gradients
        if (step + 1) % 3 == 0:
            way = anchor - run.w.mean(0)
            momentum = 0.9 * momentum + way
            anchor = anchor - 0.7 * (way + 0.9 * momentum)
            run.w = anchor.expand_as(run.w).clone()
        run.check()


def test_outer_sgd_of_rate_one_is_the_average() -> None:
    ends = []
    for outer in (None, lambda p: torch.optim.SGD(p, lr=1.0)):
        run = Run(LocalSGD(2, outer=outer))
        for _ in range(6):
            run.step()
        ends.append(run.weights())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-7)


class Layers(nn.Module):
    """Four layers of 4 x 4, 16 columns each, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))


def layers(strategy: LocalSGD, learners: int = 2) -> tuple[ddpcore.Distributed, Callable[[], None]]:
    """Learners with different data, and a function that takes a step."""
    torch.manual_seed(0)
    model, inputs = Layers(), torch.randn(learners, 6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=learners, vectorize=False)

    def step() -> None:
        optimizer.zero_grad()
        handle.model(inputs).square().mean(dim=(1, 2)).sum().backward()
        optimizer.step()

    return handle, step


def equal_layers(handle: ddpcore.Distributed) -> set[str]:
    first, second = (dict(model.named_parameters()) for model in handle.models[:2])
    return {name.removesuffix(".weight") for name in first if torch.equal(first[name], second[name])}


@pytest.mark.parametrize("outer", [None, lambda p: torch.optim.SGD(p, lr=1.0)], ids=["average", "outer"])
@pytest.mark.parametrize(
    ("fragments", "first"),
    [
        (2, {"head", "body.2"}),
        ([["head"], ["body"]], {"head"}),
        ([["body.1", "head"], ["body.0", "body.2"]], {"body.1", "head"}),
    ],
    ids=["by size", "by module", "crossed"],
)
def test_fragments_are_averaged_at_their_own_time(fragments: object, first: set[str], outer: object) -> None:
    """With a period of four, fragment 0 is averaged after steps 4, 8, and fragment 1 after 2, 6, 10."""
    handle, step = layers(LocalSGD(4, fragments=fragments, outer=outer))
    assert handle.learner is not None
    comm, others = handle.learner.comm, {"head", "body.0", "body.1", "body.2"} - first
    for number in range(1, 11):
        before = comm.bytes_sent
        step()
        wanted = {0: first, 2: others}.get(number % 4, set())
        assert equal_layers(handle) == wanted
        assert comm.bytes_sent - before == 16 * 4 * len(wanted)


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        (5, "fragments is 5 of 4 parameters"),
        ([["head"], ["body.0", "body.1"]], "parameter body.2.weight is in no fragment"),
        ([["head", "body"], ["body.1"]], "parameter body.1.weight is in fragments 0 and 1"),
        ([["nothing"]], "is in no fragment"),
        ([["head", "body"], ["neck"]], r"no parameter is in \['neck'\]"),
        ([["head", "bod"], ["body"]], None),  # a name that fits nothing beside one that does
    ],
)
def test_fragments_that_do_not_fit_the_model(fragments: object, message: str | None) -> None:
    handle, step = layers(LocalSGD(8, fragments=fragments))
    if message is None:
        step()
        return
    with pytest.raises(ValueError, match=message):
        step()
    assert handle.learner is not None
    assert handle.learner.step == 0


@pytest.mark.parametrize(("overlap", "alpha"), [(0, 0.0), (0, 0.3), (2, 0.0), (2, 0.3), (3, 1.0)])
@pytest.mark.parametrize("nesterov", [False, True], ids=["average", "nesterov"])
def test_an_average_that_is_used_later(overlap: int, alpha: float, nesterov: bool) -> None:
    """Streaming DiLoCo of one fragment, against the equation in float64."""
    outer = (lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)) if nesterov else None
    run = Run(LocalSGD(4, outer=outer, overlap=overlap, alpha=alpha))
    anchor, momentum, average = run.w[0].clone(), torch.zeros_like(run.w[0]), run.w[0]
    for step in range(1, 14):
        gradients = run.gradients()
        run.step()
        run.w = run.w - 0.01 * gradients
        if (step + overlap) % 4 == 0:
            average = run.w.mean(0)
        if step % 4 == 0:
            way = anchor - average
            momentum = 0.9 * momentum + way
            anchor = anchor - 0.7 * (way + 0.9 * momentum) if nesterov else average
            run.w = anchor + alpha * (run.w - anchor)
        run.check()


class Recorded(Codec):
    """A codec that keeps what it encoded: a difference of one rounding can change a message by much more."""

    name = "recorded"
    differences = False

    def __init__(self, codec: Codec) -> None:
        self.codec, self.given = codec, list[torch.Tensor]()

    def encode(self, rows_LP: torch.Tensor) -> torch.Tensor:
        self.given.append(rows_LP.clone())
        return self.codec.encode(rows_LP)

    def decode(self, bytes_LX: torch.Tensor, like_LP: torch.Tensor) -> torch.Tensor:
        return self.codec.decode(bytes_LX, like_LP)


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("decay", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("codec", [BFloat16(), Int8(), Int4(), SparseTopK(kept=4, chunk=8)], ids=lambda one: one.name)
def test_changes_that_are_sent_in_few_bits(codec: Codec, decay: float, overlap: int) -> None:
    """SparseLoCo: error feedback, and the mean of the messages, against the equation."""
    recorded = Recorded(codec)
    outer = lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9)  # noqa: E731
    run = Run(LocalSGD(4, outer=outer, compression=recorded, error_decay=decay, overlap=overlap))
    comm, n, shape = run.handle.comm, len(run.w), run.w[0].shape
    anchor, momentum, lost, change = run.w[0].clone(), torch.zeros_like(run.w[0]), torch.zeros_like(run.w), None
    for step in range(1, 13):
        gradients, before = run.gradients(), comm.bytes_sent
        run.step()
        run.w = run.w - 0.01 * gradients
        if (step + overlap) % 4 == 0:
            rows = recorded.given[-1]
            wanted = rows[:, : shape.numel()].view_as(run.w).double()
            torch.testing.assert_close(wanted, anchor - run.w + decay * lost, rtol=1e-4, atol=1e-5)
            message = codec.encode(rows)
            sent = codec.decode(message, rows)[:, : shape.numel()].view_as(wanted).double()
            lost, change = wanted - sent, sent.mean(0)
            assert lost.norm() < 0.8 * wanted.norm()
            assert comm.bytes_sent - before == (n - 1) * message.shape[1]
        if step % 4 == 0:
            assert change is not None
            momentum = 0.9 * momentum + change
            anchor = anchor - 0.7 * momentum
            run.w = anchor.expand_as(run.w).clone()
        run.check()


def test_a_message_of_few_bits_is_short() -> None:
    """Bytes of a message by those of the weights in fp32."""
    rows = torch.randn(1, 2**16)
    shares = [codec.encode(rows).shape[1] / (4 * 2**16) for codec in (BFloat16(), Int8(), Int4(), SparseTopK())]
    assert shares == [1 / 2, 260 / 1024, 132 / 1024, 160 / 16384]


@pytest.mark.parametrize(
    "more",
    [{}, {"topology": ddpcore.RandomPair(seed=1)}, {"compression": Int4(), "error_decay": 0.9}],
    ids=["all", "pairs", "int4"],
)
def test_a_checkpoint_between_the_start_of_an_average_and_its_use(more: dict[str, Any]) -> None:
    """All steps from the checkpoint on have the bits of the run that goes on."""
    options = {"outer": lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9), "overlap": 3, "alpha": 0.25, "fragments": 2}
    handle, step = layers(LocalSGD(6, **options, **more), learners=4)
    for _ in range(7):  # fragment 0 was used in step 6; the average of fragment 1 began in step 6, and is used in 9
        step()
    states = handle.state_dict(), [model.state_dict() for model in handle.models]
    states = copy.deepcopy(states)
    other, other_step = layers(LocalSGD(6, **options, **more), learners=4)
    for model, state in zip(other.models, states[1], strict=True):
        model.load_state_dict(state)
    other.load_state_dict(states[0])
    for _ in range(9):
        step()
        other_step()
        for one, two in zip(handle.models, other.models, strict=True):
            assert all(map(torch.equal, one.parameters(), two.parameters()))


class Crossed(nn.Module):
    """Layers that are used in the reverse of the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs))


@pytest.mark.parametrize("fragments", [1, 2])
def test_fragments_are_the_same_whatever_the_order_of_gradients(fragments: int) -> None:
    """Synchronous steps change the layout otherwise, and virtual learners would have another layout than real ranks."""
    model = Crossed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = LocalSGD(4, switch_step=2, fragments=fragments)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=2)
    assert handle.learner is not None
    before = handle.learner.flat.names
    for _ in range(3):
        optimizer.zero_grad()
        handle.model(torch.randn(2, 3, 4)).sum().backward()
        optimizer.step()
    assert (handle.learner.flat.names == before) == (fragments > 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"switch_step": -2}, "switch_step is -2"),
        ({"fragments": 0}, "fragments is 0"),
        ({"fragments": 9}, "fragments is 9: it must be at least 1 and at most 8"),
        ({"fragments": 2, "warmup_steps": 4}, "leave warmup_steps out"),
        ({"fragments": [["a"], []]}, r"fragments has \[\]: each fragment is a list of names"),
        ({"fragments": ["a", "b"]}, "fragments has 'a': each fragment is a list of names"),
        ({"fragments": [{"a"}, {"b"}]}, "fragments has {'a'}: each fragment is a list of names"),
        ({"overlap": 8}, "overlap is 8: it must be at least 0 and below 8"),
        ({"overlap": 1, "warmup_steps": 4}, "overlap needs a period that does not grow"),
        ({"topology": ddpcore.Ring(), "warmup_steps": 4}, "topology needs a period that does not grow"),
        ({"topology": "ring"}, "pass an instance"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"alpha": -0.1}, "alpha is -0.1"),
        ({"error_decay": 1.1}, "error_decay is 1.1"),
        ({"compression": "int44"}, "unknown compression 'int44': did you mean 'int4'"),
        ({"compression": Int4()}, "compression is int4: it sends changes of an anchor .* pass outer"),
    ],
)
def test_impossible_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalSGD(8, **options)


@pytest.mark.parametrize(
    ("sizes", "number", "owners"),
    [
        ([1, 1, 1, 100], 4, [0, 1, 2, 3]),
        ([100, 1, 1], 3, [0, 1, 2]),
        ([10, 10, 10, 10], 2, [0, 0, 1, 1]),
        ([60, 10, 10, 10, 10], 2, [0, 1, 1, 1, 1]),
    ],
)
def test_fragments_by_size(sizes: list[int], number: int, owners: list[int]) -> None:
    """None is empty, however the sizes differ."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(16 * size)) for size in reversed(sizes)])
    flat = FlatParameters([model.named_parameters()])
    parts = parts_of(flat, number)
    assert [part.fragment for part in parts] == sorted(set(owners))
    ends = [segment.offset + segment.numel for segment in flat.segments]
    assert [sum(part.begin < end <= part.end for end in ends) for part in parts] == [
        owners.count(fragment) for fragment in range(number)
    ]
