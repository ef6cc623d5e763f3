"""Merging two attention results over disjoint sets of keys by their log-sum-exp."""

from __future__ import annotations

import torch

from kits.kernels import _ops


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the union of two disjoint sets of keys, given the attention over each.

    ``out_a``, ``out_b`` (T, Hq, Dv); ``lse_a``, ``lse_b`` (Hq, T) float32, the layout of FlashAttention, and the
    **natural** logarithm: a producer whose LSE is in base 2 (FlashInfer) must be converted first. A part without keys
    has an LSE of -inf and counts for nothing, whatever its ``out`` holds; with both empty the result is zeros and -inf.

    Returns ``out`` in ``out_a``'s dtype and ``lse`` (Hq, T) float32. Convention source: ``merge_state`` of
    FlashInfer and ``merge_state_v2`` of sgl_kernel, except for the layout and base of the LSE.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or lse_a.shape != (out_a.shape[1], out_a.shape[0]):
        raise ValueError(
            f"merge_states: out must be (tokens, heads, dim) and lse (heads, tokens), not {tuple(out_a.shape)}, "
            f"{tuple(lse_a.shape)} and {tuple(out_b.shape)}, {tuple(lse_b.shape)}"
        )
    out, lse = _op(out_a, lse_a, out_b, lse_b)
    return out, lse


def _merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch on either device: elementwise, so there is nothing for a library to do differently."""
    lse = torch.logaddexp(lse_a, lse_b)
    # exp(-inf - -inf) is NaN; with both parts empty both weights are 0.
    shift = lse.masked_fill(lse == float("-inf"), 0.0)
    merged = _weighted(out_a, lse_a, shift) + _weighted(out_b, lse_b, shift)
    return merged.to(out_a.dtype), lse


def _weighted(out: torch.Tensor, lse: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """float32; 0 where the part has no keys: a kernel may leave NaN there, and 0 times NaN is NaN."""
    weight, empty = (x.transpose(0, 1).unsqueeze(2) for x in (torch.exp(lse - shift), lse == float("-inf")))
    return (out.float() * weight).masked_fill(empty, 0.0)


def _fake(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(out_a), torch.empty_like(lse_a)


_op = _ops.define(
    "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    cpu=_merge,
    cuda=_merge,
    fake=_fake,
)
