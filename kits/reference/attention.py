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
    group = q.shape[1] // k.shape[1]
    outputs = []
    for head in range(q.shape[1]):
        keys, values = k[:, head // group].float(), v[:, head // group].float()
        scores = q[:, head].float() @ keys.T * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~allowed, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].float().expand(len(scores), 1)], dim=1)
        weights = torch.softmax(scores, dim=1)[:, : len(keys)]
        outputs.append(weights @ values)
    return torch.stack(outputs, dim=1)
