"""Fused LAMB in torchtitan: a container of optimizers that knows the names of ddpcore.

torchrun --nproc-per-node 8 -m torchtitan.train --module examples.torchtitan_lamb --config llama3_debugmodel_lamb
python examples/torchtitan_lamb.py    the debug model without torchtitan's trainer, which needs a GPU
A CPU build of torch has no triton, which torchtitan imports: pip install torchtitan triton
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from ddpcore.optim import FusedLAMB, Muon


class FusedOptimizers(OptimizersContainer):
    """``OptimizersContainer`` with FusedLAMB and Muon."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As that of the parent; torchtitan builds the class in which it stands."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return {"FusedLAMB": FusedLAMB, "Muon": Muon}.get(name) or OptimizersContainer._resolve_optimizer_factory(name)


def lamb(lr: float) -> FusedOptimizers.Config:
    """Neither weight decay nor trust ratios for the scales of norms."""
    scales, matrices = {"weight_decay": 0.0, "always_adapt": False}, {"weight_decay": 0.1}
    norms = ParamGroupConfig(pattern="norm", optimizer_name="FusedLAMB", optimizer_kwargs={"lr": lr, **scales})
    others = ParamGroupConfig(pattern=".*", optimizer_name="FusedLAMB", optimizer_kwargs={"lr": lr, **matrices})
    return FusedOptimizers.Config(param_groups=[norms, others])


def llama3_debugmodel_lamb() -> Any:
    """The config of torchtitan's debug model, with LAMB."""
    return replace(llama3_debugmodel(), optimizer=lamb(lr=4e-3))


class Causal(nn.Module):
    """Attention that also computes gradients on a CPU, which that of torchtitan does not."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: Any = None, **_: Any) -> torch.Tensor:
        heads = [one.transpose(1, 2) for one in (q, k, v)]
        return nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=scale).transpose(1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = model_registry("debugmodel").model.build()
    model.init_states()
    for layer in model.layers.values():
        layer.attention.inner_attention = Causal()
    optimizers = lamb(lr=4e-3).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=steps)
    tokens = torch.randint(64, (4, 65))
    for step in range(steps):
        logits = model(tokens[:, :-1], torch.arange(64).expand(4, 64))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizers.zero_grad()
        loss.backward()
        optimizers.step()
        schedule.step()
        print(f"step {step + 1}: loss {loss.item():.3f}")
    print(f"{len(optimizers.state_dict())} entries of state, by the names of the parameters")


if __name__ == "__main__":
    main()
