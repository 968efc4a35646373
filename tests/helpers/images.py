"""A few random images with classes that can be learned, and configs that train on them in no time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ddpcore.data import Augmentation, Dataset, Normalization, Split
from ddpcore.training import TrainConfig
from ddpcore.training.config import merged

NUM_TRAIN, NUM_TEST, NUM_CLASSES = 50, 24, 4

STRATEGIES: dict[str, dict[str, Any]] = {
    "ssgd": {"strategy": "ssgd"},
    "dpsgd": {"strategy": "dpsgd"},
    "ring": {"strategy": {"name": "dpsgd", "topology": "ring"}, "optimizer": {"name": "lamb", "lr": 0.01}},
    "combined": {"strategy": {"name": "dpsgd", "order": "adapt_then_combine"}},
    "stale": {"strategy": {"name": "dpsgd", "staleness": 1}},
    "int8": {"strategy": {"name": "dpsgd", "compression": "int8"}},
    "topk": {"strategy": {"name": "dpsgd", "topology": "ring", "compression": {"name": "topk", "ratio": 0.2}}},
    "local_sgd": {"strategy": {"name": "local_sgd", "period": 2, "policies": {"momentum": "average"}}},
    "post-local": {
        "strategy": {
            "name": "local_sgd",
            "period": 4,
            "switch_step": 2,
            "outer": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
        },
        "optimizer": {"name": "adamw", "lr": 0.01},
    },
    "slowmo": {"strategy": {"name": "slowmo", "period": 2}},
    "push_sum": {"strategy": {"name": "push_sum", "topology": "one_peer_exponential"}},
    "noisy_ssgd": {"strategy": "noisy_ssgd"},
    "noisy apart": {"strategy": {"name": "noisy_ssgd", "where": "per_learner"}, "data": {"accumulation": 2}},
}

# Of two learners, real or virtual: without dropout, whose masks differ from rank to rank.
PLAIN: dict[str, Any] = {"strategy": {"name": "dpsgd", "learners": 2}, "model": {"dropout": 0.0}}
# A small model: the iteration for an eigenvalue takes hundreds of products.
HESSIAN: dict[str, Any] = {
    "run": {"hessian_every": 3, "hessian_samples": 12, "hessian_top": 2},
    "model": {"widths": [2, 2, 4, 4]},
}
GROWTHS = {"grew at 2": 2, "grows at 3": 3, "will grow at 4": 4}
WATCHED: dict[str, Any] = merged(merged(PLAIN, HESSIAN), {"run": {"statistics_every": 2, "flatness_samples": 20}})


def images(*, augment: bool = True, validation: int = 0) -> Dataset:
    """uint8 [N, 3, 32, 32]: the class decides the brightness of one quarter."""
    generator = torch.Generator().manual_seed(0)

    def split(num: int) -> Split:
        labels = torch.randint(NUM_CLASSES, (num,), generator=generator)
        pixels = torch.randint(128, (num, 3, 32, 32), generator=generator, dtype=torch.uint8)
        for image, label in zip(pixels, labels.tolist(), strict=True):
            image[:, 16 * (label // 2) :, 16 * (label % 2) :][:, :16, :16] += 100
        return Split(pixels, labels)

    dataset = Dataset("quarters", split(NUM_TRAIN), split(NUM_TEST), NUM_CLASSES, (3, 32, 32))
    normalization = Normalization((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    dataset = dataset.transformed(normalization, Augmentation(flip=False) if augment else None)
    return dataset.hold_out(validation) if validation else dataset


def config(*layers: Mapping[str, Any], **sections: Any) -> TrainConfig:
    """Six steps of LeNet-5, which has dropout and batch normalisation, four to an epoch; later layers override."""
    values: dict[str, Any] = {
        "data": {"batch_size": 12},
        "run": {"steps": 6, "checkpoint_every": 3, "keep_last": 10, "keep_best": False, "device": "cpu"},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "warmup": 3, "schedule_unit": "steps"},
    }
    for layer in (*layers, sections):
        values = merged(values, layer)
    return TrainConfig.from_dict(values)
