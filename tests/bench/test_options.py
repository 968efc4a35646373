"""Options of models, data sets and strategies, checked before any process starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddpcore.bench import __main__ as bench
from ddpcore.data import DATASETS
from ddpcore.models import MODELS
from ddpcore.runtime import launch

REFUSED = [
    ("strategy.staleness=3", "staleness is 3: it must be 0 or 1 step"),
    ("strategy.order=nosuch", "order is 'nosuch': choose from average_while_computing"),
    ("--strategies ssgd strategy.order=nosuch", "no strategy of ssgd has the option 'order'"),
    ("--strategies dpsgd strategy.compression=topk", "take a fixed topology (ring)"),
    ("model=mlp model.hidden=0", "each width must be at least 1"),
    ("model=mlp model.hidden=abc", "model mlp: hidden is 'abc': it must be a list of numbers"),
    ("model=mlp model.width=3", "model mlp has no option 'width'"),
    ("model=vit model.depth=abc", "model vit: depth is 'abc': it must be a whole number"),
    ("model=vit model.dropout=nan", "model vit: dropout is nan: it must be a finite number"),
    ("model=speech_lstm data=synthetic_speech model.depth=1.5", "depth is 1.5: it must be a whole"),
    ("data.num_classes=x", "data set synthetic: num_classes is 'x': it must be a whole number"),
    ("data.input_shape=-1", "input_shape is [-1], each size must be at least 1"),
    ("data.input_shape=x", "data set synthetic: input_shape is 'x': it must be a list of numbers"),
    ("data.colour=3", "data set synthetic has no option 'colour'"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refused(line: str, says: str, refused: Callable[[str, str], None]) -> None:
    refused(line, says)


def test_one_number_may_stand_for_a_list_of_one() -> None:
    assert MODELS.check_options("resnet", {"blocks": 2, "widths": 8}) == {"blocks": (2,), "widths": (8,)}
    assert DATASETS.check_options("synthetic", {"input_shape": 7}) == {"input_shape": (7,)}
    made = MODELS.build("resnet", blocks=2, widths=8)
    assert sum(p.numel() for p in made.parameters()) > 0


def test_checking_a_model_does_not_change_the_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is built on the meta device."""
    made: list[Any] = []
    build = MODELS.build

    def seen(*words: Any, **more: Any) -> Any:
        made.append(build(*words, **more))
        return made[-1]

    monkeypatch.setattr(MODELS, "build", seen)
    monkeypatch.setattr(launch, "run", lambda *args, **more: None)
    before = torch.get_rng_state()
    assert bench.main(["model=vit", "run.device=cpu"]) == 0
    assert {str(parameter.device) for parameter in made[0].parameters()} == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)
