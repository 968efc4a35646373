"""A step of the trainer, and its evaluation, compared with plain loops."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ddpcore
from ddpcore.data import Dataset, ResharedBatches, ShardedBatches, Split
from ddpcore.training import Trainer
from ddpcore.training.trainer import learner_losses
from helpers import training


def features(num: int = 24) -> Dataset:
    splits = [Split(*training.samples(num, seed=seed)) for seed in range(3)]
    return Dataset("features", splits[0], splits[1], 3, (5,), splits[2])


def trainer(learners: int | None = None, dataset: Dataset | None = None, **options: Any) -> Trainer:
    dataset = features() if dataset is None else dataset
    model = training.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = ddpcore.Single() if learners is None else ddpcore.SSGD()
    handle = ddpcore.distribute(model, optimizer, strategy, learners=learners)
    batches = ShardedBatches(len(dataset.train), 12, learners or 1, seed=3)
    return Trainer(
        handle,
        optimizer,
        dataset,
        batches,
        learners=list(range(learners or 1)),
        stacked=learners is not None,
        module=model,
        **options,
    )


def weights(made: Trainer) -> torch.Tensor:
    return training.flat_weights(made.handle.evaluation_model())


def plain(steps: int, label_smoothing: float = 0.0, max_norm: float | None = None, lr: Any = None) -> torch.Tensor:
    dataset, model = features(), training.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 if lr is None else lr(step)
        indices = ShardedBatches(24, 12, seed=3).indices(step)[0]
        optimizer.zero_grad()
        outputs = model(dataset.train.inputs[indices])
        F.cross_entropy(outputs, dataset.train.labels[indices], label_smoothing=label_smoothing).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return training.flat_weights(model)


@pytest.mark.parametrize("learners", [None, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_any_accumulation_is_one_big_batch(learners: int | None, accumulation: int) -> None:
    made = trainer(learners, accumulation=accumulation)
    losses = [made.step().mean().item() for _ in range(3)]
    training.assert_near(weights(made), plain(3))
    once = trainer(learners)
    assert losses == pytest.approx([once.step().mean().item() for _ in range(3)])


@pytest.mark.parametrize("learners", [None, 2])
def test_parts_of_different_size_are_one_big_batch(learners: int | None) -> None:
    """The smaller batch at the end of an epoch, divided into parts of different size."""
    made = trainer(learners, features(22), accumulation=3)
    made.batches = replace(made.batches, drop_last=False)
    made.num_steps = 1
    indices = made.indices().flatten()
    assert len(indices) == 10 and len({part.shape[1] for part in made.parts()}) == 2
    model = training.mlp()
    loss = F.cross_entropy(model(made.dataset.train.inputs[indices]), made.dataset.train.labels[indices])
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert made.step().mean().item() == pytest.approx(loss.item())
    training.assert_near(weights(made), training.flat_weights(model))


@pytest.mark.parametrize("learners", [None, 3])
def test_smoothing_clipping_and_schedule(learners: int | None) -> None:
    def lr(step: int) -> float:
        return 0.3 / (1 + step)

    made = trainer(learners, label_smoothing=0.2, max_grad_norm=0.05, schedule=lr)
    for _ in range(3):
        made.step()
    training.assert_near(weights(made), plain(3, label_smoothing=0.2, max_norm=0.05, lr=lr))
    assert not torch.allclose(weights(made), plain(3, label_smoothing=0.2, lr=lr))


def test_each_learner_is_clipped_alone() -> None:
    model = nn.Linear(3, 1)
    handle = ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), ddpcore.LocalSGD(8), learners=2)
    for one, size in zip(handle.models, (1.0, 0.1), strict=True):
        one.weight.grad = size * torch.tensor([[3.0, 0.0, 0.0]])
        one.bias.grad = size * torch.tensor([4.0])
    norms = handle.clip_grad_norm_(1.0)
    torch.testing.assert_close(torch.stack(norms), torch.tensor([5.0, 0.5]))
    for one, share in zip(handle.models, (0.2, 0.1), strict=True):
        torch.testing.assert_close(one.weight.grad, share * torch.tensor([[3.0, 0.0, 0.0]]))
        torch.testing.assert_close(one.bias.grad, share * torch.tensor([4.0]))


def test_bf16_forward_passes_and_fp32_weights() -> None:
    seen: list[torch.dtype] = []
    ends = []
    for autocast in (None, torch.bfloat16):
        made = trainer(autocast=autocast)
        made.handle.model[0].register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.dtype))
        loss = made.step()
        assert loss.dtype == torch.float32
        ends.append(weights(made))
    assert seen == [torch.float32, torch.bfloat16]
    assert ends[1].dtype == torch.float32
    assert not torch.equal(ends[0], ends[1])
    torch.testing.assert_close(ends[0], ends[1], rtol=0.05, atol=0.01)


@pytest.mark.parametrize("learners", [None, 2])
def test_compiled_is_the_same_model(learners: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend runs the captured graph unchanged; torch's own compiler is not tested here."""
    captured = []

    def backend(graph: Any, inputs: Any) -> Any:
        captured.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    made = trainer(learners, compile=True)
    for _ in range(2):
        made.step()
    assert captured
    training.assert_near(weights(made), plain(2))


