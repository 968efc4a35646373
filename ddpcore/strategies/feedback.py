"""Error feedback: what a message loses is part of the next one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ddpcore.strategies.compression import Codec


class ErrorFeedback:
    """``e_j <- beta e_j + d_j``; the message is ``C(e_j)``; ``e_j <- e_j - C(e_j)`` (SparseLoCo, 2508.15706).

    Args:
        codec: C.
        decay: beta, from 0, which forgets what was lost, to 1.
    """

    def __init__(self, codec: Codec, decay: float) -> None:
        self.codec, self.decay = codec, decay
        self._errors: dict[int, Tensor] = {}  # [L, X] of each part

    def encode(self, changes_LX: Tensor, part: int) -> Tensor:
        """The messages for the changes d of a part, uint8 ``[L, Y]``."""
        before = self._errors.get(part)
        wanted_LX = changes_LX.clone() if before is None else changes_LX + self.decay * before
        message = self.codec.encode(wanted_LX)
        self._errors[part] = wanted_LX.sub_(self.codec.decode(message, wanted_LX))
        return message

    def state_dict(self) -> dict[int, Any]:
        """Return the errors by part."""
        return dict(self._errors)

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        self._errors = {int(part): error.clone() for part, error in state.items()}
