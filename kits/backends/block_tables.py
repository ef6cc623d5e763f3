"""Backends over a block table and lengths: TRT-LLM MHA, FlashMLA and CUTLASS MLA."""

from __future__ import annotations

import torch

from kits.backends.base import Capabilities
from kits.backends.paging import draft_lens, is_draft_decode, page_rows
from kits.backends.persistent import INT32, PersistentBackend, PersistentBuffers
from kits.batches import Batch
from kits.kernels import cutlass_mla, flashmla, trtllm
from kits.layers import Layer

WORKSPACE_BYTES = 128 << 20


class BlockTableBackend(PersistentBackend):
    """``seq_lens`` as the kernel takes them (new keys included) and a block table wide enough for ``max_len``."""

    column_multiple = 1

    def allocate(self, buffers: PersistentBuffers) -> None:
        columns = -(-self.max_len // self.geometry.page_size)
        self.columns = -(-columns // self.column_multiple) * self.column_multiple
        for step in self.step_prefixes():
            buffers.allocate(f"{step}cache_seqlens_int32", self.max_rows)
        for group in self.pool.groups:
            buffers.allocate(f"page_table.{group}", self.max_rows, self.columns)

    def step_prefixes(self) -> list[str]:
        return ["", *(f"step{step}." for step in range(self.draft_steps))]

    def values(self, batch: Batch) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        if is_draft_decode(batch):
            for step in range(self.draft_steps):
                values[f"step{step}.cache_seqlens_int32"] = draft_lens(batch, step).to(INT32)
        elif batch.mode == "TARGET_VERIFY":
            assert batch.spec_info is not None
            values["cache_seqlens_int32"] = batch.seq_lens + batch.spec_info.draft_tokens
        else:
            values["cache_seqlens_int32"] = batch.seq_lens.clone()
        for name, group in self.pool.groups.items():
            table = page_rows(group, batch, self.columns)
            padding = table.new_zeros(len(table), self.columns - table.shape[1])
            values[f"page_table.{name}"] = torch.cat([table, padding], dim=1)
        return values


class TRTLLMBackend(BlockTableBackend):
    """``trtllm_batch_decode_with_kv_cache``: decode only; the cache is seen in NHD pages."""

    capabilities = Capabilities(
        forward_modes=frozenset({"DECODE"}),
        graph="uniform_query",
        page_sizes=frozenset({16, 32, 64}),
        sinks=True,
        window=True,
        batch_invariant=True,
    )

    libraries = ("flashinfer",)

    def allocate(self, buffers: PersistentBuffers) -> None:
        super().allocate(buffers)
        size = WORKSPACE_BYTES if self.device.type == "cuda" else 64
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        if batch.save_kv:
            self.pool.write(layer, batch.out_cache_loc[layer.group], k, v)
        group = self.pool.groups[layer.group]
        pages = (group.num_pages, group.page_size, layer.kv_heads)
        caches = (
            group.k[layer.index].view(*pages, layer.head_dim),
            group.v[layer.index].view(*pages, layer.v_head_dim),
        )
        return trtllm.trtllm_batch_decode_with_kv_cache(
            q.contiguous(),
            caches,
            self.workspace,
            self.field(f"page_table.{layer.group}"),
            self.field("cache_seqlens_int32"),
            # A bound for every replay, not the longest row of the capture: the kernel divides its work by it.
            self.columns * group.page_size,
            bmm1_scale=layer.scale,
            bmm2_scale=1.0,
            window_left=-1 if layer.window is None else layer.window - 1,
            sinks=layer.sinks,
            kv_layout="NHD",
        )


class FlashMLABackend(BlockTableBackend):
    """``flash_mla_with_kvcache``: a uniform few queries a row, with a schedule made for the current lengths."""

    capabilities = Capabilities(
        forward_modes=frozenset({"DECODE", "TARGET_VERIFY"}),
        methods=frozenset({"mla"}),
        graph="uniform_query",
        page_sizes=frozenset({flashmla.PAGE_SIZE}),
    )

    def allocate(self, buffers: PersistentBuffers) -> None:
        super().allocate(buffers)
        probe, _ = flashmla.get_mla_metadata(
            torch.ones(1, dtype=INT32, device=self.device), self.geometry.model.q_heads, 1
        )
        for step in self.step_prefixes():
            buffers.allocate(f"{step}tile_scheduler_metadata", *probe.shape)
            buffers.allocate(f"{step}num_splits", self.max_rows + 1)

    def values(self, batch: Batch) -> dict[str, torch.Tensor]:
        values = super().values(batch)
        queries = batch.spec_info.draft_tokens if batch.mode == "TARGET_VERIFY" and batch.spec_info else 1
        for name in [name for name in values if name.endswith("cache_seqlens_int32")]:
            step = name.removesuffix("cache_seqlens_int32")
            schedule, splits = flashmla.get_mla_metadata(values[name], queries * self.geometry.model.q_heads, 1)
            values[f"{step}tile_scheduler_metadata"] = schedule
            values[f"{step}num_splits"] = splits
        return values

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        if batch.save_kv:
            self.pool.write(layer, batch.out_cache_loc[layer.group], k, v)
        group, rows = self.pool.groups[layer.group], batch.batch_size
        out, _ = flashmla.flash_mla_with_kvcache(
            q.view(rows, len(q) // rows, layer.q_heads, layer.head_dim),
            group.k[layer.index].view(group.num_pages, group.page_size, 1, layer.head_dim),
            self.field(f"page_table.{layer.group}"),
            self.field("cache_seqlens_int32"),
            layer.v_head_dim,
            self.field("tile_scheduler_metadata"),
            self.field("num_splits"),
            softmax_scale=layer.scale,
            causal=True,
        )
        return out.view(len(q), layer.q_heads, layer.v_head_dim)


class CutlassMLABackend(BlockTableBackend):
    """``cutlass_mla_decode``: decode only, a fixed number of splits under a graph."""

    capabilities = Capabilities(
        forward_modes=frozenset({"DECODE"}),
        methods=frozenset({"mla"}),
        graph="single_token",
        page_sizes=frozenset({cutlass_mla.BLOCK}),
        batch_invariant=True,
    )

    def allocate(self, buffers: PersistentBuffers) -> None:
        self.column_multiple = max(1, cutlass_mla.BLOCK // self.geometry.page_size)
        super().allocate(buffers)
        size = cutlass_mla.cutlass_mla_get_workspace_size(
            self.columns * self.geometry.page_size, self.max_rows, num_kv_splits=1, device=self.device
        )
        self.workspace = torch.empty(size, dtype=torch.uint8, device=self.device)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        if batch.save_kv:
            self.pool.write(layer, batch.out_cache_loc[layer.group], k, v)
        group, latent = self.pool.groups[layer.group], layer.v_head_dim
        return cutlass_mla.cutlass_mla_decode(
            q[..., :latent].contiguous(),
            q[..., latent:].contiguous(),
            group.k[layer.index].view(group.num_pages, group.page_size, layer.head_dim),
            self.field("cache_seqlens_int32"),
            self.field(f"page_table.{layer.group}"),
            self.workspace,
            layer.scale,
            num_kv_splits=1,
        )
