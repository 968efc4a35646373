"""Ranks that share memory, and that do not all do well: ``shared_memory_ranks.py FILE``.

Each function is a trial. This process forks the ranks of the trials, so that torch is imported once, and
saves the exit status and the output of each rank. A rank that is killed stays a zombie until the others have ended. A
rank that meets a fault prints its message, lives on for a while, and must not be taken for the cause.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before the forks: else each rank imports it in its first step, which takes four seconds
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore import Round
from ddpcore.comm import SharedMemoryCommunicator
from ddpcore.comm.shared import memory
from ddpcore.optim import FusedSGD
from ddpcore.parameters.flat import FlatParameters
from helpers.connection import connected
from helpers.forked import without_gloo
from helpers.in_place_ranks import exchanges_in_place, freezes_and_saves, misses_a_gradient
from helpers.lanes import in_lanes

CPU = torch.device("cpu")
P = 5000  # beyond a page
TIMEOUT = 60.0  # seconds; of a trial, and of the connections that must not need it
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ssgd": ddpcore.SSGD,
    "ring": lambda: ddpcore.DPSGD(ddpcore.Ring()),
    "random_pair": lambda: ddpcore.DPSGD(ddpcore.RandomPair(3)),
    "one_peer_exponential": lambda: ddpcore.DPSGD(ddpcore.OnePeerExponential()),
    "stale": lambda: ddpcore.DPSGD(ddpcore.Ring(), staleness=1),
    "int8": lambda: ddpcore.DPSGD(ddpcore.Ring(), compression=ddpcore.strategies.compression.Int8()),
    "local_sgd": lambda: ddpcore.LocalSGD(period=2),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def held() -> tuple[int, int]:
    """How many mappings and open files of shared memory this process has."""
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:ddpcore"), sum("memfd:ddpcore" in file for file in files)


def connect(timeout: float = TIMEOUT) -> SharedMemoryCommunicator:
    return SharedMemoryCommunicator(timeout=timeout)


def dies_before_an_exchange(rank: int) -> None:
    """Rank 1 does not give its weights at step 3; some wait for it, others for those who do."""
    comm, weights = connect(), torch.zeros(1, P)
    for step in range(100):
        if rank == 1 and step == 3:
            die()
        comm.exchange(weights, ddpcore.Ring(), step).mixture().apply_(weights)


def dies_in_an_average(rank: int) -> None:
    """Rank 2 has said that it is ready and does not reduce its share."""
    comm = connect()
    rows = comm.allocate((1, P), torch.float32, CPU)
    for step in range(100):
        work = comm.average_(rows)
        if rank == 2 and step == 3:
            die()
        work.wait()


def dies_in_an_allocation(rank: int) -> None:
    """Rank 1 has come with its memory and dies before the others open it."""
    comm = connect()
    arrive = comm._coordinator.arrive

    def arrive_and_die(text: str, handle: bytes = b"") -> int:
        number = arrive(text, handle)
        if rank == 1:
            die()
        time.sleep(0.3)
        return number

    comm._coordinator.arrive = arrive_and_die
    comm.allocate((1, P), torch.float32, CPU)


def leaves(rank: int) -> None:
    """Rank 1 ends in good order and too early."""
    comm, weights = connect(), torch.zeros(1, P)
    for step in range(1 if rank == 1 else 5):
        comm.exchange(weights, ddpcore.Complete(), step).mixture().apply_(weights)


def stays_away(rank: int) -> None:
    """Rank 1 lives and never comes."""
    comm, weights = connect(timeout=1.0), torch.zeros(1, P)
    comm.exchange(weights, ddpcore.Complete(), 0).mixture().apply_(weights)
    if rank == 1:
        time.sleep(4)
    else:
        comm.exchange(weights, ddpcore.Complete(), 1).mixture().apply_(weights)


def is_slow(rank: int) -> None:
    """Rank 1 takes longer than the slices in which the others wait, and nobody minds."""
    comm, weights = connect(), torch.full((1, P), float(rank))
    for step in range(2):
        if rank == 1:
            time.sleep(0.5)
        comm.exchange(weights, ddpcore.Complete(), step).mixture().apply_(weights)
        comm.average_(weights).wait()
    print(weights.unique().tolist())


class OneWay(ddpcore.Topology):
    """Rank 1 reads from rank 0, which reads nothing."""

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        return Round(1.0, (), (), (1,)) if rank == 0 else Round(0.5, (0,), (0.5,), ())

    def period(self, num_learners: int) -> int:
        return 1


def reads_slowly(rank: int, in_place: bool) -> None:
    """What rank 1 was handed stays as it was until it comes again, while rank 0 runs ahead as far as it may.

    Also if weights are exchanged in place.
    """
    comm, weights, seen = connect(), torch.zeros(1, P), []
    for step in range(6):
        weights.fill_(float(step))
        mixture = comm.exchange(weights, OneWay(), step, in_place=in_place).mixture()
        if rank == 1:
            time.sleep(0.1)
            seen.append(mixture.peers[0].unique().tolist())
        if mixture.out is not None:
            weights = mixture.out[None]
    print(seen)


def averages_another_size(rank: int) -> None:
    connect().average_(torch.zeros(1, 32 if rank == 1 else 64)).wait()


def calls_something_else(rank: int) -> None:
    """Rank 1 averages where the others exchange; nothing need be allocated any more."""
    comm, weights = connect(), torch.zeros(1, P)
    rows = comm.allocate((1, P), torch.float32, CPU)
    comm.exchange(weights, ddpcore.Complete(), 0).mixture().apply_(weights)
    if rank == 1:
        comm.average_(rows).wait()
    comm.exchange(weights, ddpcore.Complete(), 1).mixture().apply_(weights)


def is_refused(rank: int) -> None:
    """Rank 1 cannot open the others' memory: shm says so on all ranks, and auto takes the process group."""

    def refuse(pid: int, descriptor: int) -> int:
        raise PermissionError("not yours")

    if rank == 1:
        memory.open_file = refuse
    for transport in ("auto", "shm"):
        model = nn.Linear(5, 3)
        handle = ddpcore.distribute(
            model, FusedSGD(model.parameters()), ddpcore.SSGD(), connection=ddpcore.Connection(transport=transport)
        )
        print(handle.comm.description)


