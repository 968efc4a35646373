"""Messages between ranks that may die: no wait for them is longer than the timeout."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from ddpcore.comm import fabric
from ddpcore.topology.rounds import Round


class Roll:
    """What a group reads of a roll."""

    generation, timeout = 1, 0.5

    def __init__(self) -> None:
        self.store = dist.HashStore()


def test_a_wait_for_a_message_has_the_timeout() -> None:
    """Also one that is shorter than the time in which ranks connect."""
    roll: Any = Roll()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: fabric._Group(roll, "gloo", (0, 1), rank, torch.device("cpu")), (0, 1)))
    row = torch.zeros(4)
    operation = fabric.Operation(
        number=0, what="an average", step=None, row=row, members=(0, 1), round_of=lambda _: Round(0.0, (1,), (1.0,), ())
    )
    flight = fabric._Flight(groups[0], {1: row})
    flight.works = groups[0].transfer(0, [], [(1, row)])  # the other one sends nothing
    groups[0].start_wait(flight, operation)
    assert flight.ended.wait(0.5 * fabric._CONNECT_SECONDS), "it still waits"
    assert "Timed out waiting 500ms" in flight.error
