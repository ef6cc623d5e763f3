"""FlashInfer's wrappers over flat slot lists, as SGLang's flashinfer backends use them.

Every batch is planned on the host; a captured batch size has wrappers of its own over fixed buffers, which are planned
again before each replay. Pages are single slots, so that any cache layout can be said.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kits.backends.base import Backend, Capabilities, Geometry
from kits.backends.paging import draft_lens, gather_draft_slots, gather_slots, indptr, is_draft_decode
from kits.backends.persistent import INT32, PersistentBuffers
from kits.batches import Batch
from kits.kernels.flashinfer import (
    DECODE_GROUPS,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)
from kits.kernels.flashinfer_mla import BatchMLAPagedAttentionWrapper
from kits.layers import Layer
from kits.pools import KVGroup

WORKSPACE_BYTES = 256 << 20
"""A plan under a graph splits the keys over all multiprocessors, and keeps a float32 tile of 64 or 128 queries for each
part: 43 MB for ten heads of 64 on an H200."""


@dataclass(frozen=True)
class SlotLists:
    """What one wrapper is planned on; int32 but for the mask. ``tokens`` is ``qo_indptr[-1]``."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: torch.Tensor
    tokens: int
    custom_mask: torch.Tensor | None


class Kernels(ABC):
    """One family of wrappers: how to make, plan and run them."""

    def __init__(self, geometry: Geometry, workspace: torch.Tensor) -> None:
        self.model, self.dtype, self.workspace = geometry.model, geometry.dtype, workspace

    @abstractmethod
    def new_wrapper(self, mode: str, buffers: dict[str, torch.Tensor] | None) -> Any:
        """A wrapper for batches of ``mode``; over fixed ``buffers`` where it is to be captured."""

    @abstractmethod
    def plan(self, wrapper: Any, lists: SlotLists, mode: str, group: str) -> None:
        """Plan one wrapper."""

    @abstractmethod
    def run(self, wrapper: Any, q: torch.Tensor, layer: Layer, group: KVGroup) -> torch.Tensor:
        """Run it over the planned tokens ``q``."""


class PagedKernels(Kernels):
    """Decode and prefill wrappers, for dense and sliding-window attention."""

    def new_wrapper(self, mode: str, buffers: dict[str, torch.Tensor] | None) -> Any:
        graph, fixed = buffers is not None, buffers or {}
        if mode == "DECODE":
            return BatchDecodeWithPagedKVCacheWrapper(
                self.workspace,
                "NHD",
                use_cuda_graph=graph,
                use_tensor_cores=self.model.q_heads // self.model.kv_heads not in DECODE_GROUPS,
                paged_kv_indptr_buffer=fixed.get("kv_indptr"),
                paged_kv_indices_buffer=fixed.get("kv_indices"),
                paged_kv_last_page_len_buffer=fixed.get("kv_lens"),
            )
        masked = mode == "TARGET_VERIFY"
        return BatchPrefillWithPagedKVCacheWrapper(
            self.workspace,
            "NHD",
            use_cuda_graph=graph,
            qo_indptr_buf=fixed.get("qo_indptr"),
            paged_kv_indptr_buf=fixed.get("kv_indptr"),
            paged_kv_indices_buf=fixed.get("kv_indices"),
            paged_kv_last_page_len_buf=fixed.get("kv_lens"),
            custom_mask_buf=fixed.get("custom_mask") if masked else None,
            mask_indptr_buf=fixed.get("mask_indptr") if masked else None,
            backend="fa2",  # one kernel for all masks; "auto" takes another without one, and compiles it for minutes
        )

    def plan(self, wrapper: Any, lists: SlotLists, mode: str, group: str) -> None:
        model = self.model
        options: dict[str, Any] = {
            "window_left": (model.window or 0) - 1 if group == "window" else -1,
            "logits_soft_cap": model.softcap,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
            "sm_scale": model.scale,
        }
        pages = (lists.kv_indptr, lists.kv_indices, torch.ones_like(lists.kv_lens))
        heads = (model.q_heads, model.kv_heads, model.head_dim, 1)
        if mode == "DECODE":
            wrapper.plan(*pages, *heads, **options)
        else:
            causal = lists.custom_mask is None
            wrapper.plan(lists.qo_indptr, *pages, *heads, custom_mask=lists.custom_mask, causal=causal, **options)

    def run(self, wrapper: Any, q: torch.Tensor, layer: Layer, group: KVGroup) -> torch.Tensor:
        caches = (group.k[layer.index].unsqueeze(1), group.v[layer.index].unsqueeze(1))
        out: torch.Tensor = wrapper.run(q, caches, k_scale=layer.k_scale, v_scale=layer.v_scale)
        return out


