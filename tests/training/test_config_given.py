"""Configs and texts from strangers: each is a config that survives a file, or one line that says what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpcore.options.fields import parse_settings, put
from ddpcore.records.run import KEYS_0_2, SECTIONS, from_0_2
from ddpcore.training import TrainConfig
from ddpcore.training.config import describe_fields

SETTINGS = settings(max_examples=150, deadline=None)
NAMES = [key for key, _ in describe_fields()]
TEXT = st.text(max_size=20)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 9), st.floats(), st.floats(0, 1), TEXT,
    st.sampled_from(["sgd", "ssgd", "dpsgd", "ring", "validation", "step", "mlp", "digits", "keep", "bf16"]),
)  # fmt: skip
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
CONFIGS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4)
FLAT = st.dictionaries(st.sampled_from(list(KEYS_0_2)), VALUES, max_size=4)
BASE: dict[str, dict[str, Any]] = {"run": {"epochs": 1}, "model": {"name": "mlp"}, "data": {"name": "digits"}}


def one_line(error: ValueError) -> None:
    assert str(error) and str(error).isprintable(), f"no printable line: {error!r}"


@SETTINGS
@given(CONFIGS, st.booleans())
def test_any_values_are_a_config_or_one_line(values: dict[str, Any], over_base: bool) -> None:
    nested: dict[str, Any] = {name: dict(BASE[name]) for name in BASE} if over_base else {}
    for key, value in values.items():
        put(nested, key, value)
    check(nested)


@SETTINGS
@given(FLAT)
@example({"strategy_options": None})
def test_any_config_of_version_0_2_is_a_config_or_one_line(values: dict[str, Any]) -> None:
    check(from_0_2({"epochs": 1, **values}))


def check(values: dict[str, Any]) -> None:
    try:
        config = TrainConfig.from_dict(values)
    except ValueError as error:
        one_line(error)
        return
    as_file = json.loads(json.dumps(config.to_dict(), allow_nan=False))
    assert TrainConfig.from_dict(as_file) == config
    assert config.difference(as_file) == []


@pytest.mark.slow
@SETTINGS
@given(
    st.lists(st.tuples(st.one_of(st.sampled_from(NAMES), TEXT), st.one_of(TEXT, st.integers().map(str))), max_size=4)
)
def test_any_settings_are_sections_or_one_line(pairs: list[tuple[str, str]]) -> None:
    try:
        found = parse_settings([f"{key}={value}" for key, value in pairs])
        TrainConfig.from_dict({"run": {"epochs": 1}, **found})
    except ValueError as error:
        assert str(error)
        return
    assert set(found) <= set(SECTIONS)
