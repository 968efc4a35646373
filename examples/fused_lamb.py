"""Fused LAMB in a plain training loop on one device: one kernel call steps all tensors.

python examples/fused_lamb.py
"""

import argparse

import torch
from torch import nn

from ddpcore.optim import FusedLAMB, param_groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(8192, 64, device=args.device)
    labels = (inputs @ torch.randn(64, 10, device=args.device)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10)).to(args.device)

    # param_groups makes two groups: biases and norms have no weight decay and no trust ratio.
    # The step clips gradients: clip_grad_norm_ is not needed.
    optimizer = FusedLAMB(param_groups(model, weight_decay=0.01), lr=0.02, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    for step in range(args.steps):
        batch = torch.randint(len(inputs), (args.batch_size,), device=args.device)
        loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    for name, trust in optimizer.trust_ratios().items():
        print(f"{name}: trust ratio {trust.ratio:.3g}")


if __name__ == "__main__":
    main()
