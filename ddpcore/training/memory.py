"""An estimate of the memory of a run, made before it starts and without computing."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpcore.data import Dataset
from ddpcore.optim.registry import OPTIMIZERS
from ddpcore.training.build import build_model
from ddpcore.training.config import TrainConfig
from ddpcore.training.trainer import Trainer, by_place


def activation_bytes(config: TrainConfig, dataset: Dataset, num_samples: int) -> int | None:
    """Bytes that autograd keeps, in float32, for a backward pass of ``num_samples``; None if ``meta`` cannot run it.

    Work space of kernels, such as the space of convolutions, is not counted.
    """
    saved: dict[int, torch.UntypedStorage] = {}  # kept alive, else the next tensor may have the same one

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        try:
            model = build_model(config, dataset, torch.device("meta"))
            dtype = torch.int64 if dataset.has_tokens else torch.float32
            inputs = torch.zeros(num_samples, *dataset.input_shape, dtype=dtype)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                logits = model(inputs)
                places = logits.shape[2:] if logits.ndim == 3 else ()
                F.cross_entropy(*by_place(logits, torch.zeros(num_samples, *places, dtype=torch.int64)))
        except (RuntimeError, NotImplementedError, ValueError):
            return None
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    return sum(storage.nbytes() for key, storage in saved.items() if key not in own)


def num_states(config: TrainConfig) -> int:
    """Numbers that the optimizer keeps for each weight. One is assumed of optimizers that are not ddpcore's."""
    rule = getattr(OPTIMIZERS.find(config.optimizer.name), "rule", None)
    return 1 if rule is None else len(rule.buffers)


def model_bytes(config: TrainConfig, dataset: Dataset) -> int:
    """Bytes of the parameters of one learner."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return sum(parameter.nbytes for parameter in build_model(config, dataset, torch.device("meta")).parameters())


def estimate(config: TrainConfig, trainer: Trainer) -> str:
    """The memory of a process in one line: activations, and weights with their gradients and states."""
    num = len(trainer.learners)
    samples = -(-config.data.batch_size // (config.strategy.learners * config.data.accumulation))
    model: Any = trainer.handle.model
    at_once = min(num, trainer.at_once or (1 if trainer.stacked and not model.runs_together() else num))
    found = activation_bytes(config, trainer.dataset, samples)
    weights = num * sum(parameter.nbytes for parameter in trainer.module.parameters()) * (2 + num_states(config))
    who = f"{at_once} of {num} learners at once" if num > 1 else "one learner"
    known = "unknown" if found is None else bytes_text(at_once * found)
    activations = f"activations {known} ({who}, {samples} samples each)"
    return f"memory, estimated: {activations}, weights, gradients and states {bytes_text(weights)}"


def bytes_text(num: float) -> str:
    """A number of bytes in the largest unit of which there is one, such as ``"1.50 MiB"``."""
    unit, size = next((one for one in (("GiB", 2**30), ("MiB", 2**20)) if num >= one[1]), ("KiB", 2**10))
    return f"{num / size:.2f} {unit}"
