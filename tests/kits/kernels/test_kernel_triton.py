"""Our Triton kernels, in the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_formula import attention, offsets, worst

pytest.importorskip("triton")

from kits.kernels.triton_ops import decode_attention, extend_attention

SLOTS = 160
TOLERANCE = 4e-3  # float16 inputs and outputs of size about 1
bounded = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Problem:
    """A pool in which only the slots of live requests hold numbers; everything else is NaN."""

    def __init__(self, prefixes, extends, heads, dims, seed, dtype=torch.float16):
        self.prefixes, self.extends = prefixes, extends
        self.q_heads, self.kv_heads = heads
        self.dim, self.v_dim = dims
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        tokens = sum(extends)
        self.k_buffer = torch.full((SLOTS, self.kv_heads, self.dim), float("nan"), dtype=dtype)
        latent = self.dim != self.v_dim
        self.v_buffer = (
            self.k_buffer[..., : self.v_dim]
            if latent
            else torch.full((SLOTS, self.kv_heads, self.v_dim), float("nan"), dtype=dtype)
        )
        self.kv_indptr = offsets(prefixes)
        self.kv_indices = torch.randperm(SLOTS, generator=generator)[: sum(prefixes)].int()
        used = self.kv_indices.long()
        self.k_buffer[used] = randn(len(used), self.kv_heads, self.dim)
        if not latent:
            self.v_buffer[used] = randn(len(used), self.kv_heads, self.v_dim)
        self.qo_indptr = offsets(extends)
        self.q = randn(tokens, self.q_heads, self.dim)
        self.k_new = randn(tokens, self.kv_heads, self.dim)
        self.v_new = self.k_new[..., : self.v_dim] if latent else randn(tokens, self.kv_heads, self.v_dim)
        self.out = torch.full((tokens, self.q_heads, self.v_dim), float("nan"), dtype=dtype)
        self.scale = 1.3 / self.dim**0.5

    def slots(self, row):
        return self.kv_indices[self.kv_indptr[row] : self.kv_indptr[row + 1]].long()

    def tokens(self, row):
        return slice(int(self.qo_indptr[row]), int(self.qo_indptr[row + 1]))

    def extend(self, **options):
        extend_attention(
            self.q, self.k_new, self.v_new, self.k_buffer, self.v_buffer, self.qo_indptr, self.kv_indptr,
            self.kv_indices, self.out, scale=self.scale, max_extend_len=max(self.extends), **options,
        )  # fmt: skip
        return self.out

    def decode(self, **options):
        decode_attention(
            self.q, self.k_buffer, self.v_buffer, self.kv_indptr, self.kv_indices, self.out, scale=self.scale, **options
        )
        return self.out


heads = st.sampled_from([(4, 4), (4, 2), (4, 1), (10, 2), (1, 1), (6, 3)])
dims = st.sampled_from([(64, 64), (16, 16), (80, 80), (48, 32)])
seeds = st.integers(0, 2**31)
features = st.fixed_dictionaries(
    {
        "window": st.sampled_from([-1, 1, 3, 8, 100]),
        "softcap": st.sampled_from([0.0, 2.5]),
        "scales": st.sampled_from([(1.0, 1.0), (0.5, 1.75)]),
        "with_sinks": st.booleans(),
    }
)


def sinks_for(problem, wanted):
    return torch.linspace(-1.0, 2.0, problem.q_heads) if wanted else None


@bounded
@given(lens=st.lists(st.integers(0, 70), min_size=1, max_size=4), heads=heads, dims=dims, seed=seeds, use=features)
def test_decode_is_attention_over_the_listed_slots(lens, heads, dims, seed, use):
    if sum(lens) > SLOTS:
        lens = lens[:2]
    problem = Problem(lens, [1] * len(lens), heads, dims, seed)
    sinks = sinks_for(problem, use["with_sinks"])
    k_scale, v_scale = use["scales"]
    window = use["window"]
    out = problem.decode(window=window, softcap=use["softcap"], sinks=sinks, k_scale=k_scale, v_scale=v_scale)
    for row, length in enumerate(lens):
        slots = problem.slots(row)
        expected, _ = attention(
            problem.q[row : row + 1],
            problem.k_buffer[slots].float() * k_scale,
            problem.v_buffer[slots].float() * v_scale,
            scale=problem.scale,
            softcap=use["softcap"],
            sinks=sinks,
            sees=lambda i, j, n=length: window < 0 or j > n - 1 - window,
        )
        assert worst(out[row : row + 1], expected) < TOLERANCE, f"row {row}"


@bounded
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=4),
    heads=heads,
    dims=dims,
    seed=seeds,
    use=features,
    causal=st.booleans(),
    masked=st.booleans(),
)
def test_extend_is_attention_over_prefix_and_new_keys(rows, heads, dims, seed, use, causal, masked):
    prefixes, extends = [p for p, _ in rows], [e for _, e in rows]
    if not any(extends):
        extends[0] = 1
    problem = Problem(prefixes, extends, heads, dims, seed)
    sinks = sinks_for(problem, use["with_sinks"])
    k_scale, v_scale = use["scales"]
    window = use["window"]
    options = {}
    masks = []
    if masked:
        generator = torch.Generator().manual_seed(seed)
        masks = [torch.rand(e, p + e, generator=generator) < 0.6 for p, e in zip(prefixes, extends, strict=True)]
        options["custom_mask"] = torch.cat([mask.flatten() for mask in masks])
        options["mask_indptr"] = offsets([mask.numel() for mask in masks])
    out = problem.extend(
        causal=causal, window=window, softcap=use["softcap"], sinks=sinks, k_scale=k_scale, v_scale=v_scale, **options
    )
    for row, prefix in enumerate(prefixes):
        slots, tokens = problem.slots(row), problem.tokens(row)

        def sees(i, j, row=row, prefix=prefix):
            allowed = bool(masks[row][i, j]) if masked else (j <= prefix + i or not causal)
            return allowed and (window < 0 or j > prefix + i - window)

        expected, _ = attention(
            problem.q[tokens],
            torch.cat([problem.k_buffer[slots].float() * k_scale, problem.k_new[tokens].float()]),
            torch.cat([problem.v_buffer[slots].float() * v_scale, problem.v_new[tokens].float()]),
            scale=problem.scale,
            softcap=use["softcap"],
            sinks=sinks,
            sees=sees,
        )
        assert worst(out[tokens], expected) < TOLERANCE, f"row {row}"
