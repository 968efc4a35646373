"""``train`` with ``on_failure="shrink"``: the run goes on when a rank is killed, also the one that writes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddpcore.storage.json_lines import read_lines
from ddpcore.training import TrainConfig
from ddpcore.training.record import RunRecord
from helpers import ranks


def test_a_run_goes_on_without_the_rank_that_wrote_it(tmp_path: Path) -> None:
    """Rank 0 of three is killed after two epochs. Another one writes on, and the model and the end are there."""
    out = tmp_path / "run"
    words = [sys.executable, "-c", "from helpers.elastic_ranks import main_whole; main_whole()", str(out)]
    subprocess.run(words, env=ranks.environment(), check=True, timeout=300)
    codes, said = torch.load(out.with_suffix(".pt"))
    assert codes == {0: -signal.SIGKILL, 1: 0, 2: 0}, said
    assert "ddpcore: learner 0 is gone, and what it held is lost: 2 learners go on" in said
    run = RunRecord.read(out)
    assert run.final["step"] == run.header["total_steps"]
    assert run.final["accuracy"] > 0.8
    (change,) = [row for row in read_lines(out / "record.jsonl").rows if row["kind"] == "members"]
    assert change["lost"] == [0] and change["members"] == [1, 2]
    steps = [row["step"] for row in run.epochs]
    assert steps == sorted(set(steps)) and len(steps) == 12, "no epoch is missing or written twice"
    assert (out / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "ddp"}, "ddp ends when a rank dies: take 'raise', or another strategy"),
        ({"strategy": "single", "learners": 1}, "2 learners must be left, and learners is 1: take more"),
        ({"learners": 2}, "2 learners must be left, and learners is 2: take more"),
        ({"statistics_every": 5}, "statistics and an emulated link need a fixed number of ranks"),
        ({"sampler": "fixed"}, "samples are dealt again with sampler 'global' and drop_last"),
        ({"strategy_options": {"compression": "topk"}, "topology": "ring"}, "topk sends differences"),
    ],
)
def test_configs_that_cannot_go_on_are_refused(fields: dict, message: str) -> None:
    known = {"strategy": "dpsgd", "learners": 4, "batch_size": 60, "epochs": 1, "on_failure": "shrink"}
    with pytest.raises(ValueError, match=message) as error:
        TrainConfig(**{**known, **fields})
    assert "\n" not in str(error.value)
