"""FlashAttention 3 and 4 over a page table, as SGLang's FlashAttentionBackend builds its metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kits.backends.base import Backend, Capabilities
from kits.backends.paging import indptr, page_rows
from kits.backends.persistent import PersistentBuffers
from kits.batches import Batch
from kits.kernels import flash_attn
from kits.layers import Layer

INT32 = torch.int32


@dataclass
class FlashAttentionMetadata:
    """What one forward reads: whole KV extents, one page table per KV group, uniform or ragged query offsets."""

    cache_seqlens_int32: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: dict[str, torch.Tensor]
    max_seq_len_q: int


class FA3Backend(Backend):
    """``flash_attn_with_kvcache``: keys are written first, then read through the page table with the cached ones.

    ``cache_seqlens`` is the whole KV extent, so ``seq_lens`` must count the new tokens wherever the mode has them
    cached already: in DRAFT_EXTEND_V2 that is the ``total`` convention, and nothing is added to it here.
    """

    version = 3
    capabilities = Capabilities(
        forward_modes=frozenset({"EXTEND", "DECODE", "MIXED", "TARGET_VERIFY", "DRAFT_EXTEND", "DRAFT_EXTEND_V2"}),
        methods=frozenset({"dense", "swa"}),
        topk=8,
        window=True,
        softcap=True,
        sinks=True,
        kv_scales=True,
        batch_invariant=True,
    )

    def open(self, geometry, *, max_rows, max_tokens, max_len, capture_sizes) -> None:  # type: ignore[no-untyped-def]
        super().open(
            geometry, max_rows=max_rows, max_tokens=max_tokens, max_len=max_len, capture_sizes=capture_sizes
        )
        self.max_pages = -(-max_len // geometry.page_size)
        self.persistent = PersistentBuffers(self.device)
        self.persistent.allocate("cache_seqlens_int32", max_rows, dtype=INT32)
        self.persistent.allocate("cu_seqlens_q", max_rows + 1, dtype=INT32)
        self.persistent.allocate("cu_seqlens_k", max_rows + 1, dtype=INT32)
        for group in self.pool.groups:
            self.persistent.allocate(f"page_table.{group}", max_rows, self.max_pages, dtype=INT32)
        self._captured: dict[int, FlashAttentionMetadata] = {}

    def prepare(self, batch: Batch) -> None:
        values = self._values(batch)
        self.current = FlashAttentionMetadata(
            cache_seqlens_int32=values["cache_seqlens_int32"],
            cu_seqlens_q=values["cu_seqlens_q"],
            cu_seqlens_k=values["cu_seqlens_k"],
            page_table={group: values[f"page_table.{group}"] for group in self.pool.groups},
            max_seq_len_q=max(batch.extend_seq_lens_cpu or [1]),
        )

    def prepare_capture(self, batch: Batch) -> None:
        size, bind = batch.batch_size, self.persistent.bind
        self._captured[size] = FlashAttentionMetadata(
            cache_seqlens_int32=bind("cache_seqlens_int32", size),
            cu_seqlens_q=bind("cu_seqlens_q", size + 1),
            cu_seqlens_k=bind("cu_seqlens_k", size + 1),
            page_table={group: bind(f"page_table.{group}", size) for group in self.pool.groups},
            max_seq_len_q=batch.num_tokens // size,
        )
        self.prepare_replay(batch)

    def prepare_replay(self, batch: Batch) -> None:
        self.persistent.fill(self._values(batch))
        self.current = self._captured[batch.batch_size]

    def _values(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Fresh metadata of ``batch``, by the names of the persistent buffers."""
        kv_lens = self.kv_lens(batch).to(INT32)
        longest = int(kv_lens.max())
        columns = min(self.max_pages, -(-longest // self.geometry.page_size))
        query_lens = torch.ones_like(kv_lens) if batch.extend_seq_lens is None else batch.extend_seq_lens
        values = {
            "cache_seqlens_int32": kv_lens,
            "cu_seqlens_q": indptr(query_lens),
            "cu_seqlens_k": indptr(kv_lens),
        }
        for name, group in self.pool.groups.items():
            values[f"page_table.{name}"] = page_rows(group, batch, columns)
        return values

    def kv_lens(self, batch: Batch) -> torch.Tensor:
        """int32 ``(B,)``: keys each row attends to, its new ones included."""
        if batch.mode == "TARGET_VERIFY":
            assert batch.spec_info is not None
            return batch.seq_lens + batch.spec_info.draft_tokens
        return batch.seq_lens

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        if batch.save_kv:
            self.pool.write(layer, batch.out_cache_loc[layer.group], k, v)
        current, group = self.current, self.pool.groups[layer.group]
        pages = (group.num_pages, group.page_size, layer.kv_heads)
        out: torch.Tensor = flash_attn.flash_attn_with_kvcache(
            q,
            group.k[layer.index].view(*pages, layer.head_dim),
            group.v[layer.index].view(*pages, layer.v_head_dim),
            page_table=current.page_table[layer.group],
            cache_seqlens=current.cache_seqlens_int32,
            cu_seqlens_q=current.cu_seqlens_q,
            max_seqlen_q=current.max_seq_len_q,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(-1, -1) if layer.window is None else (layer.window - 1, 0),
            softcap=layer.softcap or 0.0,
            sinks=layer.sinks,
            ver=self.version,
        )
        return out

    def metadata(self) -> dict[str, Any]:
        current = self.current
        fields: dict[str, Any] = {
            "cache_seqlens_int32": current.cache_seqlens_int32,
            "cu_seqlens_q": current.cu_seqlens_q,
            "cu_seqlens_k": current.cu_seqlens_k,
        }
        for group, table in current.page_table.items():
            fields["page_table" if group == "full" else f"{group}_page_table"] = table
        return fields


class FA4Backend(FA3Backend):
    """The CuTe kernels. On a CPU only the metadata differ from FA3's: both run one emulation."""

    version = 4
    capabilities = Capabilities(
        forward_modes=FA3Backend.capabilities.forward_modes,
        methods=frozenset({"dense"}),
        topk=8,
        window=True,
        softcap=True,
        sinks=True,
        batch_invariant=True,
    )
