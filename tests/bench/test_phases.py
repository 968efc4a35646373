"""Where a step spends its time, on one learner."""

from __future__ import annotations

import pytest

from ddpcore import data, models
from ddpcore.bench import contender
from ddpcore.bench.config import BenchConfig, resolve
from ddpcore.bench.phases import Phases
from ddpcore.launch import World


def test_every_gradient_arrives_between_forward_and_update() -> None:
    spec = models.spec("lenet5")
    plan = resolve(BenchConfig(model="lenet5", batch_size=8, device="cpu"), world_size=1, num_gpus=0)
    dataset = data.build("synthetic", input_shape=spec.input_shapes[0], num_classes=spec.num_classes)
    one = contender.build(contender.COMPUTE, plan, World(), dataset)
    phases = Phases(one)
    with phases.watching():
        for _ in range(3):
            phases.step()
    assert one.trainer is not None
    one.trainer.step()  # no longer watched: nothing below changes
    compute = phases.compute(10.0, cpu=3.0)
    assert compute.forward + compute.backward + compute.update == pytest.approx(10.0)
    assert min(compute.forward, compute.backward, compute.update) > 0
    assert compute.cpu == 3.0
    parameters = list(one.trainer.handle.model.parameters())
    assert sorted(numel for numel, _ in compute.arrivals) == sorted(parameter.numel() for parameter in parameters)
    shares = [share for _, share in compute.arrivals]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] <= 1
    assert compute.arrivals[0][0] in {parameter.numel() for parameter in parameters[-2:]}, "the last layer comes first"
