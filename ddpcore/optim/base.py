"""What an optimizer offers the engine beside ``step()``."""

from __future__ import annotations

from abc import abstractmethod

import torch

from ddpcore.flat import FlatParameters
from ddpcore.ops import Mixture


class MixingOptimizer(torch.optim.Optimizer):
    """An optimizer whose step can average with neighbours in the same pass over the flat buffer."""

    @abstractmethod
    def bind(self, flat: FlatParameters) -> None:
        """Step on the flat buffers from now on. The parameters must be views of them."""

    @abstractmethod
    def mix_on_next_step(self, mixture: Mixture) -> None:
        """Make the next ``step()`` an average with neighbours and a step. Every parameter must have a gradient."""
