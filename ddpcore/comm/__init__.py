"""Communicators, which connect real ranks (memory that they share, process group) or virtual learners."""

from .agreement import check_agreement, facts_of
from .base import Communicator, Exchange, LiveWeights, Work
from .connect import Choice, choose_backend, choose_transport, connect
from .link import LearnerClock, Link, LinkedCommunicator
from .mixed import MixedCommunicator
from .process import ProcessGroupCommunicator
from .shared.cuda_ipc import CudaIpcCommunicator
from .shared.segments import SharedMemoryCommunicator
from .virtual import VirtualCommunicator

__all__ = [
    "Choice", "Communicator", "CudaIpcCommunicator", "Exchange", "LearnerClock", "Link", "LinkedCommunicator",
    "LiveWeights", "MixedCommunicator", "ProcessGroupCommunicator", "SharedMemoryCommunicator",
    "VirtualCommunicator", "Work", "check_agreement", "choose_backend", "choose_transport", "connect", "facts_of",
]  # fmt: skip
