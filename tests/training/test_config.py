"""``TrainConfig``: checks, conversion, overrides."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ddpcore
from ddpcore.training import TrainConfig
from ddpcore.training.config import BOOKKEEPING, merged


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_sise": 8}, "a training run has no 'batch_sise': did you mean 'batch_size'?"),
        ({"zzz": 8}, "a training run has no 'zzz': choose from model, "),
        ({"lr": "fast"}, "lr is 'fast': it must be a finite number"),
        ({"lr": float("nan")}, "lr is nan: it must be a finite number"),
        ({"lr": -0.1}, "lr is -0.1: it must be at least 0"),
        ({"lr": True}, "lr is True: it must be a finite number"),
        ({"batch_size": 8.0}, "batch_size is 8.0: it must be a whole number"),
        ({"augment": 1}, "augment is 1: it must be true or false"),
        ({"model": 5}, "model is 5: it must be text"),
        ({"milestones": 5}, "milestones is 5: it must be a list of numbers"),
        ({"optimizer_options": [1]}, "optimizer_options is [1]: it must be a mapping"),
        ({"model": "lenet"}, "unknown model 'lenet': did you mean 'lenet5'?"),
        ({"dataset": "cifar"}, "unknown data set 'cifar': did you mean 'cifar10'?"),
        (
            {"schedule": "linear"},
            "unknown schedule 'linear': choose from constant, step, cosine, ",
        ),
        ({"strategy": "dspgd"}, "unknown strategy 'dspgd': did you mean 'dpsgd'?"),
        ({"optimizer": "adm"}, "unknown optimizer 'adm': did you mean 'adam'?"),
        ({"batch_size": 0}, "batch_size is 0: it must be at least 1"),
        ({"warmup_start": 1.5}, "warmup_start is 1.5: it must be at least 0 and at most 1"),
        ({"max_grad_norm": 0}, "max_grad_norm is 0.0: it must be above 0"),
        ({"gamma": 1.5}, "gamma is 1.5: it must be above 0 and at most 1"),
        ({"diverged_above": 0.5}, "diverged_above is 0.5: it must be above 1"),
        ({"target": 0}, "target is 0.0: it must be above 0 and at most 1"),
        ({"link": "10Gb/s", "learners": 2, "strategy": "ssgd"}, "link is '10Gb/s': write a bandwidth and a delay"),
        ({"link": "10Gb/s,50us"}, "link is '10Gb/s,50us' and learners is 1: one learner sends nothing"),
        ({"seed": -1}, "seed is -1: it must be at least 0"),
        ({"steps": 5}, "epochs is 2 and steps is 5: give exactly one"),
        ({"epochs": None}, "epochs is None and steps is None: give exactly one"),
        (
            {"learners": 3, "strategy": "ssgd"},
            "batch_size is 128: it must be a multiple of learners x accumulation, 3 x 1",
        ),
        ({"learners": 2}, "learners is 2: single trains one learner, take the strategy ssgd"),
        ({"evaluate_on": "validation"}, "evaluate_on is 'validation': set num_validation"),
        ({"milestones": [1, 2]}, "milestones is (1.0, 2.0): set milestones if and only if schedule is 'step'"),
        ({"schedule": "step"}, "milestones is (): set milestones if and only if schedule is 'step'"),
        ({"schedule": "step", "milestones": [2, 1]}, "milestones is (2.0, 1.0): they must be in ascending order"),
        ({"model_options": {"dropuot": 0.1}}, "model lenet5 has no option 'dropuot': did you mean 'dropout'?"),
        (
            {"dataset_options": {"num_classes": 3}, "dataset": "mnist"},
            "data set mnist has no option 'num_classes': choose from max_bytes",
        ),
        (
            {"optimizer_options": {"momentun": 0.1}},
            "optimizer sgd has no option 'momentun': did you mean 'momentum'?",
        ),
        ({"optimizer_options": {"lr": 0.1}}, "optimizer sgd has no option 'lr'"),
        ({"optimizer_options": {"max_grad_norm": 1}}, "set the field max_grad_norm instead"),
        ({"optimizer": "muon", "optimizer_options": {"adamw_lr": 0.1}}, "a run sets lr for all parameters, take"),
        (
            {"strategy": "local_sgd", "strategy_options": {"perod": 3}},
            "has no option 'perod': did you mean 'period'?",
        ),
        ({"strategy": "local_sgd", "strategy_options": {"period": 0}}, "local_sgd: period is 0"),
        (
            {"strategy": "local_sgd", "strategy_options": {"group": 3}, "learners": 4},
            "local_sgd: group is 3 and there are 4 learners: take a divisor of 4",
        ),
        (
            {"strategy": "local_sgd", "strategy_options": {"group": 2}, "learners": 4, "statistics_every": 5},
            "statistics_every is 5: a group of 2 leaves no learner's own gradient to compare, set it to 0 or leave",
        ),
        (
            {"strategy": "local_sgd", "strategy_options": {"group": 2}, "learners": 4, "on_failure": "shrink"},
            "local_sgd: on_failure='shrink' leaves a group with fewer learners than the others: leave group out",
        ),
        (
            {"strategy": "gasloc", "strategy_options": {"group": 2}},
            "strategy gasloc has no option 'group': choose from",
        ),
        (
            {"strategy": "local_sgd", "strategy_options": {"period": "a"}},
            "strategy local_sgd: period is 'a': it must be a whole",
        ),
        (
            {"strategy": "noisy_ssgd", "strategy_options": {"std": "a"}},
            "strategy noisy_ssgd: std is 'a': it must be a finite",
        ),
        ({"strategy": "dpsgd", "strategy_options": {"compression": "zip"}}, "unknown compression 'zip'"),
        ({"strategy": "slowmo", "strategy_options": {"base": "ssgd"}}, "slowmo: base is 'ssgd': did you mean 'dpsgd'?"),
        ({"strategy": "dpsgd", "strategy_options": {"compression": 3}}, "compression is 3: it must be a name, or"),
        (
            {"strategy": "local_sgd", "strategy_options": {"outer": {"lrr": 1}}},
            "local_sgd: outer: SGD.__init__() got an unex",
        ),
        (
            {"strategy": "local_sgd", "strategy_options": {"outer": {"lr": -1}}},
            "local_sgd: outer: Invalid learning rate: -1",
        ),
        ({"strategy": "local_sgd", "strategy_options": {"outer": 3}}, "local_sgd: outer is 3: it must be a mapping"),
        ({"lr": 10**400}, "0: it must be a finite number"),
        (
            {"dataset": "saddle", "dataset_options": {"dimension": "a"}},
            "data set saddle: dimension is 'a': it must be a whole number",
        ),
        (
            {"dataset_options": {"input_shape": "a"}},
            "synthetic: input_shape is 'a': it must be a list of numbers",
        ),
        (
            {"dataset_options": {"input_shape": ["a"]}},
            "synthetic: input_shape is 'a': it must be a whole number",
        ),
        (
            {"topology": "hierarchical", "topology_options": {"local_size": "a"}},
            "topology hierarchical: local_size is 'a': it must be a whole number",
        ),
        (
            {"topology": "torus_2d", "topology_options": {"local_size": 4}},
            "topology torus_2d has no option 'local_size': choose from num_rows",
        ),
        ({"topology_options": {"neighbors_each_side": 3}}, "topology random_pair has no option 'neighbors_each_side'"),
        (
            {"topology": "ring", "topology_options": {"neighbours_each_side": 3}},
            "topology ring has no option 'neighbours_each_side': did you mean 'neighbors_each_side'?",
        ),
        ({"shards": "dirichlet", "shards_options": {"alpha": 0}}, "shards: alpha is 0"),
        ({"shards": "dirichlet", "shards_options": {"alhpa": 1}}, "did you mean 'alpha'?"),
        ({"shards": "by_class", "shards_options": {"alpha": 1}}, "shards by_class"),
        ({"shards": "given"}, "put one list of sample numbers for each learner in shards_options, parts"),
        ({"shards": "by_class", "sampler": "fixed"}, "leave sampler at 'global' and drop_last on"),
        ({"shards": "by_class", "drop_last": False}, "leave sampler at 'global' and drop_last on"),
        ({"strategy": "dpsgd", "strategy_options": {"consensus": {"least": 2}}}, "consensus: least is 2"),
        ({"target": 0.5, "evaluate_every": 0}, "target is 0.5: only an evaluation can reach it, set evaluate_every"),
        ({"topology": "rnig"}, "unknown topology 'rnig': did you mean 'ring'?"),
        ({"policies": {"momentum": "share"}}, "policy momentum is 'share'"),
        ({"policies": {"momentun": "keep"}}, "policies has no 'momentun': did you mean 'momentum'?"),
        ({"policies": {"scaler": "average"}}, "bf16 and fp32 need none"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        TrainConfig.from_dict({"epochs": 2, **fields})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_to_a_dict_and_back() -> None:
    config = TrainConfig(
        epochs=3,
        lr=1,
        schedule="step",
        milestones=(1, 2.5),
        optimizer="lamb",
        optimizer_options={"betas": (0.9, 0.99)},
        strategy="local_sgd",
        strategy_options={"period": 4, "outer": {"lr": 0.7}},
        learners=4,
        data_dir=Path("there"),
    )
    plain = json.loads(json.dumps(config.to_dict()))
    assert plain == config.to_dict()
    assert TrainConfig.from_dict(plain) == config
    assert TrainConfig.from_dict({key: value for key, value in plain.items() if value is not None}) == config  # TOML
    assert pickle.loads(pickle.dumps(config)) == config
    assert (config.lr, config.data_dir) == (1.0, "there")


def test_options_are_a_copy() -> None:
    options = {"momentum": 0.9}
    config = TrainConfig(epochs=1, optimizer_options=options)
    options["momentum"] = 0.5
    assert config.optimizer_options == {"momentum": 0.9}


def test_overrides() -> None:
    base = TrainConfig(epochs=3, optimizer_options={"momentum": 0.9, "weight_decay": 1e-4}, policies={"rng": "reset"})
    assert base.overridden({}) == base
    row = base.overridden({"lr": 0.2, "optimizer_options": {"weight_decay": 0.0}, "policies": {"momentum": "average"}})
    assert row.lr == 0.2
    assert row.optimizer_options == {"momentum": 0.9, "weight_decay": 0.0}
    assert row.policies == {"rng": "reset", "momentum": "average"}
    assert base.overridden({"optimizer": "adamw"}).optimizer_options == {}, "another optimizer, other options"
    speech = TrainConfig(epochs=3, dataset="synthetic_speech", dataset_options={"num_frames": 3})
    assert speech.overridden({"dataset_options": {"num_classes": 4}}).dataset_options == {
        "num_frames": 3,
        "num_classes": 4,
    }
    assert speech.overridden({"dataset": "mnist"}).dataset_options == {}
    short = base.overridden({"steps": 7})
    assert (short.epochs, short.steps) == (None, 7)
    assert (short.overridden({"epochs": 2}).epochs, short.overridden({"epochs": 2}).steps) == (2, None)
    with pytest.raises(ValueError, match="did you mean 'strategy'"):
        base.overridden({"stratgy": "ssgd"})


def test_options_begin_anew_where_their_owner_becomes_another() -> None:
    """Naming the same part again keeps them, also if it is the default."""
    options = {"momentum": 0.9}
    for values in ({"optimizer": "lars"}, {}):
        said = {**values, "optimizer_options": options}
        same, other = values.get("optimizer", "sgd"), "torch_sgd"
        assert merged(said, {"optimizer": same})["optimizer_options"] == options
        again = merged(said, {"optimizer": same, "optimizer_options": {"weight_decay": 0.1}})
        assert again["optimizer_options"] == {**options, "weight_decay": 0.1}
        assert merged(said, {"optimizer": other})["optimizer_options"] == {}
        anew = merged(said, {"optimizer": other, "optimizer_options": {"nesterov": True}})
        assert anew["optimizer_options"] == {"nesterov": True}
    speech = TrainConfig(epochs=3, dataset="synthetic_speech", dataset_options={"num_frames": 3})
    assert speech.overridden({"dataset": "synthetic_speech"}) == speech


@pytest.mark.parametrize("name", ["optimizer_options", "policies"])
@pytest.mark.parametrize("wrong", [3, "abc", [1], None])
def test_options_that_are_no_mapping_are_not_merged(name: str, wrong: Any) -> None:
    for values, overrides in (({}, {name: wrong}), ({name: {}}, {name: wrong}), ({name: wrong}, {name: {}})):
        with pytest.raises(ValueError) as caught:
            merged(values, overrides)
        assert str(caught.value) == f"{name} is {wrong!r}: it must be a mapping"


def test_difference_names_what_changes_results() -> None:
    base = TrainConfig(epochs=3)
    other = base.overridden({"lr": 0.5, "data_dir": "elsewhere", "keep_last": 5}).to_dict()
    assert base.difference(other) == ["lr is 0.1, not 0.5"]
    assert base.difference(base.to_dict()) == []
    assert set(BOOKKEEPING) <= set(base.to_dict())


def test_the_strategy_that_is_meant() -> None:
    def made(**fields: Any) -> Any:
        return TrainConfig(epochs=1, learners=4, seed=5, **fields).make_strategy()

    gossip = made(strategy="dpsgd", strategy_options={"compression": {"name": "topk", "ratio": 0.1}}, topology="ring")
    assert (gossip.topology, gossip.compression.ratio) == (ddpcore.Ring(), 0.1)
    assert made(strategy="dpsgd").topology == ddpcore.RandomPair(5)
    assert made(strategy="dpsgd", topology="hierarchical", topology_options={"local_size": 4}).topology.local_size == 4
    assert made(strategy="noisy_ssgd").seed == 5
    assert made(strategy="noisy_ssgd", strategy_options={"seed": 1}).seed == 1
    local = made(strategy="local_sgd", strategy_options={"outer": {"lr": 0.7, "nesterov": True, "momentum": 0.5}})
    assert local.outer([torch.zeros(1)]).param_groups[0]["momentum"] == 0.5
    assert made(strategy="slowmo", topology="ring").base.topology == ddpcore.Ring()
    assert made(strategy="slowmo", strategy_options={"base": "none"}).base is None
    assert made(strategy="push_sum", topology="ring").topology == ddpcore.Ring()


def test_numbers_of_numpy_are_numbers() -> None:
    grid = np.logspace(-2, 0, 3)
    config = TrainConfig(
        epochs=np.int64(2),
        lr=grid[0],
        milestones=(np.float32(1),),
        schedule="step",
        optimizer_options={"momentum": grid[1]},
    )
    same = TrainConfig(epochs=2, lr=0.01, milestones=(1,), schedule="step", optimizer_options={"momentum": 0.1})
    assert config == same
    assert json.loads(json.dumps(config.to_dict())) == same.to_dict()
    with pytest.raises(ValueError, match=r"epochs is 2\.5: it must be a whole number"):
        TrainConfig(epochs=np.float64(2.5))


def test_a_config_from_before_a_field_had_its_default() -> None:
    config = TrainConfig(model="mlp", dataset="mnist", steps=3)
    older = {name: value for name, value in config.to_dict().items() if name not in ("statistics_every", "policies")}
    assert config.difference(older) == []
    assert config.overridden({"statistics_every": 5, "learners": 2, "strategy": "ssgd"}).difference(older)[-1] == (
        "strategy is 'ssgd', not 'single'"
    )
