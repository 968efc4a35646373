"""A small decoder-only transformer that predicts the next byte of a text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddpcore.models.blocks import Block, Shape


class ByteTransformer(nn.Module):
    """Embeddings of bytes and positions, then pre-norm transformer blocks with causal attention (Radford et al. 2019).

    Inputs int64 [B, T], numbers below C, to logits [B, C, T] of the next byte at each place, which
    ``torch.nn.functional.cross_entropy`` takes with labels [B, T]. T is at most the context, which is
    ``input_shape[0]``. The logits at a place depend only on the bytes up to there. Embeddings start normal with
    standard deviation 0.02, and linear layers as in torch. The defaults have 137216 parameters.

    Args:
        width: of a token; a multiple of num_heads.
        depth: number of blocks.
        num_heads: of attention.
        mlp_width: hidden units of a block's two linear layers.

    ValueError if a size is below 1, the width is no multiple of num_heads, or T is above the context.
    """

    input_shapes = ((64,),)
    num_classes = 256
    any_size = True
    tokens = True

    def __init__(
        self,
        input_shape: Shape = input_shapes[0],
        num_classes: int = num_classes,
        *,
        width: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        mlp_width: int = 256,
    ) -> None:
        super().__init__()
        if min(width, depth, num_heads, mlp_width) < 1:
            raise ValueError("width, depth, num_heads and mlp_width must be at least 1")
        if width % num_heads:
            raise ValueError(f"width is {width}, it must be a multiple of num_heads, {num_heads}")
        self.embed = nn.Embedding(num_classes, width)
        self.positions = nn.Embedding(input_shape[0], width, _weight=torch.empty(input_shape[0], width))
        self.blocks = nn.Sequential(*(Block(width, num_heads, mlp_width, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        for parameter in (self.embed.weight, self.positions.weight):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of a batch."""
        length, context = inputs.shape[1], self.positions.num_embeddings
        if length > context:
            raise ValueError(f"byte_transformer: inputs have {length} places and the context is {context}: take less")
        tokens = self.blocks(self.embed(inputs) + self.positions.weight[:length])
        logits: Tensor = self.head(self.norm(tokens))
        return logits.transpose(1, 2)
