"""Every fused optimizer that is bound to a flat buffer averages and steps in one pass, with the bits of two passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcore import ops
from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from ddpcore.parameters.flat import FlatParameters

MAKES: dict[str, Any] = {
    "sgd": lambda p, **more: FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, **more),
    "adamw": lambda p, **more: FusedAdamW(p, lr=0.01, **more),
    "lars": lambda p, **more: FusedLARS(p, lr=0.1, weight_decay=0.01, trust_coefficient=0.5, **more),
    "lamb": lambda p, **more: FusedLAMB(p, lr=0.01, weight_decay=0.01, **more),
}
every = pytest.mark.parametrize("name", MAKES)


def small_net(device: torch.device) -> nn.Module:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    return net.to(device=device, memory_format=torch.channels_last)


class Pair:
    """A net in a flat buffer with a bound optimizer, and its copy, which is averaged by hand and then stepped."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.net = small_net(device).to(dtype)
        self.plain = copy.deepcopy(self.net)
        self.flat = FlatParameters([self.net.named_parameters()])
        self.optimizers = [self._optimizer(net, name, options) for net in (self.net, self.plain)]
        self.weight_step = self.optimizers[0].bind(self.flat)
        self.device, self.dtype = device, dtype

    @staticmethod
    def _optimizer(net: nn.Module, name: str, options: dict[str, Any]) -> Any:
        params = list(net.parameters())
        return MAKES[name]([{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}], **options)

    def average(self, num_peers: int, noise: ops.Noise | None = None, elsewhere: bool = False) -> ops.Mixture:
        numel = self.flat.numel
        peers = [torch.randn(numel).to(self.dtype).to(self.device) for _ in range(num_peers)]
        out = torch.zeros_like(self.flat.param_LP[0]) if elsewhere else None
        shares = [0.5 / num_peers] * num_peers
        mixture = ops.Mixture(peers, 0.5, shares, noise, out)
        expected = self.flat.param_LP[0].clone()
        ops.mix_(expected, peers, 0.5, shares, noise)
        index = {id(param): place for place, param in enumerate(self.net.parameters())}
        views = self.flat.views_of(expected[None])
        with torch.no_grad():
            for param, mixed in zip(self.flat.parameters, views, strict=True):
                list(self.plain.parameters())[index[id(param)]].copy_(mixed)
        self.weight_step.average(mixture)
        return mixture

    def step(self, seed: int, missing: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        for place, params in enumerate(zip(self.net.parameters(), self.plain.parameters(), strict=True)):
            grad = torch.randn(params[0].shape, generator=generator)
            for param in params:
                param.grad = None if place == missing else torch.empty_like(param).copy_(grad)
        for optimizer in self.optimizers:
            optimizer.step()

    def assert_same(self) -> None:
        for (name, one), two in zip(self.net.named_parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(one, two), name
            states = [optimizer.state[p] for optimizer, p in zip(self.optimizers, (one, two), strict=True)]
            assert states[0].keys() == states[1].keys()
            assert all(torch.equal(states[0][key], states[1][key]) for key in states[0]), name


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rules whose step was called with a mix."""
    called: list[str] = []

    def watched(name: str, operator: Any) -> Any:
        def call(*args: Any, **options: Any) -> None:
            called.extend([name] * ("mixture" in options))
            operator(*args, **options)

        return call

    for rule in MAKES:
        name = f"{rule}_step_"
        monkeypatch.setattr(ops, name, watched(rule, getattr(ops, name)))
    return called


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in place", "elsewhere"])
@pytest.mark.parametrize("num_peers", [1, 3])
@every
def test_an_average_with_the_step(name, num_peers, elsewhere, device, passes):
    """Steps without an average before and after it; the first step has one too, in the other case."""
    pair = Pair(name, device)
    if elsewhere:
        pair.step(0)
    for seed, noise in ((1, None), (2, ops.Noise(0.1, seed=1, step=2, first=3))):
        mixture = pair.average(num_peers, noise, elsewhere)
        pair.step(seed)
        pair.assert_same()
        if elsewhere:
            assert pair.flat.param_LP.data_ptr() == mixture.out.data_ptr()
            assert all(p.data_ptr() >= mixture.out.data_ptr() for p in pair.net.parameters())
    pair.step(3)
    pair.assert_same()
    assert passes == [name] * 2
    if name in ("lars", "lamb"):
        assert list(pair.optimizers[0].trust_ratios().values()) == list(pair.optimizers[1].trust_ratios().values())


@every
def test_clipping_and_a_rate_on_the_device_are_part_of_the_pass(name, device, passes):
    pair = Pair(name, device, max_grad_norm=0.5)
    for optimizer in pair.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.02, device=device)
    for seed in range(3):
        pair.average(2)
        pair.step(seed)
        pair.assert_same()
    assert passes == [name] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every
def test_sixteen_bits(name, dtype, device, passes):
    pair = Pair(name, device, dtype)
    for seed in range(3):
        pair.average(1)
        pair.step(seed)
        pair.assert_same()
    assert len(passes) == 3


CASES: dict[str, dict[str, Any]] = {"a gradient is missing": {}, "masters": {"master_weights": True}, "peers": {}}


@pytest.mark.parametrize("case", [*CASES, "scaled"])
@every
def test_two_passes_where_one_cannot(name, case, device, passes):
    pair = Pair(name, device, torch.bfloat16 if case == "masters" else torch.float32, **CASES.get(case, {}))
    for seed in range(3):
        pair.average(ops.MAX_STEP_PEERS + 1 if case == "peers" else 2)
        for optimizer in pair.optimizers if case == "scaled" else ():
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(seed == 1))
        pair.step(seed, missing=1 if case == "a gradient is missing" else None)
        pair.assert_same()
    assert passes == []


@every
def test_states_of_a_file_and_of_columns_go_on_in_one_pass(name, device, passes):
    """A step without an average may put states into flat buffers; a loaded state is outside of them."""
    pair = Pair(name, device)
    pair.step(0)
    pair.average(1)
    pair.step(1)
    for optimizer in pair.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pair.average(1)
    pair.step(2)
    pair.step(3)
    pair.assert_same()
    steps: list[Tensor] = [state["step"] for state in pair.optimizers[0].state.values()]
    assert all(float(count) == 4.0 for count in steps) and len(passes) == 2
