"""``sgd_step_``, ``adamw_step_``, ``lars_step_`` and ``lamb_step_`` with a mix: ``mix_`` and then the step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ddpcore import ops
from ddpcore.ops import Mixture, Noise, reference
from ddpcore.ops.mix import noise_arguments
from ddpcore.ops.steps import RULES
from helpers import steps
from helpers.each import each

NOISE = Noise(0.3, seed=2**33 + 7, step=2**40 + 1, first=3)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 15, 17, 255, 257, 4095, 4096, 4097, 0, 9001]
every_rule = pytest.mark.parametrize("rule", steps.RULES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class MixStep:
    """A step on parts of a row that begin at ``offsets``, after an average with rows of others."""

    def __init__(
        self,
        rule: str,
        device: torch.device,
        *,
        sizes: list[int] | None = None,
        dtype: torch.dtype = torch.float32,
        num_peers: int = 2,
        gap: int = 5,
        noise: Noise | None = None,
        elsewhere: bool = False,
        **options: Any,
    ) -> None:
        sizes = SIZES if sizes is None else sizes
        starts = list(itertools.accumulate((size + gap for size in sizes), initial=1))
        self.offsets = starts[:-1]
        numel = starts[-1] + 2
        self.row, *peers = (torch.randn(numel).to(dtype).to(device) for _ in range(1 + num_peers))
        self.out = torch.randn(numel).to(dtype).to(device) if elsewhere else None
        shares = [0.5 / max(num_peers, 1) - 0.01 * k for k in range(num_peers)]
        self.mixture = Mixture(peers, 0.5, shares, noise, self.out)
        self.step = steps.new_step(rule, self.parts_of(self.row, sizes), **options)

    def parts_of(self, row: Tensor, sizes: list[int]) -> list[Tensor]:
        return [row[offset : offset + size] for offset, size in zip(self.offsets, sizes, strict=True)]

    def lists(self) -> list[Any]:
        step = self.step
        rows = [step.trust] if step.rule in steps.ADAPTIVE else []
        buffers = [[] if step.options.get("momentum") == 0 else buffer for buffer in step.buffers]
        return [step.params, step.grads, *buffers, step.masters, step.steps, step.scratch, *rows]

    def run(self) -> steps.Step:
        """One pass. Returns the step with its params where the results are."""
        options = {**self.step.options, "mixture": self.mixture, "offsets": self.offsets}
        getattr(ops, f"{self.step.rule}_step_")(*self.lists(), **options)
        return self.result()

    def run_reference(self) -> steps.Step:
        names = (argument.name for argument in RULES[self.step.rule].tensors)
        getattr(reference, f"{self.step.rule}_step_")(**dict(zip(names, self.lists(), strict=True)), **self.options())
        return self.result()

    def options(self) -> dict[str, Any]:
        """The operator's arguments besides the lists."""
        mixture = self.mixture
        mix = {"peers": mixture.peers, "self_weight": mixture.self_weight, "peer_weights": mixture.peer_weights}
        mix |= {"offsets": self.offsets, "out": mixture.out, **noise_arguments(mixture.noise)}
        return self.step.options | mix

    def run_apart(self) -> steps.Step:
        """``mix_`` of each part, and then the step: what one pass must equal."""
        for param, offset in zip(self.step.params, self.offsets, strict=True):
            part = self.mixture.columns(offset, offset + param.numel())
            ops.mix_(param, part.peers, part.self_weight, part.peer_weights, part.noise, part.out)
        return self.result().run()

    def result(self) -> steps.Step:
        step = self.step
        if self.out is not None:
            self.step.params = self.parts_of(self.out, [param.numel() for param in step.params])
        return step

    def copy(self) -> MixStep:
        """The same on copies of all tensors that a step may write, and of the row that it reads."""
        new = MixStep.__new__(MixStep)
        new.row, new.offsets = self.row.clone(), self.offsets
        new.out = None if self.out is None else self.out.clone()
        mixture = self.mixture
        new.mixture = Mixture(mixture.peers, mixture.self_weight, mixture.peer_weights, mixture.noise, new.out)
        new.step = self.step.change(lambda tensor: tensor.clone())
        new.step.params = new.parts_of(new.row, [param.numel() for param in self.step.params])
        return new


