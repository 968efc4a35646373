"""A model that starts near a strict saddle of its loss, to measure how fast learners escape."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcore.models.blocks import Shape
from ddpcore.options.typed import check_range


class Saddle(nn.Module):
    """Logits z of class 1 and 0 of all others, ``z = 1/2 escape e^2 + (p + e q).s``; inputs [B, 2 S] hold p and q.

    The 1 + S parameters, e and s, are initialized as normal with standard deviation `radius`. With two classes and
    label 1 the loss of a sample is ``log(1 + exp(-z))``, which is ln 2 at zero weights. If p and q have mean zero over
    the samples, as in the data set `saddle`, zero is a strict saddle of the mean loss: its Hessian is ``-escape / 2``
    along e and ``mean(p p^T) / 4`` along s, and zero between them. Each sample's own Hessian has ``-q / 2`` there.

    ValueError if the number of inputs is odd, escape is not above 0, or radius is below 0.
    """

    input_shapes = ((2,),)
    num_classes = 2
    any_size = True
    vectorizes = True

    def __init__(
        self,
        input_shape: Shape = input_shapes[0],
        num_classes: int = num_classes,
        *,
        escape: float = 0.1,
        radius: float = 1e-8,
    ) -> None:
        super().__init__()
        if input_shape[0] % 2:
            raise ValueError(f"samples of {input_shape[0]} numbers are no p and q of one length: take an even number")
        check_range("escape", escape, above=0)
        check_range("radius", radius, least=0)
        self.escape, self.num_classes = escape, num_classes
        self.e = nn.Parameter(radius * torch.randn(1))
        self.s = nn.Parameter(radius * torch.randn(input_shape[0] // 2))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of a batch."""
        p, q = inputs.chunk(2, dim=-1)
        z = 0.5 * self.escape * self.e.square() + (p + self.e * q) @ self.s
        return F.pad(z[..., None], (1, self.num_classes - 2))
