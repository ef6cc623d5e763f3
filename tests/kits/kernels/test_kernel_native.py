"""The libraries' own kernels against float64, on a GPU; skipped where a package or an architecture is missing."""

from __future__ import annotations

import functools

import pytest
import torch
from kernel_formula import NAN, Paged, attention, offsets, worst

from kits.errors import Unavailable
from kits.kernels import provenance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

DTYPE = torch.bfloat16
TOLERANCE = 3e-2
LENGTHS, QUERIES = [9, 40, 131], [3, 1, 4]
HEADS, KV_HEADS, DIM = 8, 2, 64
LATENT, ROPE = 512, 64


def or_skip(test):
    """Skip where a kernel says that it cannot be had here; require that what ran was native."""

    @functools.wraps(test)
    def wrapped(*args, **kwargs):
        try:
            with provenance.track() as ran:
                test(*args, **kwargs)
        except Unavailable as reason:
            pytest.skip(f"{reason.kind}: {reason}")
        assert ran == {"native"}

    return wrapped


class Device:
    """A `Paged` cache and its queries on the GPU; what no request owns is 0 there, since native kernels load tails."""

    def __init__(self, page_size, lengths=LENGTHS, kv_heads=KV_HEADS, dims=(DIM, DIM), queries=QUERIES, heads=HEADS):
        self.cache = Paged(lengths, page_size, kv_heads, *dims, seed=3, dtype=DTYPE)
        self.q = self.cache.randn(sum(queries), heads, dims[0])
        self.queries = queries
        self.k, self.v = (torch.nan_to_num(x).cuda() for x in (self.cache.k, self.cache.v))
        self.table = torch.where(self.cache.table < self.cache.pages, self.cache.table, 0).cuda()
        for name in ("seqlens", "indices", "indptr", "last_page_len"):
            setattr(self, name, getattr(self.cache, name).cuda())
        self.cu = offsets(queries).cuda()

    def check(self, out, *, scale, window=-1, causal=True, softcap=0.0, sinks=None, values=None, masks=None):
        starts = offsets(self.queries).tolist()
        for row, length in enumerate(self.cache.lengths):
            count = self.queries[row]

            def sees(i, j, row=row, length=length, count=count):
                position = length - count + i
                allowed = bool(masks[row][i, j]) if masks else (j <= position or not causal)
                return allowed and (window < 0 or j > position - window)

            tokens = slice(starts[row], starts[row + 1])
            keys = self.cache.keys[row]
            value = self.cache.values[row] if values is None else keys[..., :values]
            expected, _ = attention(self.q[tokens], keys, value, scale=scale, sees=sees, softcap=softcap, sinks=sinks)
            assert worst(out[tokens].cpu(), expected) < TOLERANCE, f"row {row}"


FEATURES = [{}, {"window": 7}, {"softcap": 2.0}, {"sinks": True}]


def named(feature):
    return "_".join(feature) or "plain"


@pytest.mark.parametrize("feature", FEATURES, ids=named)
@pytest.mark.parametrize(("ver", "page_size"), [(3, 1), (3, 16), (4, 128)])
@or_skip
def test_flash_attention(ver, page_size, feature):
    from kits.kernels.flash_attn import flash_attn_with_kvcache

    device = Device(page_size)
    sinks = torch.linspace(-1, 1, HEADS).to(DTYPE) if "sinks" in feature else None
    window = feature.get("window", -1)
    out, lse = flash_attn_with_kvcache(
        device.q.cuda(),
        device.k,
        device.v,
        page_table=device.table,
        cache_seqlens=device.seqlens,
        cu_seqlens_q=device.cu,
        max_seqlen_q=max(QUERIES),
        softmax_scale=0.2,
        causal=True,
        window_size=(window - 1, 0) if window > 0 else (-1, -1),
        softcap=feature.get("softcap", 0.0),
        sinks=None if sinks is None else sinks.cuda(),
        return_softmax_lse=True,
        ver=ver,
    )
    assert lse.shape == (HEADS, sum(QUERIES))
    device.check(out, scale=0.2, window=window, softcap=feature.get("softcap", 0.0), sinks=sinks)


