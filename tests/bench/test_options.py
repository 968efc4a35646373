"""Options of models, data sets and strategies, checked before any process starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddpcore.bench import __main__ as bench
from ddpcore.bench.config import BenchConfig
from ddpcore.models import MODELS
from ddpcore.runtime import launch

REFUSED = [
    ("--staleness 3", "staleness is 3: it must be 0 or 1 step"),
    ("--order nosuch", "--order is 'nosuch': choose from average_while_computing"),
    ("--strategies ssgd --order nosuch", "--order is 'nosuch'"),
    ("--compression topk", "take a fixed topology (ring)"),
    ("--model mlp --model-options hidden=0", "each width must be at least 1"),
    ("--model mlp --model-options hidden=abc", "--model-options hidden is 'abc': it must be a list of numbers"),
    ("--model mlp --model-options width=3", "model mlp has no option 'width'"),
    ("--model vit --model-options depth=abc", "--model-options depth is 'abc': it must be a whole number"),
    ("--model vit --model-options dropout=nan", "--model-options dropout is nan: it must be a finite number"),
    ("--model speech_lstm --dataset synthetic_speech --model-options depth=1.5", "depth is 1.5: it must be a whole"),
    ("--dataset-options num_classes=x", "--dataset-options num_classes is 'x': it must be a whole number"),
    ("--dataset-options input_shape=-1", "input_shape is [-1], each size must be at least 1"),
    ("--dataset-options input_shape=x", "--dataset-options input_shape is 'x': it must be a list of numbers"),
    ("--dataset-options colour=3", "data set synthetic has no option 'colour'"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refused(line: str, says: str, refused: Callable[[str, str], None]) -> None:
    refused(line, says)


def test_one_number_may_stand_for_a_list_of_one() -> None:
    config = BenchConfig(model="resnet", model_options={"blocks": 2, "widths": 8}, dataset_options={"input_shape": 7})
    assert config.model_options == {"blocks": (2,), "widths": (8,)}
    assert config.dataset_options == {"input_shape": (7,)}
    width = BenchConfig(model="vgg19", model_options={"width": 1}).model_options
    assert width is not None and type(width["width"]) is float


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
    assert bench.main(["--model", "vit", "--device", "cpu"]) == 0
    assert {str(parameter.device) for parameter in made[0].parameters()} == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)