def test_losses_of_learners() -> None:
    logits, labels = torch.randn(3, 4, 5), torch.randint(5, (3, 4))
    each = [F.cross_entropy(a, b, label_smoothing=0.1) for a, b in zip(logits, labels, strict=True)]
    torch.testing.assert_close(learner_losses(logits, labels, 0.1, stacked=True), torch.stack(each))
    torch.testing.assert_close(learner_losses(logits[0], labels[0], 0.1, stacked=False), each[0][None])


def test_losses_of_labels_at_several_places() -> None:
    """As many samples as places: only the first of both dimensions is that of samples."""
    logits, labels = torch.randn(3, 4, 5, 4), torch.randint(5, (3, 4, 4))
    each = [F.cross_entropy(a, b, label_smoothing=0.1) for a, b in zip(logits, labels, strict=True)]
    torch.testing.assert_close(learner_losses(logits, labels, 0.1, stacked=True), torch.stack(each))
    torch.testing.assert_close(learner_losses(logits[0], labels[0], 0.1, stacked=False), each[0][None])


def test_evaluation_is_of_the_split_that_was_asked_for() -> None:
    made = trainer(3)
    made.step()
    model = made.evaluation_model()
    for split in ("test", "validation"):
        samples = made.dataset.splits()[split]
        found = made.evaluate(model, split)
        logits = made.handle.evaluation_model()(samples.inputs)
        wrong = (logits.argmax(1) != samples.labels).sum().item()
        assert found.error_pct == pytest.approx(100 * wrong / 24)
        assert found.scores.accuracy == pytest.approx(1 - wrong / 24)
        assert found.loss == pytest.approx(F.cross_entropy(logits, samples.labels).item())
        assert int(found.confusion.sum()) == 24
    assert trainer(dataset=replace(features(), test=None)).evaluate(model) is None


def test_evaluation_goes_through_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer()
    model = made.evaluation_model()
    whole = made.evaluate(model)
    monkeypatch.setattr("ddpcore.training.trainer.BATCH_SIZE", 7)
    parts = made.evaluate(model)
    assert torch.equal(whole.confusion, parts.confusion)
    assert whole.loss == pytest.approx(parts.loss)


def test_recalibration_takes_the_last_training_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the augmentation of their epochs: no room is left in the second one when the batch grows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
    dataset = features()
    batches = ShardedBatches(24, 8, 2, growth=((4, 24),))
    made = Trainer(handle, optimizer, dataset, batches, learners=[0, 1], stacked=True, module=model)
    for _ in range(5):
        made.step()
    taken, epochs, batch = [], [], Split.batch

    def noted(split: Split, indices: torch.Tensor, epoch: int = 0) -> Any:
        epochs.append(epoch)
        return batch(split, indices, epoch)

    monkeypatch.setattr(Split, "batch", noted)
    original = handle.evaluation_model

    def evaluation_model(batch_norm: str, inputs: Any) -> nn.Module:
        taken.append(None if inputs is None else list(inputs))
        return original(batch_norm, taken[-1])

    handle.evaluation_model = evaluation_model  # type: ignore[method-assign]
    made.evaluation_model("recalibrate", 2)
    assert epochs == [1, 2]
    expected = [dataset.train.inputs[batches.indices(step).flatten()] for step in (3, 4)]
    assert all(torch.equal(a, b) for a, b in zip(taken[0], expected, strict=True))
    made.evaluation_model()
    assert taken[1] is None
    made.batches, handle.deals = ShardedBatches(24, 8, 2), ((2, (1,)), (4, (0, 1)))  # learner 0 died, and joined again
    made.evaluation_model("recalibrate", 3)
    shared = ResharedBatches(made.batches, handle.deals)
    whose = {2: (1, 1), 3: (1, 1), 4: (0, 1)}  # where it had no samples it takes those of another one
    expected = [
        dataset.train.inputs[torch.cat([shared.indices(step, one) for one in ones])] for step, ones in whose.items()
    ]
    assert all(torch.equal(a, b) for a, b in zip(taken[2], expected, strict=True))
