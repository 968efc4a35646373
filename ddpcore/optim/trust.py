"""Trust ratios: the base class of LARS and LAMB, and the values of the last step."""

from __future__ import annotations

from typing import NamedTuple

from ddpcore.optim.base import FusedOptimizer


class TrustRatio(NamedTuple):
    """The factor ``ratio`` of one tensor's step, and the norms from which it was computed."""

    ratio: float
    weight_norm: float
    update_norm: float
    """LARS: the norm of the unscaled and clipped gradient. LAMB: the norm of the update."""


class AdaptiveOptimizer(FusedOptimizer):
    """An optimizer that scales each tensor's step by a trust ratio."""

    def trust_ratios(self) -> dict[str | int, TrustRatio | list[TrustRatio]]:
        """The ratios of the last step, by name if the optimizer got named parameters, else by index.

        For stacks of virtual learners, the values are lists with one entry per learner. Empty before the first step.
        Reading them waits for the device; steps do not.
        """
        if self._plan is None:
            return {}
        names = {id(param): name for (name, param), _ in self.named_parameters()}
        found: dict[int, list[TrustRatio]] = {}
        for batch in self._plan.batches:
            rows = [TrustRatio(*row) for row in batch.trust.tolist()]
            learners = len(rows) // len(batch.members)
            for index, member in enumerate(batch.members):
                found[member] = rows[index * learners : (index + 1) * learners]
        stacked = self._flat is not None and self._flat.stack is not None
        params = self._plan.params
        return {names[id(params[member])]: rows if stacked else rows[0] for member, rows in sorted(found.items())}
