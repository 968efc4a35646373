"""Commands that cannot run: one line on standard error, exit code 2, nothing overwritten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpcore.records.run import steps_of
from ddpcore.records.study import Folder

Main = Callable[..., tuple[int, str, str]]

REFUSED = {
    "": "list | run | compare",
    "walk": "walk",
    "run": "study",
    "run lr-sweep-syntetic": "did you mean 'lr-sweep-synthetic'?",
    "list lr-sweep": "unknown study 'lr-sweep': did you mean",
    "run no/such.toml": "no/such.toml: cannot be read",
    "run TINY --rows a,sgd": "tiny: rows has no 'sgd': did you mean 'ssgd'?",
    "run TINY --rows ,": "--rows is empty",
    "run TINY --scale smok": "did you mean 'smoke'?",
    "run TINY --seeds 0": "--seeds is 0",
    "run TINY --seed -1": "--seed is -1",
    "run TINY --seeds many": "--seeds",
    "run TINY --seeds 1..100000000": "--seeds",
    "run TINY --seeds 100000000": "100,000,000 seeds of 3 rows are more than 10,000 runs: take fewer",
    "run TINY --seeds 4 --max-runs 11": "4 seeds of 3 rows are more than 11 runs",
    "run TINY --max-runs 0": "--max-runs is 0",
    "run no\x1b[31m/such.toml": r"no\x1b[31m/such.toml': cannot be read",
    "run TINY --world-size 3": "--world-size is 3: these rows have 1, 2 learners",
    "run TINY --set optimiser=adam": "did you mean 'optimizer'?",
    "run TINY --set lr": "KEY=VALUE",
    "run TINY --set optimizer.lr=fast": "--set: optimizer.lr is 'fast'",
    "run TINY --set run.seed=3": "--seeds",
    "run TINY --set optimizer.momentun=0.5": "did you mean 'momentum'?",
    "run TINY --set optimizer.momentum=-1": "row a: optimizer sgd: momentum is -1",
    "run TINY --set model=lenet5 --set model.dropout=2": "row a: model lenet5: dropout",
    "run TINY --rows b,ssgd --set run.flatness_samples=100000": "row b: flatness_samples is 100000",
    "run TINY --set data.batch_size=2000": "row a: the batch size is 2000",
    "run TINY --set optimizer=adam --set optimizer.betas=[0.9]": "row a: optimizer adam: tuple index",
    "run TINY --set run.target=0.5": "row a: run.target is 0.5: synthetic has no test split",
    "run TINY --rows ssgd --set strategy.link=1Gb/s,1ms": "row ssgd: strategy.link is '1Gb/s,1ms': learners",
    "run TINY --rows ssgd --set strategy.transport=pg": "row ssgd: strategy.transport is 'pg': learners",
    "run TINY --rows ssgd --set run.statistics_every=1 --set run.statistics_samples=1": "statistics_samples is 1",
    "run TINY --rows ssgd --set strategy=dpsgd --set strategy.topology={name='ring',neighbors_each_side=9}": (
        "row ssgd: Ring: 9 neighbours each side need at least 19 learners"
    ),
    "run TINY --rows ssgd --set strategy=ddp": "row ssgd: ddp needs real ranks: set ranks = true, or take ssgd",
    "run TINY --rows ssgd --set strategy.policies.momentum=gossip": "policy gossip needs neighbours and ssgd has none",
    "run TINY --rows a --set strategy.policies.momentum=average": "row a: strategy.policies is {'momentum': 'average'}",
    "run TINY --set data=mnist --set model=lenet5": "--data-dir",
    "run TINY --set data=mnist --set model=lenet5 --data-dir nowhere": "nowhere",
    "run TINY --frobnicate": "--frobnicate",
    "compare": "RUN",
    "compare nowhere": "there is no study in this folder",
    "compare nowhere --plot no/folder.png": "--plot",
    "compare nowhere --markdown .": "--markdown",
}


def check(answer: tuple[int, str, str], says: str) -> None:
    code, out, error = answer
    assert (code, out) == (2, "")
    assert error.startswith("ddpcore experiments: ")
    assert len(error.splitlines()) == 1, error
    assert says in error


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("line", REFUSED)
def test_refused(line: str, main: Main, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    check(main(*line.replace("TINY", str(tiny)).split()), REFUSED[line])
    assert not list(empty.iterdir())


def test_a_damaged_file(main: Main, tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace("steps = 4", "steps = "))
    check(main("run", tiny), "tiny.toml: Invalid value (at line 12")
    tiny.write_text("title = " + 5000 * "[")
    check(main("run", tiny), "tiny.toml: it is nested too deeply")


def test_under_torchrun(main: Main, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows run on all ranks, so a row that cannot is refused, and so is another way to start processes."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check(main("run", tiny), "torchrun has started 2 ranks, and row a does not run on them: leave it out")
    check(main("run", tiny, "--rows", "ssgd", "--jobs", 2), "2 ranks, and --jobs starts processes: leave it out")
    monkeypatch.setenv("WORLD_SIZE", "3")
    check(main("run", tiny, "--rows", "ssgd"), "--world-size is 3: these rows have 2 learners")


@pytest.fixture
def done(main: Main, tiny: Path, tmp_path: Path) -> Path:
    """A folder with one run."""
    out = tmp_path / "out"
    assert main("run", tiny, "--out", out, "--rows", "a", "--seeds", 1)[0] == 0
    return out


def test_folders_in_use(main: Main, tiny: Path, done: Path) -> None:
    """A folder of this study without --resume; of another scale, config or study; of unrelated files."""
    before = files(done)
    check(main("run", tiny, "--out", done, "--rows", "a"), "--resume")
    check(main("run", tiny, "--out", done, "--rows", "a", "--scale", "smoke", "--resume"), "scale 'full', not 'smoke'")
    check(
        main("run", tiny, "--out", done, "--rows", "a", "--set", "optimizer.lr=2", "--resume"),
        "set {}, not {'optimizer.lr': 2}",
    )
    whole = tiny.read_text()
    tiny.write_text(whole.replace("batch_size = 100", "batch_size = 50"))
    check(main("run", tiny, "--out", done, "--rows", "a", "--resume"), "batch_size is 50, not 100")
    tiny.write_text(whole)
    check(main("run", "lr-sweep-synthetic", "--rows", "single-0.1", "--out", done, "--resume"), "study 'tiny', not")
    assert files(done) == before
    check(main("run", tiny, "--out", tiny), "is a file")
    stranger = done.parent / "stranger"
    stranger.mkdir()
    (stranger / "thesis.tex").write_text("mine")
    check(main("run", tiny, "--out", stranger, "--resume"), "contains other files: take another folder")
    assert files(stranger) == {str(stranger / "thesis.tex"): b"mine"}


def test_damaged_folders(main: Main, tiny: Path, done: Path) -> None:
    manifest, result = (
        json.loads((done / "manifest.json").read_text()),
        json.loads((done / "results.jsonl").read_text()),
    )
    row, (claim, *_) = manifest["rows"]["a"], manifest["claims"]
    manifests = [
        *(manifest | {"metrics": wrong} for wrong in ([], [3], "train_loss")),
        *(manifest | {"claims": [claim | {"predicate": wrong}]} for wrong in ('median("a") > 1', 'mean("a', "1")),
        *(manifest | {"published": wrong} for wrong in ([3], 3, {"a": [3]}, {"a": {"train_loss": "x"}})),
        manifest | {"rows": {"a": row | {"published": {"train_loss": "x"}}}},
        manifest | {"notes": [3]},
        *(manifest | {"seeds": 3}, manifest | {"rows": []}, manifest | {"rows": {"a": 3}}, manifest | {"claims": [3]}),
        *(manifest | {"rows": {"a": {key: row[key] for key in row if key != missing}}} for missing in row),
    ]
    results = [
        *({key: result[key] for key in result if key != missing} for missing in ("row", "metrics", "device")),
        *(result | {"metrics": wrong} for wrong in (3, {"train_loss": "x"})),
    ]
    damages = (
        *(("manifest.json", text) for text in (b"{", b"[]", b"\xff")),
        *(("manifest.json", json.dumps(values).encode()) for values in manifests),
    )
    for name, text in damages:
        kept = (done / name).read_bytes()
        (done / name).write_bytes(text)
        before = files(done)
        for words in (("compare", done), ("run", tiny, "--out", done, "--rows", "a", "--resume")):
            check(main(*words), name)
        assert files(done) == before
        (done / name).write_bytes(kept)
    lines = [b"{\n", b"3\n", b"\xff\xfe\n", *(json.dumps(line).encode() + b"\n" for line in results)]
    for line in lines:  # a damaged result costs its run alone, which --resume repeats
        (done / "results.jsonl").write_bytes(line)
        code, _, error = main("compare", done)
        assert code == 0 and error.count("\n") == 1 and "results.jsonl" in error
    assert main("run", tiny, "--out", done, "--rows", "a", "--seeds", 1, "--resume")[0] == 0
    assert Folder(done).finished() == {("a", 0)}


def test_a_damaged_record_of_a_run(main: Main, tiny: Path, done: Path) -> None:
    (done / "results.jsonl").write_text("")
    record = Folder(done).run_path("a", 0) / "record.jsonl"
    header, *lines = record.read_text().splitlines(keepends=True)
    record.write_text(header.replace('"model"', '"modem"') + "".join(lines))
    code, _, error = main("run", tiny, "--out", done, "--rows", "a", "--seeds", 1, "--resume")
    assert code == 0
    assert f"{record}: line 1 is damaged: it does not match its checksum: the run goes on without it" in error
    assert Folder(done).finished() == {("a", 0)}


def test_a_run_or_checkpoint_of_another_model(
    main: Main, tiny: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished run was copied into the folder from another study."""
    other = tmp_path / "other"
    words = ("--rows", "a", "--seeds", 1, "--set", "run.checkpoint_every=2")
    monkeypatch.setattr("ddpcore.experiments.run.CHECKPOINTS", "none")  # so that the checkpoints stay
    assert main("run", tiny, "--out", other, *words, "--set", "model=mlp")[0] == 0
    (done / "results.jsonl").write_text("")
    theirs, ours = Folder(other).run_path("a", 0), Folder(done).run_path("a", 0)
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    before = {name: content for name, content in files(ours).items() if ".lock" not in name}
    for _ in range(2):
        code, out, _ = main("run", tiny, "--out", done, *words, "--resume")
        assert (code, "failed: ValueError: " in out, "model is 'simplenet', not 'mlp'" in out) == (1, True, True), out
        assert {name: content for name, content in files(ours).items() if ".lock" not in name} == before
        (ours / "record.jsonl").unlink(missing_ok=True)
        before = {name: content for name, content in before.items() if "record.jsonl" not in name}
        assert steps_of(ours / "checkpoints")


def test_no_matplotlib(main: Main, done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpcore.display.chart.find_spec", lambda name: None)
    check(main("compare", done, "--plot", done / "x.png"), "pip install 'ddpcore[report]'")
    assert not (done / "x.png").exists()


def test_a_plot_of_another_kind(main: Main, done: Path) -> None:
    pytest.importorskip("matplotlib")
    check(main("compare", done, "--plot", done / "x.gif"), ".png nor .svg")


def test_other_published_numbers_under_one_name(main: Main, done: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(done, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["rows"]["a"]["published"]["train_loss"] = 0.5
    (copy / "manifest.json").write_text(json.dumps(manifest))
    check(main("compare", done, copy), "other published numbers")
