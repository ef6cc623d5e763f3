"""The kernels that take a block table and lengths: TRT-LLM, FlashMLA, CUTLASS MLA."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_formula import OUTSIDE, Paged, attention, worst

from kits.errors import KernelFault
from kits.kernels.cutlass_mla import cutlass_mla_decode, cutlass_mla_get_workspace_size
from kits.kernels.flashmla import flash_mla_with_kvcache, get_mla_metadata
from kits.kernels.trtllm import trtllm_batch_decode_with_kv_cache

bounded = settings(max_examples=40, deadline=None)
lengths_from_one = st.lists(st.integers(1, 150), min_size=1, max_size=4)
WORKSPACE = torch.zeros(8, dtype=torch.uint8)


def trtllm(cache, q, layout="NHD", max_seq_len=4096, **options):
    k, v = (x.transpose(1, 2).contiguous() if layout == "HND" else x for x in (cache.k, cache.v))
    return trtllm_batch_decode_with_kv_cache(
        q, (k, v), WORKSPACE, cache.table, cache.seqlens, max_seq_len, kv_layout=layout, bmm1_scale=0.4, **options
    )


@bounded
@given(
    lengths=st.lists(st.integers(4, 70), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 16, 32]),
    layout=st.sampled_from(["NHD", "HND"]),
    queries=st.integers(1, 4),
    window_left=st.sampled_from([-1, 0, 7]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_trtllm_matches_float64(lengths, page_size, layout, queries, window_left, with_sinks, seed):
    cache = Paged(lengths, page_size, 2, 16, 16, seed=seed)
    q = cache.randn(len(lengths) * queries, 4, 16)
    sinks = torch.linspace(-1, 1, 4) if with_sinks else None
    out = trtllm(cache, q, layout, q_len_per_req=queries, window_left=window_left, sinks=sinks, bmm2_scale=2.5)
    for row, length in enumerate(lengths):

        def sees(i, j, length=length):
            position = length - queries + i
            return j <= position and (window_left < 0 or j >= position - window_left)

        tokens = slice(row * queries, (row + 1) * queries)
        expected, _ = attention(q[tokens], cache.keys[row], cache.values[row], scale=0.4, sees=sees, sinks=sinks)
        assert worst(out[tokens], expected * 2.5) < 1e-5


def test_trtllm_reads_no_further_than_the_captured_maximum():
    cache = Paged([9, 40], 16, 2, 16, 16, seed=1)
    q = cache.randn(2, 4, 16)
    out = trtllm(cache, q, max_seq_len=20)
    expected, _ = attention(q[1:], cache.keys[1][:20], cache.values[1][:20], scale=0.4)
    assert worst(out[1:], expected) < 1e-5


def test_trtllm_takes_the_batch_from_the_query():
    cache = Paged([9, 40, 12], 16, 2, 16, 16, seed=1)
    cache.table[2] = OUTSIDE
    assert trtllm(cache, cache.randn(2, 4, 16)).shape == (2, 4, 16)
    with pytest.raises(ValueError, match="4 requests"):
        trtllm(cache, cache.randn(4, 4, 16))
    with pytest.raises(ValueError, match="no multiple"):
        trtllm(cache, cache.randn(3, 4, 16), q_len_per_req=2)


def test_trtllm_divides_nothing_by_nothing_for_an_empty_request():
    cache = Paged([9, 40], 16, 2, 16, 16, seed=1)
    cache.seqlens[0] = 0
    out = trtllm(cache, cache.randn(2, 4, 16))
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("seqlens", 1, -1, "row 1: -1, read as 4294967295 keys"),
        ("seqlens", 1, 65, "row 1: 65 keys need 5 pages of 16; it has 4"),
        ("table", (1, 2), -1, "row 1, entry 2: page -1 is outside"),
        ("table", (0, 0), OUTSIDE, "row 0, entry 0: page 1048576 is outside"),
    ],
)
def test_trtllm_faults(field, index, value, message):
    cache = Paged([9, 40], 16, 2, 16, 16, seed=1)
    getattr(cache, field)[index] = value
    with pytest.raises(KernelFault, match=message):
        trtllm(cache, cache.randn(2, 4, 16))


def flash_mla(cache, q, metadata=None, **options):
    metadata, splits = metadata or get_mla_metadata(cache.seqlens, q.shape[1] * q.shape[2], 1)
    return flash_mla_with_kvcache(
        q, cache.k, cache.table, cache.seqlens, 16, metadata, splits, softmax_scale=0.3, **options
    )


@bounded
@given(
    lengths=st.lists(st.integers(4, 300), min_size=1, max_size=5),
    queries=st.integers(1, 4),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_flash_mla_matches_float64(lengths, queries, causal, seed):
    cache = Paged(lengths, 64, 1, 24, 1, seed=seed)
    q = cache.randn(len(lengths), queries, 2, 24)
    out, lse = flash_mla(cache, q, causal=causal)
    for row, length in enumerate(lengths):
        expected, expected_lse = attention(
            q[row],
            cache.keys[row],
            cache.keys[row][..., :16],
            scale=0.3,
            sees=lambda i, j, n=length: not causal or j <= n - queries + i,
        )
        assert worst(out[row], expected) < 1e-5
        assert worst(lse[row].T, expected_lse) < 1e-5


def test_a_stale_flash_mla_schedule_leaves_keys_out():
    cache = Paged([10, 200], 64, 1, 24, 1, seed=1)
    q = cache.randn(2, 1, 2, 24)
    stale = get_mla_metadata(torch.tensor([10, 12], dtype=torch.int32), 2, 1)
    out, _ = flash_mla(cache, q, stale)
    covered, _ = attention(q[1], cache.keys[1][:64], cache.keys[1][:64, :, :16], scale=0.3)
    assert worst(out[1], covered) < 1e-5


def test_flash_mla_schedule_and_splits_belong_together():
    cache = Paged([10, 200], 64, 1, 24, 1, seed=1)
    metadata, _ = get_mla_metadata(cache.seqlens, 2, 1)
    _, stale = get_mla_metadata(torch.tensor([10, 12], dtype=torch.int32), 2, 1)
    with pytest.raises(KernelFault, match="row 1: 1 partial results are combined, 2 were made"):
        flash_mla(cache, cache.randn(2, 1, 2, 24), (metadata, stale))


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("seqlens", 0, 0, "row 0: length 0: block -1 is fetched"),
        ("seqlens", 1, -65, "row 1: length -65"),
        ("seqlens", 1, 400, "row 1: .* keys need [567] pages of 64; it has 4"),
        ("table", (1, 2), -1, "row 1, entry 2: page -1 is outside"),
    ],
)
def test_flash_mla_faults(field, index, value, message):
    cache = Paged([10, 150], 64, 1, 24, 1, seed=1)
    getattr(cache, field)[index] = value
    with pytest.raises(KernelFault, match=message):
        flash_mla(cache, cache.randn(2, 1, 2, 24))


def test_flash_mla_checks_shapes_on_the_host():
    cache = Paged([10, 150], 64, 1, 24, 1, seed=1)
    q = cache.randn(2, 1, 2, 24)
    with pytest.raises(ValueError, match="k_cache must be"):
        flash_mla(Paged([10, 150], 32, 1, 24, 1, seed=1), q)
    with pytest.raises(ValueError, match="q has 3 requests"):
        flash_mla(cache, cache.randn(3, 1, 2, 24))
    cache.table = cache.table.long()
    with pytest.raises(TypeError, match="block_table must be int32"):
        flash_mla(cache, q)


def cutlass(cache, q, scale=0.05):
    return cutlass_mla_decode(
        q[..., :512], q[..., 512:], cache.k[:, :, 0], cache.seqlens, cache.table, WORKSPACE, scale
    )


@settings(max_examples=8, deadline=None)
@given(lengths=lengths_from_one, page_size=st.sampled_from([64, 128]), seed=st.integers(0, 2**31))
def test_cutlass_mla_matches_float64(lengths, page_size, seed):
    columns = -(-max(lengths) // page_size)
    cache = Paged(lengths, page_size, 1, 576, 1, seed=seed, spare_columns=columns % 2 if page_size == 64 else 0)
    q = cache.randn(len(lengths), 2, 576)
    out = cutlass(cache, q)
    for row in range(len(lengths)):
        expected, _ = attention(q[row : row + 1], cache.keys[row], cache.keys[row][..., :512], scale=0.05)
        assert worst(out[row : row + 1], expected) < 1e-5


def test_cutlass_mla_faults_and_refusals():
    def fresh():
        return Paged([10, 150], 128, 1, 576, 1, seed=1, spare_columns=0)

    cache = fresh()
    q = cache.randn(2, 2, 576)
    cache.seqlens[0] = 0
    assert cutlass(cache, q)[0].isnan().all()
    cache.seqlens[0] = -1
    with pytest.raises(KernelFault, match="row 0: -1"):
        cutlass(cache, q)
    cache = fresh()
    cache.seqlens[1] = 257
    with pytest.raises(KernelFault, match="257 keys need 3 pages of 128; it has 2"):
        cutlass(cache, q)
    cache = fresh()
    cache.table[1, 1] = -1
    with pytest.raises(KernelFault, match="row 1, entry 1: page -1"):
        cutlass(cache, q)
    with pytest.raises(ValueError, match="at most 128"):
        cutlass(fresh(), cache.randn(2, 129, 576))
    with pytest.raises(ValueError, match="multiples of 2"):
        cutlass(Paged([10, 150], 64, 1, 576, 1, seed=1, spare_columns=0), q)
    with pytest.raises(ValueError, match="must be above 0"):
        cutlass_mla_get_workspace_size(0, 1, device=torch.device("cpu"))
    assert cutlass_mla_get_workspace_size(4096, 3, device=torch.device("cpu")) == 1


@pytest.mark.parametrize("field", ["table", "seqlens"])
def test_trtllm_takes_packed_int32_only(field):
    """It would read half of each number, or another row's: nothing in the library looks at dtype and strides."""
    cache = Paged([9, 40], 16, 2, 16, 16, seed=1)
    q = cache.randn(2, 4, 16)
    right = getattr(cache, field)
    setattr(cache, field, right.long())
    with pytest.raises(TypeError, match="must be int32"):
        trtllm(cache, q)
    setattr(cache, field, right.repeat_interleave(2, dim=-1)[..., ::2])
    with pytest.raises(ValueError, match="must be contiguous"):
        trtllm(cache, q)


def test_a_table_of_strided_columns_is_refused():
    cache = Paged([70, 9], 64, 1, 576, 576, seed=1)
    table = cache.table.t().contiguous().t()
    q = cache.randn(2, 1, 1, 576)
    with pytest.raises(ValueError, match="block_table must be contiguous"):
        flash_mla_with_kvcache(q, cache.k, table, cache.seqlens, 512, *get_mla_metadata(cache.seqlens, 1, 1))


def test_trtllm_faults_on_a_workspace_that_another_kernel_wrote_to(monkeypatch):
    cache = Paged([9, 40], 16, 2, 16, 16, seed=1)
    monkeypatch.setitem(trtllm.__globals__, "WORKSPACE", torch.full((8,), 3, dtype=torch.uint8))
    with pytest.raises(KernelFault, match="counters that are not zero"):
        trtllm(cache, cache.randn(2, 4, 16))
