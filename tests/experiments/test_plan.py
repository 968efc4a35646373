"""The plan of a command: jobs, reused data sets, and checks of ranks and hosts."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcore.experiments import study
from ddpcore.experiments.plan import Datasets, backend_of, check_data, check_folder, make_plan
from ddpcore.records.study import Folder
from ddpcore.training import TrainConfig
from ddpcore.training.build import LearnerPlacement
from ddpcore.training.config import merged
from helpers.each import each


def place(**fields: Any) -> LearnerPlacement:
    return LearnerPlacement.of(
        TrainConfig.from_dict(
            merged({"model": "simplenet", "run": {"steps": 1, "device": "cpu"}, "data": {"batch_size": 10}}, fields)
        ),
        None,
    )


def test_a_data_set_is_reused_by_runs_that_need_the_same() -> None:
    datasets = Datasets()
    first = datasets.of(place())
    assert datasets.of(place(optimizer={"lr": 0.5})) is first
    for change in (
        {"run": {"seed": 1}},
        {"data": {"num_train": 50}},
        {"data": {"random_labels": True}},
        {"data": {"num_validation": 10}},
    ):
        kept = Datasets()
        before = kept.of(place())
        after = kept.of(place(**change))
        same = after.train.labels.shape == before.train.labels.shape
        assert not (same and torch.equal(after.train.labels, before.train.labels)), change
    short, long = (place(data={"name": "synthetic_speech", "num_samples": num, "num_frames": 1}) for num in (20, 30))
    assert (len(datasets.of(short).train), len(datasets.of(long).train)) == (16, 24)


def test_other_options_build_another_data_set() -> None:
    datasets = Datasets()
    shapes = [
        datasets.of(
            LearnerPlacement.of(
                TrainConfig.from_dict(
                    {"model": "saddle", "data": {"name": "saddle", **options}, "run": {"steps": 1, "device": "cpu"}}
                ),
                None,
            )
        ).input_shape
        for options in ({"dimension": 2}, {"dimension": 5})
    ]
    assert shapes == [(2,), (8,)]


@pytest.mark.filterwarnings("ignore:.*MD5")
def test_data_sets_that_differ_in_one_field_share_no_inputs(tmp_path: Path) -> None:
    """Images from files: normalized, augmented, fewer of them, or from another folder."""
    for shade, name in enumerate(("here", "there")):
        raw = tmp_path / name / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for split, num in (("train", 12), ("t10k", 6)):
            pixels = bytes((shade + i) % 251 for i in range(num * 784))
            (raw / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, num, 28, 28) + pixels)
            (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, num) + bytes(num))
    shared = {"data": {"name": "mnist", "data_dir": str(tmp_path / "here")}}
    for change in (
        {"data": {"normalize": True}},
        {"data": {"augment": True}},
        {"data": {"num_test": 3}},
        {"data": {"data_dir": str(tmp_path / "there")}},
    ):
        datasets = Datasets()
        one, other = (
            [split.batch(torch.arange(len(split)))[0] for split in datasets.of(made).splits().values()]
            for made in (place(**shared), place(**merged(shared, change)))
        )
        assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), change


def test_jobs(tiny: Path, tmp_path: Path) -> None:
    """All rows of a seed come before the next seed, so a stopped study has complete tables."""
    data = {"overrides": {"data": {"data_dir": "here"}}}
    plan = make_plan(study.find_study(str(tiny)), Folder(tmp_path), first_seed=3, num_seeds=2, world_size=2, **data)
    assert [(job.seed, job.row) for job in plan.jobs] == [(s, r) for s in (3, 4) for r in ("a", "b", "ssgd")]
    assert [job.ranks for job in plan.jobs[:3]] == [0, 0, 2]
    assert [job.config.run.seed for job in plan.jobs] == [3, 3, 3, 4, 4, 4]
    assert plan.jobs[5].path == tmp_path / "runs" / "ssgd" / "seed-4"
    assert plan.manifest["rows"]["ssgd"]["config"]["run"]["seed"] == 0, "a row is one config for all seeds"
    elsewhere = make_plan(study.find_study(str(tiny)), Folder(tmp_path), overrides={"data": {"data_dir": "somewhere"}})
    assert elsewhere.jobs[0].config.data.data_dir == "somewhere"
    assert "somewhere" not in str(elsewhere.manifest), "a manifest is not of one machine"
    assert plan.manifest["rows"]["ssgd"]["ranks"] == 2
    assert plan.jobs[0].config.data.data_dir == "here"
    assert '"here"' not in json.dumps(plan.manifest), "a folder of this machine"


@each(("learners", "world_size", "ranks"), [(4, 2, 2), (4, 4, 4), (2, 2, 2), (4, 1, 0), (16, 8, 8)])
def test_ranks_share_the_learners(learners, world_size, ranks, tiny: Path, tmp_path: Path) -> None:
    over = {"strategy": {"learners": learners}, "data": {"batch_size": 16}}
    options = {"rows": ["ssgd"], "overrides": over}
    if not ranks:
        with pytest.raises(ValueError, match=f"--world-size is 1: these rows have {learners} learners"):
            make_plan(study.find_study(str(tiny)), Folder(tmp_path), world_size=world_size, **options)
        return
    plan = make_plan(study.find_study(str(tiny)), Folder(tmp_path), world_size=world_size, **options)
    assert {job.ranks for job in plan.jobs} == {ranks}
    each = f" of {learners // ranks} virtual learners" if learners > ranks else ""
    assert plan.jobs[0].place == f"{ranks} processes{each}"


def test_the_place_says_how_many_hosts_there_are(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tiny.read_text().replace('strategy.name = "ssgd"', 'ranks = true, hosts = 2, strategy.name = "ssgd"')
    tiny.write_text(text.replace("strategy.learners = 2", 'strategy.learners = 4, strategy.transport = "pg"'))
    job = make_plan(study.find_study(str(tiny)), Folder(tmp_path), rows=["ssgd"]).jobs[0]
    assert job.place == "4 processes of one machine, standing for 2 hosts"
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert job.place == "4 processes of one machine, standing for 2 hosts", "torchrun on one host"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert job.place == "4 processes on 2 hosts"


def test_rows_of_a_scale(tiny: Path, tmp_path: Path) -> None:
    """The scale selects rows unless the command names some; the manifest has the published numbers of all rows."""
    tiny.write_text(tiny.read_text().replace("[scales.smoke]", '[scales.smoke]\nrows = ["ssgd", "b"]'))
    loaded, folder = study.find_study(str(tiny)), Folder(tmp_path)
    rows = {
        (scale, names): [job.row for job in make_plan(loaded, folder, scale=scale, rows=names, num_seeds=1).jobs]
        for scale in ("smoke", "cpu")
        for names in (None, ("a",))
    }
    assert rows["smoke", None] == ["b", "ssgd"]
    assert rows["cpu", None] == ["a", "b", "ssgd"]
    assert rows["smoke", ("a",)] == rows["cpu", ("a",)] == ["a"]
    manifest = make_plan(loaded, folder, scale="smoke").manifest
    assert manifest["published"] == {"a": {"train_loss": 0.7}, "b": {"train_loss": 0.6}}
    tiny.write_text(tiny.read_text().replace('["ssgd", "b"]', '["ssgd", "c"]'))
    with pytest.raises(ValueError, match="rows has no 'c'"):
        study.find_study(str(tiny))


def test_rows_by_pattern(tiny: Path) -> None:
    """A pattern selects the rows that match it, in the study's order, once. A row's name selects only this row."""
    tiny.write_text(tiny.read_text().replace("[rows]", '[rows]\n"s[1]" = {}\n"s1" = {}'))
    loaded = study.find_study(str(tiny))
    chosen = {
        keys: [row.name for row in loaded.chosen(keys)]
        for keys in (("s*",), ("[ab]",), ("*g*", "a", "s*"), ("s[1]",), ("s1",), ())
    }
    assert chosen["s*",] == ["s[1]", "s1", "ssgd"]
    assert chosen["[ab]",] == ["a", "b"]
    assert chosen["*g*", "a", "s*"] == ["s[1]", "s1", "a", "ssgd"]
    assert chosen["s[1]",] == ["s[1]"]
    assert chosen["s1",] == ["s1"]
    assert chosen[()] == []
    with pytest.raises(ValueError, match=r"rows has no 'x\*': "):
        loaded.chosen(("a", "x*"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ranks": "false", "kill_rank": None}, "row ssgd: ranks is 0, not 2; kill_rank is None, not 1"),
        ({"hosts": 2}, "row ssgd: hosts is 2, not 1"),
        ({"kill_rank": None}, "row ssgd: kill_rank is None, not 1"),
        ({"kill_rank": 0}, "row ssgd: kill_rank is 0, not 1"),
    ],
)
def test_a_folder_of_other_ranks_is_not_resumed(change: dict[str, Any], says: str, tiny: Path, tmp_path: Path) -> None:
    text, folder = tiny.read_text(), Folder(tmp_path / "out")

    def manifest(**change: Any) -> Mapping[str, Any]:
        said = {"strategy.transport": '"pg"', "ranks": "true", "hosts": 1, "kill_rank": 1, **change}
        entries = ", ".join(f"{key} = {value}" for key, value in said.items() if value is not None)
        tiny.write_text(text.replace('"ssgd" = {', f'"ssgd" = {{ {entries},'))
        return make_plan(study.find_study(str(tiny)), folder).manifest

    folder.begin(manifest(), print)
    check_folder(folder.path, manifest(), resume=True)
    with pytest.raises(ValueError, match=f"{says}: take another folder"):
        check_folder(folder.path, manifest(**change), resume=True)


def test_ranks_that_would_share_a_gpu(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    loaded, folder = study.find_study(str(tiny)), Folder(tmp_path)
    words = {"rows": ["ssgd"], "world_size": 2}
    (job, *_) = make_plan(loaded, folder, overrides={"run": {"device": "auto"}}, **words).jobs
    with pytest.raises(ValueError, match=r"2 learners would share 1 GPU: run it with --set run.device=cpu"):
        backend_of(job)
    assert backend_of(make_plan(loaded, folder, **words).jobs[0]) == "gloo", "the tiny study is of the CPU"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert backend_of(job) == "nccl"


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ("kill_rank = 1", "row ssgd, scale full: kill_rank is 1"),
        ("ranks = true, kill_rank = 2", "kill_rank is 2"),
        ("ranks = true, hosts = 2", "strategy.transport is 'auto': hosts share no memory, set it to 'pg'"),
        ("ranks = true, hosts = 3", "strategy.learners is 2: it must be a multiple of hosts, 3"),
    ],
)
def test_ranks_that_are_not_there(entries: str, says: str, tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace('"ssgd" = {', f'"ssgd" = {{ {entries},'))
    with pytest.raises(ValueError, match=says):
        study.find_study(str(tiny)).rows["ssgd"].config("full")


def test_hosts_of_learners_in_one_process(tiny: Path, tmp_path: Path) -> None:
    tiny.write_text(tiny.read_text().replace('"ssgd" = {', '"ssgd" = { hosts = 2, strategy.transport = "pg",'))
    plan = make_plan(study.find_study(str(tiny)), Folder(tmp_path), rows=["ssgd"])
    with pytest.raises(ValueError, match=r"row ssgd: strategy\.transport is 'pg': learners of one process have none"):
        check_data(plan, Datasets())
    plan = make_plan(study.find_study(str(tiny)), Folder(tmp_path), rows=["ssgd"], world_size=2)
    check_data(plan, Datasets())
    tiny.write_text(
        tiny.read_text().replace('strategy.transport = "pg", strategy.name = "ssgd"', 'strategy.name = "ddp"')
    )
    plan = make_plan(study.find_study(str(tiny)), Folder(tmp_path), rows=["ssgd"])
    with pytest.raises(ValueError, match="row ssgd: hosts is 2: learners of one process have none"):
        check_data(plan, Datasets())
