"""The choice of backend and transport, and the errors where none fits."""

from __future__ import annotations

import pytest

from ddpcore.comm import Choice, choose_backend, choose_transport
from ddpcore.comm.connect import BACKENDS, TRANSPORTS


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
    assert choice.name == backend
    assert choice.reason
    assert "as requested" not in choice.reason


@pytest.mark.parametrize("requested", ["gloo", "virtual", "nccl"])
def test_a_requested_backend(requested: str) -> None:
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
def test_errors_name_a_flag_that_helps(requested: str, device: str, num_gpus: int, helps: str) -> None:
    with pytest.raises(ValueError, match=helps) as caught:
        choose_backend(requested, world_size=4, device=device, num_gpus=num_gpus)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("world_size", "device", "num_hosts", "transport", "why"),
    [
        (4, "cpu", 1, "shm", "4 ranks on the CPU of one host"),
        (1, "cpu", 1, "pg", "no other"),
        (4, "cpu", 2, "mixed", "4 ranks on 2 hosts: ranks of one host share memory, a process group connects hosts"),
        (3, "cpu", 2, "mixed", "3 ranks on 2 hosts"),
        (4, "cpu", 4, "pg", "4 ranks on 4 hosts"),
        (4, "cuda", 2, "pg", "cuda"),
        (4, "cuda", 1, "pg", "cuda"),
    ],
)
def test_auto_transport(world_size: int, device: str, num_hosts: int, transport: str, why: str) -> None:
    choice = choose_transport("auto", world_size=world_size, device=device, num_hosts=num_hosts)
    assert choice.name == transport
    assert why in choice.reason


def test_ranks_that_may_die_are_not_connected_in_two_ways() -> None:
    choice = choose_transport("auto", world_size=4, device="cpu", num_hosts=2, may_die=True)
    assert choice == Choice("pg", "ranks on 2 hosts, which may die")
    assert choose_transport("auto", world_size=4, device="cpu", num_hosts=1, may_die=True).name == "shm"
    with pytest.raises(ValueError, match=r"--transport mixed is for ranks that end together .* --transport pg"):
        choose_transport("mixed", world_size=4, device="cpu", num_hosts=2, may_die=True)


@pytest.mark.parametrize(
    ("requested", "device"),
    [("shm", "cpu"), ("ipc", "cuda"), ("pg", "cpu"), ("pg", "cuda"), ("mixed", "cpu")],
)
def test_a_requested_transport(requested: str, device: str) -> None:
    choice = choose_transport(requested, world_size=2, device=device, num_hosts=1)
    assert choice == Choice(requested, "as requested")


@pytest.mark.parametrize(
    ("requested", "device", "num_hosts", "helps"),
    [
        ("shm", "cuda", 1, "use --transport pg"),
        ("ipc", "cpu", 1, "use --transport pg"),
        ("shm", "cpu", 2, "use --transport pg"),
        ("ipc", "cuda", 3, "use --transport pg"),
        ("symmetric", "cuda", 1, "choose from auto, shm, ipc, pg, mixed"),
        ("mixed", "cuda", 2, "use --transport pg"),
        ("rdma", "cpu", 1, ", ".join(TRANSPORTS)),
    ],
)
def test_transports_that_cannot_be(requested: str, device: str, num_hosts: int, helps: str) -> None:
    with pytest.raises(ValueError, match=helps) as caught:
        choose_transport(requested, world_size=4, device=device, num_hosts=num_hosts)
    assert "\n" not in str(caught.value)
