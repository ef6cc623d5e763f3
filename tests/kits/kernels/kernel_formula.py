"""Attention written out in float64, key by key, for comparing kernels with. Shares nothing with `kits`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

NAN = float("nan")
OUTSIDE = 1 << 20  # an id that lies in no cache


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    sees: Callable[[int, int], bool] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (T, Hq, D), k (N, Hkv, D), v (N, Hkv, Dv); ``sees(i, j)``: query i sees key j. Returns out, natural-log lse."""
    queries, keys, values = (x.double().numpy() for x in (q, k, v))
    tokens, q_heads, _ = queries.shape
    group = q_heads // keys.shape[1]
    out = np.zeros((tokens, q_heads, values.shape[2]))
    lse = np.full((tokens, q_heads), -math.inf)
    for i in range(tokens):
        seen = [j for j in range(len(keys)) if sees is None or sees(i, j)]
        for h in range(q_heads):
            scores = [scale * float(np.dot(queries[i, h], keys[j, h // group])) for j in seen]
            if softcap:
                scores = [softcap * math.tanh(s / softcap) for s in scores]
            everything = scores + ([float(sinks[h])] if sinks is not None else [])
            if not everything:
                continue
            top = max(everything)
            lse[i, h] = top + math.log(sum(math.exp(s - top) for s in everything))
            for j, s in zip(seen, scores, strict=True):
                out[i, h] += math.exp(s - lse[i, h]) * values[j, h // group]
    return torch.from_numpy(out), torch.from_numpy(lse)


def offsets(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """0 and the running sums of ``lengths``."""
    return torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=dtype)


def worst(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference; NaN counts as infinite, equal infinities as equal."""
    difference = torch.where(actual.double() == expected, 0.0, (actual.double() - expected).abs())
    return torch.nan_to_num(difference, nan=math.inf).max().item() if difference.numel() else 0.0


class Paged:
    """A paged cache that holds numbers in the slots of its requests and NaN everywhere else.

    ``table`` has ids outside the cache behind the pages of each row, ``indices``/``indptr`` list the same pages flat.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        page_size: int,
        kv_heads: int,
        dim: int,
        v_dim: int,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        spare_columns: int = 1,
    ) -> None:
        self.lengths, self.page_size = list(lengths), page_size
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // page_size) for length in lengths]
        self.pages = sum(counts) + 3
        order = torch.randperm(self.pages, generator=generator).tolist()
        self.table = torch.full((len(lengths), max(counts) + spare_columns), OUTSIDE, dtype=torch.int32)
        self.k = torch.full((self.pages, page_size, kv_heads, dim), NAN, dtype=dtype)
        self.v = torch.full((self.pages, page_size, kv_heads, v_dim), NAN, dtype=dtype)
        flat: list[int] = []
        self.keys, self.values = [], []
        for row, length in enumerate(lengths):
            own = [order.pop() for _ in range(counts[row])]
            flat += own
            self.table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
            keys = torch.randn(length, kv_heads, dim, generator=generator).to(dtype)
            values = torch.randn(length, kv_heads, v_dim, generator=generator).to(dtype)
            for position in range(length):
                page, slot = own[position // page_size], position % page_size
                self.k[page, slot], self.v[page, slot] = keys[position], values[position]
            self.keys.append(keys)
            self.values.append(values)
        self.seqlens = torch.tensor(self.lengths, dtype=torch.int32)
        self.indices = torch.tensor(flat, dtype=torch.int32)
        self.indptr = offsets(counts)
        self.last_page_len = torch.tensor(
            [length - (count - 1) * page_size if count else 0 for length, count in zip(lengths, counts, strict=True)],
            dtype=torch.int32,
        )
        self.generator = generator
        self.dtype = dtype

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)
