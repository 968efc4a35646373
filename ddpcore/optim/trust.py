"""Trust ratios: the base class of LARS and LAMB, and the values of the last step."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from ddpcore.optim.base import FusedOptimizer


class TrustRatio(NamedTuple):
    """The factor ``ratio`` of one tensor's step, and the norms from which it was computed."""

    ratio: float
    weight_norm: float
    update_norm: float
    """LARS: the norm of the unscaled and clipped gradient. LAMB: the norm of the update."""


class AdaptiveOptimizer(FusedOptimizer):
    """An optimizer that scales each tensor's step by a trust ratio."""

    uses_norms: ClassVar[bool] = True

    def trust_ratios(self) -> dict[str | int, TrustRatio | list[TrustRatio]]:
        """The ratios of the last step, by name if the optimizer got named parameters, else by index.

        With several virtual learners the values are lists with one entry per learner. Empty before the first step.
        Reading them waits for the device; steps do not.
        """
        found = {
            id(plan.params[member]): TrustRatio(*row)
            for plan in self._kept.values()
            for batch in plan.batches
            for member, row in zip(batch.members, batch.trust.tolist(), strict=True)
        }
        flat = self._flat
        if flat is None or flat.num_rows == 1:
            return {name: found[id(param)] for (name, param), _ in self.named_parameters() if id(param) in found}
        num = len(flat.segments)
        rows_of = {id(first): flat.parameters[index::num] for index, first in enumerate(flat.parameters[:num])}
        return {
            name: [found[id(row)] for row in rows_of[id(param)] if id(row) in found]
            for (name, param), _ in self.named_parameters()
            if id(param) in rows_of and id(param) in found
        }
