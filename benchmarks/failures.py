"""Ranks that are killed at random: the living go on and a new rank joins, beside a restart of all from a checkpoint.

``shrink``: a killed rank is replaced by a new one, which joins the run. ``restart``: all ranks end when one is killed,
and start again from the last checkpoint. Both train the same network on the digits for the same time, with DPSGD, one
process a rank, and are killed at random times from the same seed. Each step lasts at least ``--step-seconds``, so that
ranks that share cores have the steps of a larger network. Processes are forked from one that has imported torch: a
start costs less than in a real restart, which ``--spawn`` has. *Useful samples* are those of steps that count at the
end: a step that a restart repeats counts once.

``PYTHONPATH=. python benchmarks/failures.py --mtbf 60,15,5 --ranks 4 --seconds 60 --json failures.json``

``resume``: whole runs of ``train`` with ``on_failure="raise"``, in each of which one rank is killed at a random time.
All ranks end, and a second start resumes from the last checkpoint. It counts the runs that end with the bits of a run
that nobody killed.

``PYTHONPATH=. python benchmarks/failures.py --modes resume --ranks 2 --kills 40``
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # here, and not in each rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ddpcore
from ddpcore.data import Dataset, ResharedBatches, ShardedBatches, load_dataset
from ddpcore.optim import FusedSGD
from ddpcore.runtime.launch import World
from ddpcore.runtime.machine import machine
from ddpcore.training import TrainConfig, train

EVERY = 20  # steps between two evaluations, at which ranks also agree on the end
HIDDEN = ("curve", "pauses", "join_ratios", "exit_codes")  # in the JSON file only
SHARE = 32  # samples of a rank in a step


class Job:
    """What a rank trains, and where it writes.

    Args:
        folder: of the run.
        args: the command line.
        rank: number of the GPU, with ``--device cuda``.
    """

    def __init__(self, folder: Path, args: argparse.Namespace, rank: int) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
        self.backend = "nccl" if args.device == "cuda" else "gloo"
        self.folder, self.args = folder, args
        torch.manual_seed(args.seed)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(self.device)
        self.optimizer = FusedSGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.data: Dataset = load_dataset("digits", normalize=True).to(self.device)
        self.batches = ShardedBatches(len(self.data.train), SHARE * args.ranks, args.ranks, args.seed)
        self.store = dist.FileStore(str(folder / "store"), args.ranks)
        self.strategy = ddpcore.DPSGD(ddpcore.RandomPair(args.seed))
        self.recent = [args.step_seconds]  # seconds of the last steps

    def step(self, handle: Any, step: int) -> None:
        """One step of this rank, and a line in its log if it took long."""
        began = time.time()
        mine = handle.comm.member if self.args.mode == "shrink" else dist.get_rank()
        samples = ResharedBatches(self.batches, handle.deals).indices(step, mine)
        inputs, labels = self.data.train.batch(samples, 0)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(inputs), labels).backward()
        time.sleep(max(0.0, self.args.step_seconds - (time.time() - began)))
        known = len(handle.changes)
        self.optimizer.step()
        seconds = time.time() - began
        if seconds > 2 * self.args.step_seconds:
            self.write("slow", {"began": began, "seconds": seconds, "step": step})
        if any(change.joined for change in handle.changes[known:]):
            self.write("joins", {"step": step, "ratio": seconds / statistics.median(self.recent)})
        self.recent = [*self.recent[-19:], seconds]

    def is_over(self, handle: Any) -> bool:
        """Whether the time is over: agreed on every ``EVERY`` steps, in which the first rank writes the test loss."""
        step = handle.learner.step
        if step == 0 or step % EVERY:
            return False
        model = handle.evaluation_model().eval()
        over = (self.folder / "over").exists()
        is_over = bool(handle.comm.gather(torch.tensor([[over]], device=self.device)).any())
        if handle.comm.learners[0] == 0:
            test = self.data.test
            inputs, labels = test.batch(torch.arange(len(test)), 0)
            with torch.no_grad():
                logits = model(inputs)
            row = {
                "time": time.time(),
                "step": step,
                "loss": F.cross_entropy(logits, labels).item(),
                "error_pct": 100 * (logits.argmax(1) != labels).float().mean().item(),
                "ranks": handle.comm.num_learners,
                "samples": SHARE * self.steps_of_ranks(handle.deals, step),
            }
            self.write("curve", row)
        return is_over

    def steps_of_ranks(self, deals: Any, step: int) -> int:
        """Steps taken, summed over the ranks that took them."""
        total, now, num = 0, 0, self.args.ranks
        for begin, members in (*deals, (step, ())):
            total += num * max(0, min(begin, step) - now)
            now, num = max(now, min(begin, step)), len(members)
        return total

    def write(self, name: str, row: dict[str, Any]) -> None:
        """Append a line to a file of the run."""
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def run_shrink(folder: Path, args: argparse.Namespace, rank: int, joins: bool) -> None:
    """A rank of a run that goes on, from its start or from when it joins."""
    job = Job(folder, args, rank)
    if joins:
        handle: Any = ddpcore.join(
            job.model, job.optimizer, job.strategy, job.store, connection=ddpcore.Connection(transport=args.transport)
        )
    else:
        dist.init_process_group(job.backend, store=job.store, rank=rank, world_size=args.ranks)
        handle = ddpcore.distribute(
            job.model,
            job.optimizer,
            job.strategy,
            connection=ddpcore.Connection(on_failure="shrink", transport=args.transport),
        )
    job.write("members", {"pid": os.getpid()})
    while not job.is_over(handle):  # a rank that joins takes part in what the others do after that step
        job.step(handle, handle.learner.step)
    os._exit(0)


def run_restart(folder: Path, args: argparse.Namespace, rank: int, joins: bool) -> None:
    """A rank of a run that begins again at the last checkpoint."""
    job = Job(folder, args, rank)
    dist.init_process_group(job.backend, store=job.store, rank=rank, world_size=args.ranks)
    handle: Any = ddpcore.distribute(
        job.model, job.optimizer, job.strategy, connection=ddpcore.Connection(transport=args.transport)
    )
    last = folder.parent / "last"
    if last.exists():
        saved = torch.load(folder.parent / last.read_text() / f"{rank}.pt", weights_only=False)
        job.model.load_state_dict(saved[0])
        job.optimizer.load_state_dict(saved[1])
        handle.load_state_dict(saved[2])
    job.folder = folder.parent
    job.write("members", {"pid": os.getpid()})
    while not job.is_over(handle):
        job.step(handle, handle.learner.step)
        step = handle.learner.step
        if step % args.checkpoint_every == 0:
            place = folder.parent / f"step-{step}"
            place.mkdir(exist_ok=True)
            torch.save((job.model.state_dict(), job.optimizer.state_dict(), handle.state_dict()), place / f"{rank}.pt")
            dist.barrier()
            if rank == 0:
                (folder.parent / "new").write_text(place.name)
                (folder.parent / "new").rename(last)
    os._exit(0)


def train_rank(folder: Path, attempt: int, ranks: int, rank: int, seed: int) -> None:
    """A rank of a whole run, of its first attempt or of one that resumes it."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder.with_name(f"{folder.name}-store-{attempt}")), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    config = TrainConfig.from_dict(
        {
            "model": "mlp",
            "data": {"name": "digits", "batch_size": SHARE * ranks},
            "strategy": {"name": "dpsgd", "learners": ranks, "timeout": 60},
            "run": {"steps": 1000, "checkpoint_every": 25, "seed": seed},
            "optimizer": {"momentum": 0.9},
        }
    )
    train(config, out=folder, world=World(rank, ranks, rank, ranks), resume=True)
    os._exit(0)


