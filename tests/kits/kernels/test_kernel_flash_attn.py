"""The FlashAttention contract: its emulation against float64, and what it must refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_formula import OUTSIDE, Paged, attention, offsets, worst

from kits.errors import KernelFault
from kits.kernels import provenance
from kits.kernels.flash_attn import flash_attn_with_kvcache

bounded = settings(max_examples=60, deadline=None)


def call(cache, q, q_lens, **options):
    options = {
        "page_table": cache.table,
        "cache_seqlens": cache.seqlens,
        "cu_seqlens_q": offsets(q_lens),
        "max_seqlen_q": max(q_lens),
        "causal": True,
        **options,
    }
    return flash_attn_with_kvcache(q, cache.k, cache.v, return_softmax_lse=True, **options)


@bounded
@given(
    rows=st.lists(st.tuples(st.integers(0, 45), st.integers(0, 6)), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 4, 16, 128]),
    heads=st.sampled_from([(4, 4), (4, 1), (10, 2)]),
    dims=st.sampled_from([(16, 16), (24, 8)]),
    causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (0, 0), (2, 0), (7, -1), (3, 2), (100, 0)]),
    softcap=st.sampled_from([0.0, 1.5]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_matches_float64(rows, page_size, heads, dims, causal, window, softcap, with_sinks, seed):
    lengths, q_lens = [p + t for p, t in rows], [t for _, t in rows]
    cache = Paged(lengths, page_size, heads[1], *dims, seed=seed)
    q = cache.randn(sum(q_lens) + 2, heads[0], dims[0])
    sinks = torch.linspace(-2, 1, heads[0]) if with_sinks else None
    out, lse = call(
        cache, q, q_lens, causal=causal, window_size=window, softcap=softcap, sinks=sinks, softmax_scale=0.4
    )
    left, right = window
    right = 0 if causal else right
    starts = offsets(q_lens).tolist()
    for row, (length, count) in enumerate(zip(lengths, q_lens, strict=True)):

        def sees(i, j, length=length, count=count):
            position = length - count + i
            return (left < 0 or j >= position - left) and (right < 0 or j <= position + right)

        tokens = slice(starts[row], starts[row + 1])
        expected, expected_lse = attention(
            q[tokens], cache.keys[row], cache.values[row], scale=0.4, sees=sees, softcap=softcap, sinks=sinks
        )
        assert worst(out[tokens], expected) < 1e-5
        assert worst(lse[:, tokens].T, expected_lse) < 1e-5
    assert out[starts[-1] :].isnan().all(), "tokens of no request are not written"
    assert lse[:, starts[-1] :].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_rounded_once(dtype):
    cache = Paged([9, 20], 16, 2, 64, 64, seed=1, dtype=dtype)
    q = cache.randn(5, 4, 64)
    out, _ = call(cache, q, [2, 3])
    assert out.dtype == dtype
    expected, _ = attention(q[:2], cache.keys[0], cache.values[0], scale=0.125, sees=lambda i, j: j <= 7 + i)
    assert worst(out[:2], expected.to(dtype).double()) <= torch.finfo(dtype).eps * 2


def test_a_row_does_not_depend_on_its_neighbours():
    cache = Paged([9, 20, 31], 16, 2, 64, 64, seed=1, dtype=torch.bfloat16)
    q = cache.randn(9, 4, 64)
    alone, _ = call(cache, q, [3, 3, 3])
    cache.k[cache.table[0, 0]] = float("nan")
    q[6:] = float("nan")
    cache.seqlens[2] = 5
    among, _ = call(cache, q, [3, 3, 3])
    assert torch.equal(alone[3:6], among[3:6])
    assert among[:3].isnan().any()


@pytest.mark.parametrize("length", [0, -3])
def test_a_request_without_keys_is_zeros(length):
    cache = Paged([9, 20], 16, 2, 16, 16, seed=1)
    cache.seqlens[0] = length
    cache.table[0] = OUTSIDE
    out, lse = call(cache, cache.randn(4, 4, 16), [2, 2])
    assert (out[:2] == 0).all()
    assert (lse[:, :2] == float("-inf")).all()


@pytest.mark.parametrize(("ver", "page_size", "is_nan"), [(3, 128, False), (4, 16, False), (4, 128, True)])
def test_version_4_loads_the_first_page_of_a_request_without_keys(ver, page_size, is_nan):
    cache = Paged([9, 20], page_size, 2, 16, 16, seed=1)
    cache.seqlens[0] = 0
    out, lse = call(cache, cache.randn(4, 4, 16), [2, 2], ver=ver)  # behind its keys, a page holds NaN
    assert out[:2].isnan().all() if is_nan else (out[:2] == 0).all()
    assert (lse[:, :2] == float("-inf")).all()
    assert not out[2:].isnan().any()


def test_the_kernel_stops_at_the_captured_number_of_queries():
    cache = Paged([9, 20], 16, 2, 16, 16, seed=1)
    q = cache.randn(8, 4, 16)
    whole, _ = call(cache, q, [4, 4])
    cut, _ = call(cache, q, [4, 4], max_seqlen_q=3)
    assert torch.equal(whole[0:3], cut[0:3])
    assert cut[3].isnan().all()
    assert cut[7].isnan().all()


def test_pages_outside_the_window_are_not_looked_up():
    cache = Paged([40], 4, 2, 16, 16, seed=1)
    q = cache.randn(1, 4, 16)
    whole, _ = call(cache, q, [1], window_size=(5, 0))
    cache.table[0, :8] = OUTSIDE
    evicted, _ = call(cache, q, [1], window_size=(5, 0))
    assert torch.equal(whole, evicted)


def test_scale_factors_belong_to_eight_bit_caches():
    cache = Paged([9, 20], 16, 2, 16, 16, seed=1)
    eight = torch.float8_e4m3fn
    cache.k, cache.v = cache.k.to(eight), cache.v.to(eight)
    q = cache.randn(2, 4, 16).to(eight)
    k_descale, v_descale = torch.tensor([[0.5, 2.0], [1.5, 0.25]]), torch.tensor([[2.0, 0.5], [3.0, 4.0]])
    out, _ = call(cache, q, [1, 1], k_descale=k_descale, v_descale=v_descale)
    assert out.dtype == torch.bfloat16
    keys = cache.keys[1].to(eight).float() * k_descale[1].view(1, 2, 1)
    values = cache.values[1].to(eight).float() * v_descale[1].view(1, 2, 1)
    expected, _ = attention(q[1:].float(), keys, values, scale=0.25)
    assert worst(out[1:], expected) < 2e-2
    with pytest.raises(TypeError, match="8-bit"):
        call(Paged([9], 16, 2, 16, 16, seed=1), cache.randn(1, 4, 16), [1], k_descale=k_descale)


def damaged(**changes):
    """A good call with some values changed."""
    cache = Paged([9, 20], 16, 2, 16, 16, seed=1, spare_columns=0)
    q = cache.randn(4, 4, 16)
    arguments = {
        "page_table": cache.table,
        "cache_seqlens": cache.seqlens,
        "cu_seqlens_q": offsets([2, 2]),
    }
    for name, (index, value) in changes.items():
        arguments[name][index] = value
    return call(cache, q, [2, 2], **arguments)


@pytest.mark.parametrize(
    ("changes", "argument", "message"),
    [
        ({"page_table": ((1, 1), -1)}, "page_table", r"row 1, entry 1: page -1 is outside 0\.\.5"),
        ({"page_table": ((0, 0), 6)}, "page_table", r"row 0, entry 0: page 6 is outside 0\.\.5"),
        ({"cache_seqlens": (1, 33)}, "page_table", "row 1: 33 keys need 3 pages of 16; it has 2"),
        ({"cu_seqlens_q": (2, -1)}, "cu_seqlens_q", "decreases at row 1: 2 -> -1"),
        ({"cu_seqlens_q": (2, 0)}, "cu_seqlens_q", "decreases at row 1"),
        ({"cu_seqlens_q": (2, 5)}, "cu_seqlens_q", "row 1 ends at 5; q has 4 tokens"),
        ({"cu_seqlens_q": (0, 1)}, "cu_seqlens_q", "starts at 1"),
    ],
)
def test_what_a_gpu_would_read_out_of_bounds_is_a_fault(changes, argument, message):
    with pytest.raises(KernelFault, match=message) as caught:
        damaged(**changes)
    assert caught.value.argument == argument


def test_shapes_and_dtypes_are_checked_on_the_host():
    cache = Paged([9, 20], 16, 2, 16, 16, seed=1)
    q = cache.randn(4, 4, 16)
    with pytest.raises(TypeError, match="page_table must be int32"):
        call(cache, q, [2, 2], page_table=cache.table.long())
    with pytest.raises(ValueError, match="cu_seqlens_q has 3 rows"):
        call(cache, q, [2, 2, 0])
    with pytest.raises(TypeError, match="differ in dtype"):
        call(cache, q.half(), [2, 2])
    with pytest.raises(ValueError, match="do not fit"):
        call(cache, q[:, :3], [2, 2])
    with pytest.raises(ValueError, match="ver must be"):
        call(cache, q, [2, 2], ver=2)


def test_it_says_that_it_was_emulated():
    cache = Paged([9], 16, 2, 16, 16, seed=1)
    with provenance.track() as outer, provenance.track() as inner:
        call(cache, cache.randn(1, 4, 16), [1])
    assert outer == inner == {"emulated"}
