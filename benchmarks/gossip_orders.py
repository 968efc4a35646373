"""A quadratic on a ring of 16 learners, on which average-while-computing diverges and the other orders do not.

    python benchmarks/gossip_orders.py [--lr 1.71] [--learners 16] [--steps 200]

Every learner has the loss ``f_j(w) = 1/2 (w - c_j)^2`` with its own centre, so every order diverges if the learning
rate is above 2. Each step multiplies the component of the learners' differences in an eigenvector of W with eigenvalue
l: by ``l - lr`` under average-while-computing, and by ``l (1 - lr)`` under the other two orders. A ring of an even
number of learners has the eigenvalue l = -1/3. So the first order diverges from lr = 2/3 on, the others only from 2 on.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import ddpcore
from ddpcore import DPSGD

ORDERS = ("average_while_computing", "adapt_then_combine", "combine_then_adapt")

HEADINGS = ("order", "mean error", "consensus distance", "after half the steps")


def distances(order: str, num_learners: int, lr: float, num_steps: int) -> dict[str, Any]:
    """Train for ``num_steps`` with one of ``ORDERS``.

    Returns:
        ``mean_error``: of the mean of the learners, from the minimum of the mean loss. ``consensus`` and
        ``consensus_halfway``: root mean square distance of the learners to their mean.
    """
    centres = torch.randn(num_learners, 1, 1, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    strategy = DPSGD(ddpcore.Ring(), order=order)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=num_learners)
    halfway = float("nan")
    for step in range(num_steps):
        optimizer.zero_grad()
        (0.5 * (handle.model(torch.ones(num_learners, 1, 1)) - centres).square()).sum().backward()
        try:
            optimizer.step()
        except ddpcore.NonFiniteError:
            return dict.fromkeys(("mean_error", "consensus"), float("nan")) | {"consensus_halfway": halfway}
        if step + 1 == num_steps // 2:
            halfway = handle.consensus_distance()
    error = (handle.evaluation_model().weight.item() - centres.mean()).abs().item()
    return {"mean_error": error, "consensus": handle.consensus_distance(), "consensus_halfway": halfway}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lr", type=float, default=1.71)
    parser.add_argument("--learners", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    print(f"ring of {arguments.learners}, lr * curvature = {arguments.lr}, {arguments.steps} steps")
    print("{:<26}{:>14}{:>22}{:>22}".format(*HEADINGS))
    for order in ORDERS:
        seen = distances(order, arguments.learners, arguments.lr, arguments.steps)
        print("{:<26}{:>14.3g}{:>22.3g}{:>22.3g}".format(order, *(seen[k] for k in seen)))


if __name__ == "__main__":
    main()
