"""Names and texts from strangers, with escape codes, new lines, NUL or markup, as the command lines show them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ddpcore import training
from ddpcore.bench.__main__ import main as bench
from ddpcore.data import load_dataset
from ddpcore.display.chart import check_plot
from ddpcore.experiments.plan import check_folder
from ddpcore.experiments.study import load_study
from ddpcore.records.run import RECORD
from ddpcore.records.surface import read_surface
from ddpcore.report.__main__ import main as report
from ddpcore.runtime.progress import ProgressReport
from ddpcore.storage.files import locked
from ddpcore.storage.json_lines import JsonLines
from ddpcore.training import RunRecord, TrainConfig
from ddpcore.training.__main__ import main as train
from ddpcore.training.checkpoint import Checkpoints

Main = Callable[..., tuple[int, str, str]]
NAMES = ["a\x1b[31mred", "two\nlines", "a\0nul", "\u202eright to left", "[bold]markup[/bold]", "<b>html</b>", "a\rb\bc"]


def shows_nothing_hidden(text: str) -> None:
    assert text.replace("\n", "").isprintable(), repr(text)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_not_there(tmp_path: Path, main: Main, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """One line on standard error, whatever the command; markup stays what it is."""
    path = tmp_path / name
    commands = (
        lambda: main("list", f"{path}.toml")[0],
        lambda: main("compare", str(path))[0],
        lambda: train([f"data.data_dir={path}", "data=mnist", "run.epochs=1", "--out", str(tmp_path / "out")]),
        lambda: train(["run.epochs=1", f"model={name}", "--out", str(tmp_path / "out")]),
        lambda: bench([f"model={name}"]),
        lambda: report([str(path), "--out", str(tmp_path / "page.html")]),
    )
    for number, command in enumerate(commands):
        if number < 2:
            code, _, error = main(*(("list", f"{path}.toml") if number == 0 else ("compare", str(path))))
        else:
            capsys.readouterr()
            code = command()
            error = capsys.readouterr().err
        assert code == 2, (number, error)
        assert error.count("\n") == 1, (number, error)
        shows_nothing_hidden(error)
        assert name not in error or name.isprintable()
        assert not name.isprintable() or name in error, (number, error)


def test_texts_of_a_study(tiny: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    tiny.write_text(tiny.read_text().replace('"b" = {', '"[red]b" = { about = "\\u001B[2Jx[/bold]",', 1).replace(
        '"b"', '"[red]b"').replace('mean("b")', 'mean("[red]b")'))  # fmt: skip
    code, out, _ = main("list", str(tiny))
    assert code == 0
    shows_nothing_hidden(out)
    assert "[red]b" in out and r"\x1b[2Jx[/bold]" in out


@pytest.mark.parametrize("name", [r"a\u001B[31m", r"two\nlines", r"a\u0000", r"a\u202E"])
def test_a_row_has_a_printable_name(tiny: Path, name: str) -> None:
    tiny.write_text(tiny.read_text().replace('"b" = {', f'"{name}" = {{', 1))
    with pytest.raises(ValueError, match=r"leave / .* quotes and control characters out") as caught:
        load_study(tiny)
    assert str(caught.value).isprintable()


def test_a_bar_shows_markup_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(
        "ddpcore.runtime.progress.Console", lambda file: Console(file=file, force_terminal=True, width=90)
    )
    out = Terminal()
    with ProgressReport("[bold]what[/bold]", 2, out=out) as progress:
        progress.advance(1, "[/red]text")
    assert "[/red]text" in out.getvalue()


def _removed(path: Path) -> None:
    path.mkdir()
    lines = JsonLines(path / "lines.jsonl")
    (path / "lines.jsonl").unlink()
    lines.append({})


def _not_empty(path: Path) -> None:
    path.mkdir()
    (path / "other").touch()
    check_folder(path, {}, resume=False)


def _another_run(path: Path) -> None:
    path.mkdir()
    (path / RECORD).write_text('{"kind": "other"}\n')
    RunRecord.read(path)


def _in_use(path: Path) -> None:
    with locked(path), locked(path):
        pass


def _no_samples(path: Path) -> None:
    for part in ("train", "test"):
        (path / part).mkdir(parents=True)
        np.savez(path / part / "a.npz", inputs=np.zeros((2, 3), np.float32))
    load_dataset("features", data_dir=str(path))


def _a_run_is_there(path: Path) -> None:
    path.mkdir()
    (path / RECORD).write_text('{"kind": "run"}\n')
    training.train(TrainConfig.from_dict({"run": {"epochs": 1}}), out=path)


def _damaged_checkpoint(path: Path) -> None:
    (path / "checkpoints" / "step-00000001").mkdir(parents=True)
    Checkpoints(folder=path / "checkpoints", config={}).load_last("cpu", lambda line: None)


@pytest.mark.parametrize(
    "call",
    [
        _removed,
        _not_empty,
        _another_run,
        _in_use,
        _no_samples,
        _a_run_is_there,
        RunRecord.read,
        training.join_run,
        lambda path: check_plot(path.with_suffix(".txt")),
        lambda path: path.write_bytes(b"x") and read_surface(path),
        _damaged_checkpoint,
    ],
)
def test_exceptions_of_functions(tmp_path: Path, call: Callable[[Path], object]) -> None:
    """Not only the commands, which escape whatever they print."""
    path = tmp_path / "two\nlines\x1b[31m"
    with pytest.raises((ValueError, OSError)) as error:
        call(path)
    assert str(error.value).isprintable(), error.value
    assert r"two\nlines\x1b[31m" in str(error.value)
