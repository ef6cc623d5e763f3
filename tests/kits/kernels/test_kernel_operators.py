"""What holds for all operators: a capture runs no kernel, schemas say what is written; flex_attention; merging."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_formula import NAN, Paged, attention, offsets, worst
from torch._subclasses.fake_tensor import FakeTensorMode

from kits.kernels import cutlass_mla, provenance, trtllm
from kits.kernels.flash_attn import flash_attn_with_kvcache
from kits.kernels.flashmla import get_mla_metadata
from kits.kernels.flex import flex_attention
from kits.kernels.merge import merge_states
from kits.needs import interpreter_problem

ROOT = Path(__file__).parents[3]
DEFINES_OPS = (cutlass_mla, trtllm)  # of whose functions these tests call none


def flash_attn_arguments():
    cache = Paged([9, 20], 16, 2, 16, 16, seed=1)
    q = cache.randn(2, 4, 16)
    tensors = (q, cache.k, cache.v, cache.table, cache.seqlens, offsets([1, 1]))
    return *tensors, 1, 0.25, True, -1, -1, 0.0, None, None, None, 3


def merge_arguments():
    return torch.randn(3, 4, 8), torch.randn(4, 3), torch.randn(3, 4, 8), torch.randn(4, 3)


def flex_arguments():
    mask = torch.ones(3, 7, dtype=torch.bool)
    return torch.randn(1, 4, 3, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8), mask, 0.3, 0.0


def cutlass_arguments():
    cache = Paged([9, 20], 128, 1, 576, 1, seed=1, spare_columns=0)
    q = cache.randn(2, 2, 576)
    workspace = torch.zeros(1, dtype=torch.uint8)
    return q[..., :512], q[..., 512:], cache.k[:, :, 0], cache.seqlens, cache.table, workspace, 0.1, 1


def trtllm_arguments():
    cache = Paged([9, 20], 16, 2, 16, 16, seed=1)
    q = cache.randn(2, 4, 16)
    workspace = torch.zeros(1, dtype=torch.uint8)
    tensors = (q, cache.k, cache.v, workspace, cache.table, cache.seqlens)
    return *tensors, 64, 0.2, 1.0, -1, torch.empty_like(q), None, "NHD", 1


def flash_mla_arguments():
    cache = Paged([9, 200], 64, 1, 24, 1, seed=1)
    metadata, splits = get_mla_metadata(cache.seqlens, 2, 1)
    return cache.randn(2, 1, 2, 24), cache.k, cache.table, cache.seqlens, 16, metadata, splits, 0.3, True


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("flash_attn_with_kvcache", flash_attn_arguments),
        ("merge_states", merge_arguments),
        ("flex_attention", flex_arguments),
        ("cutlass_mla_decode", cutlass_arguments),
        ("trtllm_batch_decode", trtllm_arguments),
        ("flash_mla_metadata", lambda: (torch.tensor([9, 200], dtype=torch.int32), 2, 1)),
        ("flash_mla_with_kvcache", flash_mla_arguments),
    ],
)
def test_schema_and_shape_function_agree_with_what_runs(name, arguments):
    operator = getattr(torch.ops.attnmatrix, name).default
    torch.library.opcheck(operator, arguments(), test_utils=("test_schema", "test_faketensor"))


def test_no_kernel_runs_on_fake_tensors():
    fake = FakeTensorMode()
    q, k, v, table, seqlens, cu, *_ = (
        fake.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in flash_attn_arguments()
    )
    with provenance.track() as ran, fake:
        out, lse = flash_attn_with_kvcache(
            q, k, v, page_table=table, cache_seqlens=seqlens, cu_seqlens_q=cu, max_seqlen_q=1, return_softmax_lse=True
        )
    assert out.shape == q.shape
    assert lse.shape == (4, 2)
    assert ran == set()


def test_trackers_nest_and_end():
    with provenance.track() as outer:
        with provenance.track() as inner:
            provenance.note("native")
        provenance.note("emulated")
    provenance.note("interpreted")
    assert inner == {"native"}
    assert outer == {"native", "emulated"}


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 6),
    keys=st.integers(1, 30),
    softcap=st.sampled_from([0.0, 1.5]),
    masked=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_flex_attention_matches_float64(tokens, keys, softcap, masked, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(tokens, 4, 16, generator=generator), torch.randn(keys, 2, 16, generator=generator)
    v = torch.randn(keys, 2, 8, generator=generator)
    mask = torch.rand(tokens, keys, generator=generator) < 0.5
    out = flex_attention(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), mask=mask if masked else None, scale=0.3, softcap=softcap
    )
    expected, _ = attention(q, k, v, scale=0.3, softcap=softcap, sees=lambda i, j: not masked or bool(mask[i, j]))
    assert worst(out[0].transpose(0, 1), expected) < 1e-5


def test_flex_attention_loads_hidden_keys():
    q, k, v, mask, *_ = flex_arguments()
    mask[:, 6] = False
    v[0, 0, 6] = NAN
    out = flex_attention(q, k, v, mask=mask)
    assert out[0, :2].isnan().all()
    assert not out[0, 2:].isnan().any()
    with pytest.raises(ValueError, match="mask must be bool"):
        flex_attention(q, k, v, mask=mask.int())
    with pytest.raises(ValueError, match="do not fit"):
        flex_attention(q, k, v[:, :, :5])


@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 9), second=st.integers(0, 9), seed=st.integers(0, 2**31))
def test_merged_states_are_the_attention_over_all_keys(first, second, seed):
    cache = Paged([first, second, first + second], 16, 2, 16, 16, seed=seed)
    q = cache.randn(3, 4, 16)
    parts = [attention(q, cache.keys[row], cache.values[row], scale=0.3) for row in (0, 1)]
    expected = attention(q, torch.cat(cache.keys[:2]), torch.cat(cache.values[:2]), scale=0.3)
    out, lse = merge_states(*(x for out, lse in parts for x in (out.float(), lse.T.float())))
    assert worst(out, expected[0]) < 1e-5
    assert worst(lse, expected[1].T) < 1e-5


def test_a_part_without_keys_counts_for_nothing_whatever_it_holds():
    out, lse = torch.randn(3, 4, 8), torch.randn(4, 3)
    empty, nowhere = torch.full_like(out, float("nan")), torch.full_like(lse, float("-inf"))
    for merged, merged_lse in (merge_states(out, lse, empty, nowhere), merge_states(empty, nowhere, out, lse)):
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)
    far, _ = merge_states(out, lse, empty, torch.full_like(lse, -300.0))
    assert far.isnan().all(), "keys that weigh next to nothing are keys"
    merged, merged_lse = merge_states(empty, nowhere, empty, nowhere)
    assert torch.equal(merged, torch.zeros_like(out))
    assert torch.equal(merged_lse, nowhere)


def test_states_in_another_layout_are_refused():
    out, lse = torch.zeros(3, 4, 8), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="lse \\(heads, tokens\\)"):
        merge_states(out, lse, out, lse)


@pytest.mark.parametrize("early", [False, True])
def test_triton_is_interpreted_however_it_was_imported(early):
    triton, numpy = map(pytest.importorskip, ("triton", "numpy"))
    if problem := interpreter_problem(triton.__version__, numpy.__version__):
        pytest.skip(problem)
    code = f"""
if {early}: import triton
from kits.kernels import _triton, triton_ops
assert _triton.INTERPRETED
"""
    environment = {**os.environ, "ATTNMATRIX_DEVICE": "cpu"}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=ROOT)


def test_without_triton_the_package_is_unavailable():
    code = """
import sys
sys.modules["triton"] = None
from kits.errors import Unavailable
try:
    from kits.kernels import triton_ops
except Unavailable as reason:
    assert reason.kind == "package", reason.kind
else:
    raise SystemExit("imported")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
