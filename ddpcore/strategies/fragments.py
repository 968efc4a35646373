"""The parts of the weights that are averaged at times of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddpcore.options.typed import check_range
from ddpcore.parameters.flat import FlatParameters

Fragments = int | Sequence[Sequence[str]]
"""A number of fragments, or for each fragment the names of its modules and parameters."""


class Part(NamedTuple):
    """Columns ``begin`` to ``end`` of the flat buffer, which belong to a fragment."""

    fragment: int
    begin: int
    end: int


def check_fragments(fragments: Fragments, period: int) -> int:
    """Return the number of fragments.

    Raises:
        ValueError: there is none, there are more than the period has steps, or a fragment has no names.
    """
    if isinstance(fragments, Sequence) and not isinstance(fragments, str):
        for names in fragments:
            if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
                raise ValueError(
                    f"local_sgd: fragments has {names!r}: each fragment is a list of names of modules, such as "
                    "['layer1', 'layer2']"
                )
    number = fragments if not isinstance(fragments, Sequence) else len(fragments)
    check_range("local_sgd: fragments", number, least=1, most=period)
    return number


def parts_of(flat: FlatParameters, fragments: Fragments) -> list[Part]:
    """The parts of all fragments, in the order of the buffer. No part cuts a parameter.

    A number of fragments divides the parameters, in the order of the buffer, into fragments of about the same size.

    Raises:
        ValueError: a parameter belongs to no fragment or to two, or a fragment has no parameter.
    """
    segments = flat.segments
    if isinstance(fragments, int):
        if fragments > len(segments):
            raise ValueError(
                f"local_sgd: fragments is {fragments}, and the model has {len(segments)} parameters: take fewer"
            )
        owners = _by_size([whole.numel() for whole in flat.parameters[: len(segments)]], fragments)  # also of DTensors
        number = fragments
    else:
        owners, number = [], len(fragments)
        for name in (segment.name for segment in segments):
            found = [
                str(fragment)
                for fragment, prefixes in enumerate(fragments)
                if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)
            ]
            if len(found) != 1:
                where = f"fragments {' and '.join(found)}" if found else "no fragment"
                raise ValueError(f"local_sgd: fragments: parameter {name} is in {where}: name it, or its module, once")
            owners.append(int(found[0]))
    for fragment in range(number):
        if fragment not in owners:
            assert not isinstance(fragments, int)
            raise ValueError(f"local_sgd: fragments: no parameter is in {list(fragments[fragment])}: check the names")
    ends = [*(segment.offset for segment in segments[1:]), flat.numel]
    parts: list[Part] = []
    for owner, segment, end in zip(owners, segments, ends, strict=True):
        if parts and parts[-1].fragment == owner:
            parts[-1] = parts[-1]._replace(end=end)
        else:
            parts.append(Part(owner, segment.offset, end))
    return parts


def _by_size(sizes: Sequence[int], number: int) -> list[int]:
    """The fragment of each parameter: where its middle lies, but so that no fragment is empty."""
    total, before, owners = sum(sizes), 0, list[int]()
    for place, size in enumerate(sizes):
        wanted = int(number * (before + size / 2) / total)
        last = owners[-1] if owners else -1
        least = max(last, number - (len(sizes) - place))  # the parameters that are left must fill the rest
        owners.append(min(max(wanted, least), last + 1))
        before += size
    return owners
