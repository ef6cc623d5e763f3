"""Paged KV pools that show every wrong read and every wrong write.

Slots that no live request owns hold NaN, guard zones lie around every buffer, page 0 and request 0 are reserved for
padding, and the freed row of the request table holds ids outside the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kits.layers import DTYPES, Layer
from kits.subtest import Model

GUARD_SLOTS = 8
"""Slots of the guard zone before and after each buffer."""

TAIL_VALUE = 6.0e4
"""What the unwritten tail of an owned page holds for a kernel declared to load it: large, but finite in float16."""


REQUEST_TABLE = "req_to_token"


class KVGroup:
    """The slots, pages and request table that the layers of one kind (``full``, ``window``) share.

    ``k[layer]`` is ``(slots, kv_heads, head_dim)``, ``v[layer]`` ``(slots, kv_heads, v_head_dim)``; for mla ``v`` is
    the latent part of ``k``, a view. ``req_to_token`` is int32 ``(requests, max_len)``: slot of each position.
    """

    def __init__(
        self,
        name: str,
        layers: Sequence[Layer],
        *,
        dtype: torch.dtype,
        pages: int,
        page_size: int,
        requests: int,
        max_len: int,
        device: torch.device,
    ) -> None:
        self.name = name
        self.page_size = page_size
        self.num_pages = pages
        self.num_slots = pages * page_size
        self.stray_slot = self.num_slots + 7 * page_size
        self.req_to_token = torch.full((requests, max_len), self.stray_slot, dtype=torch.int32, device=device)
        self.req_to_token[0] = 0
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}
        self._guarded: dict[str, torch.Tensor] = {}
        self._words: dict[str, torch.Tensor] = {}
        """The raw bits of each slot as a row of int64, the fastest way to compare many."""
        for layer in layers:
            self.k[layer.index] = self._buffer(f"k[{layer.index}]", layer.kv_heads, layer.head_dim, dtype, device)
            if layer.mla:
                self.v[layer.index] = self.k[layer.index][..., : layer.v_head_dim]
            else:
                self.v[layer.index] = self._buffer(f"v[{layer.index}]", layer.kv_heads, layer.v_head_dim, dtype, device)

    def _buffer(self, name: str, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        whole = torch.full((self.num_slots + 2 * GUARD_SLOTS, heads, dim), float("nan"), dtype=dtype, device=device)
        self._guarded[name] = whole
        self._words[name] = whole.flatten(1).view(torch.int64)
        return whole[GUARD_SLOTS:-GUARD_SLOTS]

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Copies of the bits of all buffers, guard zones included, and of the request table."""
        return {name: words.clone() for name, words in self._words.items()} | {REQUEST_TABLE: self.req_to_token.clone()}

    def differences(self, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of each buffer and the request table, bool on the device: which rows differ from ``before`` in bits.

        A buffer's rows are its slots, with ``GUARD_SLOTS`` of its guard zones before and behind them.
        """
        differ = {name: (words != before[name]).any(dim=1) for name, words in self._words.items()}
        return {**differ, REQUEST_TABLE: (self.req_to_token != before[REQUEST_TABLE]).any(dim=1)}

    def poison(self, slots: torch.Tensor, value: float = float("nan")) -> None:
        """Fill ``slots`` of every layer with ``value``."""
        for layer, buffer in self.k.items():
            buffer.index_fill_(0, slots, value)
            self.v[layer].index_fill_(0, slots, value)


class KVPool:
    """All KV groups of a model; what a backend is given to read and to write."""

    def __init__(
        self,
        model: Model,
        layers: Sequence[Layer],
        *,
        pages: int,
        page_size: int,
        requests: int,
        max_len: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.page_size = page_size
        self.max_len = max_len
        self.device = device
        self.groups = {
            name: KVGroup(
                name,
                [layer for layer in layers if layer.group == name],
                dtype=DTYPES[model.dtype],
                pages=pages,
                page_size=page_size,
                requests=requests,
                max_len=max_len,
                device=device,
            )
            for name in dict.fromkeys(layer.group for layer in layers)
        }

    def write(self, layer: Layer, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store new keys and values, as an engine's pool does inside the graph.

        Args:
            slots: int64 ``(tokens,)``, the write slots of the layer's group (``batch.out_cache_loc[layer.group]``).
                -1 marks a padded token (vLLM's null slot) and goes to the reserved slot 0; without that, tensor
                indexing would wrap it to the last slot of the pool.
            k: ``(tokens, kv_heads, head_dim)`` in the pool's dtype, unscaled.
            v: ``(tokens, kv_heads, v_head_dim)``; not stored for mla, where it is part of ``k``.
        """
        group = self.groups[layer.group]
        slots = torch.where(slots == -1, 0, slots)
        group.k[layer.index].index_put_((slots,), k if layer.k_scale == 1.0 else k / layer.k_scale)
        if not layer.mla:
            group.v[layer.index].index_put_((slots,), v if layer.v_scale == 1.0 else v / layer.v_scale)
