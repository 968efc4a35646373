"""A whole run from one config: data, schedule, evaluation, a record, and checkpoints from which it continues.

python examples/train_run.py                                         four virtual learners
python examples/train_run.py --ranks 4 --out runs/four_ranks         four real ranks, started by this script
"""

import argparse
from pathlib import Path

from ddpcore.runtime import launch
from ddpcore.training import DataConfig, ModelConfig, OptimizerConfig, RunConfig, StrategyConfig, TrainConfig, train


def worker(world: launch.World, config: TrainConfig, out: Path) -> None:
    """Called on every rank. ``resume=True`` continues a run that was stopped, and begins one otherwise."""
    record = train(config, out=out, world=world, resume=True)
    if world.rank == 0:
        for epoch in record.epochs:
            print(f"epoch {epoch['epoch']}: loss {epoch['train_loss']:.4f}, accuracy {epoch['accuracy']:.4f}")
        print(f"{out}: {record.final['step']} steps, see record.jsonl, model.safetensors and checkpoints/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/train_run"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="1: all learners are virtual learners of this process")
    args = parser.parse_args()

    config = TrainConfig(
        model=ModelConfig(name="mlp"),
        data=DataConfig(
            name="digits",  # part of the package; or "cifar10" with data_dir=..., normalize=True, augment=True
            batch_size=100,  # of all learners together
        ),
        optimizer=OptimizerConfig(
            name="lamb",
            options={"weight_decay": 0.01},
            param_groups=True,  # biases and norms without decay and trust ratio
            lr=0.02,
            schedule="cosine",
            warmup=1,  # epochs
            max_grad_norm=1.0,
        ),
        strategy=StrategyConfig(name="dpsgd", topology="ring", learners=args.learners),
        run=RunConfig(epochs=args.epochs, seed=0),
    )
    backend = "gloo" if args.ranks > 1 else "virtual"
    launch.run(worker, (config, args.out), world_size=args.ranks, backend=backend)


if __name__ == "__main__":  # ranks import this file
    main()
