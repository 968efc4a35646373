"""One small training run of each strategy: the same lines for real ranks and for virtual learners.

As a script: one rank of six, which runs all cases on groups of the first 1 to 6 ranks.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import torch
import torch.distributed as dist

import ddpcore
from ddpcore import Connection
from ddpcore.comm import reductions
from ddpcore.strategies.compression import BFloat16, Int4, Int8, SparseTopK, TopK
from ddpcore.testing.learners import Result, Scenario, SmallRun, fused_sgd, torch_sgd

LARGEST = 6
TOPOLOGIES = (
    "complete", "ring", "random_pair", "one_peer_exponential", "from_matrix", "star", "static_exponential", "matching",
    "from_graph", "torus_2d", "hypercube", "hierarchical", "weighted",
)  # fmt: skip
AVERAGES = ("all_gather", "all_reduce")  # how gloo carries them: small ones are gathered, large ones reduced


MAKERS: dict[str, Any] = {
    "ssgd": lambda topology: ddpcore.SSGD(),
    "ssgd_samples": lambda topology: ddpcore.SSGD(weights="samples"),
    "local_sgd_tokens": lambda topology: ddpcore.LocalSGD(period=3, switch_step=1, fragments=2, weights="tokens"),
    "outer_samples": lambda topology: ddpcore.LocalSGD(period=2, outer=outer, overlap=1, weights="samples"),
    "outer_int4_samples": lambda topology: ddpcore.LocalSGD(
        period=2, outer=outer, compression=Int4(), weights="samples"
    ),
    "grouped_samples": lambda topology: ddpcore.LocalSGD(period=4, group=2, weights="samples"),
    "noisy_ssgd": lambda topology: ddpcore.NoisySSGD(0.05, seed=3),
    "noisy_ssgd_apart": lambda topology: ddpcore.NoisySSGD(0.05, seed=3, where="per_learner"),
    "local_sgd": lambda topology: ddpcore.LocalSGD(period=4),
    "post_local": lambda topology: ddpcore.LocalSGD(period=2, switch_step=2),
    "post_local_parts": lambda topology: ddpcore.LocalSGD(period=4, switch_step=2, fragments=2),
    "diloco": lambda topology: ddpcore.LocalSGD(period=3, fragments=2, outer=outer),
    "streaming": lambda topology: ddpcore.LocalSGD(period=4, fragments=2, outer=outer, overlap=2, alpha=0.5),
    "streaming_gossip": lambda topology: ddpcore.LocalSGD(
        period=3, fragments=2, outer=outer, overlap=1, alpha=0.5, topology=topology
    ),
    "outer_int4": lambda topology: ddpcore.LocalSGD(period=2, outer=outer, compression=Int4(), error_decay=0.9),
    "outer_sparse": lambda topology: ddpcore.LocalSGD(
        period=3, outer=outer, compression=SparseTopK(kept=4, chunk=32), fragments=2, overlap=2
    ),
    "grouped": lambda topology: ddpcore.LocalSGD(period=4, group=2),
    "grouped_streaming": lambda topology: ddpcore.LocalSGD(
        period=3, group=2, switch_step=1, fragments=2, outer=outer, overlap=2, alpha=0.5
    ),
    "grouped_int4": lambda topology: ddpcore.LocalSGD(period=2, group=2, outer=outer, compression=Int4()),
    "grouped_dpsgd": lambda topology: ddpcore.DPSGD(topology, group=2),
    "grouped_atc": lambda topology: ddpcore.DPSGD(topology, group=2, order="adapt_then_combine"),
    "grouped_gasloc": lambda topology: ddpcore.GASLoC(topology, period=[[0, 2], [2, 1]], group=2),
    "grouped_two_mixes": lambda topology: ddpcore.LocalSGD(
        period=3, group=2, topology=topology, then=ddpcore.Ring(), outer=outer, overlap=1, fragments=2, restart=1
    ),
    "two_mixes": lambda topology: ddpcore.LocalSGD(2, topology=topology, then=ddpcore.Ring(), outer=outer),
    "noloco": lambda topology: ddpcore.NoLoCo(topology, period=2),
    "gasloc": lambda topology: ddpcore.GASLoC(topology, period=2),
    "slowmo": lambda topology: ddpcore.SlowMo(ddpcore.DPSGD(topology), period=3),
    "dpsgd": lambda topology: ddpcore.DPSGD(topology),
    "dpsgd_atc": lambda topology: ddpcore.DPSGD(topology, order="adapt_then_combine"),
    "dpsgd_cta": lambda topology: ddpcore.DPSGD(topology, order="combine_then_adapt"),
    "dpsgd_stale": lambda topology: ddpcore.DPSGD(topology, staleness=1),
    "dpsgd_int8_stale": lambda topology: ddpcore.DPSGD(topology, compression=Int8(), staleness=1),
    "push_sum": lambda topology: ddpcore.PushSum(topology),
    "exact_diffusion": lambda topology: ddpcore.ExactDiffusion(topology),
    "d2": lambda topology: ddpcore.ExactDiffusion(topology, lazy=False),
    "tracking": lambda topology: ddpcore.GradientTracking(topology),
    "dpsgd_consensus": lambda topology: ddpcore.DPSGD(topology, consensus=ddpcore.AdaptiveConsensus(least=0.2)),
}
ORDERS = {"awc": "average_while_computing", "atc": "adapt_then_combine", "cta": "combine_then_adapt"}
CODECS = {"bf16": BFloat16, "int8": Int8, "topk": partial(TopK, ratio=0.2)}
CODED = {f"dpsgd_{order}_{codec}": (order, codec) for order in ORDERS for codec in CODECS}
MAKERS |= {
    name: lambda topology, order=order, codec=codec: ddpcore.DPSGD(
        topology, order=ORDERS[order], compression=CODECS[codec]()
    )
    for name, (order, codec) in CODED.items()
}
ALL_REDUCING = ("ssgd", "local_sgd", "grouped")  # run with gathered and with reduced averages
UNBALANCED = "digraph"  # for push_sum alone
UNEVEN = {
    "exact_diffusion": ("ring", "star"), "d2": ("ring", "complete"),
    "tracking": ("ring", "random_pair", "from_matrix", "weighted"),
    "dpsgd_consensus": ("ring", "random_pair"), "streaming_gossip": ("ring", "random_pair"),
    "noloco": ("ring", "random_pair", "one_peer_exponential"), "gasloc": ("ring", "random_pair", "weighted"),
    "grouped_dpsgd": ("ring", "random_pair"), "grouped_atc": ("random_pair",), "grouped_gasloc": ("random_pair",),
    "grouped_two_mixes": ("random_pair",), "two_mixes": ("random_pair",),
}  # fmt: skip
GOSSIP = ("slowmo", *(name for name in MAKERS if name.startswith("dpsgd") or name in UNEVEN), "push_sum")
FIXED = ("complete", "ring", "from_matrix")
KINDS = (*FIXED, "random_pair", "star")  # fixed or not, symmetric or not, with as many neighbours for all or not


class Case(NamedTuple):
    strategy: str
    topology: str  # of those that gossip; of the others one of AVERAGES
    world_size: int
    optimizer: str
    model: str = "mlp"  # or batch_norm, with two micro-batches a step; or backwards, each of them averaged

    def __str__(self) -> str:
        return "-".join(map(str, self))


def _topologies(strategy: str) -> tuple[str, ...]:
    if strategy in GOSSIP:
        if strategy in UNEVEN:
            return UNEVEN[strategy]
        if strategy == "push_sum":
            return *TOPOLOGIES[:-1], UNBALANCED  # it has weights of its own
        if strategy == "dpsgd_awc_topk":
            return FIXED
        if strategy in CODED and strategy != "dpsgd_awc_bf16":  # which has seen all kinds
            return ("ring",) if "topk" in strategy else ("ring", "random_pair")
        return TOPOLOGIES if strategy == "dpsgd" else KINDS  # the code that averages by topology is the same
    return AVERAGES if strategy in ALL_REDUCING else AVERAGES[:1]


def fits(topology: str, n: int, strategy: str = "") -> bool:
    """Some need factors, groups of two an even number, and D2 a least eigenvalue above -1/3."""
    if (strategy, topology) == ("d2", "ring") and n in (4, 6):
        return False
    if strategy.startswith("grouped"):
        return n % 2 == 0
    numbers = {"torus_2d": (1, 4), "hypercube": (1, 2, 4), "hierarchical": (2, 4, 6), UNBALANCED: range(3, LARGEST + 1)}
    return n in numbers.get(topology, range(1, LARGEST + 1))


def sizes(strategy: str, topology: str, optimizer: str) -> list[int]:
    """All numbers of learners on the first topology, and for DPSGD on each. Elsewhere the two largest that fit.

    One and two learners, whose neighbours are themselves or one learner, are in a ring and in all-reduces too.
    """
    fitting = [n for n in range(1, LARGEST + 1) if fits(topology, n, strategy)]
    whole = topology in (_topologies(strategy)[0], UNBALANCED) or (strategy, optimizer) == ("dpsgd", "fused")
    small = {"ring": (1, 2), "all_reduce": (1, 2), "from_matrix": (3,)}.get(topology, ())
    return [n for n in fitting if whole or n in (*small, *fitting[-2:])]


CASES = [
    Case(strategy, topology, world_size, optimizer)
    for strategy in MAKERS
    for topology in _topologies(strategy)
    for optimizer in (("fused", "torch") if strategy in ("ssgd", "local_sgd", "dpsgd") else ("fused",))
    for world_size in sizes(strategy, topology, optimizer)
] + [
    Case(strategy, _topologies(strategy)[0], world_size, "fused", "batch_norm")
    for strategy in MAKERS
    for world_size in (1, 2, 3, LARGEST)
    if fits(_topologies(strategy)[0], world_size, strategy)
]
CASES += [
    Case(strategy, AVERAGES[0], world_size, optimizer, "backwards")
    for strategy in ("ssgd", "noisy_ssgd", "noisy_ssgd_apart", "grouped")
    for world_size in (1, 3, LARGEST)
    for optimizer in ("fused", "torch")
    if fits(AVERAGES[0], world_size, strategy)
]


class Run(NamedTuple):
    """A case on real ranks."""

    case: Case
    way: str  # the transport of ranks with a learner each; or grid2, grid3: so many virtual learners on each rank

    def __str__(self) -> str:
        return f"{self.case}-{self.way}"

    @property
    def num_ranks(self) -> int:
        return self.case.world_size // (num_rows(self.way) or 1)

    def combinations(self, num: int) -> set[Any]:
        """Each combination of so many values of strategy, topology, size, optimizer, model and way."""
        return set(combinations(enumerate((*self.case, self.way)), num))


def num_rows(way: str) -> int | None:
    return int(way.removeprefix("grid")) if way.startswith("grid") else None


def _ways(case: Case) -> tuple[str, ...]:
    """Those in which a case can run. Grids take no transport, and a group of two cannot hold a part of three."""
    ways = ["pg", "shm"]
    if case.world_size in (4, LARGEST) and case.optimizer == "fused":
        ways.append("grid2")
        is_grouped = case.strategy.startswith("grouped")
        if case.world_size == LARGEST and case.topology in ("ring", "random_pair") and not is_grouped:
            ways.append("grid3")
    return tuple(ways)


def _cover(runs: list[Run], wanted: Callable[[Run], set[Any]]) -> list[Run]:
    """Some of the runs, which have together what is wanted of any run: greedy, by what each rank adds."""
    found, left = [], set().union(*map(wanted, runs))
    heap = [(-len(wanted(run)) / run.num_ranks, number) for number, run in enumerate(runs)]
    heapq.heapify(heap)
    while left:
        _, number = heapq.heappop(heap)
        run = runs[number]
        gain = len(wanted(run) & left) / run.num_ranks  # less than before, as others have been taken
        if gain and heap and -gain > heap[0][0]:
            heapq.heappush(heap, (-gain, number))
        elif gain:
            found.append(run)
            left -= wanted(run)
    return found


ALL = [Run(case, way) for case in CASES for way in _ways(case)]
WHOLE = frozenset(_cover(ALL, lambda run: {run.case, *run.combinations(3)}))
"""The runs of ``make check``: all cases, and each triple of values that occurs in any run."""
FAST = frozenset(_cover([run for run in ALL if run in WHOLE], lambda run: run.combinations(2)))
"""The runs of ``make test``: each pair of values."""
FAST_CASES = frozenset(run.case for run in FAST)
PARTS = ("averages", "gossip", "coded")


def part_of(case: Case) -> str:
    """The file that has the case, so that several processes share the work."""
    if case.strategy in CODED or case.strategy in UNEVEN:
        return "coded"
    return "gossip" if case.strategy in GOSSIP else "averages"


def runs_of(part: str) -> list[Run]:
    """The runs of a file."""
    return [run for run in ALL if run in WHOLE and part_of(run.case) == part]


def outer(tensors: Any) -> torch.optim.Optimizer:
    """DiLoCo's."""
    return torch.optim.SGD(tensors, lr=0.7, momentum=0.9, nesterov=True)