class LatentKernels(Kernels):
    """The latent-attention wrapper, absorbed: queries meet the cached latents directly. Causal, so chains only."""

    def new_wrapper(self, mode: str, buffers: dict[str, torch.Tensor] | None) -> Any:
        fixed = buffers or {}
        return BatchMLAPagedAttentionWrapper(
            self.workspace,
            use_cuda_graph=buffers is not None,
            qo_indptr=fixed.get("qo_indptr"),
            kv_indptr=fixed.get("kv_indptr"),
            kv_indices=fixed.get("kv_indices"),
            kv_len_arr=fixed.get("kv_lens"),
        )

    def plan(self, wrapper: Any, lists: SlotLists, mode: str, group: str) -> None:
        model = self.model
        wrapper.plan(
            lists.qo_indptr,
            lists.kv_indptr,
            lists.kv_indices,
            lists.kv_lens.to(INT32),
            model.q_heads,
            model.v_head_dim,
            model.head_dim - model.v_head_dim,
            1,
            mode != "DECODE",
            model.scale,
            self.dtype,
            self.dtype,
        )

    def run(self, wrapper: Any, q: torch.Tensor, layer: Layer, group: KVGroup) -> torch.Tensor:
        latent, cache = layer.v_head_dim, group.k[layer.index]
        out: torch.Tensor = wrapper.run(
            q[..., :latent].contiguous(), q[..., latent:].contiguous(), cache[..., :latent], cache[..., latent:]
        )
        return out


