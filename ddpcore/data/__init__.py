"""Data sets by name, `build("mnist", data_dir=...)`, and the batches learners take from them."""

from __future__ import annotations

from pathlib import Path

from ddpcore.data import mnist, synthetic
from ddpcore.data.base import Dataset, ShardedBatches, Split

__all__ = ["Dataset", "ShardedBatches", "Split", "build", "names"]


def names() -> tuple[str, ...]:
    """The names `build` knows."""
    return ("synthetic", "mnist")


def build(
    name: str,
    *,
    data_dir: str | Path | None = None,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
    seed: int = 0,
) -> Dataset:
    """The data set of a name, on the CPU.

    synthetic takes any input_shape (of one sample) and num_classes, and alone looks at the seed; mnist reads data_dir
    and has one shape and ten classes. ValueError if the name is unknown or the rest does not fit it.
    """
    if name == "synthetic":
        shape = synthetic.INPUT_SHAPE if input_shape is None else tuple(input_shape)
        return synthetic.load(shape, synthetic.NUM_CLASSES if num_classes is None else num_classes, seed)
    if name == "mnist":
        if data_dir is None:
            raise ValueError("mnist is read from files: pass --data-dir with the folder that holds MNIST/raw")
        if input_shape is not None and tuple(input_shape) != mnist.INPUT_SHAPE:
            raise ValueError(
                f"mnist is {list(mnist.INPUT_SHAPE)} a sample, not {list(input_shape)}: leave input_shape out"
            )
        if num_classes is not None and num_classes != mnist.NUM_CLASSES:
            raise ValueError(f"mnist has {mnist.NUM_CLASSES} classes, not {num_classes}: leave num_classes out")
        return mnist.load(data_dir)
    raise ValueError(f"unknown data set '{name}': choose one of {', '.join(names())}")
