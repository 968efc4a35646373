"""Real learners on the CPU of one host, through shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.errors import TIMEOUT_SECONDS
from ddpcore.comm.live import LiveWeights, first_rows
from ddpcore.comm.process import default_group
from ddpcore.comm.shared.live import SharedLiveWeights
from ddpcore.comm.shared.memory import HostMemory
from ddpcore.comm.shared.segments import SegmentCommunicator
from ddpcore.runtime import launch


class SharedMemoryCommunicator(SegmentCommunicator):
    """Learner j is rank j of the group. All ranks are processes of one user on one host.

    Args:
        group: a process group, used only for setting up; None is the default group, which must be initialised.
        timeout: seconds that a living rank may let the others wait. A rank that died is noticed within a second.
        among: see :class:`~ddpcore.comm.shared.segments.SegmentCommunicator`.
        in_thread: whether a thread of each rank computes averages that have begun, while the rank does other work;
            None: if there are at least two cores for each rank. With fewer cores it hides nothing.

    Raises:
        ValueError: there is no process group; or, on every rank, the ranks cannot reach each other's memory.
    """

    transport = "shm"

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout: float = TIMEOUT_SECONDS,
        among: Sequence[int] | None = None,
        *,
        in_thread: bool | None = None,
    ) -> None:
        group = default_group(group)
        if in_thread is None:
            num_ranks = dist.get_world_size(group) if among is None else len(among)
            in_thread = 1 < num_ranks <= launch.num_cores() // 2
        super().__init__(group, HostMemory(), timeout, "shared memory of one host", among, in_thread=in_thread)

    @override
    def live(self, weights_LP: Tensor, alpha: float | None = None) -> LiveWeights:
        first = first_rows(weights_LP, alpha)[0]
        parts = self._allocate(first.nbytes).values()
        rows = [part[: first.nbytes].view(first.dtype).view(first.shape) for part in parts]
        rows[self.rank].copy_(first)
        return SharedLiveWeights(self._coordinator, rows, alpha)
