"""Policies for the state beside the weights when learners average: momentum, buffers, random numbers.

Shapes: L learners held by this process, X elements of one kind of state of a learner.
"""

import hashlib
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from ddpcore.distributed.averaging import averaged_buffers, check_shared, digest
from ddpcore.optim.base import FusedOptimizer
from ddpcore.parameters.shards import local
from ddpcore.strategies.base import Strategy
from ddpcore.strategies.learner import Learner
from ddpcore.strategies.ssgd import scale_

KEEP, GOSSIP, AVERAGE, RESET = "keep", "gossip", "average", "reset"
_ROOM = 32  # kinds of states in one message
_DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)


@dataclass(frozen=True, kw_only=True)
class Policies:
    """What happens to other state in each step that averages weights or gradients. By default it does not change.

    ``keep``: each learner keeps its own. ``gossip``: averaged with the neighbours of that step, as the weights are.
    ``average``: the mean over all learners, under ``LocalSGD`` and gossip by their weights. ``reset``: the value at the
    start of training. push_sum allows no ``gossip``: its mixing is no average. ValueError: no such policy for a state.

    Attributes:
        momentum: buffers of the optimizer in the shape of their parameter. ``reset`` forgets step counts too.
        moments: a period for each of these buffers by name, instead of ``momentum``: ``{"exp_avg": 4, "exp_avg_sq":
            16}`` averages the first moment over all learners after every fourth step and the second after every
            sixteenth, whether or not these steps average the weights. With ``LocalSGD`` and an Adam this is DES-LOC
            (Iacob et al. 2025, arXiv:2505.22549); if all periods are equal, local Adam.
        batch_norm: floating-point and complex buffers of the model, without masks of pruning.
        rng: torch's generators: ``keep``, or ``reset`` (equal on all learners, by learner 0's first seed and the step).
    """

    momentum: str = KEEP
    moments: Mapping[str, int] = field(default_factory=dict)
    batch_norm: str = KEEP
    rng: str = KEEP

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self) if one.name != "moments"):
            allowed = (KEEP, RESET) if name == "rng" else (KEEP, GOSSIP, AVERAGE, RESET)
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"policy {name} is {value!r}: choose from {', '.join(allowed)}")
        if not isinstance(self.moments, Mapping):
            raise ValueError(f'policy moments is {self.moments!r}: give a period by name, such as {{"exp_avg": 4}}')
        object.__setattr__(self, "moments", dict(self.moments))  # the caller's may change
        for name, period in self.moments.items():
            if type(period) is not int or period < 1:
                raise ValueError(f"policy moments: the period of {name} is {period!r}: it must be 1 or more steps")
        if self.moments and self.momentum != KEEP:
            raise ValueError(f"policies momentum={self.momentum!r} and moments both average the same states: set one")

    def check(self, strategy: Strategy) -> None:
        """Raise ValueError if a policy needs other learners or neighbours, and the strategy has none."""
        averages, name = (self.momentum, self.batch_norm), strategy.name
        if not strategy.traits.waits and (self.moments or not {AVERAGE, GOSSIP}.isdisjoint(averages)):
            raise ValueError(f"policies that average wait for other learners and {name} does not: take keep or reset")
        if self.moments and isinstance(strategy.traits.weights, str):
            raise ValueError(f"moments average where {name} has not counted {strategy.traits.weights}: give numbers")
        if GOSSIP in averages:
            if strategy.topology is None:
                raise ValueError(f"policy gossip needs neighbours and {name} has none: take average")
            if why := strategy.traits.no_mean:
                raise ValueError(f"policy gossip averages as the weights do and {why}: take average")

    def check_moments(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError if no parameter of the model has a state that has a period."""
        if not self.moments:
            return
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        first = [(group["params"][0], group) for group in optimizer.param_groups if group["params"]]
        kept = [(parameter, _states_kept(optimizer, group, parameter)) for parameter, group in first]
        for name in self.moments:
            if all(found is not None and name not in found for _, found in kept):
                parameter, found = kept[0]
                what = f"policy moments: parameter {names.get(id(parameter), '?')} has no state {name!r}"
                why = f"{type(optimizer).__name__} keeps {', '.join(found or ()) or 'none'} for it"
                raise ValueError(f"{what}: {why}, name one of these")


class StateSync:
    """Applies checked policies to the learners of this process. ``gossip`` uses the topology of the strategy.

    A learner that ``joins`` a run loads the values at the start of training from another one.
    """

    def __init__(self, policies: Policies, learner: Learner, strategy: Strategy, *, joins: bool = False) -> None:
        self.policies, self._learner, self._strategy = policies, learner, strategy
        self._first_seed: int | None = None
        if policies.rng == RESET and not joins:
            own = torch.tensor([[torch.initial_seed() >> 1]] * len(learner.comm.learners), device="cpu")
            self._first_seed = int(learner.comm.gather(own.to(learner.flat.param_LP.device))[0])
        optimizer, at_once = learner.optimizer, (FusedOptimizer, torch.optim.Adagrad)
        is_torchs = type(optimizer).__module__.startswith("torch.optim")
        # Whether a step creates the state that a parameter has not. Adagrad does so at once.
        self._creates_states = not isinstance(optimizer, at_once) and (is_torchs or not optimizer.state)
        self._step_checked, self._first_digest = -1, digest(averaged_buffers(learner.models[0]).items())
        self._first_buffers = [buffer.clone() for buffer in self._buffers()] if policies.batch_norm == RESET else []

    def check_buffers(self, step: int) -> None:
        """Refuse buffers that learners do not share, before this step changes weights. Collective where others wait."""
        policy, traits = self.policies.batch_norm, self._strategy.traits
        if policy == KEEP or self._step_checked == step or not self._strategy.plan(step).weights:
            return
        learner, self._step_checked = self._learner, step
        own = [digest(averaged_buffers(model).items()) for model in learner.models]
        first = [self._first_digest] if policy == RESET else []
        check_shared([*(learner.gather(own, step) if traits.waits else [own]), first])

    @torch.no_grad()
    def sync(self) -> None:
        """Apply the policies. It is called after each step that averages weights or gradients."""
        policies = self.policies
        self.check_buffers(self._learner.step - 1)  # a closure may have changed them after the check before the step
        if policies.momentum == RESET:
            for parameter in self._optimized():
                self.forget(parameter)
        elif policies.momentum != KEEP:
            self._move_states(policies.momentum)
        if policies.batch_norm == RESET:
            for buffer, first in zip(self._buffers(), self._first_buffers, strict=True):
                buffer.copy_(first)
        elif policies.batch_norm != KEEP:  # keep skips this, because a loop over all modules takes time
            self._move(policies.batch_norm, self._buffers())
        if policies.rng == RESET:
            digest = hashlib.blake2b(f"{self._first_seed}, step {self._learner.step}".encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)

    @torch.no_grad()
    def sync_moments(self) -> None:
        """Average the states whose period ends with this step. It is called after each step."""
        if due := [name for name, period in self.policies.moments.items() if self._learner.step % period == 0]:
            self._move_states(AVERAGE, due)

    def forget(self, parameter: Tensor) -> None:
        """Set the optimizer's state of a parameter to that at the start."""
        optimizer = self._learner.optimizer
        if self._creates_states:
            optimizer.state.pop(parameter, None)
            return
        first = optimizer.defaults["initial_accumulator_value"] if isinstance(optimizer, torch.optim.Adagrad) else 0
        for _, value in self._states_of(parameter):
            value.fill_(first)
        if isinstance(count := optimizer.state.get(parameter, {}).get("step"), Tensor):
            count.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the values at the start of training, which ``reset`` needs after a run is resumed."""
        return {"seed": self._first_seed, "buffers": list(self._first_buffers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. Where its policies leave a value out, this run keeps its own."""
        if state["seed"] is not None:
            self._first_seed = state["seed"]
        if state["buffers"]:
            self._first_buffers = [buffer.clone() for buffer in state["buffers"]]

    def _move(self, policy: str, tensors: list[Tensor]) -> None:
        """Average tensors over the learners: as many for each learner of this process, the first learner's first."""
        if not tensors:
            return
        comm, strategy = self._learner.comm, self._strategy
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            rows_LX = torch.cat([tensor.reshape(-1) for tensor in alike]).view(len(comm.learners), -1)
            if policy == AVERAGE:
                # Under push_sum the sum over learners counts: gradients step the biased weights.
                scale_(rows_LX, None if strategy.traits.no_mean else self._learner.shares, self._learner)
                comm.average_(rows_LX, self._learner.step - 1).wait()
            else:
                assert strategy.topology is not None
                topology, step = strategy._mixing or strategy.topology, self._learner.step - 1
                if dtype.itemsize < 8:  # one that kernels mix
                    comm.mix_(rows_LX, topology, step)
                else:
                    rows_LX += comm.exchange(rows_LX, topology, step).differences(rows_LX)
            parts = rows_LX.view(-1).split([tensor.numel() for tensor in alike])
            with torch.inference_mode(any(map(Tensor.is_inference, alike))):  # states of a step inside this mode
                torch._foreach_copy_(alike, [part.reshape(t.shape) for part, t in zip(parts, alike, strict=True)])

    def _move_states(self, policy: str, names: Sequence[str] | None = None) -> None:
        """Average all states, or those of some names. A learner that has none yet takes part with zeros. Collective."""
        learner, parameters, held = self._learner, self._optimized(), list[dict[int, Tensor]]()
        for parameter in parameters:  # the name and the dtype are a number, which ranks can gather
            states = self._states_of(parameter)
            held.append({crc32(name.encode()) << 8 | _DTYPES.index(one.dtype): one for name, one in states})
        own = sorted({kind for states in held for kind in states})
        everyone = learner.gather([*own, *[-1] * (_ROOM - len(own))], learner.step)
        kinds = sorted({kind for row in everyone for kind in row}.difference([-1]))
        codes = {crc32(name.encode()): name for name in names or ()}
        if kinds and (absent := set(codes).difference(kind >> 8 for kind in kinds)):
            keeper = type(learner.optimizer).__name__
            raise ValueError(f"policy moments: {keeper} keeps no state {codes[min(absent)]!r}")
        for kind in kinds if names is None else [kind for kind in kinds if kind >> 8 in codes]:
            pairs, dtype = zip(parameters, held, strict=True), _DTYPES[kind & 255]
            self._move(policy, [of[kind] if kind in of else torch.zeros_like(local(p), dtype=dtype) for p, of in pairs])

    def _states_of(self, parameter: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The states of a parameter that have its shape. fp32 master weights are not a state."""
        for name, value in self._learner.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and name != "master":
                yield name, local(value)

    def _optimized(self) -> list[Tensor]:
        """As many for each learner: of those that were frozen from the start, the optimizer has learner 0's alone."""
        return [p for model in self._learner.models for p in model.parameters() if id(p) in self._learner.flat.index]

    def _buffers(self) -> list[Tensor]:
        """Views of the buffers that have an average; a complex number is two real ones, which the kernels can mix."""
        averaged = [local(buffer) for model in self._learner.models for buffer in averaged_buffers(model).values()]
        return [torch.view_as_real(buffer) if buffer.is_complex() else buffer for buffer in averaged]


def _states_kept(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> tuple[str, ...] | None:
    """The names of the states of a parameter's shape that the optimizer keeps; None if only a step would show it."""
    if hasattr(optimizer, "state_names"):  # ddpcore's fused ones
        return tuple(optimizer.state_names(group))
    if not (state := optimizer.state.get(parameter)):
        if not type(optimizer).__module__.startswith("torch.optim"):
            return None
        probe, trial = copy(optimizer), nn.Parameter(torch.zeros_like(parameter))
        trial.grad = torch.zeros_like(trial)
        probe.param_groups, probe.state = [{**group, "params": [trial]}], defaultdict(dict)
        try:
            type(optimizer).step(probe)
        except (RuntimeError, TypeError):  # a step that needs more, such as a closure
            return None
        state = probe.state[trial]
    return tuple(name for name, value in state.items() if isinstance(value, Tensor) and value.shape == parameter.shape)


def scales_inside(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the scaler always calls the optimizer, which itself skips a step with an overflow."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) or fused


@torch.no_grad()
def give_state(learner: Learner, new: int, sync: StateSync, handle_state: Callable[[], dict[str, Any]]) -> None:
    """Give a learner that joins the state of its neighbour. Collective over the learners that are there already."""
    comm, optimizer = learner.comm, learner.optimizer
    # It begins without momentum if each learner keeps its own, or resets it, unless all must stay equal.
    takes_momentum = sync._strategy.traits.stays_identical or sync.policies.momentum not in (KEEP, RESET)

    def packed() -> Tensor:
        """The state as bytes, uint8 ``[x]``."""
        buffer, model = io.BytesIO(), learner.models[0].state_dict()
        states = optimizer.state_dict() if takes_momentum else None
        torch.save({"model": model, "optimizer": states, "handle": handle_state()}, buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    if comm.member is not None:
        comm.hand_over(new, packed)
        return
    assert comm.membership is not None
    models = learner.models[new], learner.models[comm.membership.source_for(new)]  # virtual learners
    copied = dict[int, Any]()  # a count that parameters share is copied once
    for own, theirs in zip(*([*model.parameters(), *model.buffers()] for model in models), strict=True):
        own.data.copy_(theirs.data)
        if takes_momentum or isinstance(optimizer, FusedOptimizer):  # whose next step creates what is missing
            optimizer.state.pop(own, None)
        else:
            sync.forget(own)
        if takes_momentum and theirs in optimizer.state:
            optimizer.state[own] = deepcopy(optimizer.state[theirs], copied)


def received_state(learner: Learner) -> dict[str, Any]:
    """In the rank that joins: load model and optimizer from a neighbour, and return the state of its handle."""
    comm = learner.comm
    assert comm.member is not None and comm.membership is not None
    calls, comm.membership.on_change = comm.membership.on_change, []  # what it receives is of those that are left
    content = comm.hand_over(comm.member, lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))
    comm.membership.on_change = calls
    assert content is not None
    state: dict[str, dict[str, Any]] = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)  # no code
    learner.models[0].load_state_dict(state["model"])
    if state["optimizer"] is not None:
        learner.optimizer.load_state_dict(state["optimizer"])
    return state["handle"]