def lacks_flags(rank: int) -> None:
    """Rank 1 cannot make flags, as on a processor without the compiled library: auto takes the process group."""

    def refuse(buffer: object) -> None:
        raise ImportError("no flags")

    if rank == 1:
        ddpcore.comm.shared.coordination.Flags = refuse
    model = nn.Linear(5, 3)
    print(ddpcore.distribute(model, FusedSGD(model.parameters()), ddpcore.SSGD()).comm.description)


def is_on_another_host(rank: int) -> None:
    ddpcore.comm.shared.coordination.host_id = lambda: f"host {rank % 2}"
    connect()


def frees(rank: int) -> None:
    """A layout or a handle that was given up is freed on all ranks: no mapping and no open file is left of it."""
    comm = connect()
    before = held()
    model = nn.Sequential(nn.Linear(50, 70), nn.Linear(70, 3))
    flat = FlatParameters([model.named_parameters()], allocate=comm.allocate)
    after = held()
    for _ in range(3):
        flat.reorder(range(len(flat.segments))[::-1])
        comm.average_(flat.grad_LP).wait()
        assert held() == after, (held(), after)
    assert after > before
    del flat, model
    assert held() == before, (held(), before)
    for make in (ddpcore.SSGD, lambda: ddpcore.DPSGD(ddpcore.Ring())):
        model = nn.Linear(50, 70)
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, make(), connection=ddpcore.Connection(transport="shm"))
        for _ in range(2):
            model(torch.ones(3, 50)).sum().backward()
            optimizer.step()
        assert held() > before
        del model, optimizer, handle
        gc.collect()
        assert held() == before, (held(), before)
    print("freed")


