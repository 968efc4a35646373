"""Whether a strategy computes the same on real ranks and on virtual learners."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ddpcore import Connection, Distributed, Strategy
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.testing.learners import BATCH, STEPS, Result, Scenario, SmallRun, torch_sgd

ROUNDING = 1e-5  # 6 steps of lr 0.3 and momentum 0.9 carry errors of 2^-24 of gradients near 1 into a weight
SAID_STEPS = 12  # of the run that compares a strategy with its plan
SCENARIOS = (
    Scenario(),
    Scenario(name="torch.optim.SGD", make_optimizer=torch_sgd),
    Scenario(name="accumulation", accumulation=2),
    Scenario(name="frozen parameter", freeze=True),
    Scenario(name="batch norm", batch_norm=True),
    Scenario(name="resumed", resume_at=STEPS // 2),
)


def check_strategy(
    factory: Callable[[], Strategy],
    *,
    num_learners: Iterable[int] = (1, 2, 3),
    transports: Sequence[str] = ("pg", "shm"),
    scenarios: Sequence[Scenario] = SCENARIOS,
    tolerance: float = 0.0,
    shards: int = 1,
) -> None:
    """Train a small model with a strategy on real ranks and on virtual learners, and compare all learners' weights.

    The virtual learners of one process are the reference. They are compared with real ranks over each transport, with
    a run that is interrupted and resumed from its state, and with what the strategy says of itself: its plan names the
    steps that average gradients, and those that send weights.

    Args:
        factory: makes a new strategy at each call. Ranks are processes of their own, which import it: pass a class or a
            function of a module, no lambda. In a script, call this function under ``if __name__ == "__main__":``.
        num_learners: numbers of learners; the largest is the number of processes that are started.
        transports: ``"pg"`` (gloo) and ``"shm"`` (shared memory, Linux); none checks virtual learners alone.
        scenarios: the runs that are compared.
        tolerance: the largest difference of a weight between both worlds. 0 demands the same bits, which every strategy
            of ddpcore keeps.
        shards: so many ranks are one learner, whose model FSDP2 shards. Scenarios with batch norm are left out, because
            each rank normalizes its own samples. FSDP2 adds gradients in another order: 1e-5 is added to the tolerance.

    Raises:
        ValueError: a batch of a scenario cannot be divided among the shards.
        AssertionError: something differs; one line says what, for how many learners and in which scenario.
        ddpcore.runtime.launch.RankFailed: a rank raised an error.
    """
    if factory() is factory():
        raise AssertionError(f"{factory!r} returns the same strategy twice: it must make a new one at each call")
    counts = sorted(set(num_learners))
    for one in scenarios:
        if (size := BATCH // one.accumulation) % shards:
            raise ValueError(f"shards is {shards} and {one.name} has batches of {size} samples: take 2 shards")
    if shards > 1:
        scenarios, tolerance = [one for one in scenarios if not one.batch_norm], tolerance + ROUNDING
    with ExitStack() as stack:  # the number of threads decides the order of sums in torch's matrix products
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        if counts[-1] > 1:
            _check_said(factory, counts[-1])
        runs = {(count, index): (count, one) for count in counts for index, one in enumerate(scenarios)}
        virtual = {key: SmallRun(factory, *run).run() for key, run in runs.items()}
    for (count, index), result in virtual.items():
        _check_alone(factory(), scenarios[index], count, result, virtual)
    if not transports:
        return
    with tempfile.TemporaryDirectory() as folder:
        job = (factory, tuple(counts), tuple(transports), tuple(scenarios), folder, shards)
        launch.run(run_rank, job, world_size=max(counts) * shards, backend="gloo")
        ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(max(counts) * shards)]
    for count, index in virtual:
        for transport in transports:
            seen = [ranks[rank][count, index, transport] for rank in range(count * shards)]
            where = f"{count} learners{f' of {shards} shards' * (shards > 1)}, {transport}, {scenarios[index].name}"
            for shard in range(shards):
                _compare(where, seen[shard::shards], virtual[count, index], tolerance)


def run_rank(
    world: World,
    factory: Callable[[], Strategy],
    counts: Sequence[int],
    transports: Sequence[str],
    scenarios: Sequence[Scenario],
    folder: str,
    shards: int = 1,
) -> None:
    """One of the ranks: all runs in which it takes part, saved to a file."""
    torch.set_num_threads(1)
    learners: dict[int, dict[str, Any]] = {}
    for count in counts:  # every rank takes part in each call
        if shards == 1:
            learners[count] = {"group": dist.new_group(list(range(count)))}
        else:
            places, names = torch.arange(count * shards).view(count, shards), ("learners", "shards")
            learners[count] = {"mesh": DeviceMesh("cpu", places, mesh_dim_names=names)}
    results = {
        (count, index, transport): SmallRun(
            factory, count, scenario, **learners[count], connection=Connection(transport=transport)
        ).run()
        for count in counts
        if world.rank < count * shards
        for index, scenario in enumerate(scenarios)
        for transport in transports
    }
    torch.save(results, Path(folder) / f"{world.rank}.pt")
    dist.barrier()


class _Watched(SmallRun):
    """Counts what virtual learners send, and the checks of what they send. Keeps their gradients of each step."""

    def _start(self, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Distributed]:
        started = super()._start(seed)
        learner: Any = started[2].learner
        self.counts, self.sent, self.gradients = Counter[str](), list[bool](), list[list[Tensor | None]]()
        for name in ("average_", "average_pieces_", "mix_", "exchange", "live"):
            setattr(learner.comm, name, partial(self._call, "sent", getattr(learner.comm, name)))
        learner.check_sent = partial(self._call, "checks", learner.check_sent)
        return started

    def _call(self, what: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.counts[what] += 1
        return method(*args, **options)

    def _step(self, step: int, optimizer: torch.optim.Optimizer, handle: Distributed) -> Tensor:
        before = self.counts["sent"]
        losses = super()._step(step, optimizer, handle)
        self.sent.append(self.counts["sent"] > before)
        rows = [[p.grad.flatten() for p in one.parameters() if p.grad is not None] for one in handle.models]
        self.gradients.append([torch.cat(row) if row else None for row in rows])
        return losses


def _check_said(factory: Callable[[], Strategy], count: int) -> None:
    """Compare what is sent and averaged with the plan, and demand that weights are checked before they are sent."""
    run, strategy, where = _Watched(factory, count, Scenario()), factory(), f"{count} virtual learners"
    run.run(SAID_STEPS)
    silent = [step for step, sent in enumerate(run.sent) if strategy.plan(step).weights and not sent]
    if strategy.traits.waits and silent:
        what = f"plan({silent[0]}).weights is true and nothing is sent in that step"
        raise AssertionError(f"{where}: {what}, so policies would average without the weights: define plan()")
    for step in range(SAID_STEPS):
        size = strategy.plan(step).gradients
        _check_gradients(f"{where}: plan({step}).gradients is {size}", size or count, run.gradients[step])
    if any(run.sent) and not strategy.traits.averages_gradients and not run.counts["checks"]:
        what = f"{where}: weights are sent and learner.check_sent() is never called"
        raise AssertionError(f"{what}: call it before, so that numbers that are not finite reach no neighbour")


def _check_gradients(says: str, size: int, rows: Sequence[Tensor | None]) -> None:
    """Demand equal gradients of ``size`` consecutive learners each, and others elsewhere: each has another batch."""
    for learner, (row, before) in enumerate(zip(rows[1:], rows[:-1], strict=True), start=1):
        if row is None or before is None:  # it took no step
            continue
        is_equal = bool((row - before).abs().max() <= 1e-5 * row.abs().max())
        if is_equal != (learner % size > 0):
            found = "are equal" if is_equal else "differ"
            what = f"{says}, and the gradients of learners {learner - 1} and {learner} {found} after that step"
            raise AssertionError(f"{what}: define plan() as the strategy averages them")


def _check_alone(
    strategy: Strategy, scenario: Scenario, count: int, result: Result, virtual: dict[tuple[int, int], Result]
) -> None:
    """What virtual learners alone show."""
    where = f"{count} virtual learners, {scenario.name}"
    if not (result.weights.isfinite().all() and result.losses.isfinite().all()):
        raise AssertionError(f"{where}: weights or losses are not finite")
    parameters = result.weights[:, : result.num_weights]
    if strategy.traits.stays_identical and not torch.equal(parameters, parameters[:1].expand_as(parameters)):
        raise AssertionError(f"{where}: traits.stays_identical is true and the learners' weights differ")
    if scenario.resume_at is not None and scenario == Scenario(name=scenario.name, resume_at=scenario.resume_at):
        _demand(f"{where} after step {scenario.resume_at}: weights", result.weights, virtual[count, 0].weights, 0.0)


def _compare(where: str, ranks: Sequence[Result], virtual: Result, tolerance: float) -> None:
    _demand(f"{where}: weights", torch.cat([one.weights for one in ranks]), virtual.weights, tolerance)
    _demand(f"{where}: losses", torch.cat([one.losses for one in ranks], dim=1).T, virtual.losses.T, tolerance)
    for rank, one in enumerate(ranks):
        rounding = 1e-5 * max(1.0, virtual.average.abs().max().item())
        _demand(f"{where}: evaluation_model() of rank {rank}", one.average, virtual.average, tolerance + rounding)


def _demand(what: str, ours: Tensor, reference: Tensor, tolerance: float) -> None:
    """Raise AssertionError where rows differ by more than the tolerance."""
    if ours.shape != reference.shape:
        raise AssertionError(f"{what} have shape {list(ours.shape)}, not {list(reference.shape)}")
    if torch.equal(ours, reference):
        return
    rows = (ours - reference).abs().reshape(len(ours), -1).amax(dim=1)
    worst = rows.max().item()
    if not worst <= tolerance:  # NaN too
        those = f"the {what} of virtual learners in one run: at most {tolerance:g} is allowed"
        raise AssertionError(f"{what} of learner {int(rows.argmax())} differ by {worst:.3g} from {those}")
