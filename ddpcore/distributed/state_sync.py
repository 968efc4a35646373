"""What becomes of everything that is not a parameter when learners average their weights: declared, never by accident.

Shapes: L learners held by this process, X numbers of one kind of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.strategies.base import Strategy
from ddpcore.strategies.learner import Learner
from ddpcore.strategies.push_sum import PushSum

KEEP, GOSSIP, AVERAGE, RESET = "keep", "gossip", "average", "reset"
_NUMBERS = (KEEP, GOSSIP, AVERAGE, RESET)


@dataclass(frozen=True, kw_only=True)
class Policies:
    """Each time learners average weights, or gradients, this happens to the rest. The default touches nothing.

    ``keep``: each learner keeps its own. ``gossip``: averaged with the neighbours of that step, as the weights are; not
    under push_sum, whose mixing is no average.
    ``average``: the mean over all learners. ``reset``: as at the start of training.

    Attributes:
        momentum: buffers of the optimizer that are shaped like their parameter. ``reset`` also forgets step counts.
        batch_norm: floating-point buffers of the model. ``reset`` takes the values from before training.
        scaler: the scale of ``torch.amp.GradScaler``: ``keep``, ``average`` (the smallest of all: every learner then
            stays clear of overflow) or ``reset``.
        rng: torch's generators: ``keep``, or ``reset`` (the same on every learner: from the seed that learner 0 had in
            the beginning, and the step). There is no average of two states of a generator.

    Raises:
        ValueError: no such policy, or it makes no sense there.
    """

    momentum: str = KEEP
    batch_norm: str = KEEP
    scaler: str = KEEP
    rng: str = KEEP

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            allowed = {"scaler": (KEEP, AVERAGE, RESET), "rng": (KEEP, RESET)}.get(field.name, _NUMBERS)
            if value not in allowed:
                raise ValueError(f"policy {field.name} is {value!r}: choose from {', '.join(allowed)}")

    def check(self, strategy: Strategy, scaler: torch.amp.GradScaler | None) -> None:
        """Before anything moves.

        Raises:
            ValueError: a policy needs what is not there.
        """
        if GOSSIP in (self.momentum, self.batch_norm):
            if strategy.topology is None:
                raise ValueError(f"policy gossip needs neighbours and {strategy.name} has none: take average")
            if isinstance(strategy, PushSum):  # rows of its matrix need not sum to one, and only weights are divided
                raise ValueError(
                    f"policy gossip takes averages and the mixing of {strategy.name} is none: take average"
                )
        if self.scaler != KEEP and scaler is None:
            raise ValueError(f"policy scaler={self.scaler!r} needs the scaler: pass distribute(..., scaler=)")


class StateSync:
    """Applies policies to the learners of this process.

    Args:
        policies: what is to be done; checked.
        model: its buffers; stacks ``[L, *S]`` for virtual learners.
        learner: its optimizer and connection.
        strategy: its topology serves ``gossip``.
        scaler: for the policy of that name.
    """

    def __init__(
        self,
        policies: Policies,
        model: nn.Module,
        learner: Learner,
        strategy: Strategy,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._policies, self._model, self._learner, self._strategy = policies, model, learner, strategy
        self._scaler = scaler
        self._first_scale = None if scaler is None else scaler.get_scale()
        self._first_seed: int | None = None
        if policies.rng == RESET:
            own = torch.tensor([[torch.initial_seed() >> 1]] * len(learner.comm.learners))
            self._first_seed = int(learner.comm.gather(own.to(learner.flat.param_LP.device))[0])
        self._first_buffers = [buffer.clone() for buffer in self._buffers()] if policies.batch_norm == RESET else []

    @torch.no_grad()
    def sync(self) -> None:
        """Called after the step, where the learners met in it."""
        policies = self._policies
        if policies.momentum == RESET:
            for tensor in (*self._states(), *self._step_counts()):
                tensor.zero_()
        elif policies.momentum != KEEP:
            self._move_states()
        if policies.batch_norm == RESET:
            for buffer, first in zip(self._buffers(), self._first_buffers, strict=True):
                buffer.copy_(first)
        elif policies.batch_norm != KEEP:  # else the model is not walked: this is every step's way
            self._move(policies.batch_norm, self._buffers())
        self._move_scaler()
        if policies.rng == RESET:
            digest = hashlib.blake2b(f"{self._first_seed}, step {self._learner.step}".encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)

    def state_dict(self) -> dict[str, Any]:
        """What ``reset`` goes back to: a run that is resumed has another beginning."""
        return {"scale": self._first_scale, "seed": self._first_seed, "buffers": list(self._first_buffers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; what it lacks, for other policies made it, stays this run's own."""
        if state["scale"] is not None:
            self._first_scale = state["scale"]
        if state["seed"] is not None:
            self._first_seed = state["seed"]
        if state["buffers"]:
            self._first_buffers = [buffer.clone() for buffer in state["buffers"]]

    def _move(self, policy: str, tensors: list[Tensor]) -> None:
        if not tensors:
            return
        comm, strategy = self._learner.comm, self._strategy
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            rows_LX = torch.cat([tensor.reshape(len(comm.learners), -1) for tensor in alike], dim=1)
            if policy == AVERAGE:
                comm.average_(rows_LX).wait()
            else:
                assert strategy.topology is not None
                comm.mix_(rows_LX, strategy.topology, self._learner.step - 1)
            parts = rows_LX.split([tensor.numel() // len(comm.learners) for tensor in alike], dim=1)
            torch._foreach_copy_(alike, [part.reshape(t.shape) for part, t in zip(parts, alike, strict=True)])

    def _move_states(self) -> None:
        """Every buffer of every parameter: a learner that has none where another has one counts as zero.

        So ranks that use different parameters still exchange the same rows.
        """
        parameters = [p for group in self._learner.optimizer.param_groups for p in group["params"]]
        for name in sorted({name for p in parameters for name, _ in self._states_of(p)}):
            found = [dict(self._states_of(parameter)).get(name) for parameter in parameters]
            dtype = next(value.dtype for value in found if value is not None)
            pairs = zip(parameters, found, strict=True)
            self._move(
                self._policies.momentum,
                [torch.zeros_like(p, dtype=dtype) if value is None else value for p, value in pairs],
            )

    def _move_scaler(self) -> None:
        scaler, policy = self._scaler, self._policies.scaler
        if scaler is None or policy == KEEP or scaler._scale is None:
            return
        scale = self._first_scale
        assert scale is not None
        if policy == AVERAGE:
            comm = self._learner.comm
            mine = torch.full((len(comm.learners),), scaler.get_scale(), device=self._learner.flat.param_LP.device)
            scale = float(comm.gather(mine).min())
        scaler._scale.fill_(scale)  # not update(), which is still to come in this step and wants its overflow checks

    def _states_of(self, parameter: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Buffers shaped like their parameter. fp32 masters are weights, not companions."""
        for name, value in self._learner.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and name != "master":
                yield name, value

    def _states(self) -> list[Tensor]:
        return [value for parameter, _ in self._parameter_states() for _, value in self._states_of(parameter)]

    def _step_counts(self) -> list[Tensor]:
        counts = {id(state.get("step")): state.get("step") for _, state in self._parameter_states()}
        return [count for count in counts.values() if isinstance(count, Tensor)]

    def _parameter_states(self) -> Iterable[tuple[Tensor, dict[str, Any]]]:
        optimizer = self._learner.optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, optimizer.state.get(parameter, {})

    def _buffers(self) -> list[Tensor]:
        return [buffer for buffer in self._model.buffers() if buffer.is_floating_point()]


def scales_inside(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scaled step is called on every learner, overflow or not, and skipped inside."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) or fused
