"""The arithmetic that all emulations share: attention of one request's queries over one request's keys."""

from __future__ import annotations

import torch

NEGATIVE_INFINITY = float("-inf")


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    visible: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request in float32.

    ``q`` (T, Hq, D); ``k`` (N, Hkv, D); ``v`` (N, Hkv, Dv); Hq a multiple of Hkv, and query head ``h`` uses KV head
    ``h // (Hq / Hkv)``. ``visible`` (T, N) bool, None for all. Scores are multiplied by ``scale``, then capped
    (``softcap * tanh(score / softcap)``, 0 for none), then masked. ``sinks`` (Hq,) adds one key per head with
    that score (neither scaled nor capped) and a zero value.

    Returns the output (T, Hq, Dv) float32 and the natural-log LSE (T, Hq) float32. A query without a visible key gets
    zeros, and -inf (with sinks: the sink's score).
    """
    tokens, q_heads, dim = q.shape
    keys, kv_heads, _ = k.shape
    group = q_heads // kv_heads
    rows = q.float().view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * tokens, dim)
    scores = torch.matmul(rows, k.float().permute(1, 2, 0)).view(kv_heads, group, tokens, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, NEGATIVE_INFINITY)
    lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(kv_heads, group, 1, 1))
    # exp(-inf - -inf) is NaN: a query that sees nothing subtracts 0 and gets weights of exactly 0.
    weights = torch.exp(scores - lse.masked_fill(lse == NEGATIVE_INFINITY, 0.0))
    out = torch.matmul(weights.view(kv_heads, group * tokens, keys), v.float().transpose(0, 1))
    out = out.view(kv_heads, group, tokens, v.shape[-1]).permute(2, 0, 1, 3).reshape(tokens, q_heads, v.shape[-1])
    return out, lse.view(q_heads, tokens).transpose(0, 1)


def causal_window(
    tokens: int, first_position: int, first_key: int, keys: int, *, left: int, right: int, device: torch.device
) -> torch.Tensor | None:
    """Mask (tokens, keys) of a band, or None where it hides nothing.

    Query ``i`` stands at position ``first_position + i``, key ``j`` at ``first_key + j``; the key is visible when
    ``position - left <= key <= position + right``. -1 leaves that side open. Causal is ``right = 0``.
    """
    last_key = first_key + keys - 1
    cuts_right = right >= 0 and first_position + right < last_key
    cuts_left = left >= 0 and first_position + tokens - 1 - left > first_key
    if not (cuts_left or cuts_right):
        return None
    position = torch.arange(first_position, first_position + tokens, device=device).unsqueeze(1)
    key = torch.arange(first_key, first_key + keys, device=device).unsqueeze(0)
    if not cuts_left:
        return key <= position + right
    if not cuts_right:
        return key >= position - left
    return (key >= position - left) & (key <= position + right)


def merge_parts(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of `attend` over disjoint sets of keys, as one. A part without keys has an LSE of -inf and adds zeros."""
    if len(parts) == 1:
        return parts[0]
    outs = torch.stack([out for out, _ in parts])
    lses = torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == NEGATIVE_INFINITY, 0.0))
    return (outs * weights.unsqueeze(-1)).sum(dim=0), lse