def triton_extend(device, **options):
    """The last queries' keys as new keys, the rest as prefix in a pool of single slots."""
    from kits.kernels.triton_ops import extend_attention

    slots = [
        [int(device.cache.table[r, p // ps]) * ps + p % ps for p in range(n)]
        for r, n in enumerate(device.cache.lengths)
        for ps in [device.cache.page_size]
    ]
    prefix = [row[: len(row) - t] for row, t in zip(slots, device.queries, strict=True)]
    new = torch.tensor([s for row, t in zip(slots, device.queries, strict=True) for s in row[len(row) - t :]]).cuda()
    k, v = device.k.flatten(0, 1), device.v.flatten(0, 1)
    if k.shape[-1] == LATENT + ROPE:
        v = k[..., :LATENT]
    out = torch.empty(*device.q.shape[:2], v.shape[-1], dtype=DTYPE, device="cuda")
    k_new, v_new = k[new], v[new]
    if k.shape[-1] == LATENT + ROPE:
        v_new = k_new[..., :LATENT]
    extend_attention(
        device.q.cuda(),
        k_new,
        v_new,
        k,
        v,
        device.cu,
        offsets([len(row) for row in prefix]).cuda(),
        torch.tensor([s for row in prefix for s in row], dtype=torch.int32).cuda(),
        out,
        scale=0.2,
        max_extend_len=max(device.queries),
        **options,
    )
    return out


@pytest.mark.parametrize("feature", [*FEATURES, {"mask": True}], ids=named)
@or_skip
def test_triton_extend(feature):
    device = Device(16)
    options, masks = dict(feature), None
    if options.pop("mask", False):
        masks = [torch.rand(t, n) < 0.6 for t, n in zip(QUERIES, LENGTHS, strict=True)]
        options["custom_mask"] = torch.cat([mask.flatten() for mask in masks]).cuda()
        options["mask_indptr"] = offsets([mask.numel() for mask in masks]).cuda()
    sinks = torch.linspace(-1, 1, HEADS) if options.pop("sinks", False) else None
    if sinks is not None:
        options["sinks"] = sinks.cuda()
    window, softcap = feature.get("window", -1), feature.get("softcap", 0.0)
    device.check(triton_extend(device, **options), scale=0.2, window=window, softcap=softcap, sinks=sinks, masks=masks)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (10, 2)])
@or_skip
def test_triton_decode_of_head_shapes(heads):
    from kits.kernels.triton_ops import decode_attention

    device = Device(1, kv_heads=heads[1], heads=heads[0], queries=[1, 1, 1])
    q, out = device.q.cuda(), torch.empty_like(device.q, device="cuda")
    decode_attention(q, device.k[:, 0], device.v[:, 0], device.indptr, device.indices, out, scale=0.2, window=30)
    device.check(out, scale=0.2, window=30)


@or_skip
def test_triton_latent():
    from kits.kernels.triton_ops import decode_attention

    device = Device(1, kv_heads=1, dims=(LATENT + ROPE, 1), heads=16)
    device.check(triton_extend(device), scale=0.2, values=LATENT)
    device = Device(1, kv_heads=1, dims=(LATENT + ROPE, 1), heads=16, queries=[1, 1, 1])
    out = torch.empty(3, 16, LATENT, dtype=DTYPE, device="cuda")
    k = device.k[:, 0]
    decode_attention(device.q.cuda(), k, k[..., :LATENT], device.indptr, device.indices, out, scale=0.05)
    device.check(out, scale=0.05, values=LATENT)


def workspace():
    return torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("heads", [HEADS, 10])
@pytest.mark.parametrize("graph", [False, True])
@or_skip
def test_flashinfer_decode(graph, heads):
    from kits.kernels.flashinfer import DECODE_GROUPS, BatchDecodeWithPagedKVCacheWrapper

    device = Device(16, queries=[1, 1, 1], heads=heads)
    buffers = {}
    if graph:
        buffers = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": torch.zeros(4, dtype=torch.int32, device="cuda"),
            "paged_kv_indices_buffer": torch.zeros(64, dtype=torch.int32, device="cuda"),
            "paged_kv_last_page_len_buffer": torch.zeros(3, dtype=torch.int32, device="cuda"),
        }
    tensor_cores = heads // KV_HEADS not in DECODE_GROUPS
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=tensor_cores, **buffers)
    q, cache = device.q.cuda(), (device.k, device.v)
    if graph:
        # Capture on short requests, plan again, replay.
        wrapper.plan(
            torch.tensor([0, 1, 2, 3]).int(), torch.tensor([0, 1, 2]).int(), torch.tensor([1, 1, 1]).int(),
            heads, KV_HEADS, DIM, 16, q_data_type=DTYPE, sm_scale=0.2,
        )  # fmt: skip
        wrapper.run(q, cache)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = wrapper.run(q, cache)
    wrapper.plan(
        device.cache.indptr, device.cache.indices, device.cache.last_page_len, heads, KV_HEADS, DIM, 16,
        q_data_type=DTYPE, sm_scale=0.2,
    )  # fmt: skip
    if graph:
        captured.replay()
    else:
        out = wrapper.run(q, cache)
    device.check(out, scale=0.2)


