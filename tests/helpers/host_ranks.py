"""Ranks on emulated hosts. Started by torchrun: ``host_ranks.py FOLDER``, two ranks on each of two hosts.

Each of them trains with every strategy, and then counts what leaves its host.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddpcore
from ddpcore.comm.shared import coordination
from ddpcore.optim import FusedSGD
from helpers import hosts, oracle
from helpers.connection import connected

PER_HOST, WORLD_SIZE, STEPS = 2, 4, 4
SIZES = 400, 1000  # of the counted model


def case_of(strategy: str) -> oracle.Case:
    """Every strategy; those that gossip do so between hosts and inside them."""
    topology = "hierarchical" if strategy in oracle.GOSSIP and "topk" not in strategy else "ring"
    topology = "complete" if strategy == "d2" else topology  # which needs larger eigenvalues
    return oracle.Case(strategy, topology if strategy in oracle.GOSSIP else oracle.AVERAGES[0], WORLD_SIZE, "fused")


CASES = {
    "pg": [case_of(strategy) for strategy in oracle.MAKERS],
    "mixed": [  # every strategy: comm/test_mixed.py
        *(oracle.Case("dpsgd", topology, WORLD_SIZE, "fused") for topology in ("ring", "hierarchical", "random_pair")),
        *(case_of(strategy) for strategy in ("dpsgd_stale", "push_sum", "slowmo", "ssgd", "grouped")),
    ],
}
TOPOLOGIES: dict[str, Any] = {
    "hierarchical": lambda: ddpcore.Hierarchical(PER_HOST, ddpcore.OnePeerExponential()),
    "hierarchical_complete": lambda: ddpcore.Hierarchical(PER_HOST, ddpcore.Complete()),
    "complete": ddpcore.Complete,
    "ring": lambda: ddpcore.Ring(1),
    "random_pair": lambda: ddpcore.RandomPair(seed=5),
}
LOCAL: dict[str, Any] = {
    "ssgd": ddpcore.SSGD,
    "local_sgd": lambda: ddpcore.LocalSGD(STEPS // 2),
    "grouped": lambda: ddpcore.LocalSGD(STEPS // 2, group=PER_HOST),
}


def train(
    make: Any,
    num_learners: int,
    sizes: tuple[int, int],
    rank: int | None = None,
    before_step: Any = None,
    transport: str = "pg",
    **more: Any,
) -> Tensor:
    """The weights of the learners here: of one rank, or of as many virtual learners."""
    torch.manual_seed(0)
    model = nn.Linear(*sizes)
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"learners": num_learners, "vectorize": False} if rank is None else {"transport": transport}
    handle = ddpcore.distribute(model, optimizer, make(), **connected(**options, **more))
    for step in range(STEPS):
        if before_step is not None:
            before_step(step)
        inputs = torch.randn(num_learners, 4, sizes[0], generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        handle.model(inputs if rank is None else inputs[rank]).square().mean(dim=(-2, -1)).sum().backward()
        optimizer.step()
    return torch.stack([torch.cat([p.detach().flatten() for p in one.parameters()]) for one in handle.models])


SEGMENT = 1448  # bytes of a TCP segment at an MTU of 1500


def sent_by(device: str) -> int:
    """Bytes that have left a network device of this namespace, with all headers and all that TCP sent again."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line.split(":")[1] for line in lines if line.split(":")[0].strip() == device).split()[8])


def sent_again() -> int:
    """Bytes that TCP has sent again between the hosts.

    Nothing is lost between namespaces, but on a machine with few cores acknowledgements may come late.
    """
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return SEGMENT * int(values[names.index("RetransSegs")])


def count_bytes(rank: int, device: str, transport: str) -> dict[str, list[int]]:
    """What this host sends in the steps of a run to the other one, and by its loopback device; by run."""
    counted = {}

    def read() -> Tensor:
        """Between two barriers, so that no rank of this host has begun what follows."""
        dist.barrier()
        count = torch.tensor([sent_by(device) - sent_again(), sent_by("lo")])
        dist.barrier()
        return count

    def before_step(step: int) -> None:
        nonlocal start
        if step == 0:  # all have the first weights
            start = read()

    makes = {name: lambda make=make: ddpcore.DPSGD(make()) for name, make in TOPOLOGIES.items()}
    for name, make in {**makes, **LOCAL}.items():
        start = torch.zeros(2)
        train(make, WORLD_SIZE, SIZES, rank, before_step, transport)
        counted[name] = (read() - start).tolist()
    return counted


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = hosts.device(rank // PER_HOST)
    coordination.host_id = lambda: device  # the namespaces of one machine are one host otherwise
    results, bytes_sent = {}, {}
    for transport, cases in CASES.items():
        results[transport] = {tuple(case): oracle.train(case, dist.group.WORLD, transport=transport) for case in cases}
        bytes_sent[transport] = count_bytes(rank, device, transport)
    found = {"results": results, "bytes": bytes_sent, "namespace": os.readlink("/proc/self/ns/net")}
    torch.save(found, Path(sys.argv[1]) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
