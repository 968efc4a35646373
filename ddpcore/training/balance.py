"""Batches of learners by the speed of their ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from ddpcore.comm.groups import default_group, gather_objects
from ddpcore.comm.link import LearnerClock, Link
from ddpcore.data import Dataset
from ddpcore.records.config import nested
from ddpcore.records.run import RECORD, RunRecord
from ddpcore.training.build import LearnerPlacement, build_model
from ddpcore.training.trainer import learner_losses

ROUNDS, REPEATS = 3, 9  # each round measures the sizes that the last one has dealt


def balanced(placement: LearnerPlacement, dataset: Dataset, resumed: Path | None = None) -> LearnerPlacement:
    """The placement with ``data.learners_batch`` set, if the config has ``data.balance`` and no sizes yet. Collective.

    A run in the folder ``resumed`` keeps its sizes. ValueError: virtual learners have no speed of their own.
    """
    config, world = placement.config, placement.world
    if not config.data.balance or config.data.learners_batch:
        return placement
    batch_size, learners = config.data.batch_size, config.strategy.learners
    if world.world_size < 2 or learners > world.world_size:
        raise ValueError("data.balance is set: it measures one learner on each rank, set data.learners_batch instead")
    if resumed is not None and (resumed / RECORD).exists():
        sizes = nested(RunRecord.read(resumed).header["config"])["data"]["learners_batch"]
        return replace(placement, config=config.overridden({"data": {"learners_batch": sizes}}))
    dataset, sizes, num, seconds = dataset.to(placement.device), [batch_size // learners] * learners, 0, 0.0
    for _ in range(ROUNDS):
        num, seconds = num + sizes[world.rank], seconds + seconds_of(placement, dataset, sizes[world.rank])
        speeds = gather_objects(default_group(None), num / seconds, "the speed of the ranks", config.strategy.timeout)
        sizes = dealt(speeds, batch_size)
    return replace(placement, config=config.overridden({"data": {"learners_batch": sizes}}))


def seconds_of(placement: LearnerPlacement, dataset: Dataset, size: int) -> float:
    """Median seconds of a forward and backward pass of this rank with so many samples; on a link, by its clocks."""
    link = placement.config.strategy.link
    slow = 1.0 if link is None or placement.world.rank else Link.parse(link).slow
    now = time.perf_counter if link is None else LearnerClock(slow).now
    with torch.random.fork_rng(devices=[]):
        model, found = build_model(placement.config, dataset, placement.device), []
        inputs, labels = dataset.train.batch(torch.arange(size, device="cpu"), 0)
        for _ in range(1 + REPEATS):  # the first is a warm-up
            begin = now()
            learner_losses(model(inputs).float(), labels, stacked=False).sum().backward()
            if placement.device.type == "cuda":
                torch.cuda.synchronize()
            found.append(now() - begin)
    return median(found[1:])


def dealt(speeds: Sequence[float], batch_size: int) -> list[int]:
    """So many samples in proportion to speeds, at least one each; together ``batch_size``, by largest remainders."""
    room, total = batch_size - len(speeds), sum(speeds)
    exact = [room * speed / total for speed in speeds]
    sizes = [1 + int(one) for one in exact]
    by_rest = sorted(range(len(sizes)), key=lambda rank: int(exact[rank]) - exact[rank])
    for rank in by_rest[: batch_size - sum(sizes)]:
        sizes[rank] += 1
    return sizes
