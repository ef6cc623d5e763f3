"""FlashInfer's paged wrappers: emulation against float64, fixed graph buffers, stale schedules, faults."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_formula import OUTSIDE, Paged, attention, offsets, worst

from kits.errors import KernelFault
from kits.kernels.flashinfer import BatchDecodeWithPagedKVCacheWrapper as Decode
from kits.kernels.flashinfer import BatchPrefillWithPagedKVCacheWrapper as Prefill
from kits.kernels.flashinfer_mla import BatchMLAPagedAttentionWrapper as MLA

LOG_2 = math.log(2)
bounded = settings(max_examples=50, deadline=None)
WORKSPACE = torch.empty(8, dtype=torch.uint8)
HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 16, 8


def make(lengths, page_size=16, kv_heads=KV_HEADS, dims=(DIM, V_DIM), seed=1):
    return Paged(lengths, page_size, kv_heads, *dims, seed=seed)


def base_2(lse, log=LOG_2):
    """The library's LSE; -5e4 stands for minus infinity."""
    return (lse / log).clamp(min=-5e4)


def pages_of(cache):
    return cache.indptr, cache.indices, cache.last_page_len


def plan_decode(wrapper, cache, **options):
    sizes = (HEADS, KV_HEADS, DIM, cache.page_size)
    wrapper.plan(*pages_of(cache), *sizes, q_data_type=torch.float32, sm_scale=0.4, **options)


def plan_prefill(wrapper, cache, q_lens, **options):
    sizes = (HEADS, KV_HEADS, DIM, cache.page_size)
    wrapper.plan(offsets(q_lens), *pages_of(cache), *sizes, q_data_type=torch.float32, sm_scale=0.4, **options)


def graph_decode(rows, pages=64):
    return Decode(
        WORKSPACE,
        use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.full((rows + 1,), 99, dtype=torch.int32),
        paged_kv_indices_buffer=torch.full((pages,), OUTSIDE, dtype=torch.int32),
        paged_kv_last_page_len_buffer=torch.full((rows,), 99, dtype=torch.int32),
    )


def graph_prefill(rows, pages=64, mask_bytes=0):
    return Prefill(
        WORKSPACE,
        use_cuda_graph=True,
        qo_indptr_buf=torch.full((rows + 1,), 99, dtype=torch.int32),
        paged_kv_indptr_buf=torch.full((rows + 1,), 99, dtype=torch.int32),
        paged_kv_indices_buf=torch.full((pages,), OUTSIDE, dtype=torch.int32),
        paged_kv_last_page_len_buf=torch.full((rows,), 99, dtype=torch.int32),
        custom_mask_buf=torch.full((mask_bytes,), 0xA5, dtype=torch.uint8) if mask_bytes else None,
        mask_indptr_buf=torch.full((rows + 1,), 99, dtype=torch.int32) if mask_bytes else None,
    )


@bounded
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    page_size=st.sampled_from([1, 4, 16, 64]),
    window_left=st.sampled_from([-1, 0, 5, 200]),
    softcap=st.sampled_from([None, 1.5]),
    scales=st.sampled_from([(None, None), (0.5, 3.0)]),
    layout=st.sampled_from(["NHD", "HND"]),
    graph=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_decode_matches_float64(lengths, page_size, window_left, softcap, scales, layout, graph, seed):
    cache = make(lengths, page_size, seed=seed)
    if graph:
        wrapper = graph_decode(len(lengths), pages=300)
        wrapper.kv_layout = layout
    else:
        wrapper = Decode(WORKSPACE, layout)
    plan_decode(wrapper, cache, window_left=window_left, logits_soft_cap=softcap)
    q = cache.randn(len(lengths), HEADS, DIM)
    k, v = (x.transpose(1, 2).contiguous() if layout == "HND" else x for x in (cache.k, cache.v))
    k_scale, v_scale = scales
    out, lse = wrapper.run(q, (k, v), k_scale=k_scale, v_scale=v_scale, return_lse=True)
    for row, length in enumerate(lengths):
        expected, expected_lse = attention(
            q[row : row + 1],
            cache.keys[row],
            cache.values[row],
            scale=0.4 * (k_scale or 1.0),
            softcap=softcap or 0.0,
            sees=lambda i, j, n=length: window_left < 0 or j >= n - 1 - window_left,
        )
        assert worst(out[row : row + 1], expected * (v_scale or 1.0)) < 1e-5
        assert worst(lse[row : row + 1], base_2(expected_lse)) < 1e-5


