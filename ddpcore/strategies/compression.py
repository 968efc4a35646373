"""Compression of messages: codecs, and what sender and receivers keep of what a codec loses.

Shapes: L learners held by this process, P elements of a row, X bytes of an encoded row.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from ddpcore.options.typed import check_range, suggest
from ddpcore.strategies.learner import Learner
from ddpcore.topology.base import Topology


class Codec(ABC):
    """Encodes rows of floating-point numbers as rows of bytes. Equal rows give equal bytes on every rank."""

    name: ClassVar[str]  #: as on the command line
    by_element: ClassVar[bool] = False  #: whether the bytes of an element depend on it alone
    consensus_step: float = 1.0  #: gamma, 0..1: how far learners move towards the rows that they received

    @property
    def differences(self) -> bool:
        """Whether a message holds the change since the last message, which requires that neighbours never change."""
        return True

    @abstractmethod
    def encode(self, rows_LP: Tensor) -> Tensor:
        """Return contiguous uint8 ``[L, X]``. X depends on P alone."""

    @abstractmethod
    def decode(self, bytes_LX: Tensor, like_LP: Tensor) -> Tensor:
        """Return the rows ``[L, P]``, with P and the dtype of ``like_LP``."""


@dataclass(frozen=True)
class RoundingCodec(Codec):
    """Rounds every element to fewer bits."""

    #: send changes instead of weights, so that the rounding error shrinks with the changes. It requires that neighbours
    #: never change.
    error_feedback: bool = False

    @property
    @override
    def differences(self) -> bool:
        return self.error_feedback


@dataclass(frozen=True)
class BFloat16(RoundingCodec):
    """Half the bytes of fp32: the upper half of each element, rounded to nearest."""

    name: ClassVar[str] = "bf16"
    by_element: ClassVar[bool] = True

    @override
    def encode(self, rows_LP: Tensor) -> Tensor:
        return rows_LP.to(torch.bfloat16).contiguous().view(torch.uint8)

    @override
    def decode(self, bytes_LX: Tensor, like_LP: Tensor) -> Tensor:
        return bytes_LX.view(torch.bfloat16).to(like_LP.dtype)


@dataclass(frozen=True)
class Int8(RoundingCodec):
    """A quarter of the bytes of fp32: 8-bit integers, with the scale max|x| / 127 for each 256 elements x."""

    name: ClassVar[str] = "int8"
    block: ClassVar[int] = 256

    @override
    def encode(self, rows_LP: Tensor) -> Tensor:
        rounded, scales = _scaled(rows_LP, self.block, 127)
        integers = rounded.to(torch.int8).view(len(rows_LP), -1)[:, : rows_LP.shape[1]]
        return torch.cat([integers.contiguous().view(torch.uint8), scales.view(torch.uint8)], dim=1)

    @override
    def decode(self, bytes_LX: Tensor, like_LP: Tensor) -> Tensor:
        numel = like_LP.shape[1]
        integers = pad(bytes_LX[:, :numel].view(torch.int8).float(), (0, -numel % self.block))
        return _unscaled(integers, bytes_LX[:, numel:], like_LP)


@dataclass(frozen=True)
class Int4(RoundingCodec):
    """An eighth of the bytes of fp32: 4-bit integers, with the scale max|x| / 7 for each 256 elements x."""

    name: ClassVar[str] = "int4"
    block: ClassVar[int] = 256

    @override
    def encode(self, rows_LP: Tensor) -> Tensor:
        rounded, scales = _scaled(rows_LP, self.block, 7)
        pairs = rounded.add_(8).to(torch.uint8).view(len(rows_LP), -1, 2)
        return torch.cat([pairs[..., 0] * 16 + pairs[..., 1], scales.view(torch.uint8)], dim=1)

    @override
    def decode(self, bytes_LX: Tensor, like_LP: Tensor) -> Tensor:
        num_pairs = -(-like_LP.shape[1] // self.block) * self.block // 2
        pairs = bytes_LX[:, :num_pairs]
        integers = torch.stack((pairs // 16, pairs % 16), dim=2).float().sub_(8)
        return _unscaled(integers, bytes_LX[:, num_pairs:], like_LP)


@dataclass(frozen=True)
class TopK(Codec):
    """The largest changes only, 8 bytes each (CHOCO-SGD, Koloskova et al. 2019, algorithm 2).

    Every learner and its neighbours keep the same estimate of its weights. A message holds the elements of
    ``w - estimate`` of largest magnitude. The other elements stay in the difference, so no change is lost.
    """

    name: ClassVar[str] = "topk"
    ratio: float = 0.05  #: share of the elements that are sent, at least one element
    #: gamma of the paper; None is the ratio. A larger gamma mixes faster, but diverges above some multiple of the ratio
    #: that depends on the graph: at three times on a ring, and below that on a complete graph.
    consensus_step: float = None  # type: ignore[assignment]  # a number after __post_init__

    def __post_init__(self) -> None:
        if self.consensus_step is None:
            object.__setattr__(self, "consensus_step", self.ratio)
        check_range("TopK: ratio", self.ratio, above=0, most=1)
        check_range("TopK: consensus_step", self.consensus_step, above=0, most=1)

    @override
    def encode(self, rows_LP: Tensor) -> Tensor:
        places = rows_LP.abs().topk(max(1, int(self.ratio * rows_LP.shape[1])), dim=1, sorted=False).indices
        values = rows_LP.gather(1, places).float()
        return torch.cat([places.to(torch.int32).view(torch.uint8), values.view(torch.uint8)], dim=1)

    @override
    def decode(self, bytes_LX: Tensor, like_LP: Tensor) -> Tensor:
        places, values = (part.contiguous() for part in bytes_LX.contiguous().chunk(2, dim=1))
        rows = torch.zeros(bytes_LX.shape[0], like_LP.shape[1], dtype=like_LP.dtype, device=bytes_LX.device)
        return rows.scatter_(1, places.view(torch.int32).long(), values.view(torch.float32).to(rows.dtype))


@dataclass(frozen=True)
class SparseTopK(Codec):
    """The largest elements of each chunk, in 2 bits (SparseLoCo, 2508.15706): a hundredth of the bytes of fp32.

    An element takes 2 bytes for its place in the chunk and 2 bits for its value, and a chunk 16 bytes for the four
    values. The bins of a chunk have the width 6/4 of the standard deviation of its elements, around their mean; a value
    is the mean of its bin. The quantizer was written after descriptions of the authors' code
    (github.com/tplr-ai/templar), which has one set of bins for a whole tensor.
    """

    name: ClassVar[str] = "sparse"
    kept: int = 64  #: elements of a chunk that are sent, a multiple of 4
    chunk: int = 4096  #: consecutive elements, at most 32768
    consensus_step: float = 0.01  #: in gossip, about the share of the elements that is sent, as for TopK

    def __post_init__(self) -> None:
        check_range("SparseTopK: chunk", self.chunk, least=4, most=2**15)
        check_range("SparseTopK: kept", self.kept, least=4, most=self.chunk)
        check_range("SparseTopK: consensus_step", self.consensus_step, above=0, most=1)
        if self.kept % 4:
            raise ValueError(f"SparseTopK: kept is {self.kept}: it must be a multiple of 4")

    @override
    def encode(self, rows_LP: Tensor) -> Tensor:
        num_learners, numel = rows_LP.shape
        chunks = pad(rows_LP.float(), (0, -numel % self.chunk)).view(num_learners, -1, self.chunk)
        places = chunks.abs().topk(self.kept, dim=2, sorted=False).indices
        values = chunks.gather(2, places)
        middle, width = values.mean(dim=2, keepdim=True), values.std(dim=2, keepdim=True).mul_(6 / 4)
        bins = ((values - middle) / width.where(width > 0, 1.0)).floor_().clamp_(-2, 1).add_(2).long()
        sums = values.new_zeros(*values.shape[:2], 4).scatter_add_(2, bins, values)
        counts = values.new_zeros(*values.shape[:2], 4).scatter_add_(2, bins, torch.ones_like(values))
        fours = bins.to(torch.uint8).view(num_learners, -1, 4)
        packed = fours[..., 0] * 64 + fours[..., 1] * 16 + fours[..., 2] * 4 + fours[..., 3]
        parts = [places.to(torch.int16), packed, sums / counts.clamp_(min=1)]
        return torch.cat([part.reshape(num_learners, -1).view(torch.uint8) for part in parts], dim=1)

    @override
    def decode(self, bytes_LX: Tensor, like_LP: Tensor) -> Tensor:
        num_learners, numel = bytes_LX.shape[0], like_LP.shape[1]
        num_chunks = -(-numel // self.chunk)
        num_kept = num_chunks * self.kept
        places, packed, values = bytes_LX.split([2 * num_kept, num_kept // 4, 16 * num_chunks], dim=1)
        places = places.clone(memory_format=torch.contiguous_format).view(torch.int16)
        bins = torch.stack([packed // 64, packed // 16 % 4, packed // 4 % 4, packed % 4], dim=2)
        kept = _floats(values).view(num_learners, num_chunks, 4)
        kept = kept.gather(2, bins.view(num_learners, num_chunks, self.kept).long())
        rows = like_LP.new_zeros(num_learners, num_chunks, self.chunk)
        rows.scatter_(2, places.view(kept.shape).long(), kept.to(rows.dtype))
        return rows.view(num_learners, -1)[:, :numel]


def _scaled(rows_LP: Tensor, block: int, largest: int) -> tuple[Tensor, Tensor]:
    """Blocks ``[L, B, block]`` of whole numbers from -largest to largest, and the scale of each block, ``[L, B]``."""
    blocks = pad(rows_LP.float(), (0, -rows_LP.shape[1] % block)).view(len(rows_LP), -1, block)
    scales = blocks.abs().amax(dim=2).div_(largest)
    return (blocks / scales.where(scales > 0, 1.0).unsqueeze(2)).round_().clamp_(-largest, largest), scales


def _unscaled(integers: Tensor, scales_LX: Tensor, like_LP: Tensor) -> Tensor:
    """Whole numbers times the scales of their blocks, which follow as bytes, as the rows ``[L, P]``."""
    scales = _floats(scales_LX)
    blocks = integers.view(*scales.shape, -1) * scales.unsqueeze(2)
    return blocks.view(len(blocks), -1)[:, : like_LP.shape[1]].to(like_LP.dtype)


def _floats(bytes_LX: Tensor) -> Tensor:
    """A copy as fp32, because floats must be aligned to 4 bytes."""
    return bytes_LX.clone(memory_format=torch.contiguous_format).view(torch.float32)


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (BFloat16, Int8, Int4, TopK, SparseTopK)}
"""The classes by name. Each can be called without arguments."""


CodecLike = Codec | str | Mapping[str, Any] | None
"""A codec, its name, or a mapping of its name and settings; None or ``"none"`` for none."""


def codec_of(wanted: CodecLike) -> Codec | None:
    """Make the codec. ValueError: there is no codec of this name, or it has no such setting."""
    if wanted is None or isinstance(wanted, Codec):
        return wanted
    if not isinstance(wanted, str | Mapping):
        what = f"compression is {wanted!r}"
        raise ValueError(f"{what}: it must be a codec, such as Int4(), a name, or a mapping of name and settings")
    settings = {"name": wanted} if isinstance(wanted, str) else dict(wanted)
    name = settings.pop("name", None)
    if name == "none":
        return None
    if not isinstance(name, str) or name not in CODECS:
        raise ValueError(f"unknown compression {name!r}: {suggest(name, ('none', *CODECS))}")
    try:
        return CODECS[name](**settings)
    except TypeError as error:
        raise ValueError(f"compression {name}: {error}") from error


class Published:
    """The published rows q: the weights of learners as their neighbours decode them.

    A codec that sends weights publishes ``q = C(w)``. A codec that sends differences publishes ``q <- q + C(w - q)``:
    what it loses is part of the next difference, so q converges to w when the weights stop changing (CHOCO-SGD).
    Learners move by differences of published rows, ``w_j += gamma sum_k W_jk (q_k - q_j)``. The loss of a codec does
    not move the mean over learners, because each term occurs twice, with opposite signs.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.rows_LP: Tensor | None = None  # q of the learners held here
        self._before_LP: Tensor | None = None  # q without the message under way, which is sent anew after a load
        self._neighbors: dict[int, Tensor] = {}

    def begin(self, learner: Learner, topology: Topology) -> None:
        """If the codec sends differences, set every q, also of neighbours, to the same weights. Collective then."""
        if self.codec.differences and self.rows_LP is None:
            comm = learner.comm
            rounds = [topology.round(0, one, comm.num_learners) for one in comm.learners]
            neighbors = {source for plan in rounds for source in plan.sources}.difference(comm.learners)
            weights_1P = learner.common_weights(learner.flat.param_LP)
            self.rows_LP = weights_1P.repeat(len(learner.flat.param_LP), 1)
            self._neighbors = {neighbor: weights_1P.clone() for neighbor in neighbors}

    def encode(self, weights_LP: Tensor) -> Tensor:
        """Return the message, uint8 ``[L, X]``, and update ``rows_LP`` to what neighbours decode from it."""
        if not self.codec.differences:
            message = self.codec.encode(weights_LP)
            self.rows_LP = self.codec.decode(message, weights_LP)
            return message
        assert self.rows_LP is not None
        message = self.codec.encode(weights_LP - self.rows_LP)
        self._before_LP = self.rows_LP
        self.rows_LP = self.rows_LP + self.codec.decode(message, weights_LP)
        return message

    def settle(self) -> None:
        """The last message is used: it is part of the state from now on."""
        self._before_LP = None

    def decode(self, neighbor: int, message: Tensor, like_LP: Tensor) -> Tensor:
        """Return the published row ``[P]`` of a neighbour after its message, uint8 ``[X]``."""
        row = self.codec.decode(message[None], like_LP[:1])
        if not self.codec.differences:
            return row[0]
        self._neighbors[neighbor] += row
        return self._neighbors[neighbor][0]

    def state_dict(self) -> dict[str, Tensor | dict[int, Tensor] | None]:
        """Return the state for a checkpoint."""
        rows_LP = self.rows_LP if self._before_LP is None else self._before_LP
        return {"rows": rows_LP, "neighbors": dict(self._neighbors)}

    def load_state_dict(self, state: dict) -> None:
        """Load the result of :meth:`state_dict`."""
        self._before_LP = None
        self.rows_LP = state["rows"]
        self._neighbors = {int(neighbor): row for neighbor, row in state["neighbors"].items()}


class ErrorFeedback:
    """``e_j <- beta e_j + d_j``; the message is ``C(e_j)``; ``e_j <- e_j - C(e_j)`` (SparseLoCo, 2508.15706).

    The decay beta is from 0, which forgets what was lost, to 1.
    """

    def __init__(self, codec: Codec, decay: float) -> None:
        self.codec, self.decay = codec, decay
        self._errors: dict[int, Tensor] = {}  # [L, X] of each part

    def encode(self, changes_LX: Tensor, part: int) -> Tensor:
        """The messages for the changes d of a part, uint8 ``[L, Y]``."""
        before = self._errors.get(part)
        wanted_LX = changes_LX.clone() if before is None else changes_LX + self.decay * before
        message = self.codec.encode(wanted_LX)
        self._errors[part] = wanted_LX.sub_(self.codec.decode(message, wanted_LX))
        return message

    def state_dict(self) -> dict[int, Any]:
        """Return the errors by part."""
        return dict(self._errors)

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        self._errors = {int(part): error for part, error in state.items()}
