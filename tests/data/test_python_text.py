"""The bytes of Python's own source files: windows, next bytes, splits, and what is refused."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from ddpcore.data import built_in, load_dataset, split, total_variation

STDLIB = Path(sysconfig.get_path("stdlib"))


def text_of(inputs: torch.Tensor) -> bytes:
    return bytes(inputs.flatten().tolist())


def test_windows_are_the_files_and_labels_the_next_bytes() -> None:
    data = load_dataset("python_text", context=50)
    assert data.test is not None
    assert (data.input_shape, data.num_classes) == ((50,), 256)
    for windows, modules in ((data.train, built_in.TRAIN_MODULES), (data.test, built_in.TEST_MODULES)):
        texts = [(STDLIB / f"{module}.py").read_bytes() for module in modules]
        kept = [(len(text) - 1) // 50 * 50 for text in texts]
        assert text_of(windows.inputs) == b"".join(text[:num] for text, num in zip(texts, kept, strict=True))
        assert text_of(windows.labels) == b"".join(text[1 : num + 1] for text, num in zip(texts, kept, strict=True))
        assert windows.inputs.shape == windows.labels.shape == (sum(kept) // 50, 50)


def test_no_file_is_in_both_splits_or_twice() -> None:
    modules = (*built_in.TRAIN_MODULES, *built_in.TEST_MODULES)
    assert len(set(modules)) == len(modules)
    data = load_dataset("python_text")
    assert data.test is not None and len(data.train) > 5 * len(data.test) > 5000


def test_the_text_is_the_same_for_every_seed() -> None:
    digest = load_dataset("python_text", seed=0).digest()
    assert digest == load_dataset("python_text", seed=1).digest() != load_dataset("python_text", context=65).digest()


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="python_text: context is 0"):
        load_dataset("python_text", context=0)
    with pytest.raises(ValueError, match=r"context is 1000000: .*argparse.py has \d+ bytes, take less"):
        load_dataset("python_text", context=1_000_000)
    for option in ("normalize", "augment"):
        with pytest.raises(ValueError, match=f"python_text does not say how to {option} its samples"):
            load_dataset("python_text", **{option: True})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"argparse.py cannot be read \(No such file .*\): this Python lacks"):
        load_dataset("python_text")


def test_shards_by_class_need_one_class_a_sample() -> None:
    labels = load_dataset("python_text").train.labels[:100]
    for shards in ("by_class", "dirichlet"):
        with pytest.raises(
            ValueError, match=rf"shards is '{shards}' and labels are \[100, 64\]: a sample has no single class, take"
        ):
            split(shards, labels, 4)
    given = split("given", labels, 2, parts=[list(range(50)), list(range(50, 100))])
    flat = [[64 * sample + place for sample in part.tolist() for place in range(64)] for part in given]
    assert 0 < total_variation(labels, given) == pytest.approx(total_variation(labels.flatten(), flat))