@bounded
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 4, 16]),
    window_left=st.sampled_from([-1, 0, 5]),
    causal=st.booleans(),
    masked=st.booleans(),
    graph=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_prefill_matches_float64(rows, page_size, window_left, causal, masked, graph, seed):
    lengths, q_lens = [p + t for p, t in rows], [t for _, t in rows]
    cache = make(lengths, page_size, seed=seed)
    masks = [torch.rand(t, n, generator=cache.generator) < 0.6 for t, n in zip(q_lens, lengths, strict=True)]
    wrapper = graph_prefill(len(rows), pages=300, mask_bytes=700 if masked else 0) if graph else Prefill(WORKSPACE)
    custom_mask = torch.cat([mask.flatten() for mask in masks]) if masked else None
    plan_prefill(wrapper, cache, q_lens, causal=causal, window_left=window_left, custom_mask=custom_mask)
    q = cache.randn(sum(q_lens), HEADS, DIM)
    out, lse = wrapper.run(q, (cache.k, cache.v), return_lse=True)
    starts = offsets(q_lens).tolist()
    for row, (length, count) in enumerate(zip(lengths, q_lens, strict=True)):

        def sees(i, j, row=row, length=length, count=count):
            position = length - count + i
            allowed = bool(masks[row][i, j]) if masked else (j <= position or not causal)
            return allowed and (window_left < 0 or j >= position - window_left)

        tokens = slice(starts[row], starts[row + 1])
        expected, expected_lse = attention(q[tokens], cache.keys[row], cache.values[row], scale=0.4, sees=sees)
        assert worst(out[tokens], expected) < 1e-5
        assert worst(lse[tokens], base_2(expected_lse)) < 1e-5


@bounded
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 18)), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 16]),
    causal=st.booleans(),
    base_e=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_latent_attention_matches_float64(rows, page_size, causal, base_e, seed):
    lengths, q_lens = [p + t for p, t in rows], [t for _, t in rows]
    cache = make(lengths, page_size, kv_heads=1, dims=(24, 4), seed=seed)
    wrapper = MLA(WORKSPACE)
    wrapper.plan(
        offsets(q_lens), cache.indptr, cache.indices, cache.seqlens, HEADS, 16, 8, page_size, causal, 0.3,
        torch.float32, torch.float32,
    )  # fmt: skip
    q = cache.randn(sum(q_lens), HEADS, 24)
    out, lse = wrapper.run(
        q[..., :16], q[..., 16:], cache.k[:, :, 0, :16], cache.k[:, :, 0, 16:],
        return_lse=True, return_lse_base_on_e=base_e,
    )  # fmt: skip
    starts = offsets(q_lens).tolist()
    for row, (length, count) in enumerate(zip(lengths, q_lens, strict=True)):
        tokens = slice(starts[row], starts[row + 1])
        expected, expected_lse = attention(
            q[tokens],
            cache.keys[row],
            cache.keys[row][..., :16],
            scale=0.3,
            sees=lambda i, j, n=length, t=count: not causal or j <= n - t + i,
        )
        assert worst(out[tokens], expected) < 1e-5
        assert worst(lse[tokens], base_2(expected_lse, log=1.0 if base_e else LOG_2)) < 1e-5


def test_run_reads_the_buffers_of_the_graph_and_the_schedule_of_the_last_plan():
    short, long = make([5, 9], seed=1), make([40, 33], seed=2)
    wrapper = graph_decode(2)
    plan_decode(wrapper, short)
    buffers = [wrapper.kv_indptr, wrapper.kv_indices, wrapper.last_page_len, wrapper.int_workspace]
    plan_decode(wrapper, long)
    assert all(
        before is after
        for before, after in zip(
            buffers, [wrapper.kv_indptr, wrapper.kv_indices, wrapper.last_page_len, wrapper.int_workspace], strict=True
        )
    )
    q = long.randn(2, HEADS, DIM)
    eager = Decode(WORKSPACE)
    plan_decode(eager, long)
    assert torch.equal(wrapper.run(q, (long.k, long.v)), eager.run(q, (long.k, long.v)))


