"""One of four ranks has half the speed: samples per second with equal batches, and with batches by speed.

Each rank is a process. An emulated link (docs/transports.md) gives learner 0 half the speed, on clocks of CPU time, so
ranks that share cores have the times of four machines. ``alone`` never averages. Each rank then has its own rate, and
all of them together are the most that a strategy can reach. ``data.balance`` measures the speeds at the start.

``PYTHONPATH=. python benchmarks/balanced_batches.py --rounds 3``
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.runtime.machine import machine
from ddpcore.training import TrainConfig, train

RANKS, SLOW = 4, 2.0
STRATEGIES: dict[str, dict[str, Any]] = {
    "alone": {"name": "local_sgd", "period": 1_000_000},
    "ssgd": {"name": "ssgd"},
    "dpsgd random_pair": {"name": "dpsgd"},
    "dpsgd ring": {"name": "dpsgd", "topology": "ring"},
    "local_sgd": {"name": "local_sgd", "period": 5},
}


def measured(
    world: World, strategy: dict[str, Any], balance: bool, args: argparse.Namespace, out: Path
) -> tuple[float, list[int]]:
    """Samples per second of all ranks, the median of the epochs after the first, and the batch of each. Collective."""
    config = TrainConfig.from_dict({
        "model": args.model,
        "data": {"batch_size": args.batch_size, "balance": balance},
        "strategy": {**strategy, "learners": RANKS, "link": f"{args.link},slow={SLOW:g}"},
        "run": {"epochs": args.epochs, "evaluate_every": 0, "checkpoint_every": 0, "device": "cpu"},
    })  # fmt: skip
    record = train(config, out=out, world=world)
    sizes = record.header["config"]["data"]["learners_batch"] or [args.batch_size // RANKS] * RANKS
    return median(row["samples_per_s"] for row in record.epochs[1:]), sizes


def run_rank(world: World, args: argparse.Namespace, folder: str) -> None:
    rates: dict[tuple[str, bool], list[float]] = {}
    sizes: dict[tuple[str, bool], list[int]] = {}
    for number in range(args.rounds):
        for name, strategy in STRATEGIES.items():
            for balance in (False, True) if name != "alone" else (False,):
                out = Path(folder) / f"{number} {name} {balance}"
                rate, sizes[name, balance] = measured(world, strategy, balance, args, out)
                rates.setdefault((name, balance), []).append(rate)
    if world.rank == 0:
        report(rates, sizes, args)


def report(
    rates: dict[tuple[str, bool], list[float]], sizes: dict[tuple[str, bool], list[int]], args: argparse.Namespace
) -> None:
    # The run ends with its slowest rank, so alone a fast one takes SLOW times as many samples as the slow one.
    together = (1 + (RANKS - 1) * SLOW) / RANKS
    alone = [together * rate for rate in rates.pop(("alone", False))]
    rows = []
    for (name, balance), found in rates.items():
        shares = [rate / best for rate, best in zip(found, alone, strict=True)]
        row = {"strategy": name, "balance": balance, "samples_per_s": median(found), "share": median(shares)}
        rows.append(row | {"shares": shares, "sizes": sizes[name, balance]})
    print(f"{RANKS} ranks, learner 0 at 1/{SLOW:g} of the speed; all alone: {median(alone):,.0f} samples/s")
    print(f"{'strategy':20}{'balance':>8}{'samples/s':>12}{'of alone':>10}  rounds, batches")
    for row in rows:
        rounds = " ".join(f"{share:.3f}" for share in row["shares"])
        line = f"{row['strategy']:20}{row['balance']!s:>8}{row['samples_per_s']:12,.0f}{row['share']:10.3f}"
        print(f"{line}  {rounds}  {row['sizes']}")
    if args.json is not None:
        about = {**machine("cpu"), **vars(args)}
        args.json.write_text(json.dumps({"about": {k: str(v) for k, v in about.items()}, "rows": rows}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--batch-size", type=int, default=256, help="of all ranks together")
    parser.add_argument("--epochs", type=int, default=10, help="of 1000 samples")
    parser.add_argument("--link", default="10Gb/s,50us")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        launch.run(run_rank, (args, folder), world_size=RANKS, backend="gloo")


if __name__ == "__main__":
    main()