def train(strategy: str, dtype: torch.dtype, transport: str) -> list[Tensor]:
    """Four steps of two micro-batches; all that the model holds then, and what the average of all learners holds."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(50, 70), nn.BatchNorm1d(70), nn.Tanh(), nn.Linear(70, 3)).to(dtype)
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    sizes = {"bucket_bytes": 4096, "first_bucket_bytes": 1024}
    handle = ddpcore.distribute(model, optimizer, STRATEGIES[strategy](), **connected(transport=transport, **sizes))
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        inputs, labels = torch.randn(8, 50, dtype=dtype), torch.randint(3, (8,))
        optimizer.zero_grad()
        with handle.no_sync():
            F.cross_entropy(model(inputs[:4]), labels[:4]).backward()
        F.cross_entropy(model(inputs[4:]), labels[4:]).backward()
        optimizer.step()
    average = handle.evaluation_model()
    return [tensor.clone() for one in (model, average) for tensor in one.state_dict().values()]


def trains(rank: int) -> None:
    """The same bits over shared memory and over the process group: fp32 and bf16 in turn, on 2 ranks and on 3 both."""
    warnings.filterwarnings("ignore", ".*there is one learner")
    for number, strategy in enumerate(STRATEGIES, start=dist.get_world_size()):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        ours, theirs = (train(strategy, dtype, transport) for transport in ("shm", "pg"))
        print(strategy, dtype, all(map(torch.equal, ours, theirs)), all(one.isfinite().all() for one in ours))


def is_killed_somewhere(rank: int, seed: int) -> None:
    """Rank 1, or all ranks, die while they set up or train."""
    chance = random.Random(seed)  # the same on all ranks
    everyone, seconds = chance.random() < 0.3, 0.001 + 0.8 * chance.random() ** 2
    if everyone or rank == 1:
        signal.signal(signal.SIGALRM, lambda *_: die())
        signal.setitimer(signal.ITIMER_REAL, seconds)
    while True:
        train(chance.choice(["ssgd", "ring", "local_sgd"]), torch.float32, "shm")


def trains_something_else(rank: int, what: str, transport: str) -> None:
    odd = rank == 1
    width = 8 if odd and what == "shape" else 7
    model = nn.Sequential(
        nn.Linear(5, width), nn.BatchNorm1d(width, track_running_stats=not (odd and what == "buffer"))
    )
    if odd and what == "dtype":
        model.double()
    model[1].bias.requires_grad_(not (odd and what == "frozen"))
    optimizer = (torch.optim.SGD if odd and what == "optimizer" else FusedSGD)(model.parameters(), lr=0.1)
    strategy: Any = ddpcore.DPSGD(ddpcore.RandomPair(seed=1 if odd and what == "topology" else 0))
    if what == "matrix":
        weights = torch.full((3, 3), 0.25) + torch.eye(3) / 4
        strategy = ddpcore.DPSGD(ddpcore.FromMatrix(weights.roll(1, 0) if odd else weights))
    if odd and what == "strategy":
        strategy = ddpcore.LocalSGD(4)
    ddpcore.distribute(
        model,
        optimizer,
        strategy,
        connection=ddpcore.Connection(transport="pg" if odd and what == "transport" else transport),
    )


DIFFERENCES = ["shape", "dtype", "buffer", "frozen", "optimizer", "topology", "matrix", "strategy", "transport"]
TRIALS: list[tuple[Any, ...]] = [  # function, number of ranks, arguments
    (dies_before_an_exchange, 4),
    (dies_in_an_average, 3),
    (dies_in_an_allocation, 3),
    (leaves, 3),
    (stays_away, 3),
    (is_slow, 3),
    *((reads_slowly, 2, in_place) for in_place in (False, True)),
    *((exchanges_in_place, world_size) for world_size in (2, 3, 4)),
    (misses_a_gradient, 3),
    (freezes_and_saves, 2),
    (averages_another_size, 3),
    (calls_something_else, 3),
    (is_refused, 2),
    (is_on_another_host, 3),
    (lacks_flags, 2),
    (frees, 2),
    *((trains, world_size) for world_size in (1, 2, 3, 6)),
    *((is_killed_somewhere, 3, seed) for seed in range(12)),
    *((trains_something_else, 3, what, "shm") for what in DIFFERENCES),
    (trains_something_else, 3, "shape", "pg"),
    (trains_something_else, 3, "strategy", "pg"),
]


def run_rank(trial: tuple[Any, ...], rank: int, folder: Path) -> None:
    """In the forked process, which ends here."""
    os.dup2(os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY), 1)
    os.dup2(1, 2)
    function, world_size, *arguments = trial
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(store=store, rank=rank, world_size=world_size)
    try:
        function(rank, *arguments)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        time.sleep(0.5)
    sys.stdout.flush()
    os._exit(0)


def run_trial(trial: tuple[Any, ...]) -> list[tuple[int, str]]:
    """The status and the output of each rank; SIGXCPU stands for one that had to be ended."""
    with tempfile.TemporaryDirectory() as name:
        folder, pids = Path(name), []
        for rank in range(trial[1]):
            pids.append(os.fork())
            if pids[-1] == 0:
                run_rank(trial, rank, folder)
        statuses: dict[int, int] = {}
        deadline = time.monotonic() + TIMEOUT
        while len(statuses) < len(pids):
            left = [rank for rank in range(len(pids)) if rank not in statuses]
            ended = [
                rank
                for rank in left
                if os.waitid(os.P_PID, pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            ]
            late = time.monotonic() > deadline
            if late or len(ended) == len(left):  # all at once: until then those that died are zombies
                for rank in left:
                    if rank not in ended:
                        os.kill(pids[rank], signal.SIGXCPU)
                    statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
            time.sleep(0.02)
        return [(statuses[rank], without_gloo((folder / f"{rank}.log").read_text())) for rank in range(len(pids))]


def name_of(trial: tuple[Any, ...]) -> str:
    return "-".join([trial[0].__name__, *map(str, trial[1:])])


def main(trials: list[tuple[Any, ...]]) -> None:
    """All of them, or those whose names are given."""
    torch.set_num_threads(1)
    chosen = [trial for trial in trials if name_of(trial) in sys.argv[2:] or not sys.argv[2:]]
    torch.save(in_lanes({name_of(trial): trial for trial in chosen}, run_trial), sys.argv[1])


if __name__ == "__main__":
    main(TRIALS)
