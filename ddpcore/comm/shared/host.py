"""Real learners on the CPU of one host, through memory that they share."""

from __future__ import annotations

import torch.distributed as dist

from ddpcore.comm.process import default_group
from ddpcore.comm.shared.memory import HostMemory
from ddpcore.comm.shared.segments import SegmentCommunicator

TIMEOUT_SECONDS = 600.0


class SharedMemoryCommunicator(SegmentCommunicator):
    """Learner j is rank j of the group; all ranks are processes of one user on one host.

    Args:
        group: a process group, for setting up; None is the default one, which must be initialised.
        timeout: seconds that a rank which lives may let the others wait. One that is gone is noticed within a second.

    Raises:
        ValueError: the ranks do not reach each other's memory, on every rank alike; there is no process group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT_SECONDS) -> None:
        group = default_group(group)
        super().__init__(group, HostMemory(), timeout, f"shared memory of one host, {dist.get_world_size(group)} ranks")