class FlashInferBackend(Backend):
    """Wrappers by name (``full``, ``window``, ``step1.full``): one set for eager batches, one per captured size.

    New keys are written before they are read.
    """

    capabilities = Capabilities(
        forward_modes=frozenset({"EXTEND", "DECODE", "MIXED", "TARGET_VERIFY", "DRAFT_EXTEND"}),
        methods=frozenset({"dense", "swa", "mla"}),
        topk=8,
        window=True,
        softcap=True,
        kv_scales=True,
        fills_at_capture=frozenset({"DRAFT_EXTEND"}),
    )

    libraries = ("flashinfer", "flashinfer.mla")

    def open(
        self, geometry: Geometry, *, max_rows: int, max_tokens: int, max_len: int, capture_sizes: Sequence[int]
    ) -> None:
        super().open(geometry, max_rows=max_rows, max_tokens=max_tokens, max_len=max_len, capture_sizes=capture_sizes)
        size = WORKSPACE_BYTES if self.device.type == "cuda" else 64
        self.workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        family = LatentKernels if geometry.model.method == "mla" else PagedKernels
        self.kernels: Kernels = family(geometry, self.workspace)
        self.buffers = PersistentBuffers(self.device)
        steps = geometry.speculation.steps if geometry.speculation is not None else 0
        for part in ("", *(f"step{step}." for step in range(steps))):
            for group in self.pool.groups:
                self.buffers.allocate(f"{part}{group}.qo_indptr", max_tokens + 1)
                self.buffers.allocate(f"{part}{group}.kv_indptr", max_tokens + 1)
                self.buffers.allocate(f"{part}{group}.kv_indices", max_tokens * max_len)
                self.buffers.allocate(f"{part}{group}.kv_lens", max_tokens)
                self.buffers.allocate(f"{part}{group}.mask_indptr", max_rows + 1)
                self.buffers.allocate(f"{part}{group}.custom_mask", max_tokens * max_len, dtype=torch.uint8)
        self.eager: dict[tuple[str, str], Any] = {}
        self.captured: dict[int, dict[str, Any]] = {}

    def prepare(self, batch: Batch) -> None:
        wrappers = {}
        for name in self._names(batch):
            key = (batch.mode, name)
            if key not in self.eager:
                self.eager[key] = self.kernels.new_wrapper(batch.mode, None)
            wrappers[name] = self.eager[key]
        self._plan_all(batch, wrappers, batch.extend_seq_lens)

    def prepare_capture(self, batch: Batch) -> None:
        rows = batch.num_tokens if is_draft_decode(batch) else batch.batch_size
        self.captured[batch.batch_size] = {
            name: self.kernels.new_wrapper(batch.mode, self._fixed_buffers(name, rows)) for name in self._names(batch)
        }
        extend_lens = batch.extend_seq_lens
        if extend_lens is not None:
            # The first plan of a graph's wrapper fixes its number of tokens: plan for full rows, ragged ones follow.
            extend_lens = torch.full_like(extend_lens, batch.num_tokens // batch.batch_size)
        self._plan_all(batch, self.captured[batch.batch_size], extend_lens)

    def prepare_replay(self, batch: Batch) -> None:
        self._plan_all(batch, self.captured[batch.batch_size], batch.extend_seq_lens)

    def _names(self, batch: Batch) -> list[str]:
        steps = range(batch.spec_info.steps) if is_draft_decode(batch) and batch.spec_info else ()
        parts = [f"step{step}." for step in steps] or [""]
        return [f"{part}{group}" for part in parts for group in self.pool.groups]

    def _fixed_buffers(self, name: str, rows: int) -> dict[str, torch.Tensor]:
        """The buffers that a graph of ``rows`` rows binds, by the field they hold."""
        return {
            "qo_indptr": self.buffers.buffers[f"{name}.qo_indptr"][: rows + 1],
            "kv_indptr": self.buffers.buffers[f"{name}.kv_indptr"][: rows + 1],
            "kv_indices": self.buffers.buffers[f"{name}.kv_indices"],
            "kv_lens": self.buffers.buffers[f"{name}.kv_lens"][:rows],
            "mask_indptr": self.buffers.buffers[f"{name}.mask_indptr"][: rows + 1],
            "custom_mask": self.buffers.buffers[f"{name}.custom_mask"],
        }

    def _plan_all(self, batch: Batch, wrappers: dict[str, Any], extend_lens: torch.Tensor | None) -> None:
        self.wrappers, self.lists = wrappers, {}
        for name, wrapper in wrappers.items():
            part, _, group = name.rpartition(".")
            self.lists[name] = self._lists(batch, part, group, extend_lens)
            self.kernels.plan(wrapper, self.lists[name], batch.mode, group)
        self.step = "step0." if is_draft_decode(batch) else ""

    def _lists(self, batch: Batch, part: str, group_name: str, extend_lens: torch.Tensor | None) -> SlotLists:
        group = self.pool.groups[group_name]
        if part:
            assert batch.spec_info is not None
            step = int(part.removeprefix("step"))
            kv_lens = draft_lens(batch, step).repeat_interleave(batch.spec_info.topk)
            slots = gather_draft_slots(group, batch, step)
        else:
            totals = self.kv_lens(batch)
            kv_lens = totals
            if group_name == "window" and batch.mode == "DECODE":
                kv_lens = torch.clamp(totals, max=self.geometry.model.window)
            starts, ends = torch.stack([totals - kv_lens, totals]).tolist()
            slots = gather_slots(group, batch, starts, ends)
        query_lens = torch.ones_like(kv_lens) if extend_lens is None else extend_lens
        verify = batch.mode == "TARGET_VERIFY" and batch.spec_info is not None
        return SlotLists(
            qo_indptr=indptr(query_lens),
            kv_indptr=indptr(kv_lens),
            kv_indices=slots,
            kv_lens=kv_lens,
            tokens=int(query_lens.sum()),
            custom_mask=batch.spec_info.custom_mask if verify and batch.spec_info is not None else None,
        )

    def kv_lens(self, batch: Batch) -> torch.Tensor:
        """int32 ``(B,)``: keys of each row, its new ones included."""
        if batch.mode == "TARGET_VERIFY":
            assert batch.spec_info is not None
            return batch.seq_lens + batch.spec_info.draft_tokens
        return batch.seq_lens

    def advance_draft(self, step: int) -> None:
        self.step = f"step{step}."

    def metadata(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, wrapper in self.wrappers.items():
            part, dot, group = name.rpartition(".")
            prefix = f"{part}{dot}{'window_' if group == 'window' else ''}"
            fields[f"{prefix}kv_indptr"] = wrapper.kv_indptr
            fields[f"{prefix}kv_indices"] = wrapper.kv_indices
            if group == "full":
                fields[f"{part}{dot}qo_indptr"] = wrapper.qo_indptr
        return fields

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        if batch.save_kv:
            self.pool.write(layer, batch.out_cache_loc[layer.group], k, v)
        name = self.step + layer.group
        planned = q[: self.lists[name].tokens]
        return self.kernels.run(self.wrappers[name], planned, layer, self.pool.groups[layer.group])
