"""Parts by name: ddpcore's own, ``module:attribute``, entry points, and what is refused."""

from __future__ import annotations

import re
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcore import STRATEGIES, TOPOLOGIES, Ring, Topology
from ddpcore.models import MODELS
from ddpcore.optim import OPTIMIZERS
from ddpcore.options.registry import Registry

MODULE = """
from dataclasses import dataclass
from ddpcore import Ring, Topology

def chain(share: float = 0.25, *, wide: int = 1, names: tuple[str, ...] = ()) -> Topology:
    if share > 1:
        raise ValueError(f"share is {share}: it must be at most 1")
    return Ring(wide)

def number(share: float = 1.0):
    return 3

class NoTopology:
    pass

value = 5

class Outer:
    class Inner(Ring):
        pass
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user."""
    (tmp_path / "labparts.py").write_text(MODULE)
    (tmp_path / "labbroken.py").write_text("import math\nmath.no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "labparts"


def test_a_part_of_a_module(lab: str) -> None:
    assert TOPOLOGIES.build(f"{lab}:chain", wide=2) == Ring(2)
    assert TOPOLOGIES.options(f"{lab}:chain") == {"share": 0.25, "wide": 1, "names": ()}
    assert TOPOLOGIES.hints(f"{lab}:chain") == {"share": float, "wide": int, "names": tuple[str, ...]}
    assert isinstance(TOPOLOGIES.build(f"{lab}:Outer.Inner"), Ring)
    assert TOPOLOGIES.build(f"{lab}:chain", seed=3) == Ring(1), "a reserved parameter that it does not have"


def test_an_installed_package(lab: str, tmp_path: Path) -> None:
    info = tmp_path / "labparts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: labparts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ddpcore.topologies]\nlab_chain = {lab}:chain\nring = {lab}:number\n")
    assert TOPOLOGIES.names()[-1] == "lab_chain"
    assert TOPOLOGIES.build("lab_chain", wide=3) == Ring(3)
    assert TOPOLOGIES.build("ring") == Ring(1), "ddpcore's own names come first"


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("rnig", {}, "unknown topology 'rnig': did you mean 'ring'?"),
        ("xyz", {}, "unknown topology 'xyz': choose from complete, ring"),
        ("labparts:chian", {}, "topology labparts:chian: labparts has no 'chian': did you mean 'chain'?"),
        ("labparts:value", {}, "topology labparts:value: 5 makes no Topology: name a class or function"),
        ("labparts:NoTopology", {}, "makes no Topology: name a class or function"),
        ("labparts:number", {}, "topology labparts:number makes a int: it must make a Topology"),
        ("no_such_lab:chain", {}, "cannot import no_such_lab (ModuleNotFoundError: No module named 'no_such_lab')"),
        (
            "labbroken:chain",
            {},
            "cannot import labbroken (AttributeError: module 'math' has no attribute 'no_such_name')",
        ),
        ("labparts:chain", {"wdie": 1}, "topology labparts:chain has no option 'wdie': did you mean 'wide'?"),
        ("labparts:chain", {"wide": "a"}, "topology labparts:chain: wide is 'a': it must be a whole number"),
        ("labparts:chain", {"share": True}, "topology labparts:chain: share is True: it must be a finite number"),
        ("labparts:chain", {"names": "a"}, "topology labparts:chain: names is 'a': it must be a list of text"),
        ("labparts:chain", {"share": 2}, "topology labparts:chain: share is 2: it must be at most 1"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, object], says: str, lab: str) -> None:
    with pytest.raises(ValueError) as caught:
        TOPOLOGIES.build(name, **options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_attribute_of_another_kind_is_refused_before_it_is_called(lab: str) -> None:
    with pytest.raises(ValueError, match=r"strategy labparts:NoTopology: .* makes no Strategy or Baseline"):
        STRATEGIES.find("labparts:NoTopology")
    with pytest.raises(ValueError, match="model labparts:chain makes a Ring: it must make a Module"):
        MODELS.build("labparts:chain")


def test_reserved_parameters_are_no_options() -> None:
    assert "lr" not in OPTIMIZERS.options("sgd")
    assert OPTIMIZERS.takes("sgd", "max_grad_norm") and not OPTIMIZERS.takes("adam", "max_grad_norm")
    parts: Registry[Topology] = Registry("part", "none", Topology, {"a": Ring}, reserved=["neighbors_each_side"])
    assert parts.options("a") == {"self_weight": None}
    assert parts.build("a", neighbors_each_side=2) == Ring(2)


@pytest.mark.parametrize(
    "registry", [STRATEGIES, OPTIMIZERS, TOPOLOGIES], ids=["strategies", "optimizers", "topologies"]
)
def test_no_option_of_a_part_is_not_a_number(registry: Registry[Any]) -> None:
    """Of none of ddpcore's parts, and of none of torch's."""
    required: dict[str, Any] = {"topology": Ring(), "params": [torch.nn.Parameter(torch.ones(2, 2))], "lr": 0.1}
    taken = []
    for name in registry.names():
        for option in registry.options(name):
            try:
                registry.build(
                    name, **{key: required[key] for key in registry.reserved if key in required}, **{option: nan}
                )
            except ValueError:
                continue
            taken.append((name, option))
    assert not taken


@pytest.mark.parametrize(
    ("registry", "name", "option", "value", "message"),
    [
        (STRATEGIES, "local_sgd", "fragments", 1.5, "fragments is 1.5: it must be a whole number"),
        (STRATEGIES, "local_sgd", "fragments", "head", "fragments is 'head': it must be a whole number"),
        (STRATEGIES, "local_sgd", "seed", "1", "seed is '1': it must be a whole number"),
        (STRATEGIES, "ddp", "bucket_cap_mb", -1.0, "bucket_cap_mb is -1.0: it must be above 0"),
        (OPTIMIZERS, "torch_sgd", "weight_decay", "x", "weight_decay is 'x': it must be a finite number"),
        (OPTIMIZERS, "muon", "process_group", 1, "no option 'process_group'"),
    ],
)
def test_values_that_only_a_later_step_met(
    registry: Registry[Any], name: str, option: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        registry.check_options(name, {option: value})
        registry.build(name, **{option: value})
