"""The command line as one checked config, and its resolution on a machine."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ddpcore.bench.config import BenchConfig, resolve
from ddpcore.bench.contender import ddp_options
from ddpcore.bench.run import prepare
from ddpcore.options import command_line


def parse(words: list[str]) -> BenchConfig:
    return command_line.parse(BenchConfig, words, prog="bench")


def test_defaults() -> None:
    config = parse([])
    assert config == BenchConfig()
    assert config.world_size is None
    assert config.strategies is None
    training = config.train_config("ssgd")
    assert (training.model.name, training.data.name, training.run.steps) == ("mlp", "digits", 300)
    assert (training.data.batch_size, training.optimizer.lr) == (256, 0.05)
    assert BenchConfig(settings=("model=lenet5",)).value("data") == "synthetic"  # which takes any shape
    assert BenchConfig(settings=("data.num_classes=3",)).value("data") == "synthetic"  # digits has no options
    assert BenchConfig(settings=("model=byte_transformer",)).value("data") == "python_text"
    with pytest.raises(FrozenInstanceError):
        config.backend = "gloo"  # type: ignore[misc]


def test_settings_and_flags(tmp_path: Path) -> None:
    line = (
        "strategy.topology=ring --world-size 3 --strategies dpsgd,ssgd,noisy_ssgd model=mlp data=synthetic_speech "
        "data.data_dir=/somewhere model.hidden=[8,8] data.num_classes=10 "
        "strategy.order=adapt_then_combine strategy.compression=int8 strategy.std=0.5 "
        "data.batch_size=96 optimizer.lr=0.5 optimizer.momentum=0 run.steps=7 run.seed=11 run.device=cpu "
        f"--backend gloo --json {tmp_path / 'out.json'}"
    )
    config = parse(line.split())
    assert (config.world_size, config.backend, config.json) == (3, "gloo", tmp_path / "out.json")
    gossip, noisy = config.train_config("dpsgd"), config.train_config("noisy_ssgd")
    assert gossip.strategy.options == {"order": "adapt_then_combine", "compression": "int8"}
    assert noisy.strategy.options == {"std": 0.5} and config.train_config("ssgd").strategy.options == {}
    for one in (gossip, noisy):
        assert (one.model.options, one.data.options) == ({"hidden": [8, 8]}, {"num_classes": 10})
        assert (one.data.data_dir, one.data.batch_size, one.strategy.topology) == ("/somewhere", 96, "ring")
        assert (one.optimizer.lr, one.optimizer.options) == (0.5, {"momentum": 0})
        assert (one.run.steps, one.run.seed, one.run.device) == (7, 11, "cpu")


def test_baselines_have_the_optimizer_of_torch() -> None:
    for name, options in (("sgd", {"momentum": 0.9}), ("adamw", {})):
        config = BenchConfig(settings=(f"optimizer={name}",))
        ours, theirs = config.train_config("dpsgd").optimizer, config.train_config("ddp").optimizer
        assert (ours.name, ours.options) == (name, options)
        assert (theirs.name, theirs.options) == (f"torch_{name}", {**options, "fused": True})


def test_options_of_baselines_are_kept() -> None:
    resolved = resolve(BenchConfig(settings=("strategy.bucket_cap_mb=5",)), world_size=2, num_gpus=0)
    assert resolved.train_config("ddp", options=ddp_options(25)).strategy.options == {"bucket_cap_mb": 5}
    assert resolved.train_config("ddp", options=ddp_options(1)).strategy.options == {"bucket_cap_mb": 1}


def test_learners_with_neighbours_can_be_quarantined() -> None:
    given = ("strategy.on_nonfinite=quarantine",)
    resolved = resolve(BenchConfig(settings=given, strategies=("dpsgd",)), world_size=4, num_gpus=0)
    assert resolved.training.strategy.on_nonfinite == "quarantine"
    with pytest.raises(ValueError, match="'quarantine': ssgd has no neighbours: take 'skip'"):
        BenchConfig(settings=given, strategies=("dpsgd", "ssgd"))


def test_spaces_between_strategies() -> None:
    assert parse(["--strategies", " ssgd , dpsgd ,"]).strategies == ("ssgd", "dpsgd")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"world_size": 0}, "--world-size is 0"),
        ({"world_size": -3}, "--world-size is -3"),
        ({"backend": "mpi"}, "--backend is 'mpi': choose from"),
        ({"strategies": ("dpsdg",)}, "--strategies: unknown strategy 'dpsdg': did you mean 'dpsgd'"),
        ({"strategies": ("ssgd", "ssgd")}, "names one twice"),
        ({"strategies": ()}, "--strategies is empty"),
        ({"json": Path("/nowhere/at/all/out.json")}, "/nowhere/at/all does not exist"),
    ],
)
def test_refused_values(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        BenchConfig(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["--world-size", "--world-size many", "--nope 1", "--world 5", "--world-size 2.5"])
def test_refused_lines(line: str) -> None:
    with pytest.raises(ValueError, match="--help") as caught:
        parse(line.split())
    assert "\n" not in str(caught.value)


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for item in fields(BenchConfig):
        assert item.name == "settings" or "--" + item.name.replace("_", "-") in text


# --- resolve -----------------------------------------------------------------------------------------------------


def test_on_the_cpu() -> None:
    resolved = resolve(BenchConfig(), world_size=4, num_gpus=0)
    assert (resolved.device, resolved.choice.name, resolved.world_size, resolved.notes) == ("cpu", "gloo", 4, ())
    assert resolved.strategies == ("ddp", "ssgd", "dpsgd", "local_sgd")


def test_a_gpu_for_each_rank() -> None:
    resolved = resolve(BenchConfig(), world_size=2, num_gpus=2)
    assert (resolved.device, resolved.choice.name) == ("cuda", "nccl")


def test_ranks_that_would_share_a_gpu() -> None:
    """Virtual learners: ddp is left out with a note by default, and is an error if it was requested."""
    resolved = resolve(BenchConfig(), world_size=4, num_gpus=1)
    assert (resolved.device, resolved.choice.name) == ("cuda", "virtual")
    assert resolved.strategies == ("ssgd", "dpsgd", "local_sgd")
    assert any("ddp" in note for note in resolved.notes)
    with pytest.raises(ValueError, match=r"ddp needs real ranks.*--strategies"):
        resolve(BenchConfig(strategies=("ddp", "ssgd")), world_size=4, num_gpus=1)
    with pytest.raises(ValueError, match="--backend virtual"):
        resolve(BenchConfig(backend="gloo"), world_size=4, num_gpus=1)
    with pytest.raises(ValueError, match="--backend virtual"):
        resolve(BenchConfig(backend="nccl"), world_size=4, num_gpus=1)


def test_devices_that_are_not_there() -> None:
    with pytest.raises(ValueError, match=r"run\.device=cpu"):
        resolve(BenchConfig(settings=("run.device=cuda",)), world_size=1, num_gpus=0)
    with pytest.raises(ValueError, match="--backend gloo"):
        resolve(BenchConfig(backend="nccl"), world_size=2, num_gpus=0)
    assert resolve(BenchConfig(settings=("run.device=cpu",)), world_size=2, num_gpus=8).choice.name == "gloo"


@pytest.mark.parametrize(
    ("batch", "world", "says"),
    [
        (3, 4, "take 4"),
        (10, 4, "take 8"),
        (255, 2, "take 254"),
        (256, 1024, "take 1024"),
        (256, 2000, "take at most 1400 learners"),
        (2000, 4, "take at most 1400"),
    ],
)
def test_batches_that_do_not_divide(batch: int, world: int, says: str) -> None:
    """The data set is known when the batch is checked, so that no advice leads into another error."""
    with pytest.raises(ValueError, match=says):
        prepare(
            BenchConfig(
                settings=(
                    f"data.batch_size={batch}",
                    "run.device=cpu",
                ),
                world_size=world,
            ),
            None,
        )


def test_one_learner_averages_nothing() -> None:
    assert "averages anything" in resolve(BenchConfig(), world_size=1, num_gpus=0).notes[0]
    assert resolve(BenchConfig(), world_size=2, num_gpus=0).notes == ()


def test_every_topology_fits_every_world() -> None:
    for topology, num in product(["random_pair", "ring", "complete", "one_peer_exponential"], [1, 2, 3, 5]):
        config = BenchConfig(settings=(f"strategy.topology={topology}", "data.batch_size=30"))
        assert resolve(config, world_size=num, num_gpus=0).world_size == num, topology


def test_the_transport() -> None:
    """The transport is chosen before any process starts; virtual learners have none."""
    resolved = resolve(BenchConfig(), world_size=4, num_gpus=0)
    assert resolved.transport is not None
    assert resolved.transport.name == "shm"
    apart = resolve(BenchConfig(), world_size=4, num_gpus=0, num_hosts=2)
    assert apart.transport is not None
    assert apart.transport.name == "mixed"
    assert resolve(BenchConfig(backend="virtual"), world_size=4, num_gpus=0).transport is None
    with pytest.raises(ValueError, match=r"strategy\.transport=shm is for real ranks"):
        resolve(BenchConfig(settings=("strategy.transport=shm",), backend="virtual"), world_size=4, num_gpus=0)
    with pytest.raises(ValueError, match="transport ipc is for"):
        resolve(BenchConfig(settings=("strategy.transport=ipc",)), world_size=4, num_gpus=0)
    with pytest.raises(ValueError, match=r"strategy\.transport is 'tcp': choose from auto, shm, ipc, pg, mixed"):
        BenchConfig(settings=("strategy.transport=tcp",))


def test_batches_by_speed_are_checked_before_ranks_start() -> None:
    """For each strategy with so many learners; one learner alone has the whole batch."""
    fields = {"settings": ("data.batch_size=32", "data.balance=true"), "backend": "gloo"}
    assert resolve(BenchConfig(strategies=("ssgd", "dpsgd", "single"), **fields), world_size=2, num_gpus=0)
    with pytest.raises(ValueError, match="ddp averages all learners alike"):
        resolve(BenchConfig(strategies=("ddp", "dpsgd"), **fields), world_size=2, num_gpus=0)
    sizes = {**fields, "settings": ("data.batch_size=32", "data.learners_batch=[20,11]")}
    with pytest.raises(ValueError, match="together the batch size 32"):
        resolve(BenchConfig(strategies=("dpsgd",), **sizes), world_size=2, num_gpus=0)