def test_a_replay_without_a_new_plan_misses_the_keys_beyond_the_old_schedule():
    short, long = make([5, 40], seed=1), make([40, 41], seed=2)
    wrapper = graph_decode(2)
    plan_decode(wrapper, short)
    wrapper.kv_indptr.copy_(long.indptr)
    wrapper.kv_indices[: len(long.indices)].copy_(long.indices)
    wrapper.last_page_len.copy_(long.last_page_len)
    q = long.randn(2, HEADS, DIM)
    out = wrapper.run(q, (long.k, long.v))
    whole, _ = attention(q[:1], long.keys[0], long.values[0], scale=0.4)
    covered, _ = attention(q[:1], long.keys[0][:16], long.values[0][:16], scale=0.4)
    assert worst(out[:1], covered) < 1e-5 < 1e-2 < worst(out[:1], whole)
    # This row's old length needed as many tiles as the new one does.
    same, _ = attention(q[1:], long.keys[1], long.values[1], scale=0.4)
    assert worst(out[1:], same) < 1e-5


def test_a_prefill_replay_without_a_new_plan_leaves_queries_out():
    first, second = make([20, 20], seed=1), make([20, 20], seed=2)
    wrapper = graph_prefill(2)
    plan_prefill(wrapper, first, [2, 18], causal=True)
    wrapper.qo_indptr.copy_(offsets([18, 2]))
    wrapper.kv_indices[: len(second.indices)].copy_(second.indices)
    out = torch.full((20, HEADS, V_DIM), 7.0)
    wrapper.run(second.randn(20, HEADS, DIM), (second.k, second.v), out=out)
    assert (out[16:18] == 7).all()
    assert not (out[:16] == 7).any()


def test_latent_run_reads_nothing_but_the_schedule_and_the_indices():
    cache = make([20, 30], page_size=1, kv_heads=1, dims=(24, 4))
    wrapper = MLA(
        WORKSPACE, True, torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32),
        torch.zeros(64, dtype=torch.int32), torch.zeros(2, dtype=torch.int32),
    )  # fmt: skip
    wrapper.plan(
        offsets([1, 1]), cache.indptr, cache.indices, cache.seqlens, HEADS, 16, 8, 1, False, 0.3,
        torch.float32, torch.float32,
    )  # fmt: skip
    q = cache.randn(2, HEADS, 24)
    operands = (q[..., :16], q[..., 16:], cache.k[:, :, 0, :16], cache.k[:, :, 0, 16:])
    before = wrapper.run(*operands)
    for twin in (wrapper.qo_indptr, wrapper.kv_indptr, wrapper.kv_len_arr):
        twin.fill_(-7)
    assert torch.equal(before, wrapper.run(*operands))


def test_a_wrapper_with_mask_buffers_masks_in_every_run():
    cache = make([20, 20])
    wrapper = graph_prefill(2, mask_bytes=64)
    nothing = torch.zeros(80, dtype=torch.bool)
    plan_prefill(wrapper, cache, [2, 2], custom_mask=nothing)
    plan_prefill(wrapper, cache, [2, 2], causal=True)
    q = cache.randn(4, HEADS, DIM)
    assert (wrapper.run(q, (cache.k, cache.v)) == 0).all()
    eager = Prefill(WORKSPACE)
    plan_prefill(eager, cache, [2, 2], custom_mask=nothing)
    plan_prefill(eager, cache, [2, 2], causal=True)
    assert not (eager.run(q, (cache.k, cache.v)) == 0).any()


def test_mask_bits_of_a_request_start_at_a_byte_of_their_own():
    cache = make([3, 5], page_size=1)
    masks = [torch.tensor([[1, 0, 1]]).bool(), torch.tensor([[1, 1, 0, 0, 1], [0, 1, 0, 1, 1]]).bool()]
    wrapper = Prefill(WORKSPACE)
    plan_prefill(wrapper, cache, [1, 2], custom_mask=torch.cat([mask.flatten() for mask in masks]))
    assert wrapper.mask_indptr.tolist() == [0, 1, 3]
    assert wrapper.custom_mask.tolist() == [0b101, 0b01010011, 0b11]


