"""``ddpcore bench`` as a user runs it: errors, and small real runs."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpcore.bench import __main__ as bench
from ddpcore.bench import run
from helpers import ranks

ROW = {
    "strategy",
    "topology",
    "world_size",
    "samples_per_s",
    "curve",
    "step_ms",
    "exposed_comm_ms",
    "bytes_per_step",
    "loss_first",
    "loss_last",
    "test_error_pct",
    "consensus_distance",
    "num_nonfinite",
    "ratio_to_ddp",
}
ENVIRONMENT = {
    "device", "device_type", "cores", "kernels", "threads_per_rank", "oversubscribed", "backend", "backend_reason",
    "transport", "transport_reason", "ddpcore", "commit", "torch", "cuda", "python", "date", "notes",
}  # fmt: skip


def command(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the bench in its own process, in an empty folder, on the CPU."""
    return ranks.python("-m", "ddpcore.bench", *line.split(), cwd=folder, CUDA_VISIBLE_DEVICES="")


def started(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The same as a user starts it: in a new interpreter, which spawns its ranks."""
    environment = ranks.environment() | {"CUDA_VISIBLE_DEVICES": ""}
    whole = [sys.executable, "-m", "ddpcore.bench", *line.split()]
    return subprocess.run(whole, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


def strict(text: str) -> Any:
    """Parse strict JSON: NaN and Infinity, which Python's parser accepts, are errors."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


Start = Callable[[str, Path], subprocess.CompletedProcess[str]]


def rows_of(line: str, folder: Path, start: Start = command) -> tuple[dict[str, Any], dict[str, dict[str, Any]], str]:
    """The environment, the rows by strategy, and the printed text of a run that must succeed."""
    done = start(f"{line} --json out.json", folder)
    assert done.returncode == 0, done.stderr
    result = strict((folder / "out.json").read_text())
    assert set(result) - {"checksum"} == {"environment", "model", "dataset", "batch_size", "steps", "rows"}
    assert set(result["environment"]) == ENVIRONMENT
    for row in result["rows"]:
        assert set(row) == ROW
        assert set(row["step_ms"]) == {"p20", "p50", "p80"}
        assert 0 < row["step_ms"]["p20"] <= row["step_ms"]["p50"] <= row["step_ms"]["p80"]
        assert row["samples_per_s"] > 0
        assert row["strategy"] in done.stdout
    rows = {row["strategy"]: row for row in result["rows"]}
    assert len(rows) == len(result["rows"])
    return result["environment"], rows, done.stdout


# --- refusals ----------------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    magic = {1: 2049, 3: 2051}[array.ndim]
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """A folder with 64 training and 32 test images, each class with its own brightness."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, count in (("train", 64), ("t10k", 32)):
        labels = np.arange(count) % 10
        images = labels[:, None, None] * 25 + generator.integers(0, 20, (count, 28, 28))
        (raw / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))
    return tmp_path / "data"


def gone(raw: Path) -> None:
    (raw / "train-labels-idx1-ubyte").unlink()


def truncated(raw: Path) -> None:
    file = raw / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])


def mislabelled(raw: Path) -> None:
    (raw / "t10k-images-idx3-ubyte").write_bytes((raw / "t10k-labels-idx1-ubyte").read_bytes())


def broken_gzip(raw: Path) -> None:
    file = raw / "t10k-labels-idx1-ubyte"
    file.with_name(file.name + ".gz").write_bytes(gzip.compress(file.read_bytes())[:-9])
    file.unlink()


def check_refusal(errors: str, says: str) -> None:
    lines = errors.strip().splitlines()
    assert len(lines) == 1, errors
    assert lines[0].startswith("ddpcore bench: ")
    assert says in lines[0]
    assert "Traceback" not in errors


REFUSED = [
    ("--world-size 0", "--world-size is 0"),
    ("--world-size -2", "--world-size is -2"),
    ("--strategies sgd", "--strategies: unknown strategy 'sgd'"),
    ("model=vgg", "model: unknown model 'vgg'"),
    ("data=imagenet", "data: unknown data set 'imagenet'"),
    ("strategy.topology=moebius", "strategy.topology: unknown topology 'moebius'"),
    ("strategy.topology=hypercube --world-size 6 data.batch_size=12", "6 learners are no power of two"),
    ("strategy.topology=hierarchical strategy.topology.local_size=0", "local_size is 0"),
    ("--backend mpi", "--backend is 'mpi'"),
    ("run.device=tpu", "run.device is 'tpu'"),
    ("optimizer.lr=nan", "optimizer.lr is nan"),
    ("optimizer.lr=-1", "optimizer.lr is -1"),
    ("optimizer.momentum=nan", "momentum is nan"),
    ("data.batch_size=3 --world-size 4", "batch size 3"),
    ("data.batch_size=10 --world-size 4", "not a multiple"),
    ("data.batch_size=100000 --world-size 4", "only 1400 samples"),
    ("--backend nccl", "--backend nccl needs a GPU"),
    ("run.device=cuda", "run.device=cuda"),
    ("data=mnist model=lenet5", "--data-dir"),
    ("data=mnist model=lenet5 data.data_dir=nowhere", "no such file"),
    ("data=cifar10 model=lenet5", "--data-dir"),
    ("data=cifar100 model=resnet18 data.data_dir=nowhere", "holds neither cifar-100-python nor cifar-100-binary"),
    ("data=mnist model=mlp data.download=true", "--data-dir"),
    ("data.normalize=true data=synthetic", "leave normalize out"),
    ("data.augment=true", "leave augment out"),
    ("--backend virtual --strategies ddp", "ddp needs real ranks"),
    ("run.steps=0", "run.steps is 0"),
    ("strategy.period=0", "period is 0"),
    ("strategy.timeout=0", "strategy.timeout is 0.0: it must be above 0"),
    ("strategy.timeout=-1", "strategy.timeout is -1.0: it must be above 0"),
    ("strategy.timeout=inf", "strategy.timeout is inf"),
    ("run.steps=many", "run.steps is 'many': it must be a whole number"),
    ("--lr 0.1", "--lr"),
    ("lr=0.1", "a training run has no 'lr': write optimizer.lr"),
    ("strategy=dpsgd", "strategy.name is set: use --strategies"),
    ("strategy.learners=3", "strategy.learners is set: use --world-size"),
    ("run.epochs=3", "run.epochs is set: a bench uses steps, seed, device of a run alone"),
    ("--strategies ssgd strategy.period=4", "no strategy of ssgd has the option 'period': choose from weights"),
    ("--strategies local_sgd strategy.perod=4", "has the option 'perod': did you mean 'period'?"),
    ("optimizer.lr=fast", "optimizer.lr is 'fast'"),
    ("--frobnicate 3", "--frobnicate"),
    ("--json nowhere/out.json", "does not exist"),
    ("--json .", "--json"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refused(line: str, says: str, refused: Callable[[str, str], None]) -> None:
    refused(line if "--json" in line else f"{line} --json out.json", says)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("damage", [gone, truncated, mislabelled, broken_gzip], ids=lambda damage: damage.__name__)
def test_refused_files(damage: Callable[[Path], None], mnist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(mnist / "MNIST" / "raw")
    line = f"data=mnist model=lenet5 data.batch_size=16 data.data_dir={mnist} --json out.json"
    assert bench.main(line.split()) == 2
    check_refusal(capsys.readouterr().err, "ubyte")
    assert not (mnist.parent / "out.json").exists()


@pytest.mark.usefixtures("no_launch")
def test_refused_model(mnist: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that does not accept the data: the message names models that do."""
    assert bench.main(f"data=mnist model=simplenet data.batch_size=16 data.data_dir={mnist}".split()) == 2
    errors = capsys.readouterr().err
    check_refusal(errors, "model simplenet")
    assert "lenet5" in errors


@pytest.mark.usefixtures("no_launch")
def test_a_rank_of_torchrun_names_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors of a rank name the rank, because a file may be missing on only one machine."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert bench.main(["run.steps=0"]) == 2
        assert capsys.readouterr().err == f"ddpcore bench, rank {rank}: run.steps is 0: it must be at least 1\n"


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("variables", "line"),
    [({"RANK": "a", "WORLD_SIZE": "2"}, ""), ({}, "run.seed=99999999999999999999"), ({}, "--json /proc/x.json")],
)
def test_refused_before_anything_starts(
    variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert bench.main(line.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("line", ["--world-size 0 --json out.json", "optimizer.lr=nan --json out.json"])
def test_refused_as_a_process(line: str, tmp_path: Path) -> None:
    done = command(line, tmp_path)
    assert done.returncode == 2
    assert not done.stdout
    check_refusal(done.stderr, "is")
    assert not list(tmp_path.iterdir())


# --- small runs --------------------------------------------------------------------------------------------------


def test_edges_that_go_two_ways_are_counted(tmp_path: Path) -> None:
    """Here all ranks are on one host, whatever was requested."""
    line = "--world-size 2 run.steps=2 data.batch_size=32 --strategies ssgd,dpsgd strategy.transport=mixed"
    environment, _, text = rows_of(line, tmp_path)
    said = "dpsgd: 1 host: shared memory inside a host (1 edge), torch.distributed, gloo, between hosts (0 edges)"
    assert [note for note in environment["notes"] if "host" in note] == [f"{said} and for averages of all ranks"]
    assert said.split(",")[0] in text


@pytest.mark.slow
def test_default_strategies_twice(tmp_path: Path) -> None:
    """Two real ranks. The same seed gives the same losses, bit for bit, however the ranks were started."""
    line = "--world-size 2 run.steps=6 data.batch_size=32 run.seed=3 strategy.period=2"
    environment, rows, text = rows_of(line, tmp_path)
    assert list(rows) == ["ddp", "ssgd", "dpsgd", "local_sgd"]
    assert (environment["backend"], environment["transport"]) == ("gloo", "shm")
    assert "backend gloo: ranks on the CPU" in text
    assert "transport shm: 2 ranks on the CPU of one host" in text
    assert len({row["loss_first"] for row in rows.values()}) == 1
    for row in rows.values():
        assert row["world_size"] == 2
        assert 0 < row["test_error_pct"] < 100
        assert row["exposed_comm_ms"] >= 0
        assert row["ratio_to_ddp"] > 0
        assert row["loss_last"] != row["loss_first"]
    assert rows["ddp"]["ratio_to_ddp"] == 1.0
    assert rows["dpsgd"]["topology"] == "random_pair"
    assert rows["ssgd"]["topology"] is None
    assert rows["ssgd"]["loss_last"] == pytest.approx(rows["ddp"]["loss_last"], rel=1e-5)
    assert rows["ssgd"]["consensus_distance"] == pytest.approx(0, abs=1e-6)
    assert rows["dpsgd"]["consensus_distance"] > 1e-5
    assert rows["ddp"]["bytes_per_step"] == pytest.approx(rows["ssgd"]["bytes_per_step"], rel=0.5)  # no padding in ddp
    assert rows["local_sgd"]["bytes_per_step"] == pytest.approx(rows["ssgd"]["bytes_per_step"] / 2)

    _, again, _ = rows_of(line, tmp_path, started)
    for name, row in rows.items():
        for key in ("loss_first", "loss_last", "consensus_distance", "bytes_per_step"):
            assert again[name][key] == row[key], f"{name}: {key}"
    assert {entry.name for entry in tmp_path.iterdir()} == {"out.json"}


def test_virtual_learners_have_the_losses_of_real_ranks(tmp_path: Path) -> None:
    line = "--world-size 3 run.steps=5 data.batch_size=30 --strategies ssgd,dpsgd,local_sgd strategy.period=2"
    environment, virtual, _ = rows_of(f"{line} --backend virtual", tmp_path)
    assert (environment["backend"], environment["transport"]) == ("virtual", None)
    _, real, _ = rows_of(f"{line} --backend gloo strategy.transport=pg", tmp_path)
    for name, row in virtual.items():
        assert row["loss_first"] == pytest.approx(real[name]["loss_first"], rel=1e-6)
        assert row["loss_last"] == pytest.approx(real[name]["loss_last"], rel=1e-5)
        assert row["bytes_per_step"] == real[name]["bytes_per_step"], f"{name}: virtual learners count as real ones"
        assert row["consensus_distance"] == pytest.approx(real[name]["consensus_distance"], rel=1e-4, abs=1e-6)
        assert row["ratio_to_ddp"] is None


@pytest.mark.usefixtures("no_launch")
def test_ranks_of_torchrun_do_not_download(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All ranks would write the same files."""
    variables = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run, "build_dataset", lambda *args, **more: pytest.fail("data were read"))
    assert bench.main(["data=mnist", "model=mlp", "data.data_dir=.", "data.download=true"]) == 2
    assert "data.download under torchrun" in capsys.readouterr().err


@pytest.mark.parametrize("options", ["", "data.augment=true data.normalize=true"])
def test_cifar_on_ranks_and_as_virtual_learners(options: str, tmp_path: Path) -> None:
    """Real ranks and virtual learners get the same augmented batches. The model has no dropout, unlike LeNet-5."""
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    records = np.random.default_rng(0).integers(0, 256, (6, 10, 3073), dtype=np.uint8)
    records[:, :, 0] %= 10
    for name, part in zip([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], records, strict=True):
        (folder / f"{name}.bin").write_bytes(part.tobytes())
    line = f"--world-size 2 run.steps=6 data.batch_size=20 data=cifar10 data.data_dir={folder.parent} model=simple_cnn"
    rows = {}
    for backend in ("gloo", "virtual"):
        _, rows[backend], _ = rows_of(f"{line} --strategies ssgd --backend {backend} {options}", tmp_path)
    real, virtual = (rows[backend]["ssgd"] for backend in ("gloo", "virtual"))
    assert (real["test_error_pct"] * 10 / 100) % 1 == 0, "a share of 10 images"
    assert virtual["loss_first"] == pytest.approx(real["loss_first"], rel=1e-6)
    assert virtual["loss_last"] == pytest.approx(real["loss_last"], rel=1e-5)


def test_virtual_learners_on_mnist_leave_ddp_out_with_a_note(mnist: Path) -> None:
    """A model with buffers, convolutions and dropout."""
    line = (
        f"--world-size 2 run.steps=2 data.batch_size=8 --backend virtual data=mnist data.data_dir={mnist} model=lenet5"
    )
    environment, rows, text = rows_of(line, mnist.parent)
    assert list(rows) == ["ssgd", "dpsgd", "local_sgd"]
    assert "ddp" in environment["notes"][0]
    assert environment["notes"][0] in text
    assert all(0 <= row["test_error_pct"] <= 100 for row in rows.values())


def test_mnist_with_single_beside_ranks(mnist: Path) -> None:
    """The test error is that of the whole test set; single is one learner on the whole batch."""
    line = f"--world-size 2 run.steps=4 data.batch_size=16 data=mnist data.data_dir={mnist} model=mlp"
    _, rows, _ = rows_of(f"{line} --strategies single,ddp,dpsgd", mnist.parent)
    for row in rows.values():
        assert 0 <= row["test_error_pct"] <= 100
        assert (row["test_error_pct"] * 32 / 100) % 1 == 0, "a share of 32 images"
    single = rows["single"]
    assert (single["world_size"], single["bytes_per_step"]) == (1, 0.0)
    assert single["exposed_comm_ms"] is None
    assert single["consensus_distance"] is None
    assert single["loss_first"] == pytest.approx(rows["ddp"]["loss_first"], rel=1e-5)
    assert single["loss_last"] == pytest.approx(rows["ddp"]["loss_last"], rel=1e-4)


def test_one_step_and_one_learner(tmp_path: Path) -> None:
    _, rows, _ = rows_of("--world-size 1 run.steps=1 data.batch_size=8", tmp_path)
    for row in rows.values():
        assert row["loss_first"] == row["loss_last"]
        assert row["bytes_per_step"] == 0
        assert row["consensus_distance"] == 0


def test_a_run_that_diverges(tmp_path: Path) -> None:
    """A diverged loss is null in strict JSON and a word in the table; the exit code is 0."""
    _, rows, text = rows_of("--world-size 2 run.steps=6 data.batch_size=16 optimizer.lr=1e30", tmp_path)
    for row in rows.values():
        assert row["loss_last"] is None
        assert row["loss_first"] is not None
        assert row["test_error_pct"] is None
    assert text.count("diverged") == 2 * len(rows)  # in the table and below it


def test_options_reach_the_model_and_the_data_set(tmp_path: Path) -> None:
    line = (
        "model=speech_lstm model.depth=1 model.width=4 model.bottleneck=3 data=synthetic_speech "
        "data.num_classes=5 data.num_frames=3 data.num_features=6 data.num_samples=50 "
        "--backend virtual --world-size 2 --strategies ssgd data.batch_size=8 run.steps=10"
    )
    _, rows, _ = rows_of(line, tmp_path)
    num_parameters, num_tensors = 2 * 4 * 4 * (6 + 4 + 2) + (8 * 3 + 3) + (3 * 5 + 5), 12
    padding = rows["ssgd"]["bytes_per_step"] - 4 * num_parameters  # two ranks reduce and gather halves
    assert 0 <= padding < 4 * 16 * num_tensors
    assert rows["ssgd"]["test_error_pct"] is not None