def mixing_matrix(n: int) -> np.ndarray:
    """Doubly stochastic and directed, all weights different: 0.5 of its own, 0.3 one behind, 0.2 two behind."""
    identity = np.eye(n)
    return 0.5 * identity + 0.3 * np.roll(identity, 1, axis=0) + 0.2 * np.roll(identity, 2, axis=0)


def topology_of(case: Case) -> Any:
    n = case.world_size
    return {
        "complete": ddpcore.Complete,
        "ring": lambda: ddpcore.Ring(1),
        "random_pair": lambda: ddpcore.RandomPair(seed=5),
        "one_peer_exponential": ddpcore.OnePeerExponential,
        "from_matrix": lambda: ddpcore.FromMatrix(mixing_matrix(n)),
        "star": ddpcore.Star,
        "static_exponential": ddpcore.StaticExponential,
        "matching": lambda: ddpcore.Matching([pairs(n, 0), pairs(n, 1)]),
        "from_graph": lambda: ddpcore.FromGraph(nx.path_graph(n)),
        "torus_2d": ddpcore.Torus2D,
        "hypercube": ddpcore.Hypercube,
        "digraph": lambda: ddpcore.FromGraph(nx.DiGraph([(0, 2), *((k, (k + 1) % n) for k in range(n))])),
        "weighted": lambda: ddpcore.Weighted(ddpcore.Ring(), range(1, n + 1)),
        "hierarchical": lambda: ddpcore.Hierarchical(2, ddpcore.OnePeerExponential()),
    }.get(case.topology, lambda: None)()