def run_resume(args: argparse.Namespace) -> dict[str, Any]:
    """Kill a rank of each of ``--kills`` runs, resume the run, and compare it with one that nobody killed."""
    context, rng, num_same, kill_steps = multiprocessing.get_context("forkserver"), random.Random(args.seed), 0, []
    context.set_forkserver_preload(["failures"])

    def start(folder: Path, attempt: int) -> list[Any]:
        mine = [(folder, attempt, args.ranks, rank, args.seed) for rank in range(args.ranks)]
        ranks = [context.Process(target=train_rank, args=words) for words in mine]
        for rank in ranks:
            rank.start()
        while not (folder / "record.jsonl").exists() and all(rank.is_alive() for rank in ranks):
            time.sleep(0.01)
        return ranks

    def end(ranks: list[Any]) -> list[int]:
        for rank in ranks:
            rank.join(90)
            rank.kill()
            rank.join()
        return [rank.exitcode for rank in ranks]

    with tempfile.TemporaryDirectory() as name:
        whole, began = start(Path(name) / "whole", 0), time.time()
        assert end(whole) == [0] * args.ranks
        seconds, number = time.time() - began, 0
        model = (Path(name) / "whole" / "model.safetensors").read_bytes()
        while len(kill_steps) < args.kills:
            number += 1
            folder = Path(name) / f"run-{number}"
            ranks = start(folder, 0)
            time.sleep(rng.uniform(0, seconds))
            rng.choice(ranks).kill()
            if -signal.SIGKILL not in end(ranks) or (folder / "model.safetensors").exists():
                continue  # it had ended
            saved = max((path.name for path in (folder / "checkpoints").glob("step-*")), default="step-0")
            kill_steps.append(int(saved.removeprefix("step-")))
            num_same += (
                end(start(folder, 1)) == [0] * args.ranks and (folder / "model.safetensors").read_bytes() == model
            )
    return {"mode": "resume", "ranks": args.ranks, "kills": args.kills, "same_bits": num_same, "resumed_at": kill_steps}