def test_a_row_does_not_depend_on_its_neighbours():
    cache = make([9, 40, 31])
    wrapper = graph_decode(3)
    q = cache.randn(3, HEADS, DIM)
    plan_decode(wrapper, cache)
    alone = wrapper.run(q, (cache.k, cache.v))
    cache.last_page_len[0] = 3
    cache.k[cache.table[0, 0], 0] = float("nan")
    q[2] = float("nan")
    plan_decode(wrapper, cache)
    among = wrapper.run(q, (cache.k, cache.v))
    assert torch.equal(alone[1], among[1])
    assert among[0].isnan().all()


def broken_decode(name, index, value, graph=True):
    cache = make([9, 40], page_size=4)
    wrapper = graph_decode(2) if graph else Decode(WORKSPACE)
    plan_decode(wrapper, cache)
    getattr(wrapper, name)[index] = value
    return wrapper.run(cache.randn(2, HEADS, DIM), (cache.k, cache.v))


@pytest.mark.parametrize(
    ("name", "index", "value", "argument", "message"),
    [
        ("kv_indices", 4, -1, "paged_kv_indices", "row 1, entry 1: page -1 is outside"),
        ("kv_indices", 4, OUTSIDE, "paged_kv_indices", "row 1, entry 1: page 1048576 is outside"),
        ("kv_indptr", 2, 65, "paged_kv_indices", "row 1 reads up to entry 64 of 64"),
        ("kv_indptr", 2, -1, "paged_kv_indptr", "decreases at row 1"),
        ("last_page_len", 1, 5, "paged_kv_last_page_len", "row 1: 5 of a page of 4"),
        ("last_page_len", 1, 0, "paged_kv_last_page_len", "row 1: 0 of a page of 4"),
        ("int_workspace", 0, -5, "int_workspace", "plan was not called"),
        ("int_workspace", 2, 2, "int_workspace", "a tile belongs to request 2 of 2"),
        ("int_workspace", 4, 5, "int_workspace", "a tile of row 0 begins at key 80 of 9"),
    ],
)
def test_what_a_gpu_would_read_out_of_bounds_is_a_fault(name, index, value, argument, message):
    with pytest.raises(KernelFault, match=message) as caught:
        broken_decode(name, index, value)
    assert caught.value.argument == argument


def test_a_mask_that_ends_too_early_is_a_fault():
    cache = make([20, 20])
    wrapper = Prefill(WORKSPACE)
    plan_prefill(wrapper, cache, [2, 2], custom_mask=torch.ones(80, dtype=torch.bool))
    wrapper.mask_indptr[1] = 40  # bits, where bytes are meant
    with pytest.raises(KernelFault, match=r"row 1 reads bytes 40\.\.44 of 10"):
        wrapper.run(cache.randn(4, HEADS, DIM), (cache.k, cache.v))


def test_plan_refuses_what_cannot_be_there():
    cache = make([9, 40])
    wrapper = Decode(WORKSPACE)
    sizes = (HEADS, KV_HEADS, DIM, 16)
    with pytest.raises(KernelFault, match="has 3 entries; the offsets announce 4"):
        wrapper.plan(cache.indptr, cache.indices[:3], cache.last_page_len, *sizes)
    with pytest.raises(KernelFault, match="decreases at row 1"):
        wrapper.plan(torch.tensor([0, 3, 2], dtype=torch.int32), cache.indices, cache.last_page_len, *sizes)
    with pytest.raises(KernelFault, match="row 1: -2 of a page"):
        wrapper.plan(cache.indptr, cache.indices, torch.tensor([9, -2]), *sizes)
    with pytest.raises(ValueError, match="batch size is fixed"):
        graph_decode(3).plan(*pages_of(cache), *sizes)
    with pytest.raises(ValueError, match="do not fit"):
        graph_decode(2, pages=2).plan(*pages_of(cache), *sizes)
    with pytest.raises(ValueError, match="should be a torch"):
        Decode(WORKSPACE, use_cuda_graph=True)
    prefill = graph_prefill(2)
    plan_prefill(prefill, cache, [2, 2])
    with pytest.raises(ValueError, match="the 4 of the first plan are the maximum"):
        plan_prefill(prefill, cache, [3, 2])
    with pytest.raises(ValueError, match="custom_mask_buf should be"):
        plan_prefill(prefill, cache, [2, 2], custom_mask=torch.ones(98, dtype=torch.bool))
    with pytest.raises(KernelFault, match="97 entries; 98 are needed"):
        plan_prefill(Prefill(WORKSPACE), cache, [2, 2], custom_mask=torch.ones(97, dtype=torch.bool))
    with pytest.raises(KernelFault, match="row 0: 17 keys; its pages hold 16"):
        MLA(WORKSPACE).plan(
            offsets([1, 1]), cache.indptr, cache.indices, torch.tensor([17, 40]), HEADS, 16, 8, 16, False, 0.3,
            torch.float32, torch.float32,
        )  # fmt: skip


