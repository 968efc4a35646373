"""The command line as one checked config, and its resolution on a machine."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from ddpcore.bench.config import BenchConfig, resolve
from ddpcore.bench.run import prepare
from ddpcore.options import command_line


def parse(words: list[str]) -> BenchConfig:
    return command_line.parse(BenchConfig, words, prog="bench", description="")


def test_defaults() -> None:
    config = parse([])
    assert config == BenchConfig()
    assert config.world_size is None
    assert config.strategies is None
    assert (config.model, config.dataset, config.steps) == ("mlp", "digits", 300)
    assert BenchConfig(model="lenet5").dataset == "synthetic"  # which takes any shape
    assert BenchConfig(dataset_options={"num_classes": 3}).dataset == "synthetic"  # digits has no options
    assert BenchConfig(model="byte_transformer").dataset == "python_text"
    with pytest.raises(FrozenInstanceError):
        config.steps = 1  # type: ignore[misc]


def test_every_flag(tmp_path: Path) -> None:
    line = (
        "--world-size 3 --strategies dpsgd,ssgd --topology ring --model mlp --dataset synthetic_speech "
        "--data-dir /somewhere "
        "--model-options hidden=8x8 --dataset-options num_classes=10 "
        "--order adapt_then_combine --compression int8 --noise-std 0.5 --staleness 0 "
        "--batch-size 96 --optimizer sgd --lr 0.5 --momentum 0 --period 4 --steps 7 --seed 11 --device cpu "
        "--backend gloo "
        f"--json {tmp_path / 'out.json'}"
    )
    assert parse(line.split()) == BenchConfig(
        world_size=3,
        strategies=("dpsgd", "ssgd"),
        topology="ring",
        model_options={"hidden": (8, 8)},
        dataset_options={"num_classes": 10},
        order="adapt_then_combine",
        compression="int8",
        noise_std=0.5,
        model="mlp",
        dataset="synthetic_speech",
        data_dir=Path("/somewhere"),
        batch_size=96,
        lr=0.5,
        momentum=0.0,
        period=4,
        steps=7,
        seed=11,
        device="cpu",
        backend="gloo",
        json=tmp_path / "out.json",
    )


def test_baselines_have_the_optimizer_of_torch() -> None:
    for name, momentum in (("sgd", {"momentum": 0.5}), ("adamw", {})):
        config = BenchConfig(optimizer=name, momentum=0.5)
        ours, theirs = config.train_config("dpsgd"), config.train_config("ddp")
        assert (ours.optimizer, ours.optimizer_options) == (name, momentum)
        assert (theirs.optimizer, theirs.optimizer_options) == (f"torch_{name}", {**momentum, "fused": True})


def test_spaces_between_strategies() -> None:
    assert parse(["--strategies", " ssgd , dpsgd ,"]).strategies == ("ssgd", "dpsgd")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"world_size": 0}, "--world-size is 0"),
        ({"world_size": -3}, "--world-size is -3"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"steps": 0}, "--steps is 0"),
        ({"period": 0}, "--period is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"lr": float("inf")}, "--lr is inf"),
        ({"lr": -0.1}, "--lr is -0.1"),
        ({"momentum": -0.1}, "--momentum is -0.1"),
        ({"momentum": float("nan")}, "--momentum is nan"),
        ({"topology": "spiral"}, "--topology: unknown topology 'spiral': choose from complete, ring, star"),
        ({"local_size": 0}, "--local-size is 0"),
        ({"model": "vgg"}, "--model: unknown model 'vgg': did you mean 'vgg19'"),
        ({"dataset": "cifar"}, "--dataset: unknown data set 'cifar': did you mean 'cifar10'"),
        ({"device": "tpu"}, "--device is 'tpu': did you mean 'cpu'"),
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


@pytest.mark.parametrize(
    "line", ["--steps", "--steps many", "--lr fast", "--nope 1", "extra", "--step 5", "--world-size 2.5"]
)
def test_refused_lines(line: str) -> None:
    with pytest.raises(ValueError, match="--help") as caught:
        parse(line.split())
    assert "\n" not in str(caught.value)


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in BenchConfig.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text


# --- resolve -----------------------------------------------------------------------------------------------------


def test_on_the_cpu() -> None:
    resolved = resolve(BenchConfig(), world_size=4, num_gpus=0)
    assert (resolved.device, resolved.choice.backend, resolved.world_size, resolved.notes) == ("cpu", "gloo", 4, ())
    assert resolved.strategies == ("ddp", "ssgd", "dpsgd", "local_sgd")


def test_a_gpu_for_each_rank() -> None:
    resolved = resolve(BenchConfig(), world_size=2, num_gpus=2)
    assert (resolved.device, resolved.choice.backend) == ("cuda", "nccl")


def test_ranks_that_would_share_a_gpu() -> None:
    """Virtual learners: ddp is left out with a note by default, and is an error if it was requested."""
    resolved = resolve(BenchConfig(), world_size=4, num_gpus=1)
    assert (resolved.device, resolved.choice.backend) == ("cuda", "virtual")
    assert resolved.strategies == ("ssgd", "dpsgd", "local_sgd")
    assert any("ddp" in note for note in resolved.notes)
    with pytest.raises(ValueError, match=r"ddp needs real ranks.*--strategies"):
        resolve(BenchConfig(strategies=("ddp", "ssgd")), world_size=4, num_gpus=1)
    with pytest.raises(ValueError, match="--backend virtual"):
        resolve(BenchConfig(backend="gloo"), world_size=4, num_gpus=1)
    with pytest.raises(ValueError, match="--backend virtual"):
        resolve(BenchConfig(backend="nccl"), world_size=4, num_gpus=1)


def test_devices_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="--device cpu"):
        resolve(BenchConfig(device="cuda"), world_size=1, num_gpus=0)
    with pytest.raises(ValueError, match="--backend gloo"):
        resolve(BenchConfig(backend="nccl"), world_size=2, num_gpus=0)
    assert resolve(BenchConfig(device="cpu"), world_size=2, num_gpus=8).choice.backend == "gloo"


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
        prepare(BenchConfig(batch_size=batch, world_size=world, device="cpu"), None)


def test_one_learner_averages_nothing() -> None:
    assert "averages anything" in resolve(BenchConfig(), world_size=1, num_gpus=0).notes[0]
    assert resolve(BenchConfig(), world_size=2, num_gpus=0).notes == ()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("topology", ["random_pair", "ring", "complete", "one_peer_exponential"])
def test_every_topology_fits_every_world(topology: str, world_size: int) -> None:
    config = BenchConfig(topology=topology, batch_size=30)
    assert resolve(config, world_size=world_size, num_gpus=0).world_size == world_size


def test_the_transport() -> None:
    """The transport is chosen before any process starts; virtual learners have none."""
    resolved = resolve(BenchConfig(), world_size=4, num_gpus=0)
    assert resolved.transport is not None
    assert resolved.transport.name == "shm"
    apart = resolve(BenchConfig(), world_size=4, num_gpus=0, num_hosts=2)
    assert apart.transport is not None
    assert apart.transport.name == "mixed"
    may_die = resolve(BenchConfig(on_failure="shrink"), world_size=4, num_gpus=0, num_hosts=2)
    assert may_die.transport is not None
    assert may_die.transport.name == "pg"
    assert resolve(BenchConfig(backend="virtual"), world_size=4, num_gpus=0).transport is None
    with pytest.raises(ValueError, match="--transport shm is for real ranks"):
        resolve(BenchConfig(backend="virtual", transport="shm"), world_size=4, num_gpus=0)
    with pytest.raises(ValueError, match="--transport ipc"):
        resolve(BenchConfig(transport="ipc"), world_size=4, num_gpus=0)
    with pytest.raises(ValueError, match="--transport is 'tcp': choose from auto, shm, ipc, pg, mixed"):
        BenchConfig(transport="tcp")
