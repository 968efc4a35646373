"""A vision transformer for small images (Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddpcore.models.blocks import Block, Shape
from ddpcore.options.typed import check_range


class ViT(nn.Module):
    """Patches, a class token, learned positions and pre-norm transformer blocks; the class token gives the logits.

    Inputs [B, channels, H, W] to logits [B, C]. The defaults have 811146 parameters for 3 x 32 x 32 and 10 classes.

    Args:
        patch_size: side of a patch in pixels; divides H and W.
        width: of a token; a multiple of num_heads.
        depth: number of blocks.
        num_heads: of attention.
        mlp_width: hidden units of a block's two linear layers.
        dropout: share of the outputs of embedding, attention and hidden layers that are set to zero in training.
        stochastic_depth: share of samples that skip the branches of the last block; 0 in the first, linear in between.

    ValueError if a size is below 1, does not divide as above, or a share is not in [0, 1).
    """

    input_shapes = ((3, 32, 32), (1, 28, 28))
    num_classes = 10

    def __init__(
        self,
        input_shape: Shape = input_shapes[0],
        num_classes: int = num_classes,
        *,
        patch_size: int = 4,
        width: int = 128,
        depth: int = 6,
        num_heads: int = 4,
        mlp_width: int = 256,
        dropout: float = 0.1,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__()
        channels, height, image_width = input_shape
        if min(patch_size, width, depth, num_heads, mlp_width) < 1:
            raise ValueError("patch_size, width, depth, num_heads and mlp_width must be at least 1")
        if height % patch_size or image_width % patch_size:
            raise ValueError(f"patch_size is {patch_size}, it must divide the image of {height}x{image_width}")
        if width % num_heads:
            raise ValueError(f"width is {width}, it must be a multiple of num_heads, {num_heads}")
        for name, share in (("dropout", dropout), ("stochastic_depth", stochastic_depth)):
            check_range(name, share, least=0, below=1)
        num_patches = (height // patch_size) * (image_width // patch_size)
        self.embed = PatchEmbedding(channels, patch_size, num_patches, width, dropout)
        self.blocks = nn.Sequential(
            *(
                Block(width, num_heads, mlp_width, dropout, stochastic_depth * i / max(1, depth - 1))
                for i in range(depth)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of a batch."""
        tokens = self.blocks(self.embed(inputs))
        logits: Tensor = self.head(self.norm(tokens[:, 0]))
        return logits


class PatchEmbedding(nn.Module):
    """A linear layer of each patch, the class token before them, and a learned position added to each token."""

    def __init__(self, channels: int, patch_size: int, num_patches: int, width: int, dropout: float) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.project = nn.Linear(channels * patch_size**2, width)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 1 + num_patches, width))
        self.dropout = nn.Dropout(dropout)
        for parameter in (self.class_token, self.positions):
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """[B, channels, H, W] to tokens [B, 1 + patches, width]."""
        size = self.patch_size
        grid = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # [B, channels, rows, size, columns, size]
        patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        class_tokens = self.class_token.expand(images.shape[0], -1, -1)
        tokens: Tensor = self.dropout(torch.cat([class_tokens, self.project(patches)], dim=1) + self.positions)
        return tokens