def assert_same(got: MixStep, want: MixStep, assert_same_bits: Any) -> None:
    steps.assert_same_step(got.step, want.step, assert_same_bits)
    assert_same_bits(got.row, want.row, "the row, what lies between its parts included")
    if got.out is not None:
        assert_same_bits(got.out, want.out, "the row that receives the result")


SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_peers": 0},
    {"num_peers": 1},
    {"num_peers": 1, "elsewhere": True},
    {"num_peers": 8, "elsewhere": True},
    {"noise": NOISE},
    {"num_peers": 1, "noise": NOISE, "elsewhere": True},
    {"gap": 0, "maximize": True},
    {"weight_decay": [0.0]},
]
OF_RULE: dict[str, list[dict[str, Any]]] = {
    "sgd": [{"momentum": 0.0}, {"dampening": 0.3}, {"nesterov": True, "decoupled": True}],
    "adamw": [{"decoupled": False}],
    "lars": [{"variant": "scaled_grad"}, {"variant": "scaled_lr", "nesterov": True}, {"adapt": [0]}],
    "lamb": [{"decay_mode": "coupled"}, {"decay_mode": "decoupled", "debias": False}, {"adapt": [0]}],
}
CASES = [(rule, setting) for rule in steps.RULES for setting in SETTINGS + OF_RULE[rule]]


@every_dtype
@pytest.mark.parametrize(("rule", "setting"), CASES, ids=str)
def test_one_pass_has_the_bits_of_two(rule, setting, dtype, device, assert_same_bits):
    """Twice, so that the second step starts from the states of the first one."""
    one = MixStep(rule, device, dtype=dtype, **setting)
    apart, plain, before = one.copy(), one.copy(), one.row.clone()
    one.run()
    apart.run_apart()
    plain.run_reference()
    assert_same(one, apart, assert_same_bits)
    assert_same(one, plain, assert_same_bits)
    if one.out is not None:
        assert_same_bits(one.row, before, "weights that gave their place away")
        return
    one.run()
    apart.run_apart()
    assert_same(one, apart, assert_same_bits)
    assert one.step.steps[0] == 5.0


@every_rule
def test_groups_and_clipping(rule, device, assert_same_bits):
    options: dict[str, Any] = {"group_sizes": [2, 1, 0, 3], "lr": [0.05, 0.7, 9.0, 0.01]}
    options["weight_decay"] = [0.0, 0.1, 9.0, 0.02]
    if rule in steps.ADAPTIVE:
        options["adapt"] = [1, 0, 1, 1]
    one = MixStep(rule, device, sizes=[5000, 17, 4096, 0, 33, 8200], **options)
    squared = torch.tensor([400.0], dtype=torch.float64, device=device)
    one.step.options |= {"norm_squared": squared, "max_norm": 2.0}
    one.step.options["device_lr"] = [torch.tensor(lr, device=device) for lr in options["lr"]]
    apart = one.copy()
    one.run()
    apart.run_apart()
    assert_same(one, apart, assert_same_bits)
    assert [count.item() for count in one.step.steps] == [4.0] * 4


@every_rule
def test_any_number_of_threads(rule, set_threads, assert_same_bits):
    start = MixStep(rule, torch.device("cpu"), sizes=[300_001, 70_000], num_peers=1)
    results = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        results.append(start.copy())
        results[-1].run()
    assert_same(results[1], results[0], assert_same_bits)


@every_rule
def test_opcheck(rule, device):
    """Of one parameter that is a row of its own: views of one base are one input to torch's functionalisation."""
    one = MixStep(rule, device, sizes=[33], gap=0, noise=NOISE)
    one.step.params, one.offsets = [one.row[1:34].clone()], [0]
    operator = getattr(torch.ops.ddpcore, f"{rule}_step_").default
    torch.library.opcheck(operator, (*one.lists(),), one.options())
    one.mixture = Mixture(one.mixture.peers, 0.5, one.mixture.peer_weights, None, torch.zeros(33, device=device))
    torch.library.opcheck(operator, (*one.lists(),), one.options())


