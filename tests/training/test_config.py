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
from ddpcore.options.fields import dotted, parse_settings
from ddpcore.records.run import BOOKKEEPING
from ddpcore.strategies.registry import STRATEGIES
from ddpcore.training import DataConfig, ModelConfig, OptimizerConfig, RunConfig, StrategyConfig, TrainConfig
from ddpcore.training.config import merged


def with_epochs(name: str, table: Any) -> Any:
    return {"epochs": 2, **table} if name == "run" and isinstance(table, dict) else table


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_sise": 8}, "a training run has no 'batch_sise': did you mean 'data.batch_size'?"),
        ({"zzz": 8}, "a training run has no 'zzz': choose from model, "),
        ({"optimizer": {"lr": "fast"}}, "lr is 'fast': it must be a finite number"),
        ({"optimizer": {"lr": float("nan")}}, "lr is nan: it must be a finite number"),
        ({"optimizer": {"lr": -0.1}}, "lr is -0.1: it must be at least 0"),
        ({"optimizer": {"lr": True}}, "lr is True: it must be a finite number"),
        ({"data": {"batch_size": 8.0}}, "batch_size is 8.0: it must be a whole number"),
        ({"data": {"augment": 1}}, "augment is 1: it must be true or false"),
        ({"model": 5}, "model is 5: it must be text"),
        ({"optimizer": {"milestones": 5}}, "milestones is 5: it must be a list of numbers"),
        ({"optimizer": [1]}, "optimizer is [1]: it must be text"),
        ({"run": 3}, "run is 3: it must be a table, of the keys epochs, steps, "),
        ({"lr": 0.1}, "a training run has no 'lr': write optimizer.lr"),
        ({"topology_options": {}}, "a training run has no 'topology_options': write strategy.topology"),
        ({"optimizer": {"lrr": 0.1}}, "optimizer sgd has no option 'lrr': did you mean 'lr'?"),
        ({"data": {"batch_sise": 8}}, "data set synthetic has no option 'batch_sise': did you mean 'batch_size'?"),
        ({"run": {"epohcs": 8}}, "run has no 'epohcs': did you mean 'epochs'?"),
        ({"model": "lenet"}, "unknown model 'lenet': did you mean 'lenet5'?"),
        ({"data": "cifar"}, "unknown data set 'cifar': did you mean 'cifar10'?"),
        (
            {"optimizer": {"schedule": "linear"}},
            "unknown schedule 'linear': choose from constant, step, cosine, ",
        ),
        ({"strategy": "dspgd"}, "unknown strategy 'dspgd': did you mean 'dpsgd'?"),
        ({"optimizer": "adm"}, "unknown optimizer 'adm': did you mean 'adam'?"),
        ({"data": {"batch_size": 0}}, "batch_size is 0: it must be at least 1"),
        ({"optimizer": {"warmup_start": 1.5}}, "warmup_start is 1.5: it must be at least 0 and at most 1"),
        ({"optimizer": {"max_grad_norm": 0}}, "max_grad_norm is 0.0: it must be above 0"),
        ({"optimizer": {"gamma": 1.5}}, "gamma is 1.5: it must be above 0 and at most 1"),
        ({"run": {"diverged_above": 0.5}}, "diverged_above is 0.5: it must be above 1"),
        ({"run": {"target": 0}}, "target is 0.0: it must be above 0 and at most 1"),
        (
            {"strategy": {"link": "10Gb/s", "learners": 2, "name": "ssgd"}},
            "link is '10Gb/s': write a bandwidth and a delay",
        ),
        ({"strategy": {"link": "10Gb/s,50us"}}, "link is '10Gb/s,50us' and learners is 1: one learner sends nothing"),
        ({"run": {"seed": -1}}, "seed is -1: it must be at least 0"),
        ({"run": {"steps": 5}}, "run.epochs is 2 and run.steps is 5: give exactly one"),
        ({"run": {"epochs": None}}, "run.epochs is None and run.steps is None: give exactly one"),
        (
            {"strategy": {"learners": 3, "name": "ssgd"}},
            "batch_size is 128: it must be a multiple of learners x accumulation, 3 x 1",
        ),
        ({"strategy": {"learners": 2}}, "learners is 2: single trains at most 1, take the strategy ssgd"),
        ({"run": {"evaluate_on": "validation"}}, "run.evaluate_on is 'validation': set data.num_validation"),
        (
            {"optimizer": {"milestones": [1, 2]}},
            "milestones is (1.0, 2.0): set milestones if and only if schedule is 'step'",
        ),
        ({"optimizer": {"schedule": "step"}}, "milestones is (): set milestones if and only if schedule is 'step'"),
        (
            {"optimizer": {"schedule": "step", "milestones": [2, 1]}},
            "milestones is (2.0, 1.0): they must be in ascending order",
        ),
        ({"model": {"dropuot": 0.1}}, "model lenet5 has no option 'dropuot': did you mean 'dropout'?"),
        (
            {"data": {"num_clases": 3, "name": "synthetic"}},
            "data set synthetic has no option 'num_clases': did you mean 'num_classes'?",
        ),
        (
            {"optimizer": {"momentun": 0.1}},
            "optimizer sgd has no option 'momentun': did you mean 'momentum'?",
        ),
        ({"optimizer": {"name": "muon", "adamw_lr": 0.1}}, "a run sets lr for all parameters, take"),
        (
            {"strategy": {"name": "local_sgd", "perod": 3}},
            "has no option 'perod': did you mean 'period'?",
        ),
        ({"strategy": {"name": "local_sgd", "period": 0}}, "local_sgd: period is 0"),
        (
            {"strategy": {"name": "local_sgd", "group": 3, "learners": 4}},
            "local_sgd: group is 3 of 4 learners: take a divisor of 4",
        ),
        (
            {"strategy": {"name": "local_sgd", "group": 2, "learners": 4}, "run": {"statistics_every": 5}},
            "statistics_every is 5: a group of 2 leaves no learner's own gradient, set 0 or leave",
        ),
        (
            {"strategy": {"name": "local_sgd", "group": 2, "learners": 4, "on_failure": "shrink"}},
            "local_sgd: on_failure='shrink' leaves a group with fewer learners than the others: leave group out",
        ),
        (
            {"strategy": {"name": "gasloc", "group": 2}},
            "gasloc: group is 2 of 1 learners: take a divisor of 1",
        ),
        (
            {"strategy": {"name": "local_sgd", "period": "a"}},
            "local_sgd: period is 'a': it must be a whole",
        ),
        (
            {"strategy": {"name": "noisy_ssgd", "std": "a"}},
            "strategy noisy_ssgd: std is 'a': it must be a finite",
        ),
        ({"strategy": {"name": "dpsgd", "compression": "zip"}}, "unknown compression 'zip'"),
        ({"strategy": {"name": "slowmo", "base": "ssgd"}}, "slowmo: base is 'ssgd': did you mean 'dpsgd'?"),
        ({"strategy": {"name": "dpsgd", "compression": 3}}, "compression is 3: it must be a codec"),
        (
            {"strategy": {"name": "local_sgd", "outer": {"lrr": 1}}},
            "local_sgd: outer: SGD.__init__() got an unex",
        ),
        (
            {"strategy": {"name": "local_sgd", "outer": {"lr": -1}}},
            "local_sgd: outer: Invalid learning rate: -1",
        ),
        ({"strategy": {"name": "local_sgd", "outer": 3}}, "local_sgd: outer is 3: it must be a mapping"),
        ({"optimizer": {"lr": 10**400}}, "0: it must be a finite number"),
        (
            {"data": {"name": "saddle", "dimension": "a"}},
            "data set saddle: dimension is 'a': it must be a whole number",
        ),
        (
            {"data": {"input_shape": "a"}},
            "synthetic: input_shape is 'a': it must be a list of numbers",
        ),
        (
            {"data": {"input_shape": ["a"]}},
            "synthetic: input_shape is 'a': it must be a whole number",
        ),
        (
            {"strategy": {"topology": {"name": "hierarchical", "local_size": "a"}}},
            "topology hierarchical: local_size is 'a': it must be a whole number",
        ),
        (
            {"strategy": {"topology": {"name": "torus_2d", "local_size": 4}}},
            "topology torus_2d has no option 'local_size': choose from num_rows",
        ),
        (
            {"strategy": {"topology": {"neighbors_each_side": 3}}},
            "topology random_pair has no option 'neighbors_each_side'",
        ),
        (
            {"strategy": {"topology": {"name": "ring", "neighbours_each_side": 3}}},
            "topology ring has no option 'neighbours_each_side': did you mean 'neighbors_each_side'?",
        ),
        ({"data": {"shards": {"name": "dirichlet", "alpha": 0}}}, "shards: alpha is 0"),
        ({"data": {"shards": {"name": "dirichlet", "alhpa": 1}}}, "did you mean 'alpha'?"),
        ({"data": {"shards": {"name": "by_class", "alpha": 1}}}, "shards by_class"),
        ({"data": {"shards": "given"}}, "put one list of sample numbers for each learner in the option parts"),
        ({"data": {"shards": "by_class", "sampler": "fixed"}}, "leave sampler at 'global' and drop_last on"),
        ({"data": {"shards": "by_class", "drop_last": False}}, "leave sampler at 'global' and drop_last on"),
        ({"strategy": {"name": "dpsgd", "consensus": {"least": 2}}}, "consensus: least is 2"),
        (
            {"run": {"target": 0.5, "evaluate_every": 0}},
            "run.target is 0.5: it does nothing without run.evaluate_every, set that or leave it out",
        ),
        ({"strategy": {"topology": "rnig"}}, "unknown topology 'rnig': did you mean 'ring'?"),
        ({"strategy": {"policies": {"momentum": "share"}}}, "policy momentum is 'share'"),
        ({"strategy": {"policies": {"momentun": "keep"}}}, "policies has no 'momentun': did you mean 'momentum'?"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        TrainConfig.from_dict(
            {"run": {"epochs": 2}} | {name: with_epochs(name, table) for name, table in fields.items()}
        )
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_that_would_do_nothing_are_refused() -> None:
    """And are taken beside what they need."""
    recalibrates = {"run": {"evaluation_batch_norm": "recalibrate"}}
    for section, name, value, with_it in (
        ("optimizer", "gamma", 0.5, {"optimizer": {"schedule": "exponential"}}),
        ("optimizer", "warmup_start", 0.5, {"optimizer": {"warmup": 1}}),
        ("run", "statistics_samples", 9, {"run": {"statistics_every": 1}}),
        ("run", "statistics_hessian", True, {"run": {"statistics_every": 1}}),
        ("run", "hessian_samples", 9, {"run": {"hessian_every": 1}}),
        ("run", "hessian_top", 2, {"run": {"hessian_every": 1}}),
        ("run", "recalibration_batches", 2, recalibrates),
    ):
        fields = {"run": {"epochs": 2}, "strategy": {"name": "ssgd", "learners": 2}}
        fields = merged(fields, {section: {name: value}})
        with pytest.raises(ValueError, match=f"{section}.{name} is {value!r}: it does nothing without "):
            TrainConfig.from_dict(fields)
        assert getattr(getattr(TrainConfig.from_dict(merged(fields, with_it)), section), name) == value


def test_to_a_dict_and_back() -> None:
    config = TrainConfig.from_dict(
        {
            "run": {"epochs": 3},
            "optimizer": {"lr": 1, "schedule": "step", "milestones": (1, 2.5), "name": "lamb", "betas": (0.9, 0.99)},
            "strategy": {"name": "local_sgd", "period": 4, "outer": {"lr": 0.7}, "learners": 4},
            "data": {"data_dir": Path("there")},
        }
    )
    plain = json.loads(json.dumps(config.to_dict()))
    assert plain == config.to_dict()
    assert TrainConfig.from_dict(plain) == config
    assert TrainConfig.from_dict({key: value for key, value in plain.items() if value is not None}) == config  # TOML
    assert pickle.loads(pickle.dumps(config)) == config
    assert (config.optimizer.lr, config.data.data_dir) == (1.0, "there")


def test_options_are_a_copy() -> None:
    options = {"momentum": 0.9}
    config = TrainConfig.from_dict({"run": {"epochs": 1}, "optimizer": {**options}})
    options["momentum"] = 0.5
    assert config.optimizer.options == {"momentum": 0.9}


def test_overrides() -> None:
    base = TrainConfig.from_dict(
        {
            "run": {"epochs": 3},
            "optimizer": {"momentum": 0.9, "weight_decay": 1e-4},
            "strategy": {"policies": {"rng": "reset"}},
        }
    )
    assert base.overridden({}) == base
    row = base.overridden(
        {"optimizer": {"lr": 0.2, "weight_decay": 0.0}, "strategy": {"policies": {"momentum": "average"}}}
    )
    assert row.optimizer.lr == 0.2
    assert row.optimizer.options == {"momentum": 0.9, "weight_decay": 0.0}
    assert row.strategy.policies == {"rng": "reset", "momentum": "average"}
    assert base.overridden({"optimizer": "adamw"}).optimizer.options == {}, "another optimizer, other options"
    speech = TrainConfig.from_dict({"run": {"epochs": 3}, "data": {"name": "synthetic_speech", "num_frames": 3}})
    assert speech.overridden({"data": {"num_classes": 4}}).data.options == {
        "num_frames": 3,
        "num_classes": 4,
    }
    assert speech.overridden({"data": "mnist"}).data.options == {}
    short = base.overridden({"run": {"steps": 7}})
    assert (short.run.epochs, short.run.steps) == (None, 7)
    assert (
        short.overridden({"run": {"epochs": 2}}).run.epochs,
        short.overridden({"run": {"epochs": 2}}).run.steps,
    ) == (
        2,
        None,
    )
    with pytest.raises(ValueError, match="did you mean 'strategy'"):
        base.overridden({"stratgy": "ssgd"})


def test_options_begin_anew_where_their_owner_becomes_another() -> None:
    """Naming the same part again keeps them, also if it is the default."""
    options = {"momentum": 0.9}
    for values in ({"optimizer": "lars"}, {}):
        said = merged(values, {"optimizer": {"lr": 0.5, **options}})
        same, other = values.get("optimizer", "sgd"), "torch_sgd"
        kept = said["optimizer"]
        assert merged(said, {"optimizer": same})["optimizer"] == {**kept, "name": same}
        again = merged(said, {"optimizer": {"name": same, "weight_decay": 0.1}})
        assert again["optimizer"] == {**kept, "name": same, "weight_decay": 0.1}
        assert merged(said, {"optimizer": other})["optimizer"] == {"name": other, "lr": 0.5}
        anew = merged(said, {"optimizer": {"name": other, "nesterov": True}})
        assert anew["optimizer"] == {"name": other, "lr": 0.5, "nesterov": True}
    ring = {"strategy": {"topology": {"name": "ring", "neighbors_each_side": 2}}}
    assert merged(ring, {"strategy": {"topology": "complete"}}) == {"strategy": {"topology": {"name": "complete"}}}
    assert merged(ring, {"strategy": "dpsgd"}) == {"strategy": {**ring["strategy"], "name": "dpsgd"}}
    speech = TrainConfig.from_dict({"run": {"epochs": 3}, "data": {"name": "synthetic_speech", "num_frames": 3}})
    assert speech.overridden({"data": "synthetic_speech"}) == speech


@pytest.mark.parametrize("wrong", [3, "abc", [1], None])
def test_policies_that_are_no_mapping_are_not_merged(wrong: Any) -> None:
    for values, overrides in (({}, wrong), ({}, {"momentum": "keep"})):
        config = {"run": {"epochs": 1}, "strategy": {"policies": values if overrides == wrong else wrong}}
        with pytest.raises(ValueError, match=r"strategy\.policies is .*: it must be a mapping"):
            TrainConfig.from_dict(merged(config, {"strategy": {"policies": wrong}}))


def test_difference_names_what_changes_results() -> None:
    base = TrainConfig.from_dict({"run": {"epochs": 3}})
    other = base.overridden(
        {"optimizer": {"lr": 0.5}, "data": {"data_dir": "elsewhere"}, "run": {"keep_last": 5}}
    ).to_dict()
    assert base.difference(other) == ["optimizer.lr is 0.1, not 0.5"]
    assert base.difference(base.to_dict()) == []
    assert set(BOOKKEEPING) <= set(dotted(base.to_dict()))


def test_the_strategy_that_is_meant() -> None:
    def made(**fields: Any) -> Any:
        return TrainConfig.from_dict(
            merged({"run": {"epochs": 1, "seed": 5}, "strategy": {"learners": 4}}, fields)
        ).make_strategy()

    gossip = made(strategy={"name": "dpsgd", "compression": {"name": "topk", "ratio": 0.1}, "topology": "ring"})
    assert (gossip.topology, gossip.compression.ratio) == (ddpcore.Ring(), 0.1)
    assert made(strategy="dpsgd").topology == ddpcore.RandomPair(5)
    assert (
        made(strategy={"name": "dpsgd", "topology": {"name": "hierarchical", "local_size": 4}}).topology.local_size == 4
    )
    assert made(strategy="noisy_ssgd").seed == 5
    assert made(strategy={"name": "noisy_ssgd", "seed": 1}).seed == 1
    local = made(strategy={"name": "local_sgd", "outer": {"lr": 0.7, "nesterov": True, "momentum": 0.5}})
    assert local.outer([torch.zeros(1)]).param_groups[0]["momentum"] == 0.5
    assert made(strategy={"name": "slowmo", "topology": "ring"}).base.topology == ddpcore.Ring()
    assert made(strategy={"name": "slowmo", "base": "none"}).base is None
    assert made(strategy={"name": "push_sum", "topology": "ring"}).topology == ddpcore.Ring()


def test_numbers_of_numpy_are_numbers() -> None:
    grid = np.logspace(-2, 0, 3)
    config = TrainConfig.from_dict(
        {
            "run": {"epochs": np.int64(2)},
            "optimizer": {"lr": grid[0], "milestones": (np.float32(1),), "schedule": "step", "momentum": grid[1]},
        }
    )
    same = TrainConfig.from_dict(
        {"run": {"epochs": 2}, "optimizer": {"lr": 0.01, "milestones": (1,), "schedule": "step", "momentum": 0.1}}
    )
    assert config == same
    assert json.loads(json.dumps(config.to_dict())) == same.to_dict()
    with pytest.raises(ValueError, match=r"epochs is 2\.5: it must be a whole number"):
        TrainConfig.from_dict({"run": {"epochs": np.float64(2.5)}})


def test_a_config_from_before_a_field_had_its_default() -> None:
    config = TrainConfig.from_dict({"model": "mlp", "data": "mnist", "run": {"steps": 3}})
    older = config.to_dict()
    del older["run"]["statistics_every"], older["strategy"]["policies"]
    assert config.difference(older) == []
    other = config.overridden({"run": {"statistics_every": 5}, "strategy": {"learners": 2, "name": "ssgd"}})
    assert other.difference(older)[0] == "run.statistics_every is 5, not 0"


def test_options_beside_fields_are_what_python_says() -> None:
    same = TrainConfig(
        model=ModelConfig(name="mlp", options={"hidden": [8]}),
        data=DataConfig(shards="dirichlet", shards_options={"alpha": 0.5}),
        optimizer=OptimizerConfig(lr=0.2, options={"momentum": 0.9}),
        strategy=StrategyConfig(name="local_sgd", options={"period": 4}, learners=4),
        run=RunConfig(steps=3),
    )
    texts = "model=mlp model.hidden=[8] data.shards=dirichlet data.shards.alpha=0.5 optimizer.lr=0.2 " \
        "optimizer.momentum=0.9 strategy=local_sgd strategy.period=4 strategy.learners=4 run.steps=3"  # fmt: skip
    assert TrainConfig.from_dict(parse_settings(texts.split())) == same
    with pytest.raises(ValueError, match=r"options has lr: set the field optimizer\.lr instead"):
        OptimizerConfig(options={"lr": 0.1})
    with pytest.raises(ValueError, match="OptimizerConfig has no 'lrr': did you mean 'lr'"):
        OptimizerConfig(lrr=0.1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"a training run has no 'lr': write optimizer\.lr"):
        TrainConfig(lr=0.1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="model is 'mlp': it must be a ModelConfig"):
        TrainConfig(model="mlp", run=RunConfig(steps=3))  # type: ignore[arg-type]


def test_a_strategy_is_built_once_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    build = STRATEGIES.build

    def counted(name: str, *arguments: Any, **options: Any) -> Any:
        built.append(name)
        return build(name, *arguments, **options)

    monkeypatch.setattr(STRATEGIES, "build", counted)
    config = TrainConfig.from_dict({"strategy": {"name": "dpsgd", "learners": 2}, "run": {"steps": 3}})
    first = config.make_strategy()
    assert config.checked_strategy is first and built == ["dpsgd"]
    assert config.make_strategy() is not first, "two runs of one config have two strategies"
    there = pickle.loads(pickle.dumps(config))
    built.clear()
    assert there == config and there.checked_strategy is there.make_strategy() and built == ["dpsgd"]
