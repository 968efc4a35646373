"""A strategy of your own: gossip in every H-th step only. One class runs on virtual learners and on real ranks.

python examples/own_strategy.py             trains with it on virtual learners
python examples/own_strategy.py --check     compares real ranks with virtual learners, and a resumed run; about a minute
"""

import argparse

import torch
from torch import nn

import ddpcore
from ddpcore.optim import FusedSGD
from ddpcore.testing import check_strategy


class RareGossip(ddpcore.Strategy):
    """Averages with neighbours in every ``period``-th step: ``w_j <- sum_k W_jk w_k - a g_j(w_j)``, else a plain step.

    It has no state between steps, so it needs no ``state_dict``.
    """

    name = "rare_gossip"

    def __init__(self, topology: ddpcore.Topology | None = None, period: int = 4) -> None:
        self.topology = topology or ddpcore.Ring()
        self.period = period

    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        self.topology.validate(num_learners)

    def before_step(self, learner):
        """Return the average of this step as a value. ddpcore averages and steps in one pass over the weights."""
        if not self.plan(learner.step).weights:
            return None
        learner.check_sent()  # raises before weights that are not finite reach a neighbour
        return learner.comm.exchange(learner.flat.param_LP, self.topology, learner.step).mixture()

    def plan(self, step: int) -> ddpcore.Plan:
        """Policies average other state in the same steps."""
        return ddpcore.Plan(weights=(step + 1) % self.period == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        check_strategy(RareGossip, num_learners=(1, 2))
        print("real ranks, virtual learners and resumed runs have the same bits")
        return

    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    labels = (inputs @ torch.randn(32, 10)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, RareGossip(period=4), learners=8)
    for _ in range(args.steps):
        batch = torch.randint(len(inputs), (8, 32))
        logits = handle.model(inputs[batch])
        optimizer.zero_grad()
        (nn.functional.cross_entropy(logits.flatten(0, 1), labels[batch].flatten(), reduction="sum") / 32).backward()
        optimizer.step()
    accuracy = (handle.evaluation_model()(inputs).argmax(dim=1) == labels).float().mean().item()
    print(f"accuracy of the averaged model {accuracy:.3f}, consensus distance {handle.consensus_distance():.3g}")


if __name__ == "__main__":
    main()