@every_rule
def test_fake_and_compiled(rule, device, assert_same_bits):
    one = MixStep(rule, device, sizes=[21], gap=0)
    one.step.params, one.offsets = [one.row[1:22].clone()], [0]

    def call(param: Tensor, grad: Tensor, buffers: list[list[Tensor]], count: Tensor, scratch: Tensor, trust: Tensor):
        rows = [trust] if rule in steps.ADAPTIVE else []
        operator = getattr(ops, f"{rule}_step_")
        mix = {"mixture": one.mixture, "offsets": [0]}
        operator([param], [grad * 2], *buffers, [], [count], scratch, *rows, **mix, **one.step.options)
        return param + 1, count * 2

    def arguments(this: steps.Step) -> tuple:
        return this.params[0], this.grads[0], this.buffers, this.steps[0], this.scratch, this.trust

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = one.step.change(lambda tensor: mode.from_tensor(tensor))
        assert [tuple(tensor.shape) for tensor in call(*arguments(fake))] == [(21,), (1,)]
    compiled = one.step.change(lambda tensor: tensor.clone())
    expected = call(*arguments(one.step))
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*arguments(compiled))
    for left, right in zip(got, expected, strict=True):
        assert_same_bits(left, right)


REFUSED: dict[str, tuple[Any, str]] = {
    "offsets": (lambda one: one.offsets.pop(), "offsets must have the length of params"),
    "another place": (lambda one: one.offsets.__setitem__(1, 0), "params must be dense views of one row, from offsets"),
    "negative": (lambda one: one.offsets.__setitem__(0, -1), "params must be dense views of one row, from offsets on"),
    "short peer": (lambda one: one.mixture.peers.append(one.row[:20].clone()), "a peer must be a contiguous row"),
    "peer of halves": (
        lambda one: one.mixture.peers.append(one.row.half()),
        "a peer must be a contiguous row with the",
    ),
    "itself": (lambda one: one.mixture.peers.append(one.row), "a peer must not be the weights themselves"),
    "weights": (lambda one: one.mixture.peer_weights.append(0.1), "peers and peer_weights must have the same length"),
}


@each("case", REFUSED)
@every_rule
def test_bad_arguments(rule, case, assert_same_bits):
    change, message = REFUSED[case]
    one = MixStep(rule, torch.device("cpu"), sizes=[33, 17])
    change(one)
    if len(one.mixture.peers) > 2:
        one.mixture.peer_weights.append(0.1)
    before = one.step.on_cpu()
    with pytest.raises(RuntimeError, match=message):
        one.run()
    steps.assert_unchanged(one.step, before, assert_same_bits)


REFUSED_OPTIONS: dict[str, Any] = {
    "masters": lambda step: setattr(step, "masters", [param.float() for param in step.params]),
    "state_firsts": lambda step: step.rounded(),
    "grad_scale": lambda step: step.options.update(grad_scale=torch.ones(1)),
    "found_inf": lambda step: step.options.update(found_inf=torch.zeros(1)),
    "passes": lambda step: step.options.update(passes="first", squares=torch.zeros(2, 2, dtype=torch.float64)),
}


@each("option", REFUSED_OPTIONS)
@every_rule
def test_options_that_need_two_passes(rule, option, assert_same_bits):
    if option == "passes" and rule not in steps.ADAPTIVE:
        return
    for run in (MixStep.run, MixStep.run_reference):
        one = MixStep(rule, torch.device("cpu"), sizes=[33, 17], dtype=torch.bfloat16)
        if option == "masters":
            one.step.buffers = [[tensor.float() for tensor in buffers] for buffers in one.step.buffers]
        REFUSED_OPTIONS[option](one.step)
        before = one.step.on_cpu()
        with pytest.raises(
            RuntimeError, match="a step with a mix takes no masters, state_firsts, grad_scale, found_inf"
        ):
            run(one)
        steps.assert_unchanged(one.step, before, assert_same_bits)


@every_rule
def test_peers_need_weights_and_offsets(rule):
    one = MixStep(rule, torch.device("cpu"), sizes=[33, 17])
    options = {**one.options(), "peer_weights": None}
    with pytest.raises(RuntimeError, match="peers need peer_weights and offsets"):
        getattr(torch.ops.ddpcore, f"{rule}_step_").default(*one.lists(), **options)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (lambda one: one.row[:5].clone(), "out must be a contiguous row"),
        (lambda one: one.row.double(), "out must be a contiguous row"),
        (lambda one: one.mixture.peers[0], "out must not be a peer"),
    ],
)
def test_bad_results(out, message):
    one = MixStep("adamw", torch.device("cpu"), sizes=[33, 17])
    mixture = one.mixture
    one.mixture = Mixture(mixture.peers, 0.5, mixture.peer_weights, None, out(one))
    with pytest.raises(RuntimeError, match=message):
        one.run()
