"""The studies of the package: every row is a valid run, and published numbers equal those of the documents."""

from __future__ import annotations

import pytest

from ddpcore.data import ShardedBatches, load_dataset
from ddpcore.experiments import study
from ddpcore.experiments.claims import Outcome, judge
from helpers.each import each

NAMES = (
    "batch-size-cifar10",
    "batch-warmup",
    "cifar10-landscape",
    "digits-large-rate",
    "disagreement-eigenspace",
    "edge-of-stability",
    "gpu-configs-cifar10",
    "large-batch-cifar100",
    "large-batch-search",
    "late-averaging",
    "local-sgd-cifar100",
    "lr-sweep-synthetic",
    "mnist-effective-lr",
    "mnist-flat-minimum",
    "mnist-landscape",
    "mnist-odds",
    "muon-gossip",
    "noise-scale-branching",
    "outer-gossip",
    "saddle-escape",
    "single-vs-two",
    "ssgd-vs-dpsgd-cifar10",
    "ssgd-vs-dpsgd-speech",
    "state-dtype",
    "time-to-accuracy",
)

# Typed from the tables of the documents.
PUBLISHED = [
    ("lr-sweep-synthetic", "single-0.0001", "train_loss", 0.7400),
    ("lr-sweep-synthetic", "ddp-0.001", "train_loss", 0.7114),
    ("lr-sweep-synthetic", "single-1.0", "train_loss", 0.6760),
    ("lr-sweep-synthetic", "ddp-1.0", "train_loss", 0.6940),
    ("large-batch-cifar100", "sgdm-256", "accuracy_pct", 52.71),
    ("large-batch-cifar100", "lars-2048", "accuracy_pct", 56.91),
    ("large-batch-cifar100", "lamb-512", "accuracy_pct", 54.93),
    ("large-batch-cifar100", "sgdm-8192", "accuracy_pct", 19.74),
    ("large-batch-cifar100", "lars-8192", "accuracy_pct", 48.0),
    ("large-batch-cifar100", "lamb-8192", "accuracy_pct", 46.0),
    ("local-sgd-cifar100", "samples-J10-K4", "accuracy_pct", 29.75),
    ("local-sgd-cifar100", "steps-J20-K12", "accuracy_pct", 44.73),
    ("local-sgd-cifar100", "rounds-J30-K12", "accuracy_pct", 42.96),
    ("mnist-effective-lr", "dpsgd", "error_pct", 2.1),
    ("mnist-effective-lr", "noise-0.01", "error_pct", 5.7),
    ("mnist-flat-minimum", "dpsgd", "error_pct", 2.3),
    ("mnist-flat-minimum", "ssgd", "error_pct", 2.6),
    ("mnist-flat-minimum", "noise-0.01", "error_pct", 3.9),
    ("mnist-landscape", "dpsgd", "error_pct", 2.3),
    ("mnist-landscape", "ssgd", "error_pct", 2.6),
    ("gpu-configs-cifar10", "simple-cnn-1x1-16", "seconds", 393.81),
    ("gpu-configs-cifar10", "simple-cnn-1x1-16", "precision", 0.39407),
    ("gpu-configs-cifar10", "simple-cnn-2x2-64", "f1", 0.0333),
    ("gpu-configs-cifar10", "resnet-1x1-64", "accuracy", 0.8548),
    ("gpu-configs-cifar10", "resnet-2x2-16", "seconds", 298.57),
    ("gpu-configs-cifar10", "vit-1x2-64", "specificity", 0.9615),
    ("gpu-configs-cifar10", "vit-2x2-64", "recall", 0.6271),
    ("batch-size-cifar10", "128-efficientnet_b0", "accuracy_pct", 87.51),
    ("batch-size-cifar10", "8192-resnext29", "accuracy_pct", 91.06),
    ("batch-size-cifar10", "2048-resnet18", "accuracy_pct", 94.96),
    ("batch-size-cifar10", "128-vgg19", "parameters_mb", 76.45),
    ("batch-size-cifar10", "128-densenet121", "seconds", 19728),
    ("ssgd-vs-dpsgd-cifar10", "baseline-128-mobilenet", "accuracy_or_chance_pct", 89.53),
    ("ssgd-vs-dpsgd-cifar10", "ssgd-8192-senet18", "accuracy_or_chance_pct", 10.0),
    ("ssgd-vs-dpsgd-cifar10", "dpsgd-8192-senet18", "accuracy_or_chance_pct", 90.48),
    ("ssgd-vs-dpsgd-cifar10", "dpsgd-2048-shufflenet", "accuracy_or_chance_pct", 92.89),
    ("ssgd-vs-dpsgd-cifar10", "ssgd-8192-vgg19-half-lr", "accuracy_or_chance_pct", 91.06),
    ("ssgd-vs-dpsgd-cifar10", "dpsgd-8192-googlenet-quarter-lr", "accuracy_or_chance_pct", 93.41),
    ("ssgd-vs-dpsgd-cifar10", "noise-8192-efficientnet_b0-0.04", "accuracy_or_chance_pct", 22.15),
    ("ssgd-vs-dpsgd-speech", "ssgd-4096-synthetic-small", "loss_or_chance", 10.37),
    ("ssgd-vs-dpsgd-speech", "dpsgd-8192-synthetic-large", "loss_or_chance", 1.47),
    ("ssgd-vs-dpsgd-speech", "ssgd-8192-synthetic-small-eighth-lr", "loss_or_chance", 2.05),
    ("ssgd-vs-dpsgd-speech", "dpsgd-8192-synthetic-large-quarter-lr", "loss_or_chance", 1.52),
]
NUM_PUBLISHED = {
    "batch-size-cifar10": 70,
    "gpu-configs-cifar10": 18,
    "large-batch-cifar100": 36,  # the 18 cells of table 1 on two networks
    "local-sgd-cifar100": 18,
    "lr-sweep-synthetic": 10,
    "mnist-effective-lr": 2,
    "mnist-flat-minimum": 3,
    "mnist-landscape": 2,
    "ssgd-vs-dpsgd-cifar10": 132,  # tables 3 and 5, which share 20, and two of section 4.3
    "ssgd-vs-dpsgd-speech": 30,  # tables 4 and 6, which share 6
}


