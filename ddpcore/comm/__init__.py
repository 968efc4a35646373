"""The learners' connection: real ranks over a process group, or virtual learners in one process."""

from .base import Communicator, Exchange, Work
from .choice import Choice, choose_backend
from .grid import GridCommunicator
from .process import ProcessGroupCommunicator
from .virtual import VirtualCommunicator

__all__ = [
    "Choice",
    "Communicator",
    "Exchange",
    "GridCommunicator",
    "ProcessGroupCommunicator",
    "VirtualCommunicator",
    "Work",
    "choose_backend",
]
