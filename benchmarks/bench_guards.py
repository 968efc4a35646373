"""What the checks of a training step cost: steps of ``distribute`` with the checks of ``LoopWatch``, and without any.

    PYTHONPATH=. python benchmarks/bench_guards.py [--models lenet5 mlp] [--worlds virtual gloo shm] [--json FILE]

Two learners train with SSGD and DPSGD: as virtual learners of one process, and as ranks over gloo and shared memory, on
the CPU with one thread each. One handle takes all steps, with and without checks in turn, A/B/A/B. Times of virtual
learners are those of the processor; a time of ranks is that of the slowest. The ratio is the median over pairs. On a
busy machine it needs many steps, so a last column has the CPU time inside of the checks, in percent of the time of a
step without checks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import add_options, append
from rich.console import Console
from rich.table import Table

import ddpcore
from ddpcore.models import MODELS
from ddpcore.optim import FusedSGD
from ddpcore.runtime import launch
from ddpcore.runtime.machine import machine
from ddpcore.runtime.timing import quantiles

NUM_LEARNERS, BATCH_SIZE, WARM_UP = 2, 32, 6
MODELS_OF: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {  # shape of a sample, options
    "lenet5": ((3, 32, 32), {}),
    "mlp": ((784,), {"hidden": [2048, 2048]}),  # 5.8 million parameters
}
STRATEGIES: dict[str, Callable[[], Any]] = {"ssgd": ddpcore.SSGD, "dpsgd": lambda: ddpcore.DPSGD(ddpcore.Ring())}
WORLDS = {"virtual": None, "gloo": "pg", "shm": "shm"}  # and the transport of ranks


class NoWatch:
    """Stands in for ``LoopWatch``: it only tells steps from other calls, and every call is a step."""

    def __init__(self) -> None:
        self.sums: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Callable[..., bool]:
        answer = name in ("is_own_pass", "begin_call", "end_call")
        return lambda *args, **options: answer

    @property
    def resets(self) -> NoWatch:
        """Its notes do nothing either."""
        return self

    num_passes = 1


class TimedWatch:
    """A ``LoopWatch`` that counts the CPU seconds of its calls."""

    def __init__(self, watch: Any) -> None:
        self.seconds = 0.0
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._watch, name)
        if not callable(method):
            return method

        def timed(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return method(*args, **options)
            finally:
                self.seconds += time.thread_time() - start

        return timed


class Steps:
    """Steps of one model, with the checks or without."""

    def __init__(self, model: str, strategy: str, transport: str | None) -> None:
        torch.manual_seed(0)
        shape, options = MODELS_OF[model]
        net = MODELS.build(model, input_shape=shape, num_classes=10, **options)
        self.optimizer = FusedSGD(net.parameters(), lr=1e-3, momentum=0.9)
        where: dict[str, Any] = {"learners": NUM_LEARNERS}
        if transport is not None:
            where = {"connection": ddpcore.Connection(transport=transport)}
        self.handle: Any = ddpcore.distribute(net, self.optimizer, STRATEGIES[strategy](), **where)
        self._clock = time.thread_time if transport is None else time.perf_counter  # ranks wait for each other
        leading = (NUM_LEARNERS, BATCH_SIZE) if transport is None else (BATCH_SIZE,)
        self.inputs, self.labels = torch.randn(*leading, *shape), torch.randint(10, leading)
        self.timed = TimedWatch(self.handle._watch)
        self._watches = {"on": self.handle._watch, "off": NoWatch(), "timed": self.timed}
        # LoopWatch has hooks on parameters where no buckets have any.
        own = self.handle.learner.flat.parameters if strategy == "dpsgd" and transport is None else ()
        self._hooks = [(p._post_accumulate_grad_hooks, dict(p._post_accumulate_grad_hooks)) for p in own]

    def __call__(self, checks: str) -> float:
        """Take a step with checks ``on``, ``off`` or ``timed``. Returns its seconds."""
        self.handle._watch = self.handle.learner.watch = self._watches[checks]
        for hooks, all_hooks in self._hooks:
            hooks.clear()
            hooks.update({} if checks == "off" else all_hooks)
        start = self._clock()
        self.optimizer.zero_grad()
        outputs = self.handle.model(self.inputs)
        F.cross_entropy(outputs.flatten(0, -2), self.labels.flatten()).backward()
        self.optimizer.step()
        return self._clock() - start


def seconds_of(steps: Steps, repeats: int) -> torch.Tensor:
    """Seconds ``[repeats, 3]``: of a step with checks and of one without, and CPU seconds of its checks."""
    seconds = torch.zeros(repeats + WARM_UP, 3, dtype=torch.float64)
    for row in seconds:
        for column, checks in enumerate(("on", "off", "timed")):
            if dist.is_initialized():
                dist.barrier()
            before = steps.timed.seconds
            row[column] = steps(checks)
        row[2] = steps.timed.seconds - before
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds[WARM_UP:]


def measure(world: launch.World | None, options: argparse.Namespace, name: str, rows: list[dict[str, Any]]) -> None:
    """Add a row for each model and strategy, and append it to the file."""
    torch.set_num_threads(1)
    for model in options.models:
        for strategy in STRATEGIES:
            steps = Steps(model, strategy, WORLDS[name])
            repeats = options.repeats if model == "lenet5" else -(-options.repeats // 4)
            with_checks, without, inside = seconds_of(steps, repeats).T
            learners = "virtual learners" if world is None else f"ranks, {name}"
            row = {
                "case": f"{strategy} of {model}, {NUM_LEARNERS} {learners}",
                "ms": quantiles((1e3 * with_checks).tolist()),
                "ms_without": quantiles((1e3 * without).tolist()),
                "ratio": quantiles((with_checks / without).tolist()),
                "ratio_of_medians": float(with_checks.median() / without.median()),
                "percent_inside": quantiles((100 * inside / without.median()).tolist()),
                "repeats": repeats,
                **machine("cpu"),
            }
            if world is None or world.rank == 0:
                rows.append(row)
                append(options.json, row)


def of_ranks(world: launch.World, options: argparse.Namespace, name: str) -> None:
    """Run on every rank; rank 0 prints."""
    rows: list[dict[str, Any]] = []
    measure(world, options, name, rows)
    if rows:
        show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    table = Table(title=f"torch {rows[0]['torch']}, commit {rows[0]['commit']}", caption="p20/p50/p80")
    for heading in ("step", "ms with checks", "ms without", "ratio of pairs", "of medians", "CPU % inside"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        shown = [
            "/".join(f"{row[key][p]:.{digits}f}" for p in ("p20", "p50", "p80"))
            for key, digits in (("ms", 2), ("ms_without", 2), ("ratio", 3), ("percent_inside", 2))
        ]
        table.add_row(row["case"], *shown[:3], f"{row['ratio_of_medians']:.3f}", shown[3])
    Console(width=150).print(table)


def main() -> None:
    """Virtual learners here, then ranks of each transport."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS_OF), default=list(MODELS_OF))
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    add_options(parser, repeats=400)
    options = parser.parse_args()
    for name in options.worlds:
        if WORLDS[name] is None:
            rows: list[dict[str, Any]] = []
            measure(None, options, name, rows)
            show(rows)
        else:
            launch.run(of_ranks, (options, name), world_size=NUM_LEARNERS, backend="gloo")


if __name__ == "__main__":
    main()
