"""Attention written out in float64, key by key, for comparing kernels with. Shares nothing with `kits`."""

from __future__ import annotations

import math

import numpy as np
import torch


def attention(q, k, v, *, scale, sees=None, softcap=0.0, sinks=None):
    """q (T, Hq, D), k (N, Hkv, D), v (N, Hkv, Dv); ``sees(i, j)``: query i sees key j. Returns out, natural-log lse."""
    q, k, v = (np.asarray(x.double()) for x in (q, k, v))
    tokens, q_heads, _ = q.shape
    group = q_heads // k.shape[1]
    out = np.zeros((tokens, q_heads, v.shape[2]))
    lse = np.full((tokens, q_heads), -math.inf)
    for i in range(tokens):
        keys = [j for j in range(len(k)) if sees is None or sees(i, j)]
        for h in range(q_heads):
            scores = [scale * float(np.dot(q[i, h], k[j, h // group])) for j in keys]
            if softcap:
                scores = [softcap * math.tanh(s / softcap) for s in scores]
            everything = scores + ([float(sinks[h])] if sinks is not None else [])
            if not everything:
                continue
            top = max(everything)
            total = sum(math.exp(s - top) for s in everything)
            lse[i, h] = top + math.log(total)
            for j, s in zip(keys, scores, strict=True):
                out[i, h] += math.exp(s - lse[i, h]) * v[j, h // group]
    return torch.from_numpy(out), torch.from_numpy(lse)


def offsets(lengths, dtype=torch.int32):
    """0 and the running sums of ``lengths``."""
    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=dtype)


def worst(actual, expected):
    """Largest absolute difference; NaN counts as infinite."""
    if not actual.numel():
        return 0.0
    return torch.nan_to_num((actual.double() - expected).abs(), nan=math.inf).max().item()
