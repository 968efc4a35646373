"""``ddpcore bench optim``: comparisons, errors and its JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcore.bench import __main__ as bench
from ddpcore.bench import command, implementations, optim
from ddpcore.bench.implementations import COMPARISONS, OURS, Implementation
from ddpcore.bench.optim import OptimConfig
from ddpcore.ops.steps import bytes_per_param
from helpers.drawn import words_drawn

TABLE = [
    "FusedSGD / torch.optim.SGD(fused=True)",
    "FusedAdamW / torch.optim.AdamW(fused=True)",
    "FusedLARS / torch.optim.SGD(fused=True)",
    "FusedLAMB / torch.optim.AdamW(fused=True)",
    "FusedSGD(bfloat16 state) / FusedSGD",
    "FusedAdamW(bfloat16 state) / FusedAdamW",
    "FusedLARS(bfloat16 state) / FusedLARS",
    "FusedLAMB(bfloat16 state) / FusedLAMB",
    "torch_optimizer.Lamb / FusedLAMB",
    "pytorch_optimizer.Lamb / FusedLAMB",
    "torch_optimizer.LARS / FusedLARS",
]
ROW = {
    "comparison", "optimizer", "implementation", "against", "list", "parameters", "num_tensors", "device", "dtype",
    "ms", "ratio", "bytes_per_param", "bytes_per_param_uncached", "gb_per_s", "copy_gb_per_s", "repeats",
}  # fmt: skip
SMALL = ["--models", "lenet5", "--repeats", "3", "--device", "cpu"]


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Implementation, "is_installed", lambda self: not self.install)


@pytest.mark.usefixtures("nothing_installed")
def test_the_table_is_the_same_without_the_libraries() -> None:
    chosen, notes = optim._comparisons(OptimConfig(device="cpu"))
    assert [one.name for one in chosen] == TABLE
    assert len(notes) == 1
    for part in ("torch_optimizer (pip install 'ddpcore[bench]')", "pytorch_optimizer"):
        assert part in notes[0]
    chosen, notes = optim._comparisons(OptimConfig(device="cpu", peers=False, optimizers=("sgd", "lars")))
    assert ([one.name for one in chosen], notes) == ([TABLE[index] for index in (0, 2, 4, 6)], [])


def test_a_library_that_does_not_work_is_left_out_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Implementation("json.Lamb", "json", "nothing", install="pip install json")
    comparison = replace(COMPARISONS[3], left=broken)
    monkeypatch.setattr(optim, "COMPARISONS", (comparison,))
    chosen, notes = optim._comparisons(OptimConfig(device="cpu"))
    assert chosen == []
    assert notes == ["json.Lamb is left out: AttributeError: module 'json' has no attribute 'nothing'"]


@pytest.mark.usefixtures("nothing_installed")
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    try:
        assert bench.main(["optim", *SMALL, "--threads", "1", "--json", str(tmp_path / "out.json")]) == 0
    finally:
        torch.set_num_threads(before)
    result = json.loads((tmp_path / "out.json").read_text())
    assert set(result) - {"checksum"} == {"environment", "lists", "comparisons", "rows"}
    assert {"device", "commit", "torch", "cuda", "threads", "date", "dtype", "notes"} <= set(result["environment"])
    assert result["environment"]["threads"] == 1
    assert result["comparisons"] == TABLE
    rows = result["rows"]
    measured = [name for pair in zip(TABLE[:4], TABLE[4:8], strict=True) for name in pair]  # optimizer by optimizer
    assert [(row["comparison"], row["implementation"]) for row in rows] == [
        (name, side) for name in measured for side in name.split(" / ")
    ], "absent libraries have no rows"
    for row in rows:
        assert set(row) == ROW
        assert (row["parameters"], row["num_tensors"], row["repeats"]) == (69_656, 10, 3)
        for quantiles in (row["ms"], row["ratio"]):
            assert 0 < quantiles["p20"] <= quantiles["p50"] <= quantiles["p80"]
        assert (row["gb_per_s"] is None) == (row["bytes_per_param"] is None) == (row["implementation"][:5] != "Fused")
        assert row["copy_gb_per_s"] > 0
    assert [row["bytes_per_param"] for row in rows[::2]] == [20, 16, 28, 20, 20, 16, 28, 20]
    assert [row["bytes_per_param_uncached"] for row in rows[::2]] == [20, 16, 28, 20, 28, 24, 40, 28]
    for left, right in zip(rows[::2], rows[1::2], strict=True):
        assert left["ratio"]["p50"] * right["ratio"]["p50"] == pytest.approx(1), "of an odd number of pairs"
    text = capsys.readouterr().out
    for name in TABLE:
        assert name in text
    assert "69,656 in 10" in text
    assert words_drawn(result, tmp_path) >= {"Bandwidth of a step, and of a copy", "step", "copy"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.usefixtures("nothing_installed")
def test_other_dtypes(dtype: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert bench.main(["optim", *SMALL, "--optimizers", "lamb", "--dtype", dtype, "--json", str(out)]) == 0
    row = json.loads(out.read_text())["rows"][0]
    assert (row["dtype"], row["bytes_per_param"], row["bytes_per_param_uncached"]) == (dtype, 22, 32)


REFUSED = [
    ("optim --models vgg", "--models is 'vgg': choose from lenet5, resnet18, resnet50, vit-s, bert-base, bert-large"),
    ("optim --models lenet5,lenet5", "names one twice"),
    ("optim --models ,", "--models is empty"),
    ("optim --optimizers adam", "--optimizers is 'adam': did you mean 'adamw'?"),
    ("optim --repeats 0", "--repeats is 0"),
    ("optim --threads 0", "--threads is 0"),
    ("optim --seconds nan", "--seconds is nan"),
    ("optim --seconds 0", "--seconds is 0.0"),
    ("optim --device tpu", "--device is 'tpu': did you mean 'cpu'?"),
    ("optim --device cuda", "--device cuda"),
    ("optim --dtype int8", "--dtype is 'int8': choose from float32"),
    ("optim --json nowhere/out.json", "does not exist"),
    ("optim --steps 3", "--steps"),
    ("optim more", "more"),
    ("optimize", "unknown command 'optimize': choose from buckets"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refused(line: str, says: str, refused: Callable[[str, str], None]) -> None:
    refused(line, says)


def test_too_little_memory_is_an_error_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "free_memory", lambda device: 3e9)
    monkeypatch.setattr(optim, "measure", lambda config: pytest.fail("it was started"))
    assert bench.main(["optim", "--device", "cpu"]) == 2
    assert "steps of bert-base need about 5.4 GB of memory and 3.0 GB are free" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(["optim", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in OptimConfig.__dataclass_fields__:
        assert f"--{name}" in text
    assert "--no-peers" in text


# --- implementations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "itemsize", "expected"),
    [("sgd", 4, (20, 20)), ("sgd", 2, (10, 10)), ("lars", 4, (20, 28)), ("lars", 2, (10, 14)), ("lamb", 4, (28, 40)),
     ("lamb", 2, (22, 32)), ("adamw", 4, (28, 28)), ("adamw", 2, (22, 22))],
)  # fmt: skip
def test_traffic(optimizer: str, itemsize: int, expected: tuple[int, int]) -> None:
    assert bytes_per_param(optimizer, itemsize) == expected


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda one: one.name)
def test_every_implementation_steps_where_it_is_installed(comparison: Any) -> None:
    for one in (comparison.left, comparison.right):
        if not one.is_installed():
            assert one.install, "only other libraries may be absent"
            continue
        assert one.why_unusable("cpu", torch.float32) is None


def test_ours_is_on_one_side_of_every_comparison() -> None:
    for comparison in COMPARISONS:
        assert OURS[comparison.optimizer] in (comparison.left, comparison.right)
        assert (comparison.peer is None) == (comparison.left is OURS[comparison.optimizer] or comparison.left.rounded)
    assert implementations.OURS["lars"].library == "ddpcore"


def test_contenders_share_no_tensor() -> None:
    """Some libraries write to gradients."""
    field = optim._OwnStep("lenet5", "sgd", OptimConfig(device="cpu"))
    ours, other = (field._stepper(OURS["sgd"]).__self__ for _ in range(2))  # type: ignore[attr-defined]
    for left, right in zip(ours.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert torch.equal(left, right)
        assert left.data_ptr() != right.data_ptr()
        assert left.grad.data_ptr() not in (right.grad.data_ptr(), left.data_ptr())
