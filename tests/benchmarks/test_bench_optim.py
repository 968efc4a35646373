"""``benchmarks/bench_optim.py``: comparisons, errors and its JSON file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_optim
import pytest
import torch
from common import bytes_per_param
from implementations import COMPARISONS, OURS, Implementation

from ddpcore.report.sources import read_bench
from ddpcore.runtime import machine
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
SMALL = "--models lenet5 --repeats 3 --device cpu"
Parse = Callable[[str], argparse.Namespace]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parse:
    """The options of a line, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def parsed(line: str) -> argparse.Namespace:
        monkeypatch.setattr("sys.argv", ["bench_optim.py", *line.split()])
        return bench_optim.parse_options()

    return parsed


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Implementation, "is_installed", lambda self: not self.install)


@pytest.mark.usefixtures("nothing_installed")
def test_the_table_is_the_same_without_the_libraries(parse: Parse) -> None:
    chosen, notes = bench_optim.comparisons(parse(SMALL))
    assert [one.name for one in chosen] == TABLE
    assert len(notes) == 1
    for part in ("torch_optimizer (pip install 'ddpcore[bench]')", "pytorch_optimizer"):
        assert part in notes[0]
    chosen, notes = bench_optim.comparisons(parse(f"{SMALL} --no-peers --optimizers sgd,lars"))
    assert ([one.name for one in chosen], notes) == ([TABLE[index] for index in (0, 2, 4, 6)], [])


def test_a_library_that_does_not_work_is_left_out_in_one_line(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Implementation("json.Lamb", "json", "nothing", install="pip install json")
    comparison = replace(COMPARISONS[3], left=broken)
    monkeypatch.setattr(bench_optim, "COMPARISONS", (comparison,))
    chosen, notes = bench_optim.comparisons(parse(SMALL))
    assert chosen == []
    assert notes == ["json.Lamb is left out: AttributeError: module 'json' has no attribute 'nothing'"]


@pytest.mark.usefixtures("nothing_installed")
def test_a_run(parse: Parse, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report reads its file, as it reads those of ``benchmarks/results``."""
    before = torch.get_num_threads()
    parse(f"{SMALL} --threads 1 --json out.json")
    try:
        bench_optim.main()
    finally:
        torch.set_num_threads(before)
    result = read_bench(tmp_path / "out.json")
    assert set(result) == {"environment", "lists", "comparisons", "rows"}
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
    for name in measured:
        assert name in text
    assert words_drawn(result, tmp_path) >= {"Bandwidth of a step, and of a copy", "step", "copy"}


@pytest.mark.parametrize(
    ("optimizer", "dtype", "moved"),
    [("lamb", "bfloat16", (22, 32)), ("lamb", "float16", (22, 32)), ("muon", "float32", (None, None))],
)
@pytest.mark.usefixtures("nothing_installed")
def test_others(optimizer: str, dtype: str, moved: tuple[int | None, ...], parse: Parse, tmp_path: Path) -> None:
    parse(f"{SMALL} --optimizers {optimizer} --dtype {dtype} --json out.json")
    bench_optim.main()
    row = json.loads((tmp_path / "out.json").read_text())["rows"][0]
    assert (row["dtype"], row["bytes_per_param"], row["bytes_per_param_uncached"]) == (dtype, *moved)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.cuda
def test_on_a_gpu_with_the_libraries_that_are_installed(parse: Parse, tmp_path: Path) -> None:
    parse("--device cuda --models lenet5 --repeats 1 --seconds 0.1 --json out.json")
    bench_optim.main()
    assert json.loads((tmp_path / "out.json").read_text())["rows"][0]["device"] == "cuda"


REFUSED = [
    ("--models vgg", "'vgg': name some of lenet5,resnet18,resnet50,vit-s,bert-base,bert-large"),
    ("--models lenet5,lenet5", "each once"),
    ("--models ,", "name some of lenet5"),
    ("--optimizers adam", "'adam': name some of sgd,adamw,lars,lamb,muon"),
    ("--repeats 0", "--repeats and --threads must be at least 1"),
    ("--threads 0", "--repeats and --threads must be at least 1"),
    ("--seconds nan", "--seconds above 0"),
    ("--seconds 0", "--seconds above 0"),
    ("--device tpu", "--device"),
    ("--dtype int8", "--dtype"),
    ("--json nowhere/out.json", "--json: nowhere/out.json is a folder, or lies in none"),
    ("--json .", "--json: . is a folder"),
    ("--steps 3", "--steps"),
    ("more", "more"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refused(line: str, says: str, parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(line)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_too_little_memory_is_an_error_before_the_start(
    parse: Parse, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: 3e9)
    with pytest.raises(SystemExit):
        parse("--device cpu")
    assert "steps of bert-base need about 5.4 GB of memory and 3.0 GB are free" in capsys.readouterr().err


def test_help_names_the_baselines(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in ("models", "optimizers", "no-peers", "repeats", "seconds", "threads", "device", "dtype", "json"):
        assert f"--{name}" in text
    assert "torch's fused SGD and AdamW" in text


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
    assert OURS["lars"].library == "ddpcore"


def test_contenders_share_no_tensor(parse: Parse) -> None:
    """Some libraries write to gradients."""
    own = bench_optim.OwnStep("lenet5", "sgd", parse(SMALL))
    ours, other = (own.stepper(OURS["sgd"]).__self__ for _ in range(2))  # type: ignore[attr-defined]
    for left, right in zip(ours.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert torch.equal(left, right)
        assert left.data_ptr() != right.data_ptr()
        assert left.grad.data_ptr() not in (right.grad.data_ptr(), left.data_ptr())
