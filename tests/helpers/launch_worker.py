"""Workers of :func:`ddpcore.runtime.launch.run`, started by tests: ``launch_worker.py FOLDER TRIAL WORLD_SIZE``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ddpcore
from ddpcore.comm.groups import barrier
from ddpcore.optim import FusedSGD
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World


def train(world: World, folder: str) -> None:
    """Five steps of dpsgd. Losses, weights, threads, and where it listens go to a file of this rank."""
    found = {"threads": torch.get_num_threads()}
    torch.set_num_threads(1)  # else a result could depend on how many threads each start gives
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    ddpcore.distribute(model, optimizer, ddpcore.DPSGD())
    losses = []
    for step in range(5):
        generator = torch.Generator().manual_seed(100 * step + world.rank)
        inputs, labels = torch.randn(4, 5, generator=generator), torch.randint(3, (4,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([parameter.flatten() for parameter in model.parameters()]).tolist()
    dist.all_reduce(torch.zeros(4))  # gloo has connected the ranks then
    found |= {"rank": listening(os.getpid()), "parent": listening(os.getppid())}
    found |= {"world": [world.rank, world.world_size, world.local_rank, world.local_world_size]}
    found |= {"losses": losses, "weights": weights}
    Path(folder, f"{world.rank}.json").write_text(json.dumps(found))


def raises(world: World, folder: str) -> None:
    """Rank 1 fails while the others wait for it in a collective."""
    dist.barrier()
    if world.rank == 1:
        raise LookupError("the cause of it all")
    dist.all_reduce(torch.zeros(4))
    dist.barrier()


def exits(world: World, folder: str) -> None:
    """Rank 1 leaves at once, without a traceback; the others never look at the network."""
    if world.rank == 1:
        os._exit(7)
    time.sleep(600)


def is_killed(world: World, folder: str) -> None:
    """Rank 2 dies by SIGKILL while the others wait for it in a collective."""
    dist.barrier()
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(4))


def hangs(world: World, folder: str) -> None:
    """All ranks say that they are there; rank 0 then waits in a collective, the others in Python."""
    Path(folder, f"{world.rank}.there").touch()
    if world.rank == 0:
        dist.barrier()
    time.sleep(600)


def trains_and_hangs(world: World, folder: str) -> None:
    train(world, folder)
    hangs(world, folder)


def listening(pid: int) -> list[str]:
    """The addresses on which a process listens, as /proc writes them: 0100007F is 127.0.0.1."""
    files = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    sockets = {name[len("socket:[") : -1] for name in files if name.startswith("socket:[")}
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()]
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in sockets]


def comes_late(world: World, folder: str) -> None:
    """Rank 1 lets rank 0 wait longer than run(timeout=) allows."""
    dist.barrier()
    if world.rank == 1:
        time.sleep(600)
    barrier("the barrier of this test")


def orphans(folder: str) -> None:
    """Two ranks of torchrun: one began with launch.run, the other only with distribute."""
    if os.environ["RANK"] == "0":
        launch.run(hangs, (folder,), world_size=2, backend="gloo")
        return
    dist.init_process_group("gloo")
    group = dist.new_group([1], use_local_synchronization=True)
    model = nn.Linear(2, 2)
    ddpcore.distribute(model, FusedSGD(model.parameters(), lr=0.1), ddpcore.SSGD(), group=group)
    Path(folder, "1.there").touch()
    time.sleep(600)


def ignores_sigterm(world: World, folder: str) -> None:
    """Rank 0 cannot be asked to end; rank 1 fails."""
    if world.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(folder, "deaf").touch()
        time.sleep(600)
    while not Path(folder, "deaf").exists():
        time.sleep(0.02)
    raise LookupError("the cause of it all")


def unconnected(world: World, folder: str) -> None:
    """Where this process stands, and whether it is of a group."""
    place = [world.rank, world.world_size, torch.get_num_threads(), dist.is_initialized()]
    Path(folder, f"{world.rank}.json").write_text(json.dumps(place))


def goes_on(world: World, folder: str) -> None:
    """Rank 0 dies by SIGKILL, rank 1 fails, and rank 2 has something to write."""
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1:
        raise LookupError("no such luck")
    Path(folder, "finished").touch()


def stops(world: World, folder: str) -> None:
    """Rank 0 stops at once, rank 1 long after, and has something to write."""
    if world.rank == 1:
        time.sleep(launch.GRACE_SECONDS + launch.KILL_SECONDS + 2)
        Path(folder, "saved").touch()
    raise launch.Stopped(f"rank {world.rank} stopped")


def main() -> int:
    folder, trial, world_size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if trial == "orphans":
        orphans(folder)
        return 0
    timeout = 2.0 if trial == "comes_late" else launch.TIMEOUT_SECONDS
    backend = "none" if trial in ("unconnected", "stops", "goes_on") else "gloo"
    on_failure = "shrink" if trial == "goes_on" else "raise"
    try:
        function, options = globals()[trial], {"backend": backend, "timeout": timeout, "on_failure": on_failure}
        launch.run(function, (folder,), world_size=world_size, **options)
    except (launch.RankFailed, launch.Stopped) as error:
        print(error, file=sys.stderr)
        return 3 if isinstance(error, launch.Stopped) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
