"""``benchmarks/bench_guards.py``: steps with the checks, without them, and timed, take the same steps."""

import bench_guards
import torch


def test_a_step_is_the_same_with_and_without_checks():
    for strategy in bench_guards.STRATEGIES:
        weights = []
        for checks in ("on", "off", "timed"):
            steps = bench_guards.Steps("lenet5", strategy, None)
            for _ in range(2):
                assert steps(checks) > 0
            assert (steps.timed.seconds > 0) == (checks == "timed")
            weights.append(steps.handle.learner.flat.param_LP.clone())
        assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
