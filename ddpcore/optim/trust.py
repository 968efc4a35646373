"""What LARS and LAMB report about their last step."""

from __future__ import annotations

from typing import NamedTuple

from ddpcore.optim.base import FusedOptimizer


class TrustRatio(NamedTuple):
    """How a tensor was adapted: ``ratio`` is what multiplied its step."""

    ratio: float
    weight_norm: float
    update_norm: float
    """LARS: of the gradient, unscaled and clipped. LAMB: of the update."""


class AdaptiveOptimizer(FusedOptimizer):
    """An optimizer that scales each tensor's step by a trust ratio."""

    def trust_ratios(self) -> dict[str | int, TrustRatio | list[TrustRatio]]:
        """The ratios of the last step: by name where the optimizer got named parameters, else by index.

        Reading waits for the device; steps do not. Before the first step there are none. For stacks of virtual
        learners, a list with one entry a learner.
        """
        if self._plan is None:
            return {}
        names = {id(param): name for (name, param), _ in self.named_parameters()}
        found: dict[int, list[TrustRatio]] = {}
        for batch in self._plan.batches:
            assert batch.trust is not None
            rows = [TrustRatio(*row) for row in batch.trust.tolist()]
            learners = len(rows) // len(batch.members)
            for index, member in enumerate(batch.members):
                found[member] = rows[index * learners : (index + 1) * learners]
        stacked = self._flat is not None and self._flat.stack is not None
        params = self._plan.params
        return {names[id(params[member])]: rows if stacked else rows[0] for member, rows in sorted(found.items())}
