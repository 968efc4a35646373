"""Which connection serves a world of learners on this machine, and why."""

from __future__ import annotations

from dataclasses import dataclass

BACKENDS = ("auto", "nccl", "gloo", "virtual")


@dataclass(frozen=True)
class Choice:
    """A backend, ``nccl``, ``gloo`` or ``virtual``, and the reason in one clause."""

    backend: str
    reason: str


def choose_backend(requested: str, *, world_size: int, device: str, num_gpus: int) -> Choice:
    """NCCL where every rank has a GPU, virtual learners where they would share one, gloo on the CPU.

    Args:
        requested: one of ``BACKENDS``.
        world_size: number of learners.
        device: ``cpu`` or ``cuda``, where the model trains.
        num_gpus: visible CUDA devices.

    Raises:
        ValueError: what was requested cannot run here; the message names the flag that helps.
    """
    if requested not in BACKENDS:
        raise ValueError(f"unknown backend {requested!r}: choose from {', '.join(BACKENDS)}")
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