@pytest.mark.parametrize("masked", [False, True])
@or_skip
def test_flashinfer_prefill(masked):
    from kits.kernels.flashinfer import BatchPrefillWithPagedKVCacheWrapper

    device = Device(16)
    masks = [torch.rand(t, n) < 0.6 for t, n in zip(QUERIES, LENGTHS, strict=True)] if masked else None
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="fa2")
    wrapper.plan(
        device.cu, device.indptr, device.indices, device.last_page_len, HEADS, KV_HEADS, DIM, 16, causal=True,
        custom_mask=torch.cat([mask.flatten() for mask in masks]).cuda() if masks else None,
        q_data_type=DTYPE, sm_scale=0.1,
    )  # fmt: skip
    out = wrapper.run(device.q.cuda(), (device.k, device.v), k_scale=2.0, v_scale=1.0)
    device.check(out, scale=0.2, masks=masks)


@or_skip
def test_flashinfer_latent():
    from kits.kernels.flashinfer_mla import BatchMLAPagedAttentionWrapper

    device = Device(1, kv_heads=1, dims=(LATENT + ROPE, 1), heads=16)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(), backend="fa2")
    wrapper.plan(
        device.cu, device.indptr, device.indices, device.seqlens, 16, LATENT, ROPE, 1, True, 0.05, DTYPE, DTYPE
    )
    q, k = device.q.cuda(), device.k[:, :, 0]
    out = wrapper.run(q[..., :LATENT].contiguous(), q[..., LATENT:].contiguous(), k[..., :LATENT], k[..., LATENT:])
    device.check(out, scale=0.05, values=LATENT)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@or_skip
def test_trtllm_decode(layout):
    from kits.kernels.trtllm import trtllm_batch_decode_with_kv_cache

    device = Device(16, queries=[1, 1, 1])
    k, v = (x.transpose(1, 2).contiguous() if layout == "HND" else x for x in (device.k, device.v))
    out = trtllm_batch_decode_with_kv_cache(
        device.q.cuda(), (k, v), workspace(), device.table, device.seqlens, 256, bmm1_scale=0.2, kv_layout=layout
    )
    device.check(out, scale=0.2)


@or_skip
def test_flash_mla():
    from kits.kernels.flashmla import flash_mla_with_kvcache, get_mla_metadata

    device = Device(64, kv_heads=1, dims=(LATENT + ROPE, 1), heads=16, queries=[2, 2, 2])
    metadata, splits = get_mla_metadata(device.seqlens, 2 * 16, 1)
    out, _ = flash_mla_with_kvcache(
        device.q.cuda().view(3, 2, 16, -1), device.k, device.table, device.seqlens, LATENT, metadata, splits,
        softmax_scale=0.05, causal=True,
    )  # fmt: skip
    device.check(out.flatten(0, 1), scale=0.05, values=LATENT)


