"""One of four real ranks that train as if on two hosts of one machine, placed in several ways."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddpcore
from ddpcore.comm import MixedCommunicator
from ddpcore.comm.base import exchange_columns
from ddpcore.comm.shared import coordination
from ddpcore.ops import Mixture
from ddpcore.optim import FusedSGD
from ddpcore.topology.wrapped import BetweenGroups
from helpers import host_ranks, oracle
from helpers.connection import connected
from helpers.ranks import join

NUM_RANKS = 4
PLACES = {"two and two": "aabb", "three and one": "aaab", "in turn": "abab"}  # the host of each rank
TOPOLOGIES = ("ring", "hierarchical", "one_peer_exponential", "random_pair", "complete", "from_matrix")
STRATEGIES = ("dpsgd", "dpsgd_atc", "dpsgd_stale", "dpsgd_awc_bf16", "push_sum")
CASES = [oracle.Case(name, topology, NUM_RANKS, "fused") for name in STRATEGIES for topology in TOPOLOGIES]
CASES += [oracle.Case("dpsgd", topology, NUM_RANKS, "torch") for topology in TOPOLOGIES]
CASES += [case for case in host_ranks.CASES["pg"] if case not in CASES]  # every strategy


def cases_of(place: str) -> list[oracle.Case]:
    """All, if hosts have two ranks each; else a third, in which each strategy and each topology are."""
    if place == "two and two":
        return CASES
    grid = [case for case in CASES if case.strategy in STRATEGIES and case.topology in TOPOLOGIES]
    first = [*PLACES].index(place)
    return [
        case for case in grid if (STRATEGIES.index(case.strategy) + TOPOLOGIES.index(case.topology) + first) % 3 == 0
    ]


NARROW: dict[str, Callable[[], Any]] = {
    "ring": lambda: ddpcore.DPSGD(ddpcore.Ring()),
    "hierarchical": lambda: ddpcore.DPSGD(ddpcore.Hierarchical(2)),
    "stale": lambda: ddpcore.DPSGD(ddpcore.RandomPair(3), staleness=1),
    "local_sgd": lambda: ddpcore.LocalSGD(2),
}


def claim_host(name: str) -> None:
    """This process is on a host of that name."""
    coordination.host_id = lambda: name


def trained(
    make: Callable[[], Any], transport: str | None, dtype: torch.dtype = torch.bfloat16, *, loads: bool = False
) -> Tensor:
    """Weights after four steps, of this rank or, without a transport, of four virtual learners.

    If it ``loads``, its own state is loaded in the middle of the third step, which changes no result.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3)).to(dtype)
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"learners": NUM_RANKS, "vectorize": False} if transport is None else {"transport": transport}
    handle = ddpcore.distribute(model, optimizer, make(), **connected(**options))
    for step in range(4):
        inputs = torch.randn(NUM_RANKS, 8, 20, generator=torch.Generator().manual_seed(step)).to(dtype)
        if loads and step == 2:
            parts = (model, optimizer, handle)
            saved = copy.deepcopy([part.state_dict() for part in parts])
            model(inputs[0])  # begins an exchange
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)
        optimizer.zero_grad()
        outputs = handle.model(inputs if transport is None else inputs[dist.get_rank()])
        outputs.square().mean(dim=(-2, -1)).sum().backward()
        optimizer.step()
    if loads:  # buffers of the exchange that was given up are free again
        comm, num = handle.comm, 1 if "staleness=1" in repr(handle.strategy) else 0
        assert len(comm._busy) == num, comm._busy
    return torch.stack([torch.cat([p.detach().flatten() for p in one.parameters()]) for one in handle.models])


def chosen(strategy: Any, **more: Any) -> tuple[str, str]:
    """Transport and description of what ``distribute`` connects by itself."""
    model = nn.Linear(5, 3)
    comm = ddpcore.distribute(model, FusedSGD(model.parameters(), lr=0.1), strategy, **connected(**more)).comm
    return comm.transport, comm.description


def choices() -> dict[str, Any]:
    return {
        "ring": chosen(ddpcore.DPSGD(ddpcore.Ring())),
        "hierarchical": chosen(ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Hierarchical(2)))),
        "ssgd": chosen(ddpcore.SSGD()),
        "adpsgd": chosen(ddpcore.ADPSGD()),
        "shrink": chosen(ddpcore.DPSGD(ddpcore.Ring()), on_failure="shrink"),
    }


def sent(topology: Any) -> tuple[int, int]:
    """What this rank sent in four exchanges: in all, and over the process group."""
    comm = ddpcore.comm.connect(dist.group.WORLD, torch.device("cpu"))
    weights = torch.zeros(1, 100)
    for step in range(4):
        comm.exchange(weights, topology, step).mixture().apply_(weights)
    return comm.bytes_sent, comm.bytes_by_group


def grouped(rank: int) -> tuple[list[float], int]:
    """The mean of ranks 0 and 1, or of 2 and 3, and what this rank sent for it over the process group."""
    comm = ddpcore.comm.connect(dist.group.WORLD, torch.device("cpu"))
    comm.form_groups(2)
    rows = torch.full((1, 100), float(rank))
    comm.average_(rows, size=2).wait()
    return rows.unique().tolist(), comm.bytes_by_group


def by_columns(rank: int) -> tuple[bool, int, int]:
    """Whether two groups that hold different rows get their mean, and what this rank sent: in all, and by the group."""
    comm = ddpcore.comm.connect(dist.group.WORLD, torch.device("cpu"))
    rows = torch.arange(100.0)[None] + 8 * (rank // 2)
    exchange_columns(comm, rows, BetweenGroups(2, ddpcore.Ring()), 2, 0).mixture().apply_(rows)
    return torch.equal(rows, torch.arange(100.0)[None] + 4), comm.bytes_sent, comm.bytes_by_group


def in_place(rank: int) -> tuple[bool, list[float]]:
    """Whether the new weights go to another buffer than the old ones, and the averages of three steps in place."""
    hosts = PLACES["two and two"]
    claim_host(hosts[rank])
    comm = MixedCommunicator(None, hosts)
    weights, moves, seen = torch.full((1, 100), float(rank)), [], []
    for step in range(3):
        mixture = comm.exchange(weights, ddpcore.Ring(), step, in_place=True).mixture()
        assert isinstance(mixture, Mixture)
        moves.append(mixture.out is not None and mixture.out.data_ptr() != weights.data_ptr())
        mixture.apply_(weights)
        weights = weights if mixture.out is None else mixture.out[None]
        seen += weights.unique().tolist()
    return all(moves), seen


def main() -> None:
    path, rank, _ = join()
    seen: dict[str, Any] = {}
    for place, hosts in PLACES.items():
        claim_host(hosts[rank])
        cases = {tuple(case): oracle.train(case, dist.group.WORLD, transport="mixed") for case in cases_of(place)}
        seen[place] = {
            "oracle": cases,
            "narrow": {name: trained(make, "mixed") for name, make in NARROW.items()},
            "loads": {name: trained(make, "mixed", torch.float32, loads=True) for name, make in NARROW.items()},
            "choices": choices(),
            "grouped": grouped(rank),
            "columns": by_columns(rank),
            "sent": {name: sent(oracle.topology_of(oracle.Case("dpsgd", name, 4, "fused"))) for name in TOPOLOGIES},
        }
    seen["in place"] = in_place(rank)
    claim_host(f"host {rank}")
    seen["apart"] = chosen(ddpcore.DPSGD(ddpcore.Ring()))
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