def test_names() -> None:
    assert study.STUDIES.names() == NAMES


@pytest.mark.slow
@each("scale", study.SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_a_valid_run(name: str, scale: str) -> None:
    loaded = study.find_study(name)
    assert loaded.seeds[scale] >= 1
    for row in loaded.rows.values():
        config = row.config(scale)
        assert config.make_strategy() is not None
        if config.strategy.name == "ddp":
            assert row.ranks, f"{row.name}: ddp needs real ranks"


@each(("name", "row", "metric", "value"), PUBLISHED)
def test_published_numbers(name: str, row: str, metric: str, value: float) -> None:
    assert study.find_study(name).rows[row].published[metric] == value


@pytest.mark.parametrize("name", NUM_PUBLISHED)
def test_as_many_rows_as_the_table_has_are_published(name: str) -> None:
    assert sum(bool(row.published) for row in study.find_study(name).rows.values()) == NUM_PUBLISHED[name]


def test_rows_have_the_settings_of_the_documents() -> None:
    rows = study.find_study("large-batch-cifar100").rows
    lars = rows["lars-8192"].config("full")
    assert (lars.optimizer.name, lars.data.batch_size, lars.run.epochs, lars.optimizer.warmup) == (
        "lars",
        8192,
        100,
        5.0,
    )
    assert (lars.optimizer.schedule, lars.optimizer.reference_batch_size, lars.optimizer.param_groups) == (
        "cosine",
        128,
        True,
    )
    lamb = rows["lamb-8192"].config("full")
    assert (lamb.optimizer.lr, lamb.optimizer.warmup, lamb.optimizer.reference_batch_size) == (0.02, 10.0, None)
    assert rows["sgdm-8192"].config("full").optimizer.schedule == "step"
    assert rows["sgdm-8192"].config("cpu").run.epochs == 30
    sweep = study.find_study("lr-sweep-synthetic")
    assert sweep.seeds["full"] == 20
    two = sweep.rows["ddp2-0.1"].config("full")
    assert (two.strategy.learners, two.data.batch_size, two.data.sampler, two.run.epochs) == (2, 32, "distributed", 10)
    local = study.find_study("local-sgd-cifar100").rows["samples-J20-K12"].config("full")
    assert (local.strategy.learners, local.data.sampler, local.strategy.options) == (12, "fixed", {"period": 20})
    five = study.find_study("mnist-effective-lr").rows["dpsgd"].config("full")
    assert (five.strategy.learners, five.data.batch_size, five.optimizer.lr, five.strategy.topology) == (
        5,
        2000,
        1.0,
        "complete",
    )
    six = study.find_study("mnist-flat-minimum").rows["dpsgd"].config("full")
    assert (six.strategy.learners, six.optimizer.lr, six.run.steps, six.strategy.topology) == (6, 0.2, 6000, "ring")
    assert six.strategy.topology_options == {"neighbors_each_side": 2}
    gossip = study.find_study("ssgd-vs-dpsgd-cifar10").rows["dpsgd-4096-vgg19"].config("full")
    assert (gossip.strategy.name, gossip.strategy.topology, gossip.strategy.learners) == ("dpsgd", "random_pair", 16)
    assert (gossip.optimizer.lr, gossip.data.batch_size, gossip.run.epochs, gossip.optimizer.milestones) == (
        0.4,
        4096,
        320,
        (160, 240),
    )
    speech = study.find_study("ssgd-vs-dpsgd-speech").rows["ssgd-4096-synthetic-small-half-lr"].config("full")
    assert (speech.optimizer.lr, speech.optimizer.reference_batch_size, speech.optimizer.warmup) == (0.05, 256, 10)
    hosts = study.find_study("gpu-configs-cifar10").rows["vit-2x2-64"]
    assert (hosts.hosts, hosts.config("full").strategy.learners, hosts.config("full").data.batch_size) == (2, 4, 256)


@pytest.mark.parametrize(
    ("first", "begin", "num_samples"),
    [("", 200, 16384), ("", 800, 16384), ("", 2400, 16384), ("text-", 100, 8192), ("text-", 400, 8192)],
)
def test_branches_of_the_noise_scale_take_the_same_samples(first: str, begin: int, num_samples: int) -> None:
    rows, seen = study.find_study("noise-scale-branching").rows, []
    assert rows[f"{first}until-{begin}"].config("cpu").run.steps == begin
    dataset = rows[f"{first}at-{begin}-1"].config("cpu").data.name
    num_train = len(load_dataset(dataset).train) if dataset == "python_text" else 50000
    for factor in (1, 2, 4, 8, 16):
        config = rows[f"{first}at-{begin}-{factor}"].config("cpu")
        batches = ShardedBatches(num_train, config.data.batch_size, 2, growth=config.data.batch_growth)
        taken = [batches.indices(step) for step in range(begin, config.run.steps or 0)]
        assert {indices.shape for indices in taken} == {(2, 16 * factor)}
        seen.append({sample for indices in taken for sample in indices.flatten().tolist()})
    assert [len(samples) for samples in seen] == [num_samples] * 5
    assert all(samples == seen[0] for samples in seen)


@pytest.mark.parametrize(
    ("name", "claim", "word"),
    [
        ("large-batch-cifar100", 'mean("lars-8192") > mean("sgdm-8192") + 5', "holds"),
        ("lr-sweep-synthetic", 'mean("ddp-1.0") < mean("single-1.0")', "does not hold"),
    ],
)
def test_claims_on_the_published_numbers(name: str, claim: str, word: str) -> None:
    """The second is a claim of a document that its own table contradicts."""
    loaded = study.find_study(name)
    published = {row.name: {0: Outcome(metrics=row.published)} for row in loaded.rows.values() if row.published}
    assert any(claim in one.predicate for one in loaded.claims)
    assert judge(claim, published, loaded.metrics[0]).word == word
