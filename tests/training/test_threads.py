"""The number of threads follows the size of a model, not a clock."""

import pytest
import torch
from torch import nn

from ddpcore.training import TrainConfig, train
from ddpcore.training.build import LEAST_WORK, build_model, forward_work, read_dataset, threads_for


def config_of(accumulation=1, **model):
    values = {
        "data": {"name": "digits", "batch_size": 128, "accumulation": accumulation},
        "model": {"name": "mlp", **model},
        "strategy": {"name": "dpsgd", "learners": 4},
        "run": {"steps": 2, "evaluate_every": 0},
    }
    return TrainConfig.from_dict(values)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_work_of_a_small_model():
    config = config_of()  # 64-50-50-10
    dataset = read_dataset(config, first=True)
    work = 2 * (64 * 50 + 50 * 50 + 50 * 10) + 20 * 64
    assert forward_work(config, dataset, 1) == 128 * (work + 2 * 110)  # fewer products than weights with biases
    assert forward_work(config, dataset, 2) == forward_work(config, dataset, 1) / 2
    assert forward_work(config_of(accumulation=2), dataset, 1) == forward_work(config, dataset, 1) / 2


def test_work_of_convolutions():
    config = TrainConfig.from_dict(
        {"model": "lenet5", "data": {"name": "synthetic", "batch_size": 32}, "run": {"steps": 1}}
    )
    dataset = read_dataset(config, first=True)
    weights = sum(p.numel() for p in build_model(config, dataset, torch.device("cpu")).parameters())
    assert forward_work(config, dataset, 1) > 5 * 32 * 2 * weights  # a weight of a convolution is used at each place


class OfTheBatch(nn.Module):
    """Normalizes with the statistics of the batch also in evaluation, which one sample does not have."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.BatchNorm1d(50, track_running_stats=False))
        self.head = nn.Linear(50, 10)

    def forward(self, x):
        return self.head(self.layers(x))


def test_a_model_that_normalizes_by_the_batch_has_two_samples(tmp_path):
    config = config_of(name=f"{__name__}:{OfTheBatch.__name__}")
    work = 2 * (64 * 50 + 50 * 10) + 20 * 64
    assert forward_work(config, read_dataset(config, first=True), 1) >= 128 * work
    assert train(config, out=tmp_path / "run").final["step"] == 2


@pytest.mark.parametrize(("hidden", "threads"), [([50, 50], 1), ([1024, 1024], 2)])
def test_a_run_has_the_threads_of_its_size(hidden, threads, two_threads, tmp_path):
    config = config_of(hidden=hidden)
    assert (forward_work(config, read_dataset(config, first=True), 1) < LEAST_WORK) == (threads == 1)
    record = train(config, out=tmp_path / "run")
    assert record.header["threads"] == threads
    assert torch.get_num_threads() == 2  # as before the run


def test_threads_are_restored_after_an_error(two_threads):
    config = config_of()
    with pytest.raises(RuntimeError, match="stop"), threads_for(config, read_dataset(config, first=True), 1):
        assert torch.get_num_threads() == 1
        raise RuntimeError("stop")
    assert torch.get_num_threads() == 2
