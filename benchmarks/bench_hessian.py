"""The cost of a Hessian-vector product against that of a gradient, on the same samples, in turn.

python benchmarks/bench_hessian.py [--models mlp,simple_cnn,vit] [--samples 512] [--seconds 20]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import interleaved
from torch import Tensor

from ddpcore.diagnostics import DataLoss, Hessian
from ddpcore.models import MODELS
from ddpcore.runtime.machine import machine


def contenders(name: str, num_samples: int) -> list[Callable[[], object]]:
    """A gradient, a product with one vector, and a product with eight vectors."""
    spec = MODELS.spec(name)
    torch.manual_seed(0)
    model = MODELS.build(name).eval()
    batch = torch.randn(num_samples, *spec.input_shapes[0]), torch.randint(spec.num_classes, (num_samples,))
    data = DataLoss(model, F.cross_entropy, [batch])
    hessian = Hessian(model, data)
    vectors = torch.randn(8, hessian.numel)

    def gradient() -> tuple[Tensor, ...]:
        return torch.autograd.grad(sum(data()), [*model.parameters()])

    return [gradient, lambda: hessian.product(vectors[0]), lambda: hessian.product(vectors)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="mlp,simple_cnn,vit")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    print(machine("cpu"))
    for name in arguments.models.split(","):
        one, product, eight = interleaved(contenders(name, arguments.samples), "cpu", 10**6, arguments.seconds)
        ratios = [statistics.median(b / a for a, b in zip(one, found, strict=True)) for found in (product, eight)]
        print(
            f"{name:>10}: gradient {1000 * statistics.median(one):.1f} ms, a product {ratios[0]:.2f} gradients, "
            f"each of eight products {ratios[1] / 8:.2f} (medians over {len(one)} rounds)"
        )


if __name__ == "__main__":
    main()
