"""Runs whose batch grows: the bits of a plain loop, of a run that stopped, and of one with that batch all along."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ddpcore.data import ShardedBatches
from ddpcore.data.shards import permutation
from ddpcore.models import MODELS
from ddpcore.storage.json_lines import read_lines
from ddpcore.training import RunRecord, TrainConfig, train
from ddpcore.training.build import build_schedule, total_steps
from ddpcore.training.config import merged
from helpers import images as helper
from helpers.resumed import back_to, without_times

GROWTH = [[2, 24], [4, 48]]


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("rule", "power"), [("none", 0), ("sqrt", 0.5), ("linear", 1)])
def test_the_bits_of_a_plain_loop(rule: str, power: float, tmp_path: Path) -> None:
    dataset = helper.images(augment=False)
    fields = {"model": {"dropout": 0.0}, "optimizer": {"name": "torch_sgd", "momentum": 0.9, "warmup": 0}}
    train(
        helper.config(fields, data={"batch_growth": GROWTH, "batch_growth_lr": rule}, run={"record_steps": True}),
        out=tmp_path,
        dataset=dataset,
    )
    torch.manual_seed(0)
    model = MODELS.build("lenet5", input_shape=(3, 32, 32), num_classes=4, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch, begin, end in [(0, 0, 12), (0, 12, 24), (0, 24, 48), (1, 0, 24), (2, 0, 48), (3, 0, 48)]:
        optimizer.param_groups[0]["lr"] = 0.05 * ((end - begin) / 12) ** power
        inputs, labels = dataset.train.batch(torch.from_numpy(permutation(50, 0, epoch)[begin:end].copy()))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name
    lines = read_lines(tmp_path / "steps" / "rank-0.jsonl").rows
    assert [line["batch_size"] for line in lines] == [12, 12, 24, 24, 48, 48]


RESUMED: dict[str, dict[str, Any]] = {
    "one learner": {"run": {"evaluation_batch_norm": "recalibrate", "recalibration_batches": 4}},
    "gossip": {"strategy": {"learners": 3, "name": "dpsgd"}, "data": {"batch_growth_lr": "sqrt"}},
    "stale": {"strategy": {"learners": 2, "name": "dpsgd", "staleness": 1}, "data": {"sampler": "distributed"}},
    "periods": {"strategy": {"learners": 2, "name": "local_sgd", "period": 2}, "data": {"drop_last": False}},
    "parts": {
        "strategy": {"learners": 2, "name": "ssgd"},
        "data": {"shards": "dirichlet", "batch_growth_lr": "linear"},
    },
    "accumulation": {
        "data": {"accumulation": 4, "sampler": "fixed"},
        "optimizer": {"schedule": "cosine", "schedule_unit": "epochs"},
    },
    "curvature": merged(
        merged({"strategy": {"learners": 2, "name": "ssgd"}}, helper.HESSIAN),
        {"run": {"hessian_every": 3, "hessian_top": 1, "hessian_samples": 4}},
    ),
}


FAST = ("one learner", "stale", "parts")


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in FAST else pytest.mark.slow) for one in RESUMED])
def test_resume_before_at_and_after_a_growth(name: str, tmp_path: Path) -> None:
    """The batch grows before step index 3: a checkpoint after 2, 3 and 4 steps."""
    config = helper.config(
        RESUMED[name], data={"batch_growth": [[3, 24]]}, run={"checkpoint_every": 1, "record_steps": True}
    )
    through = train(config, out=tmp_path / "through", dataset=helper.images())
    assert not through.final["diverged"]
    for step in (2, 3, 4):
        out = tmp_path / str(step)
        shutil.copytree(tmp_path / "through", out)
        back_to(step, out)
        torch.manual_seed(99)
        resumed = train(config, out=out, resume=True, dataset=helper.images())
        assert resumed.resumed[0]["step"] == step
        for file in ("model.safetensors", "checkpoints/step-00000006/rank-0.safetensors"):
            assert (out / file).read_bytes() == (tmp_path / "through" / file).read_bytes(), (step, file)
        assert without_times(resumed) == without_times(through)
        curvature = [[{**row, "seconds": 0} for row in one.hessian] for one in (resumed, through)]
        assert curvature[0] == curvature[1]
        lines = [read_lines(folder / "steps" / "rank-0.jsonl").rows for folder in (out, tmp_path / "through")]
        seen = [[(line["step"], line["batch_size"], line["loss"]) for line in one] for one in lines]
        assert seen[0] == seen[1] and len(seen[0]) == 6


def test_another_growth_is_another_run(tmp_path: Path) -> None:
    train(helper.config(data={"batch_growth": [[3, 24]]}), out=tmp_path, dataset=helper.images())
    with pytest.raises(ValueError, match=r"holds another run: data.batch_growth is \[\[4, 24\]\], not \[\[3, 24\]\]"):
        train(helper.config(data={"batch_growth": [[4, 24]]}), out=tmp_path, resume=True, dataset=helper.images())


def run(out: Path, **fields: Any) -> RunRecord:
    common = {
        "run": {"steps": None, "epochs": 3},
        "optimizer": {"schedule": "cosine", "schedule_unit": "epochs", "warmup": 1},
    }
    return train(helper.config(common, fields), out=out, dataset=helper.images())


def test_growth_at_step_0_is_a_run_with_that_batch(tmp_path: Path) -> None:
    at_0, plain = run(tmp_path / "0", data={"batch_growth": [[0, 24]]}), run(tmp_path / "24", data={"batch_size": 24})
    assert weights(tmp_path / "0") == weights(tmp_path / "24")
    assert [{**row, "batch_size": 24} for row in without_times(plain)[:-1]] == without_times(at_0)[:-1]
    run(tmp_path / "linear", data={"batch_growth": [[0, 24]], "batch_growth_lr": "linear"})
    run(tmp_path / "reference", data={"batch_size": 24}, optimizer={"reference_batch_size": 12})
    assert weights(tmp_path / "linear") == weights(tmp_path / "reference") != weights(tmp_path / "0")


def test_before_it_grows_it_is_the_run_without_growth(tmp_path: Path) -> None:
    """So runs that grow at one step are branches of one run."""
    for name, growth in {"8": [[4, 48]], "2": [[4, 24]], "1": []}.items():
        fields = {
            "data": {"batch_growth": growth},
            "strategy": {"learners": 2, "name": "ssgd"},
            "optimizer": {"warmup": 0},
            "run": {"checkpoint_every": 2},
        }
        train(helper.config(fields), out=tmp_path / name, dataset=helper.images())
    files = [tmp_path / name / "checkpoints" / "step-00000004" / "rank-0.safetensors" for name in "821"]
    assert len({file.read_bytes() for file in files}) == 1
    assert len({weights(tmp_path / name) for name in "821"}) == 3


def test_a_run_in_epochs_ends_after_so_many_epochs(tmp_path: Path) -> None:
    """50 samples: four batches of 12; one of 16 and one of 24; two of 24."""
    record = run(tmp_path / "grown", data={"batch_growth": [[4, 16], [5, 24]]})
    assert [(row["epoch"], row["step"], row["batch_size"]) for row in record.epochs] == [
        (1, 4, 12), (2, 6, 24), (3, 8, 24),
    ]  # fmt: skip
    assert record.header["total_steps"] == record.final["step"] == 8
    taken = [row["samples_per_s"] * row["seconds"] for row in record.epochs]
    assert taken == pytest.approx([48, 40, 48])
    assert "batch_size" not in run(tmp_path / "plain").epochs[0], "without growth the record has what it had"


def test_an_incomplete_batch_counts_its_samples(tmp_path: Path) -> None:
    """Without drop_last, of 50 samples the last batch of the first epoch has 14, of a size of 24."""
    fields = {
        "run": {"steps": 7, "epochs": None},
        "optimizer": {"warmup": 0},
        "data": {"drop_last": False, "batch_growth": [[3, 24]]},
    }
    record = run(tmp_path, **fields)
    assert [(row["step"], row["batch_size"]) for row in record.epochs] == [(4, 24), (7, 24)]
    taken = [row["samples_per_s"] * row["seconds"] for row in record.epochs]
    assert taken == pytest.approx([50, 50])


def test_small_parts_count_all_samples_of_a_step(tmp_path: Path) -> None:
    """A learner with three samples repeats them in a step of 12 or 24: samples_per_s counts each time."""
    parts = {"data": {"shards": {"name": "given", "parts": [[0, 1, 2], [3, 4, 5]]}}}
    fields = {
        "run": {"steps": 4, "epochs": None},
        "strategy": {"learners": 2, "name": "ssgd"},
        "optimizer": {"warmup": 0},
        "data": {"batch_growth": [[2, 24]]},
    }
    record = run(tmp_path, **merged(parts, fields))
    taken = [row["samples_per_s"] * row["seconds"] for row in record.epochs]
    assert taken == pytest.approx([12, 12, 24, 24])


def rates(**fields: Any) -> list[float]:
    config = TrainConfig.from_dict(
        merged({"run": {"epochs": 4}, "optimizer": {"lr": 1.0}, "data": {"batch_growth": [[10, 256]]}}, fields)
    )
    batches = ShardedBatches(1280, 128, growth=config.data.batch_growth)
    assert total_steps(config, batches) == 25, "an epoch has ten steps, and then five"
    schedule = build_schedule(config, batches)
    return [schedule(step) for step in range(26)]


def test_a_schedule_in_epochs_counts_data() -> None:
    """After step 10 a step moves through as much data as two steps before."""
    for fields in ({}, {"run": {"epochs": None, "steps": 25}}):
        cosine = rates(**merged(fields, {"optimizer": {"schedule": "cosine"}}))
        assert [cosine[step] for step in (0, 10, 15, 20, 25)] == pytest.approx(
            [(1 + math.cos(math.pi * part)) / 2 for part in (0, 1 / 4, 1 / 2, 3 / 4, 1)]
        )
    step = rates(optimizer={"schedule": "step", "milestones": [1.5, 2.5], "gamma": 0.5})
    assert [step[i] for i in (0, 12, 13, 17, 18)] == [1, 1, 0.5, 0.5, 0.25]
    assert rates(optimizer={"warmup": 2})[9:17] == pytest.approx([0.5, 0.55, 0.65, 0.75, 0.85, 0.95, 1, 1])
    exponential = rates(optimizer={"schedule": "exponential", "gamma": 0.25})
    assert (exponential[10], exponential[15]) == pytest.approx((0.25, 0.0625))


def test_a_schedule_in_steps_counts_steps() -> None:
    step = rates(optimizer={"schedule": "step", "milestones": [18], "gamma": 0.5, "schedule_unit": "steps"})
    assert step == [1.0] * 18 + [0.5] * 8
    cosine = rates(optimizer={"schedule": "cosine", "schedule_unit": "steps"})
    assert cosine == pytest.approx([(1 + math.cos(math.pi * step / 25)) / 2 for step in range(26)])


def test_the_rate_with_the_batch() -> None:
    for rule, factor in (("none", 1), ("sqrt", 2**0.5), ("linear", 2)):
        assert rates(data={"batch_growth_lr": rule}) == [1.0] * 10 + [factor] * 16
    assert rates(data={"batch_growth_lr": "linear"}, optimizer={"reference_batch_size": 64}) == [2.0] * 10 + [4.0] * 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": {"batch_growth": 5}}, "batch_growth is 5: it must be a list of pairs"),
        (
            {"data": {"batch_growth": [5, 256]}},
            "batch_growth is [5, 256]: it must be a list of pairs, such as [[300, 256]]",
        ),
        ({"data": {"batch_growth": [[5]]}}, "batch_growth is [[5]]: it must be a list of pairs"),
        ({"data": {"batch_growth": [[5, 256, 3]]}}, "batch_growth is [[5, 256, 3]]: it must be a list of pairs"),
        ({"data": {"batch_growth": [[5, 256.0]]}}, "batch_growth is 256.0: it must be a whole number"),
        (
            {"data": {"batch_growth": [[5, 256], [5, 512]]}},
            "batch_growth has the steps [5, 5]: they must ascend, from 0",
        ),
        (
            {"data": {"batch_growth": [[5, 64]]}},
            "batch_growth has the batch sizes [64]: they must ascend, from above 128",
        ),
        (
            {"data": {"batch_growth": [[5, 258]], "accumulation": 4}},
            "batch_growth has the batch size 258: it must be a multiple of learners x accumulation, 1 x 4",
        ),
        (
            {"data": {"batch_growth": [[5, 256]]}, "run": {"epochs": None, "steps": 5}},
            "batch_growth has the step 5: the run ends after 5 steps",
        ),
        (
            {"data": {"batch_growth": [[5, 256]]}, "model": {"compile": True}},
            "data.batch_growth is set and model.compile is True: a compiled model has one batch size, leave one out",
        ),
        (
            {
                "data": {"batch_growth": [[5, 256]]},
                "run": {"statistics_every": 5},
                "strategy": {"learners": 2, "name": "ssgd"},
            },
            "data.batch_growth is set and run.statistics_every is 5: a noise scale averages steps of one batch",
        ),
        (
            {"data": {"batch_growth": [[5, 256]]}, "strategy": {"on_failure": "shrink", "learners": 4, "name": "ssgd"}},
            "data.batch_growth is set and strategy.on_failure is 'shrink': ranks that die and join share batches",
        ),
        ({"data": {"batch_growth_lr": "root"}}, "batch_growth_lr is 'root': "),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        TrainConfig.from_dict(merged({"run": {"epochs": 2}}, fields))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_that_ends_before_it_grows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch_growth has the step 12: the run ends after 12 steps, take earlier"):
        run(tmp_path, data={"batch_growth": [[12, 24]]})
    with pytest.raises(ValueError, match="the batch size is 60 but there are only 50 samples: take at most 50"):
        run(tmp_path, data={"batch_growth": [[4, 60]]})
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_the_config_of_a_run_from_before_batches_could_grow() -> None:
    config = TrainConfig.from_dict(
        {"run": {"epochs": 2}, "data": {"batch_growth": [(5, 256)], "batch_growth_lr": "sqrt"}}
    )
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert config.to_dict()["data"]["batch_growth"] == [[5, 256]]
    plain = TrainConfig.from_dict({"run": {"epochs": 2}})
    older = plain.to_dict()
    del older["data"]["batch_growth"], older["data"]["batch_growth_lr"]
    assert TrainConfig.from_dict(older) == plain and plain.difference(older) == []