def test_decode_kernels_know_some_numbers_of_heads_and_tensor_cores_all():
    cache = make([9, 40])
    q = cache.randn(2, 5 * KV_HEADS, DIM)
    pages = (*pages_of(cache), 5 * KV_HEADS, KV_HEADS, DIM, 16)
    with pytest.raises(ValueError, match="no decode kernel has 5 query heads per KV head, only 1, 2, 3, 4, 8"):
        Decode(WORKSPACE).plan(*pages, q_data_type=torch.float32)
    wrapper = Decode(WORKSPACE, use_tensor_cores=True)
    wrapper.plan(*pages, q_data_type=torch.float32)
    out = wrapper.run(q, (cache.k, cache.v))
    for row in range(2):
        expected, _ = attention(q[row : row + 1], cache.keys[row], cache.values[row], scale=DIM**-0.5)
        assert worst(out[row : row + 1], expected) < 1e-5


@pytest.mark.parametrize("heads", [(9, 2), (4, 0), (2, 4)])
def test_heads_that_share_no_keys_evenly_are_refused(heads):
    cache = make([9, 40])
    with pytest.raises(ValueError, match=f"{heads[0]} query heads cannot share {heads[1]} KV heads"):
        Decode(WORKSPACE).plan(*pages_of(cache), *heads, DIM, 16)
    with pytest.raises(ValueError, match=f"{heads[0]} query heads cannot share {heads[1]} KV heads"):
        Prefill(WORKSPACE).plan(offsets([1, 1]), *pages_of(cache), *heads, DIM, 16)


def test_run_refuses_what_was_not_planned():
    cache = make([9, 40])
    wrapper = Decode(WORKSPACE)
    plan_decode(wrapper, cache)
    with pytest.raises(ValueError, match="q has 3 rows"):
        wrapper.run(cache.randn(3, HEADS, DIM), (cache.k, cache.v))
    with pytest.raises(ValueError, match="planned for q"):
        wrapper.run(cache.randn(2, HEADS, DIM).half(), (cache.k, cache.v))
    with pytest.raises(ValueError, match="pages of 16"):
        wrapper.run(cache.randn(2, HEADS, DIM), (cache.k[:, :8], cache.v[:, :8]))
    prefill = Prefill(WORKSPACE)
    plan_prefill(prefill, cache, [2, 2])
    with pytest.raises(ValueError, match="q has 5 tokens, qo_indptr ends at 4"):
        prefill.run(cache.randn(5, HEADS, DIM), (cache.k, cache.v))


@pytest.mark.parametrize("graph", [False, True])
def test_a_plan_for_other_heads_is_a_fault(graph):
    """The library runs it, and computes what the plan covers (sgl-project/sglang#32625)."""
    cache = make([5, 9])
    q = cache.randn(2, HEADS, DIM)
    wrapper = graph_decode(2) if graph else Decode(WORKSPACE)
    plan_decode(wrapper, cache)
    with pytest.raises(KernelFault, match=r"plan: is for heads and dims \(4, 2, 16\); run has \(8, 2, 16\)"):
        wrapper.run(torch.cat([q, q], dim=1), (cache.k, cache.v))
    wrapper = graph_decode(2) if graph else Decode(WORKSPACE)
    plan_decode(wrapper, cache)
    wrapper.run(q, (cache.k, cache.v))
    with pytest.raises(KernelFault, match="plan: is for heads"):  # a graph would go on with this plan
        wrapper.plan(*pages_of(cache), KV_HEADS, KV_HEADS, DIM, cache.page_size, q_data_type=torch.float32)
