"""``Progress``: sums of losses, divergence, the best evaluation."""

from __future__ import annotations

import math

import pytest
import torch

from ddpcore.comm import VirtualCommunicator
from ddpcore.training.progress import Progress


def progress() -> tuple[Progress, VirtualCommunicator]:
    return Progress.start(2, torch.device("cpu")), VirtualCommunicator(2)


def test_means_over_steps_and_learners() -> None:
    made, comm = progress()
    made.add(torch.tensor([1.0, 3.0]))
    assert made.check(comm, False, None) == (2.0, False, 0)
    made.add(torch.tensor([4.0, 6.0]))
    made.add(torch.tensor([6.0, 8.0]))
    assert made.check(comm, False, None) == (6.0, False, 0), "since the last check"
    assert made.first_loss == 2.0
    assert made.end_epoch(comm) == pytest.approx(14 / 3)
    made.add(torch.tensor([1.0, 1.0]))
    assert made.end_epoch(comm) == 1.0


@pytest.mark.parametrize(
    ("losses", "above", "diverged"),
    [((5.0, 6.9), 3.0, False), ((5.0, 7.1), 3.0, True), ((500.0, 1.0), None, False), ((1.0, math.nan), None, True)],
)
def test_divergence(losses: tuple[float, float], above: float | None, diverged: bool) -> None:
    made, comm = progress()
    for step in ((2.0, 2.0), losses):
        made.add(torch.tensor(step))
        made.check(comm, False, above)
    assert made.diverged is diverged


def test_losses_count_as_many_times_as_the_samples_of_a_batch() -> None:
    """Batches of 3 and 1 samples: a loss of the first learner counts three times."""
    made, comm = progress()
    shares_L = torch.tensor([1.5, 0.5])
    made.add(torch.tensor([1.0, 5.0]), shares_L=shares_L)
    assert made.check(comm, False, None)[0] == made.end_epoch(comm) == 2.0
    made.add(torch.tensor([1.0, 5.0]), shares_L=shares_L, only_finite=True)
    made.add(torch.tensor([math.nan, 5.0]), shares_L=shares_L, only_finite=True)
    assert made.check(comm, False, None)[0] == pytest.approx((3 + 5 + 5) / 5)
    assert made.end_epoch(comm) == pytest.approx((3 + 5 + 5) / 5)
    for _ in range(20):  # shares of 5 and 1 samples, whose sums are rounded
        made.add(
            torch.full((2,), math.nan), shares_L=torch.tensor([5 / 3, 1 / 3], dtype=torch.float64), only_finite=True
        )
    assert math.isnan(made.check(comm, False, None)[0]) and math.isnan(made.end_epoch(comm))


def test_a_stop_of_one_learner_stops_all() -> None:
    made, comm = progress()
    made.add(torch.ones(2))
    assert made.check(comm, True, None)[1] is True


def test_the_best_is_the_first_of_equals() -> None:
    made, _ = progress()
    seen = [made.evaluated(accuracy, 1.0, epoch, 10 * epoch) for epoch, accuracy in enumerate([0.2, 0.5, 0.5, 0.4])]
    assert seen == [True, True, False, False]
    assert made.best == {"accuracy": 0.5, "epoch": 1, "step": 10}
    assert made.accuracy == 0.4
    assert Progress(**made.state_dict()).best == made.best


def test_a_loss_that_is_not_finite_in_an_evaluation_is_a_divergence() -> None:
    made, _ = progress()
    assert made.evaluated(0.9, float("nan"), 1, 10) is False
    assert made.diverged and made.best is None


def test_a_state_in_memory_does_not_change() -> None:
    made, _ = progress()
    made.add(torch.tensor([1.0, 3.0]))
    state = made.state_dict()
    made.add(torch.tensor([math.nan, 3.0]), only_finite=True)
    assert state["epoch_loss_L"].tolist() == state["window_loss_L"].tolist() == [1.0, 3.0]
    assert not state["epoch_lost_L"].any() and not state["window_lost_L"].any()
