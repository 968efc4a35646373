"""The choice of a backend and of a transport, from the number of learners and the hardware."""

from __future__ import annotations

from dataclasses import dataclass

BACKENDS = ("auto", "nccl", "gloo", "virtual")
TRANSPORTS = ("auto", "shm", "ipc", "pg", "mixed")


@dataclass(frozen=True)
class Choice:
    """A backend, ``nccl``, ``gloo`` or ``virtual``, and the reason for it in one clause."""

    backend: str
    reason: str


def choose_backend(requested: str, *, world_size: int, device: str, num_gpus: int) -> Choice:
    """Choose NCCL if every rank has a GPU, virtual learners if ranks would share a GPU, and gloo on the CPU.

    A ``requested`` backend other than ``auto`` is only checked. ``device`` is ``cpu`` or ``cuda``, where the model
    trains. ValueError: the requested backend cannot run here; the message names a flag to change.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend is {requested!r}: choose from {', '.join(BACKENDS)}")
    if requested == "nccl" and device != "cuda":
        raise ValueError("--backend nccl needs a GPU for each rank and the model is on the CPU: use --backend gloo")
    if requested == "nccl" and num_gpus < world_size:
        raise ValueError(
            f"--backend nccl needs a GPU for each of {world_size} ranks and {num_gpus} are visible: "
            "use --backend virtual, or a smaller --world-size"
        )
    if requested != "auto":
        return Choice(requested, "as requested")
    if device != "cuda":
        return Choice("gloo", "ranks on the CPU")
    if num_gpus >= world_size:
        return Choice("nccl", f"a GPU for each of {world_size} ranks")
    return Choice("virtual", f"{world_size} learners would share {num_gpus} GPU" + ("s" if num_gpus != 1 else ""))


@dataclass(frozen=True)
class Transport:
    """A transport between real ranks, of ``TRANSPORTS``, and the reason for it in one clause."""

    name: str
    reason: str


def choose_transport(
    requested: str, *, world_size: int, device: str, num_hosts: int, may_die: bool = False
) -> Transport:
    """Choose shared memory for ranks on the CPU of one Linux host, and for those of each host if there are several.

    The process group connects all other ranks. CUDA IPC is used only if it is requested. A ``requested`` transport
    other than ``auto`` is only checked. With ``may_die`` the others go on when a rank dies (``on_failure="shrink"``).
    ValueError: the requested transport cannot connect these ranks; the message names a flag to change.
    """
    if requested not in TRANSPORTS:
        raise ValueError(f"transport is {requested!r}: choose from {', '.join(TRANSPORTS)}")
    for name, wanted in (("shm", "cpu"), ("ipc", "cuda"), ("mixed", "cpu")):
        if requested == name and device != wanted:
            raise ValueError(
                f"--transport {name} is for ranks on {wanted} and the model is on {device}: use --transport pg"
            )
        if requested == name != "mixed" and num_hosts > 1:
            raise ValueError(f"--transport {name} is for one host and the ranks are on {num_hosts}: use --transport pg")
    if requested == "mixed" and may_die:
        raise ValueError(f"--transport {requested} is for ranks that end together when one dies: use --transport pg")
    if requested != "auto":
        return Transport(requested, "as requested")
    if device != "cpu":
        return Transport("pg", f"ranks on {device}")
    if world_size == 1:
        return Transport("pg", "one rank shares memory with no other")
    if num_hosts == world_size:
        return Transport("pg", f"{world_size} ranks on {num_hosts} hosts")
    if num_hosts > 1 and may_die:
        return Transport("pg", f"ranks on {num_hosts} hosts, which may die")
    if num_hosts > 1:
        how = "those of a host share memory, a process group connects hosts"
        return Transport("mixed", f"{world_size} ranks on {num_hosts} hosts: {how}")
    return Transport("shm", f"{world_size} ranks on the CPU of one host")
