"""FlashAttention 3 and 4 over a page table, as SGLang's FlashAttentionBackend builds its metadata."""

from __future__ import annotations

from dataclasses import replace

import torch

from kits.backends.base import Capabilities
from kits.backends.paging import draft_lens, indptr, is_draft_decode, page_rows
from kits.backends.persistent import INT32, PersistentBackend, PersistentBuffers
from kits.batches import Batch
from kits.kernels import flash_attn
from kits.kernels.merge import merge_states
from kits.layers import Layer


class FA3Backend(PersistentBackend):
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
        batch_invariant=True,
    )

    def allocate(self, buffers: PersistentBuffers) -> None:
        rows, tokens, speculation = self.max_rows, self.max_tokens, self.geometry.speculation
        self.max_pages = -(-self.max_len // self.geometry.page_size)
        for step in ("", *(f"step{step}." for step in range(self.draft_steps))):
            buffers.allocate(f"{step}cache_seqlens_int32", rows)
            buffers.allocate(f"{step}cu_seqlens_k", rows + 1)
        buffers.allocate("cu_seqlens_q", rows + 1)
        buffers.allocate("tree.cache_seqlens_int32", tokens)
        buffers.allocate("tree.cu_seqlens_q", tokens + 1)
        for group in self.pool.groups:
            buffers.allocate(f"page_table.{group}", rows, self.max_pages)
            buffers.allocate(f"tree.page_table.{group}", tokens, speculation.draft_tokens if speculation else 0)

    def values(self, batch: Batch) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        kv_lens = self.kv_lens(batch)
        if is_draft_decode(batch):
            for step in range(self.draft_steps):
                kv_lens = draft_lens(batch, step)
                values[f"step{step}.cache_seqlens_int32"] = kv_lens
                values[f"step{step}.cu_seqlens_k"] = indptr(kv_lens)
        else:
            values["cache_seqlens_int32"] = kv_lens
            values["cu_seqlens_k"] = indptr(kv_lens)
        query_lens = torch.ones_like(kv_lens) if batch.extend_seq_lens is None else batch.extend_seq_lens
        values["cu_seqlens_q"] = indptr(query_lens)
        columns = min(self.max_pages, -(-int(kv_lens.max()) // self.geometry.page_size))
        for name, group in self.pool.groups.items():
            values[f"page_table.{name}"] = page_rows(group, batch, columns)
        return values | self._tree_values(batch) if is_tree(batch) else values

    def kv_lens(self, batch: Batch) -> torch.Tensor:
        """int32 ``(B,)``: keys each row attends to, its new ones included; in a tree verify the prefix alone."""
        if batch.mode == "TARGET_VERIFY" and not is_tree(batch):
            assert batch.spec_info is not None
            return batch.seq_lens + batch.spec_info.draft_tokens
        return batch.seq_lens

    def _tree_values(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Which draft keys each draft token sees, as one-slot pages in the order of the draft.

        Here every draft token is a row of its own: ``(T,)`` lengths over a ``(T, draft)`` page table.
        """
        assert batch.spec_info is not None
        assert batch.spec_info.custom_mask is not None
        draft, offset, rows = batch.spec_info.draft_tokens, 0, []
        for prefix in batch.seq_lens.tolist():
            size = draft * (prefix + draft)
            rows.append(batch.spec_info.custom_mask[offset : offset + size].view(draft, prefix + draft)[:, prefix:])
            offset += size
        visible = torch.cat(rows)
        seen_first = torch.argsort(visible.to(torch.int8), dim=1, descending=True, stable=True)
        values = {
            "tree.cache_seqlens_int32": visible.sum(dim=1).to(INT32),
            "tree.cu_seqlens_q": torch.arange(len(visible) + 1, dtype=INT32, device=self.device),
        }
        for name in self.pool.groups:
            slots = batch.out_cache_loc[name].clamp(min=0)  # a null slot, -1, is written to slot 0 and read from there
            own_slots = slots.view(-1, draft).repeat_interleave(draft, dim=0)
            values[f"tree.page_table.{name}"] = own_slots.gather(1, seen_first).to(INT32)
        return values

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        if batch.save_kv:
            self.pool.write(layer, batch.out_cache_loc[layer.group], k, v)
        page_size = self.pool.page_size
        if not is_tree(batch):
            return self._attend(q, layer, "", page_size, self.max_extend_len, causal=True)[0]
        # The tree's own keys see each other by ancestry, the prefix is seen whole: two passes, merged by their LSE.
        # A sink joins the softmax once, so neither pass has it: it takes its share of the merged row.
        passes = replace(layer, sinks=None)
        over_prefix = self._attend(q, passes, "", page_size, self.max_extend_len, causal=False)
        over_draft = self._attend(q, passes, "tree.", 1, 1, causal=False)
        out, lse = merge_states(*over_prefix, *over_draft)
        if layer.sinks is None:
            return out
        share = torch.sigmoid(lse - layer.sinks.unsqueeze(1))  # exp(lse) / (exp(lse) + exp(sink))
        return (out.float() * share.transpose(0, 1).unsqueeze(2)).to(out.dtype)

    def _attend(
        self, q: torch.Tensor, layer: Layer, part: str, page_size: int, max_seqlen_q: int, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One kernel call over the metadata of ``part``, the cache seen in pages of ``page_size``: ``(out, lse)``."""
        group = self.pool.groups[layer.group]
        pages = (group.num_slots // page_size, page_size, layer.kv_heads)
        out, lse = flash_attn.flash_attn_with_kvcache(
            q,
            group.k[layer.index].view(*pages, layer.head_dim),
            group.v[layer.index].view(*pages, layer.v_head_dim),
            page_table=self.field(f"{part}page_table.{layer.group}"),
            cache_seqlens=self.field(f"{part}cache_seqlens_int32"),
            cu_seqlens_q=self.field(f"{part}cu_seqlens_q"),
            max_seqlen_q=max_seqlen_q,
            softmax_scale=layer.scale,
            causal=causal,
            window_size=(-1, -1) if layer.window is None else (layer.window - 1, 0),
            softcap=layer.softcap or 0.0,
            sinks=None if layer.sinks is None else layer.sinks.to(q.dtype),
            return_softmax_lse=True,
            ver=self.version,
        )
        return out, lse


class FA4Backend(FA3Backend):
    """The CuTe kernels. On a CPU one emulation serves both: only the metadata differ (page 128 where it is free)."""

    version = 4
    libraries = ("flash_attn.cute",)
    capabilities = Capabilities(
        forward_modes=FA3Backend.capabilities.forward_modes,
        methods=frozenset({"dense"}),
        topk=8,
        window=True,
        softcap=True,
        sinks=True,
        batch_invariant=True,
        reads_tail="the CuTe kernels load V of the whole last tile and weigh it with 0: NaN there reaches the row "
        "(flash-attn-4 4.0.0b14 on SM 9.0, page 128)",
    )


def is_tree(batch: Batch) -> bool:
    """Whether the batch verifies a draft with more than one branch, whose mask is not causal."""
    return batch.mode == "TARGET_VERIFY" and batch.spec_info is not None and batch.spec_info.topk > 1