@or_skip
def test_cutlass_mla():
    from kits.kernels.cutlass_mla import cutlass_mla_decode, cutlass_mla_get_workspace_size

    device = Device(128, kv_heads=1, dims=(LATENT + ROPE, 1), heads=16, queries=[1, 1, 1])
    size = cutlass_mla_get_workspace_size(256, 3, device=torch.device("cuda"))
    q = device.q.cuda()
    out = cutlass_mla_decode(
        q[..., :LATENT].contiguous(), q[..., LATENT:].contiguous(), device.k[:, :, 0], device.seqlens, device.table,
        torch.zeros(size, dtype=torch.uint8, device="cuda"), 0.05,
    )  # fmt: skip
    device.check(out, scale=0.05, values=LATENT)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@or_skip
def test_flex_attention(softcap):
    from kits.kernels.flex import flex_attention

    device = Device(16, lengths=[40], queries=[4])
    masks = [torch.rand(4, 40) < 0.6]
    keys, values = device.cache.keys[0].cuda(), device.cache.values[0].cuda()
    q, k, v = (x.transpose(0, 1).unsqueeze(0).contiguous() for x in (device.q.cuda(), keys, values))
    out = flex_attention(q, k, v, mask=masks[0].cuda(), scale=0.2, softcap=softcap)
    device.check(out[0].transpose(0, 1), scale=0.2, masks=masks, softcap=softcap)


@pytest.mark.parametrize(("ver", "page_size"), [(3, 16), (3, 128), (4, 1), (4, 128)])
@or_skip
def test_flash_attention_of_requests_without_keys(ver, page_size):
    """Zeros, whatever the pages hold; but version 4 loads the first listed page where one is as large as its tile."""
    from kits.kernels.flash_attn import flash_attn_with_kvcache

    device = Device(page_size, queries=[2, 2, 2])
    device.seqlens[:2] = torch.tensor([0, -3])

    def call():
        return flash_attn_with_kvcache(
            device.q.cuda(), device.k, device.v, page_table=device.table, cache_seqlens=device.seqlens,
            cu_seqlens_q=device.cu, max_seqlen_q=2, causal=True, return_softmax_lse=True, ver=ver,
        )  # fmt: skip

    for dirty in (False, True):
        device.v[device.table[0, 0]] = NAN if dirty else 0.0
        out, lse = call()
        assert out[:2].isnan().all() if dirty and ver == 4 and page_size == 128 else (out[:2] == 0).all()
        assert (out[2:4] == 0).all()
        assert (lse[:, :4] == float("-inf")).all()
        assert not out[4:].isnan().any()


@or_skip
def test_flashinfer_request_without_pages():
    from kits.kernels.flashinfer import BatchDecodeWithPagedKVCacheWrapper

    device = Device(16, queries=[1, 1, 1])
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(
        torch.tensor([0, 1, 1, 2]).int(), torch.tensor([0, 1]).int(), torch.tensor([9, 0, 9]).int(),
        HEADS, KV_HEADS, DIM, 16, q_data_type=DTYPE,
    )  # fmt: skip
    out, lse = wrapper.run(device.q.cuda(), (device.k, device.v), return_lse=True)
    assert (out[1] == 0).all()
    assert (lse[1] < -4e4).all()


@or_skip
def test_trtllm_request_of_length_zero():
    from kits.kernels.trtllm import trtllm_batch_decode_with_kv_cache

    device = Device(16, queries=[1, 1, 1])
    device.seqlens[1] = 0
    out = trtllm_batch_decode_with_kv_cache(
        device.q.cuda(), (device.k, device.v), workspace(), device.table, device.seqlens, 256, kv_layout="NHD"
    )
    # Outside the contract; whatever it is, it must be the row's own.
    assert out[1].isnan().all() or (out[1] == 0).all()
    assert not out[[0, 2]].isnan().any()


@or_skip
def test_flex_attention_query_that_sees_nothing():
    from kits.kernels.flex import flex_attention

    mask = torch.ones(4, 40, dtype=torch.bool, device="cuda")
    mask[2] = False
    q, k, v = (torch.randn(1, 2, n, DIM, dtype=DTYPE, device="cuda") for n in (4, 40, 40))
    out = flex_attention(q, k, v, mask=mask)
    assert (out[:, :, 2] == 0).all()
    assert not (out[:, :, 1] == 0).any()
