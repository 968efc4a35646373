"""Transformers: of small images (Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words"), and of bytes of text."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcore.models.blocks import Shape
from ddpcore.options.typed import check_range


class ViT(nn.Module):
    """Patches, a class token, learned positions and pre-norm transformer blocks; the class token gives the logits.

    Inputs [B, channels, H, W] to logits [B, C].

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
        input_shape: Shape,
        num_classes: int,
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
        for name, share in (("dropout", dropout), ("stochastic_depth", stochastic_depth)):
            check_range(name, share, least=0, below=1)
        num_patches = (height // patch_size) * (image_width // patch_size)
        self.embed = PatchEmbedding(channels, patch_size, num_patches, width, dropout)
        shares = [stochastic_depth * i / max(1, depth - 1) for i in range(depth)]
        self.blocks = nn.Sequential(*(Block(width, num_heads, mlp_width, dropout, share) for share in shares))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of a batch."""
        return self.head(self.norm(self.blocks(self.embed(inputs))[:, 0]))


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
        return self.dropout(torch.cat([class_tokens, self.project(patches)], dim=1) + self.positions)


class ByteTransformer(nn.Module):
    """Embeddings of bytes and positions, then pre-norm transformer blocks with causal attention (Radford et al. 2019).

    Inputs int64 [B, T], numbers below C, to logits [B, C, T] of the next byte at each place, which
    ``torch.nn.functional.cross_entropy`` takes with labels [B, T]. T is at most the context, which is
    ``input_shape[0]``. The logits at a place depend only on the bytes up to there. Embeddings start normal with
    standard deviation 0.02, and linear layers as in torch. Sizes are as in :class:`ViT`.

    ValueError if a size is below 1, the width is no multiple of num_heads, or T is above the context.
    """

    input_shapes = ((64,),)
    num_classes = 256
    any_size = True
    tokens = True

    def __init__(
        self,
        input_shape: Shape,
        num_classes: int,
        *,
        width: int = 64,
        depth: int = 2,
        num_heads: int = 4,
        mlp_width: int = 256,
    ) -> None:
        super().__init__()
        if min(width, depth, num_heads, mlp_width) < 1:
            raise ValueError("width, depth, num_heads and mlp_width must be at least 1")
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
        return self.head(self.norm(self.blocks(self.embed(inputs) + self.positions.weight[:length]))).transpose(1, 2)


class Block(nn.Module):
    """Attention, then two linear layers with a GELU between them; each has a norm before it and a residual sum.

    ``dropout`` acts on attention, hidden and last layer. ``drop_path`` is the share of samples that skip the branches
    in training. With ``causal`` a token attends only to itself and to the tokens before it.
    """

    def __init__(
        self, width: int, num_heads: int, mlp_width: int, dropout: float = 0, drop_path: float = 0, causal: bool = False
    ) -> None:
        super().__init__()
        attention = SelfAttention(width, num_heads, causal=causal)
        self.attention = nn.Sequential(nn.LayerNorm(width), attention, nn.Dropout(dropout))
        self.mlp = nn.Sequential(
            *(nn.LayerNorm(width), nn.Linear(width, mlp_width), nn.GELU(), nn.Dropout(dropout)),
            *(nn.Linear(mlp_width, width), nn.Dropout(dropout)),
        )
        self.drop_path = DropPath(drop_path)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, tokens, width] to the same shape."""
        tokens = tokens + self.drop_path(self.attention(tokens))
        return tokens + self.drop_path(self.mlp(tokens))


class SelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017); ``causal`` masks the tokens after each token."""

    def __init__(self, width: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width is {width}, it must be a multiple of num_heads, {num_heads}")
        self.num_heads, self.causal = num_heads, causal
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, tokens, width] to the same shape."""
        heads = self.query_key_value(tokens).unflatten(-1, (3, self.num_heads, -1))  # [B, tokens, 3, heads, head width]
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.project(attended.transpose(1, 2).flatten(2))


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training some samples become zeros, the others are scaled up."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, branch: Tensor) -> Tensor:
        """[B, ...] to the same shape, with the same expectation."""
        if self.share == 0 or not self.training:
            return branch
        return branch * F.dropout(branch.new_ones(len(branch), *[1] * (branch.ndim - 1)), self.share)