def pairs(n: int, first: int) -> list[tuple[int, int]]:
    """Neighbours on a path, every second edge of it."""
    return [(left, left + 1) for left in range(first, n - 1, 2)]


GATHER_BYTES = reductions.GATHER_BYTES
MODELS = {
    "mlp": Scenario(),
    "batch_norm": Scenario(batch_norm=True, accumulation=2),
    "backwards": Scenario(accumulation=2, averages_each=True),
}
OPTIMIZERS = {"fused": fused_sgd, "torch": torch_sgd}


def train(
    case: Case,
    group: dist.ProcessGroup | None = None,
    num_rows: int | None = None,
    transport: str = "auto",
    device: torch.device | str = "cpu",
) -> Result:
    """What the learners held by this process end with.

    Without a group all are virtual, with one each rank is one, or with ``num_rows`` so many.
    """
    reductions.GATHER_BYTES = 0 if case.topology == "all_reduce" else GATHER_BYTES
    decay = 0.7 if case.strategy == "dpsgd_consensus" else 1.0
    scenario = replace(MODELS[case.model], make_optimizer=OPTIMIZERS[case.optimizer], lr_decay=decay)
    is_rank = num_rows is None and group is not None
    run = SmallRun(
        lambda: MAKERS[case.strategy](topology_of(case)),
        case.world_size,
        scenario,
        group=group,
        learners=num_rows,
        connection=Connection(transport=transport) if is_rank else None,
        device=device,
    )
    return run.run()


def main() -> None:
    from helpers.ranks import join

    path, rank, world_size = join()
    groups = {n: dist.new_group(list(range(n))) for n in range(1, world_size + 1)}  # every rank takes part in each
    results: dict[str, Result] = {}  # by the run's name, as this file is another module in the tests
    part, is_fast = sys.argv[4], sys.argv[5] == "fast"
    for run in runs_of(part):
        if rank < run.num_ranks and (run in FAST or not is_fast):
            given: dict[str, Any] = {"num_rows": num_rows(run.way)} if num_rows(run.way) else {"transport": run.way}
            results[str(run)] = train(run.case, groups[run.num_ranks], **given)
    torch.save(results, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
