"""The trainer passes the epoch of each batch to the augmentation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.comm.virtual import VirtualCommunicator
from ddpcore.data import Augmentation, Dataset, ShardedBatches, Split
from ddpcore.distributed.handle import Distributed
from ddpcore.training import Trainer


@pytest.mark.parametrize("learner", [0, 1])
def test_every_epoch_is_augmented_anew(learner: int) -> None:
    torch.manual_seed(0)
    pixels = torch.randint(256, (8, 1, 6, 6)).to(torch.uint8)
    split = Split(pixels, torch.arange(8) % 3, augmentation=Augmentation(seed=1))
    batches = ShardedBatches(8, 4, num_learners=2, seed=2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dataset = Dataset("tiny", split, None, 3, (1, 6, 6))
    handle = Distributed(model, VirtualCommunicator(1))
    trainer = Trainer(handle, optimizer, dataset, batches, learners=[learner], stacked=False, module=model)
    for step in range(6):
        inputs, labels = split.batch(batches.indices(step)[learner], epoch=step // 2)
        assert trainer.step().item() == nn.functional.cross_entropy(model(inputs), labels).item()
