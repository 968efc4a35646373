"""Training in which the samples of one learner hold a NaN at one step: the same lines for ranks and virtual learners.

As a script: one rank of four, which runs all cases over each transport.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ddpcore
from ddpcore.optim import FusedLAMB, FusedSGD
from helpers import ranks
from helpers.connection import connected

NUM_RANKS, STEPS, BAD_LEARNER = 4, 6, 2
ORDERS = {"awc": "average_while_computing", "atc": "adapt_then_combine", "cta": "combine_then_adapt"}
STRATEGIES: dict[str, Any] = {
    "ssgd": ddpcore.SSGD,
    "local_sgd": lambda: ddpcore.LocalSGD(period=2),
    "post_local": lambda: ddpcore.LocalSGD(period=2, switch_step=2),
    "grouped": lambda: ddpcore.LocalSGD(period=2, group=2),
    "push_sum": lambda: ddpcore.PushSum(ddpcore.OnePeerExponential()),
    "slowmo": lambda: ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Ring()), period=3),
    "stale": lambda: ddpcore.DPSGD(ddpcore.Ring(), staleness=1),
    **{
        f"{short}_{topology.__name__}": lambda order=order, topology=topology: ddpcore.DPSGD(topology(), order=order)
        for short, order in ORDERS.items()
        for topology in (ddpcore.Ring, ddpcore.RandomPair)
    },
}
OPTIMIZERS: dict[str, Any] = {
    "fused": lambda params: FusedSGD(params, lr=0.3, momentum=0.9, weight_decay=0.01),
    "lamb": lambda params: FusedLAMB(params, lr=0.03),
    "adam": lambda params: torch.optim.Adam(params, lr=0.03),
}


class Case(NamedTuple):
    strategy: str
    mode: str
    bad_step: int | None
    optimizer: str = "fused"
    batch_norm: bool = False

    def __str__(self) -> str:
        return "-".join(map(str, self))


QUARANTINE = tuple(name for name in STRATEGIES if name.split("_")[0] in (*ORDERS, "slowmo"))
CASES = [
    Case(strategy, mode, bad_step)
    for strategy in STRATEGIES
    for mode in ("raise", "skip", *(("quarantine",) if strategy in QUARANTINE else ()))
    for bad_step in (0, 3)
]
CASES += [
    Case(strategy, "skip", 3, optimizer)
    for strategy in ("ssgd", "grouped", "awc_Ring")
    for optimizer in ("lamb", "adam")
]
CASES += [Case("awc_Ring", "quarantine", 3, "adam"), Case("cta_Ring", "quarantine", STEPS - 1)]
CASES += [Case(strategy, "skip", 3, "fused", True) for strategy in ("ssgd", "grouped", "awc_Ring")]
ON_PROCESS_GROUPS = ("ssgd", "post_local", "grouped", "push_sum", "awc_Ring", "atc_RandomPair", "cta_Ring")
RUNS = [(case, "shm") for case in CASES if case.bad_step or case.strategy == "post_local"]
RUNS += [(case, "pg") for case, _ in RUNS if case.strategy in ON_PROCESS_GROUPS and case.optimizer == "fused"]
"""The cases that ranks run too, and the transport: those at step 0 differ only for post_local."""


class Outcome(NamedTuple):
    """Weights and running statistics of each learner here, what was found, and the texts of the errors."""

    weights: Tensor
    found: list[ddpcore.NonFinite]
    errors: list[str]


def samples(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of all learners at a step."""
    generator = torch.Generator().manual_seed(100 + step)
    shape = NUM_RANKS, 4
    return torch.randn(*shape, 5, generator=generator), torch.randint(3, shape, generator=generator)


def train(case: Case, **options: Any) -> Outcome:
    """All steps. After an error the loop takes the step again with samples that are finite."""
    torch.manual_seed(7)
    norm = (nn.BatchNorm1d(7),) if case.batch_norm else ()
    model = nn.Sequential(nn.Linear(5, 7), *norm, nn.Tanh(), nn.Linear(7, 3))
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    handle = ddpcore.distribute(
        model, optimizer, STRATEGIES[case.strategy](), on_nonfinite=case.mode, **connected(**options)
    )
    errors, step, is_bad = [], 0, case.bad_step == 0
    while step < STEPS:
        inputs, labels = samples(step)
        if is_bad:
            inputs[BAD_LEARNER, 1, 3] = torch.nan
        held = list(handle.comm.learners)
        inputs, labels = inputs[held], labels[held]
        optimizer.zero_grad()
        outputs = handle.model(inputs) if options.get("learners") else handle.model(inputs[0])[None]
        torch.stack([F.cross_entropy(*pair) for pair in zip(outputs, labels, strict=True)]).sum().backward()
        try:
            optimizer.step()
        except ddpcore.NonFiniteError as error:
            errors.append(str(error))
            is_bad = False
            continue
        for own in handle.models:
            assert all(tensor.isfinite().all() for tensor in own.state_dict().values()), f"{case}: step {step}"
        step += 1
        is_bad = step == case.bad_step
    rows = [torch.cat([tensor.flatten().double() for tensor in own.state_dict().values()]) for own in handle.models]
    return Outcome(torch.stack(rows), list(handle.nonfinite), errors)


def main() -> None:
    path, _, _ = ranks.join()
    torch.save({(*case, transport): (*train(case, transport=transport),) for case, transport in RUNS}, path)


if __name__ == "__main__":
    main()
