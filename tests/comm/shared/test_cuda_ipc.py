"""Device memory shared between processes: with replaced CUDA calls on the CPU, and with two processes on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcore.comm.shared import cuda_ipc as ipc
from ddpcore.comm.shared.cuda_ipc import CudaMemory
from helpers import ranks


def test_the_stream_is_synchronized_before_a_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Allocation and ``publish`` synchronize the stream. A handle is passed on without the device of its owner.

    ``forget`` removes torch's counter files of this process and no others.
    """
    calls: list[Any] = []
    monkeypatch.setattr(ipc, "_synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(ipc, "_share", lambda own: (7, b"handle", own.numel(), 64, b"/torch_counter"))
    monkeypatch.setattr(ipc, "_counters", set())
    monkeypatch.setattr(ipc, "SHARED_MEMORY", tmp_path)

    def fake_open(device: torch.device, *handle: object) -> torch.Tensor:
        calls.append((device, *handle))
        return torch.zeros(128, dtype=torch.uint8)

    monkeypatch.setattr(ipc, "_open", fake_open)
    device = torch.device("cpu")
    memory = CudaMemory(device)
    own, handle = memory.allocate(96)
    assert own.tolist() == [0] * 96
    assert calls == ["synchronize"]
    assert len(memory.open(1, handle, 96)) == 96
    assert calls[1:] == [(device, b"handle", 96, 64, b"/torch_counter")]
    memory.publish()
    assert calls[2:] == ["synchronize"]
    (tmp_path / "torch_counter").touch()
    (tmp_path / "torch_of_another").touch()
    ipc.forget()
    assert [path.name for path in tmp_path.iterdir()] == ["torch_of_another"]
    ipc.forget()  # a second call does nothing


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_ranks(device: str) -> None:
    """Every method of the connection, with weights and gradients in shared memory."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")
    before = ranks.names_in_shared_memory()
    for rank, seen in enumerate(ranks.run(f"ipc_ranks_{device}", 2)):
        assert seen["average"].tolist() == [[0.5] * 100]
        assert seen["staged"].tolist() == [[0.5] * 10]
        assert seen["gathered"].tolist() == [[0], [1]]
        assert seen["broadcast"].tolist() == [[0.0, 0.0]]
        for step, mixed in enumerate(seen["mixed"]):
            own, other = 10.0 * step + rank, 10.0 * step + 1 - rank
            assert mixed.tolist() == [[(own + other) / 2] * 100]
    assert ranks.names_in_shared_memory() <= before
