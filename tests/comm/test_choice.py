"""Which backend serves a world, and what is said where none does."""

from __future__ import annotations

import pytest

from ddpcore.comm import choose_backend
from ddpcore.comm.choice import BACKENDS, Choice


@pytest.mark.parametrize(
    ("world_size", "device", "num_gpus", "backend"),
    [
        (1, "cpu", 0, "gloo"),
        (4, "cpu", 0, "gloo"),
        (4, "cpu", 8, "gloo"),
        (1, "cuda", 1, "nccl"),
        (4, "cuda", 4, "nccl"),
        (4, "cuda", 8, "nccl"),
        (4, "cuda", 3, "virtual"),
        (2, "cuda", 1, "virtual"),
    ],
)
def test_auto(world_size: int, device: str, num_gpus: int, backend: str) -> None:
    choice = choose_backend("auto", world_size=world_size, device=device, num_gpus=num_gpus)
    assert choice.backend == backend
    assert choice.reason
    assert "as requested" not in choice.reason


@pytest.mark.parametrize("requested", ["gloo", "virtual", "nccl"])
def test_what_was_asked_for(requested: str) -> None:
    choice = choose_backend(requested, world_size=2, device="cuda", num_gpus=2)
    assert choice == Choice(requested, "as requested")


@pytest.mark.parametrize(
    ("requested", "device", "num_gpus", "helps"),
    [
        ("nccl", "cpu", 0, "--backend gloo"),
        ("nccl", "cpu", 4, "--backend gloo"),
        ("nccl", "cuda", 3, "--backend virtual"),
        ("mpi", "cpu", 0, ", ".join(BACKENDS)),
    ],
)
def test_refusals_name_what_helps(requested: str, device: str, num_gpus: int, helps: str) -> None:
    with pytest.raises(ValueError, match=helps) as caught:
        choose_backend(requested, world_size=4, device=device, num_gpus=num_gpus)
    assert "\n" not in str(caught.value)
