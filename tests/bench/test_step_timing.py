"""The time of the parts of a step, on one learner."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddpcore.bench import contender
from ddpcore.bench.config import BenchConfig, resolve
from ddpcore.bench.contender import Contender
from ddpcore.bench.isolated import StepTimer
from ddpcore.data import load_dataset
from ddpcore.models import MODELS
from ddpcore.optim import FusedSGD
from ddpcore.runtime.launch import World


def test_every_gradient_arrives_between_forward_and_update(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MODELS.spec("lenet5")
    resolved = resolve(
        BenchConfig(
            settings=(
                "model=lenet5",
                "data.batch_size=8",
                "run.device=cpu",
            )
        ),
        world_size=1,
        num_gpus=0,
    )
    dataset = load_dataset("synthetic", input_shape=spec.input_shapes[0], num_classes=spec.num_classes)
    one = Contender.build(contender.COMPUTE, resolved, World(), dataset)
    timer = StepTimer(one)
    clock = count()
    monkeypatch.setattr(timer, "_now", lambda: float(next(clock)))  # each reading takes a second
    with timer.hooks():
        for _ in range(3):
            timer.step()
    assert one.trainer is not None
    one.trainer.step()  # hooks are removed
    parameters = list(one.trainer.handle.model.parameters())
    assert next(clock) == 3 * (4 + len(parameters))
    compute = timer.compute(3.0 + len(parameters), cpu=3.0)
    assert (compute.forward, compute.update, compute.cpu) == (1, 1, 3)
    assert compute.backward == len(parameters) + 1
    assert [share for _, share in compute.arrivals] == [
        pytest.approx(number / (len(parameters) + 1)) for number in range(1, len(parameters) + 1)
    ]
    assert sorted(numel for numel, _ in compute.arrivals) == sorted(parameter.numel() for parameter in parameters)
    assert compute.arrivals[0][0] in {parameter.numel() for parameter in parameters[-2:]}, "the last layer comes first"


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_the_work_of_our_strategies_without_communication_has_their_optimizer() -> None:
    spec = MODELS.spec("mlp")
    resolved = resolve(
        BenchConfig(
            settings=(
                "model=mlp",
                "data.batch_size=8",
                "run.device=cpu",
            )
        ),
        world_size=1,
        num_gpus=0,
    )
    dataset = load_dataset("synthetic", input_shape=spec.input_shapes[0], num_classes=spec.num_classes)
    kinds = {}
    for name in ("ssgd", "ddp"):
        one = Contender.build(contender.compute_of(name), resolved, World(), dataset)
        one.run(3, timed=True)
        assert one.bytes_per_step(1) == 0
        assert one.trainer is not None
        kinds[name] = type(one.trainer.optimizer)
    assert kinds == {"ssgd": FusedSGD, "ddp": torch.optim.SGD}
