"""How weights are written on the wire: fewer bytes than fp32, and what the receiver makes of them.

A codec is a function of the rows alone; :class:`Published` remembers what it has told the others. Shapes: L learners, P
elements of a row, X bytes of an encoded row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


class Codec(ABC):
    """Rows of floating-point numbers as rows of bytes, and back. Equal rows give equal bytes on every rank.

    Attributes:
        name: as on the command line.
        differences: whether rows are sent as what changed since the last time, which takes neighbours that stay the
            same; else every message stands for itself.
        consensus_step: gamma, how far, 0..1, learners move towards what they received.
    """

    name: ClassVar[str]
    consensus_step: float = 1.0

    @property
    @abstractmethod
    def differences(self) -> bool:
        """See the class."""

    @abstractmethod
    def encode(self, rows_LP: Tensor) -> Tensor:
        """uint8 ``[L, X]``, contiguous; X depends on P alone."""

    @abstractmethod
    def decode(self, bytes_LX: Tensor, like_LP: Tensor) -> Tensor:
        """The rows ``[L, P]`` in the dtype of ``like_LP``, which tells P."""


@dataclass(frozen=True)
class BFloat16(Codec):
    """Half the bytes: the upper half of each fp32, rounded to nearest.

    Args:
        error_feedback: send what changed, so that the loss shrinks with the changes; takes fixed neighbours.
    """

    name: ClassVar[str] = "bf16"
    error_feedback: bool = False

    @property
    def differences(self) -> bool:
        """With error feedback."""
        return self.error_feedback

    def encode(self, rows_LP: Tensor) -> Tensor:
        """See :class:`Codec`."""
        return rows_LP.to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, bytes_LX: Tensor, like_LP: Tensor) -> Tensor:
        """See :class:`Codec`."""
        return bytes_LX.view(torch.bfloat16).to(like_LP.dtype)


@dataclass(frozen=True)
class Int8(Codec):
    """A quarter of the bytes: 8-bit integers times the largest magnitude of each 256 elements over 127.

    Args:
        error_feedback: send what changed, so that the loss shrinks with the changes; takes fixed neighbours.
    """

    name: ClassVar[str] = "int8"
    error_feedback: bool = False
    block: ClassVar[int] = 256

    @property
    def differences(self) -> bool:
        """With error feedback."""
        return self.error_feedback

    def encode(self, rows_LP: Tensor) -> Tensor:
        """See :class:`Codec`."""
        num_learners, numel = rows_LP.shape
        blocks = torch.nn.functional.pad(rows_LP.float(), (0, -numel % self.block)).view(num_learners, -1, self.block)
        scales = blocks.abs().amax(dim=2).div_(127)
        integers = (blocks / scales.where(scales > 0, 1.0).unsqueeze(2)).round_().clamp_(-127, 127).to(torch.int8)
        parts = [integers.view(num_learners, -1)[:, :numel].contiguous().view(torch.uint8), scales.view(torch.uint8)]
        return torch.cat(parts, dim=1)

    def decode(self, bytes_LX: Tensor, like_LP: Tensor) -> Tensor:
        """See :class:`Codec`."""
        num_learners, numel = bytes_LX.shape[0], like_LP.shape[1]
        integers = bytes_LX[:, :numel].view(torch.int8).float()
        scales = bytes_LX[:, numel:].clone().view(torch.float32)  # a copy: bytes need not start where floats may
        padded = torch.nn.functional.pad(integers, (0, -numel % self.block)).view(num_learners, -1, self.block)
        return (padded * scales.unsqueeze(2)).view(num_learners, -1)[:, :numel].to(like_LP.dtype)


@dataclass(frozen=True)
class TopK(Codec):
    """The largest changes alone, 8 bytes each (CHOCO-SGD, Koloskova et al. 2019, algorithm 2).

    Every learner and its neighbours keep an estimate of its weights; what is sent is the part of ``w - estimate`` of
    largest magnitude. What is not sent stays in the difference, so nothing is ever lost.

    Args:
        ratio: share of the elements that are sent, at least one.
        consensus_step: gamma of the paper; None is the ratio. A larger one mixes faster and, at some multiple of the
            ratio that depends on the graph, diverges: tripling it did on a ring, and on a complete graph before.
    """

    name: ClassVar[str] = "topk"
    ratio: float = 0.05
    consensus_step: float = None  # type: ignore[assignment]  # a number once made

    def __post_init__(self) -> None:
        if self.consensus_step is None:
            object.__setattr__(self, "consensus_step", self.ratio)
        for field, value in (("ratio", self.ratio), ("consensus_step", self.consensus_step)):
            if not (math.isfinite(value) and 0 < value <= 1):
                raise ValueError(f"TopK: {field} is {value}: it must be above 0 and at most 1")

    @property
    def differences(self) -> bool:
        """Always."""
        return True

    def encode(self, rows_LP: Tensor) -> Tensor:
        """See :class:`Codec`."""
        num_kept = max(1, int(self.ratio * rows_LP.shape[1]))
        places = rows_LP.abs().topk(num_kept, dim=1, sorted=False).indices
        values = rows_LP.gather(1, places).float()
        return torch.cat([places.to(torch.int32).view(torch.uint8), values.view(torch.uint8)], dim=1)

    def decode(self, bytes_LX: Tensor, like_LP: Tensor) -> Tensor:
        """See :class:`Codec`."""
        places, values = bytes_LX.contiguous().chunk(2, dim=1)
        rows = torch.zeros(bytes_LX.shape[0], like_LP.shape[1], dtype=like_LP.dtype, device=bytes_LX.device)
        return rows.scatter_(1, places.contiguous().view(torch.int32).long(), _floats(values).to(rows.dtype))


def _floats(bytes_LX: Tensor) -> Tensor:
    return bytes_LX.contiguous().view(torch.float32)


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (BFloat16, Int8, TopK)}
"""By name, with default settings when called."""


class Published:
    """What the others know of the learners held here, and what this process knows of its neighbours.

    A direct codec publishes ``q = C(w)``. One that sends differences publishes ``q <- q + C(w - q)``: what it loses is
    in the next difference, so q comes to w as the weights come to rest (CHOCO-SGD). Learners then move by differences
    of *published* rows, ``w_j += gamma sum_k W_jk (q_k - q_j)``. Whatever a codec loses, the mean over learners does
    not move: each term is there twice, with both signs.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.rows_LP: Tensor | None = None  # q of the learners held here
        self._neighbors: dict[int, Tensor] = {}

    def begin(self, weights_LP: Tensor, neighbors: Iterable[int]) -> None:
        """Before the first step, where differences are sent: all learners start alike, so everyone's q is known."""
        if self.codec.differences and self.rows_LP is None:
            self.rows_LP = weights_LP.clone()
            self._neighbors = {neighbor: weights_LP[:1].clone() for neighbor in neighbors}

    def encode(self, weights_LP: Tensor) -> Tensor:
        """The message, uint8 ``[L, X]``; ``rows_LP`` is what others will make of it."""
        if not self.codec.differences:
            message = self.codec.encode(weights_LP)
            self.rows_LP = self.codec.decode(message, weights_LP)
            return message
        assert self.rows_LP is not None
        message = self.codec.encode(weights_LP - self.rows_LP)
        self.rows_LP += self.codec.decode(message, weights_LP)
        return message

    def decode(self, neighbor: int, message: Tensor, like_LP: Tensor) -> Tensor:
        """A neighbour's published row ``[P]`` after its message, uint8 ``[X]``."""
        row = self.codec.decode(message[None], like_LP[:1])
        if not self.codec.differences:
            return row[0]
        self._neighbors[neighbor] += row
        return self._neighbors[neighbor][0]

    def state_dict(self) -> dict[str, Tensor | dict[int, Tensor] | None]:
        """For a checkpoint."""
        return {"rows": self.rows_LP, "neighbors": dict(self._neighbors)}

    def load_state_dict(self, state: dict) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.rows_LP = None if state["rows"] is None else state["rows"].clone()
        self._neighbors = {int(neighbor): row.clone() for neighbor, row in state["neighbors"].items()}