class Ranks:
    """The processes of a run."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args, self.processes, self._num = folder, args, [], 0
        self._context: Any = multiprocessing.get_context("spawn" if args.spawn else "forkserver")
        if not args.spawn:
            self._context.set_forkserver_preload(["failures"])

    def start(self, rank: int, *, joins: bool) -> None:
        """Start a rank."""
        folder = self.folder if self.args.mode == "shrink" else self.folder / f"attempt-{self._num}"
        folder.mkdir(exist_ok=True)
        run = run_shrink if self.args.mode == "shrink" else run_restart
        self.processes.append(self._context.Process(target=run, args=(folder, self.args, rank, joins), name=str(rank)))
        self.processes[-1].start()

    def start_all(self) -> None:
        """Start all ranks, of a new attempt."""
        self._num += 1
        for rank in range(self.args.ranks):
            self.start(rank, joins=False)

    def kill(self, process: Any) -> int:
        """Kill a rank, or one that is left over. Returns the number that it was started with."""
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        self.processes.remove(process)
        return int(process.name)


def run(args: argparse.Namespace, mtbf: float) -> dict[str, Any]:
    """One run. ``mtbf``: mean seconds between two kills."""
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        ranks = Ranks(Path(name), args)
        ranks.start_all()
        while not (Path(name) / "curve.jsonl").exists():  # the time of the first start does not count
            time.sleep(0.05)
        began, kills, joins = time.time(), [], []
        next_kill = began + rng.expovariate(1 / mtbf)
        while time.time() < began + args.seconds:
            time.sleep(0.01)
            now = time.time()
            while joins and joins[0][0] <= now:
                ranks.start(joins.pop(0)[1], joins=True)
            if now < next_kill or (args.kills is not None and len(kills) >= args.kills):
                continue
            known = {row["pid"] for row in lines(Path(name) / "members.jsonl")}
            members = [process for process in ranks.processes if process.pid in known]
            if len(members) > 2:  # two are left, and no rank is killed before it has joined
                kills.append(now)
                number = ranks.kill(rng.choice(members))
                if args.mode == "restart":
                    for process in list(ranks.processes):
                        ranks.kill(process)
                    time.sleep(args.revive_after)
                    ranks.start_all()
                elif not args.no_revive:
                    joins.append((now + args.revive_after, number))
                next_kill = time.time() + rng.expovariate(1 / mtbf)
        (Path(name) / "over").touch()
        deadline = time.time() + 30
        while any(process.is_alive() for process in ranks.processes) and time.time() < deadline:
            time.sleep(0.05)
        codes = [process.exitcode for process in ranks.processes]
        for process in list(ranks.processes):
            ranks.kill(process)
        return summary(Path(name), args, mtbf, began, kills, codes)


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of the run; the last one may be incomplete."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def summary(
    folder: Path, args: argparse.Namespace, mtbf: float, began: float, kills: list[float], codes: list[int | None]
) -> dict[str, Any]:
    """What a run did in its time."""
    curve, slow, joins = (lines(folder / f"{name}.jsonl") for name in ("curve", "slow", "joins"))
    curve = [row for row in curve if row["time"] <= began + args.seconds]
    pauses = []  # from a kill to the end of the step that it interrupted, on the slowest of the living
    for when in kills:
        ends = [
            row["began"] + row["seconds"] for row in slow if row["began"] - 1 < when < row["began"] + row["seconds"]
        ]
        pauses += [max(ends) - when] if ends else []
    first, last = curve[0], curve[-1]
    return {
        "mode": args.mode,
        "ranks": args.ranks,
        "mtbf": mtbf,
        "seed": args.seed,
        "kills": len(kills),
        "exit_codes": codes,
        "goes_on": codes.count(0) >= 2,  # a rank that has just been started may not have joined before the end
        "pauses": pauses,
        "join_ratios": [row["ratio"] for row in joins],  # a step in which a rank joined, to a usual step of that rank
        "useful_samples_per_s": (last["samples"] - first["samples"]) / args.seconds,
        "loss": last["loss"],
        "error_pct": last["error_pct"],
        "curve": [{**row, "time": row["time"] - began} for row in curve],
    }


def main() -> None:
    """Run both modes for each mean time between failures, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mtbf", default="60,15,5", help="mean seconds between two kills, comma-separated")
    parser.add_argument("--modes", default="shrink,restart", help="or resume, alone")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each run")
    parser.add_argument("--seeds", default="0", help="comma-separated")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="a step lasts at least this long")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps; of restart")
    parser.add_argument("--revive-after", type=float, default=1.0, help="seconds before a killed rank starts again")
    parser.add_argument("--no-revive", action="store_true", help="of shrink: nobody joins")
    parser.add_argument("--kills", type=int, help="at most so many")
    parser.add_argument("--transport", default="shm", choices=("shm", "pg"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: a GPU for each rank, by NCCL")
    parser.add_argument("--spawn", action="store_true", help="each process imports torch when it starts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cuda":
        args.transport = "pg"
    if args.modes == "resume":
        args.seed, args.kills = int(args.seeds.split(",")[0]), args.kills or 40
        print(run_resume(args))
        return
    rows = []
    for mtbf in map(float, args.mtbf.split(",")):
        for seed in map(int, args.seeds.split(",")):
            for mode in args.modes.split(","):
                args.mode, args.seed = mode, seed
                row = run(args, mtbf)
                rows.append(row)
                shown = {key: value for key, value in row.items() if key not in HIDDEN}
                longest = f"{max(row['pauses']):.2f} s" if row["pauses"] else "-"
                middle = f"{statistics.median(row['pauses']):.2f} s" if row["pauses"] else "-"
                if row["join_ratios"]:
                    shown["join_ratio"] = statistics.median(row["join_ratios"])
                print(shown, f"pause after a kill: median {middle}, longest {longest}", flush=True)
                if args.json:
                    args.json.write_text(json.dumps({"environment": machine("cpu"), "rows": rows}))


if __name__ == "__main__":
    main()
