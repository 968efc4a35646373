"""The example of docs/noise_statistics.md runs as it stands, and says what the page says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from ddpcore.diagnostics import Dynamics, NoiseScale, Spread

PAGE = Path(__file__).parents[2] / "docs" / "noise_statistics.md"


def test_the_example(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    records = names["statistics"].records
    assert [record.step for record in records] == [50, 100, 150, 200]
    assert all(record.valid and record.at_mean for record in records)
    assert len(capsys.readouterr().out.splitlines()) == 4
    for record in records:
        moves = record.dynamics
        assert moves.full_gradient == "the training set"
        assert moves.hessian_noise > 0 and moves.landscape_noise > 0
        assert len(record.spread.eigenvalues) == 2
        # the equality that the paper gives for the two: a^2 |g_a|^2 = a_e^2 |g|^2 + D
        whole = moves.effective_lr**2 * moves.grad_squared + moves.noise
        assert abs(whole - moves.lr**2 * moves.mean_grad_squared) <= 1e-12 * whole


def test_every_field_is_explained():
    text = PAGE.read_text()
    for kind in (NoiseScale, Spread):
        for field in fields(kind):
            assert f"`{field.name}`" in text, field.name
    for field in fields(Dynamics):
        if field.name not in ("lr", "grad_squared", "mean_grad_squared"):
            assert f"`{field.name}`" in text, field.name
