"""Runs and configs of version 0.2: the folder ``version_0_2`` holds a run of six steps that stopped after three."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ddpcore.options.fields import dotted
from ddpcore.records.run import KEYS_0_2, from_0_2, nested
from ddpcore.training import RunRecord, TrainConfig, train
from ddpcore.training.config import describe_fields

THERE = Path(__file__).parent / "version_0_2"


def test_it_resumes_and_ends_as_version_0_2_did(tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(THERE, out)
    config = TrainConfig.from_dict(RunRecord.read(out).header["config"])
    assert (config.strategy.name, config.strategy.topology, config.strategy.learners) == ("dpsgd", "ring", 2)
    assert config.strategy.options == {"order": "adapt_then_combine"}
    record = train(config, out=out, resume=True)
    assert record.resumed[0]["step"] == 3 and record.final["step"] == 6
    theirs = safetensors.torch.load_file(THERE / "final.safetensors")
    ours = safetensors.torch.load_file(out / "model.safetensors")
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():  # on the CPU that wrote them the bits are the same
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)


def test_another_config_is_refused_by_its_new_keys(tmp_path: Path) -> None:
    shutil.copytree(THERE, tmp_path / "run")
    config = TrainConfig.from_dict(RunRecord.read(THERE).header["config"])
    other = config.overridden({"optimizer": {"lr": 0.3, "momentum": 0.5}, "run": {"keep_last": 4}})
    says = r"holds another run: optimizer\.lr is 0\.3, not 0\.2; optimizer\.momentum is 0\.5, not 0\.9: take"
    with pytest.raises(ValueError, match=says):
        train(other, out=tmp_path / "run", resume=True)


def test_every_field_of_version_0_2_has_a_key() -> None:
    keys = {key for key, _ in describe_fields()}
    assert {key for key in KEYS_0_2.values() if key != "strategy.policies"} <= keys
    flat = {name: name for name in KEYS_0_2 if not name.endswith("_options")}
    assert set(dotted(from_0_2(flat))) == {KEYS_0_2[name] for name in flat}


@pytest.mark.parametrize(
    ("flat", "sections"),
    [
        ({}, {}),
        ({"lr": 0.1}, {"optimizer": {"lr": 0.1}}),
        ({"model_options": {"hidden": [3]}, "model": "mlp"}, {"model": {"name": "mlp", "hidden": [3]}}),
        (
            {"topology": "ring", "topology_options": {"neighbors_each_side": 2}},
            {"strategy": {"topology": {"name": "ring", "neighbors_each_side": 2}}},
        ),
        ({"shards": "even", "policies": {"rng": "keep"}},
         {"data": {"shards": {"name": "even"}}, "strategy": {"policies": {"rng": "keep"}}}),
        ({"policies": {"scaler": "keep", "rng": "keep"}}, {"strategy": {"policies": {"rng": "keep"}}}),
        ({"unheard_of": 3}, {"unheard_of": 3}),
        ({"run": {"steps": 3}, "model": {"name": "mlp"}}, {"run": {"steps": 3}, "model": {"name": "mlp"}}),
    ],
)  # fmt: skip
def test_configs_of_files(flat: dict[str, Any], sections: dict[str, Any]) -> None:
    assert nested(flat) == sections
