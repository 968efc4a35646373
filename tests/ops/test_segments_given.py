"""Segment tables of any list: a list of tensors is a flat buffer cut anywhere, and strides do not matter."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddpcore import ops

SETTINGS = settings(max_examples=60, deadline=None)
SIZES = st.lists(
    st.one_of(st.integers(0, 70), st.sampled_from([4095, 4096, 4097, 8192, 9000])), min_size=1, max_size=20
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def cut(flat: Tensor, sizes: list[int], gap: int) -> list[Tensor]:
    """Views of these sizes, with so many elements between them."""
    views, begin = [], 0
    for size in sizes:
        views.append(flat[begin : begin + size])
        begin += size + gap
    return views


@SETTINGS
@given(SIZES, DTYPES, st.integers(0, 3))
def test_views_with_gaps_have_the_bits_of_separate_tensors(sizes: list[int], dtype: torch.dtype, gap: int) -> None:
    flat = torch.randn(sum(sizes) + gap * len(sizes), generator=torch.Generator().manual_seed(0)).to(dtype)
    before = flat.clone()
    views = cut(flat, sizes, gap)
    norms = ops.segment_norms(views)
    assert torch.equal(norms, ops.segment_norms([view.clone() for view in views]))
    assert torch.equal(flat, before)
    exact = torch.stack([view.double().square().sum() for view in views])
    torch.testing.assert_close(norms, exact, rtol=2.0**-53 * (1 + max(sizes)), atol=0)  # one rounding an addition


@SETTINGS
@given(SIZES, st.integers(0, 2**31))
def test_a_mixture_writes_its_own_elements_only(sizes: list[int], seed: int) -> None:
    flat = torch.randn(sum(sizes) + 2 * len(sizes), generator=torch.Generator().manual_seed(seed))
    for view, whole in zip(cut(flat, sizes, 2), cut(flat.clone(), sizes, 2), strict=True):
        before = flat.clone()
        ops.mix_(view, [whole], 0.25, [0.5])
        changed = (flat != before).nonzero().flatten()
        begin = view.storage_offset()
        assert ((changed >= begin) & (changed < begin + view.numel())).all()
        torch.testing.assert_close(view, 0.75 * whole, rtol=2.0**-23, atol=0)  # two roundings


@SETTINGS
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_any_strides_are_read_element_by_element(shape: list[int], strides: list[int]) -> None:
    """Also with overlaps and gaps: nothing beyond the elements of a tensor is read."""
    strides = (strides + [1] * 4)[: len(shape)]
    tensor = torch.arange(1000.0).as_strided(shape, strides)
    assert ops.segment_norms([tensor]).item() == tensor.double().square().sum().item()  # whole numbers: exact
