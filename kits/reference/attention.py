"""Scaled dot-product attention by its definition."""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one request, in float32.

    Args:
        q: ``(queries, q_heads, head_dim)``.
        k: ``(keys, kv_heads, head_dim)``; query head ``h`` reads KV head ``h // (q_heads // kv_heads)``.
        v: ``(keys, kv_heads, v_head_dim)``.
        allowed: bool ``(queries, keys)``; every query sees at least one key.
        scale: multiplies the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)`` before the mask (Gemma 2's rule).
        sinks: ``(q_heads,)`` logits that join the softmax without a value (gpt-oss's rule).

    Returns:
        float32 ``(queries, q_heads, v_head_dim)``.
    """
    groups = k.shape[1], q.shape[1] // k.shape[1]
    queries = q.float().transpose(0, 1).unflatten(0, groups)  # KV head, head of its group, query
    keys, values = (x.float().transpose(0, 1).unsqueeze(1) for x in (k, v))  # KV head, any of its group, key
    scores = queries @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(*groups, 1, 1).expand(-1, -1, len(q), 1)], dim=3)
    weights = torch.softmax(scores, dim=3)[..., : len(k)]
    return (weights @ values).flatten(0, 1).transpose(0, 1)
