"""Models by name: ``MODELS.build("mlp")``. Torch's seed decides the initial weights.

Every one runs as virtual learners over stacked parameters and buffers, all but `speech_lstm` under `torch.func.vmap`.
"""

from ddpcore.models.registry import MODELS, ModelRegistry, Spec

__all__ = ["MODELS", "ModelRegistry", "Spec"]
