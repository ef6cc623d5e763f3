"""Our Triton kernels behind flat slot-index metadata, as SGLang's triton backend builds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kits.backends.base import Capabilities
from kits.backends.paging import draft_lens, gather_draft_slots, gather_slots, indptr, is_draft_decode
from kits.backends.persistent import PersistentBackend, PersistentBuffers
from kits.batches import Batch
from kits.kernels import triton_ops
from kits.layers import Layer


class TritonBackend(PersistentBackend):
    """Paged decode and extend over ``kv_indptr``/``kv_indices``, one pair per KV group.

    In extend modes the index lists cover the cached keys only: new keys come as arguments.
    """

    capabilities = Capabilities(
        forward_modes=frozenset({"EXTEND", "DECODE", "MIXED", "TARGET_VERIFY", "DRAFT_EXTEND_V2"}),
        methods=frozenset({"dense", "swa", "mla"}),
        dtypes=frozenset({"float16", "float32"}),
        topk=8,
        window=True,
        sinks=True,
        softcap=True,
        kv_scales=True,
        batch_invariant=True,
    )

    def allocate(self, buffers: PersistentBuffers) -> None:
        rows, tokens, slots = self.max_rows, self.max_tokens, self.max_tokens * self.max_len
        buffers.allocate("qo_indptr", rows + 1)
        for group in self.pool.groups:
            buffers.allocate(f"kv_indptr.{group}", rows + 1)
            buffers.allocate(f"kv_indices.{group}", slots, whole=True)
            buffers.allocate(f"mask_indptr.{group}", rows + 1)
            buffers.allocate(f"custom_mask.{group}", slots, dtype=torch.bool, whole=True)
            for step in range(self.draft_steps):
                buffers.allocate(f"step{step}.kv_indptr.{group}", tokens + 1)
                buffers.allocate(f"step{step}.kv_indices.{group}", slots, whole=True)

    def values(self, batch: Batch) -> dict[str, torch.Tensor]:
        if is_draft_decode(batch):
            return self._draft_values(batch)
        values: dict[str, torch.Tensor] = {}
        cached = self.cached_lens(batch)
        if batch.extend_seq_lens is not None:
            values["qo_indptr"] = indptr(batch.extend_seq_lens)
        for name, group in self.pool.groups.items():
            visible = cached if name == "full" else self._window_lens(cached, batch)
            starts, ends = torch.stack([cached - visible, cached]).tolist()
            values[f"kv_indptr.{name}"] = indptr(visible)
            values[f"kv_indices.{name}"] = gather_slots(group, batch, starts, ends)
            if batch.mode == "TARGET_VERIFY":
                assert batch.spec_info is not None
                draft = batch.spec_info.draft_tokens
                masks = self._verify_masks(batch, starts, window=name == "window")
                values[f"mask_indptr.{name}"] = indptr(draft * (visible + draft))
                values[f"custom_mask.{name}"] = torch.cat([mask.flatten() for mask in masks])
        return values

    def _draft_values(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Per step, the slots of all branches: each sees the prefix and its own draft tokens so far."""
        assert batch.spec_info is not None
        values = {}
        for step in range(batch.spec_info.steps):
            lens = draft_lens(batch, step).repeat_interleave(batch.spec_info.topk)
            for name, group in self.pool.groups.items():
                values[f"step{step}.kv_indptr.{name}"] = indptr(lens)
                values[f"step{step}.kv_indices.{name}"] = gather_draft_slots(group, batch, step)
        return values

    def cached_lens(self, batch: Batch) -> torch.Tensor:
        """int32 ``(B,)``: keys each row finds in the pool.

        Padded rows come with ``seq_lens`` below ``extend_seq_lens``; without the clamp their prefix is negative and
        ``kv_indptr`` decreases behind the last live row.
        """
        if batch.extend_seq_lens is None or batch.mode == "TARGET_VERIFY":
            return batch.seq_lens
        return torch.clamp(batch.seq_lens - batch.extend_seq_lens, min=0)

    def _window_lens(self, cached: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Cached keys that some query of the row can see through the window."""
        window = self.geometry.model.window
        assert window is not None
        return torch.clamp(cached, max=window if batch.mode == "DECODE" else window - 1)

    def _verify_masks(self, batch: Batch, starts: Sequence[int], *, window: bool) -> list[torch.Tensor]:
        """Per row bool ``(draft, visible prefix + draft)``: the batch's mask, cut to where the row's indices start.

        A window is applied here, by position: tree siblings share one, which the kernel cannot know.
        """
        assert batch.spec_info is not None
        assert batch.spec_info.custom_mask is not None
        draft, offset, masks = batch.spec_info.draft_tokens, 0, []
        for row, prefix in enumerate(batch.seq_lens.tolist()):
            size = draft * (prefix + draft)
            mask = batch.spec_info.custom_mask[offset : offset + size].view(draft, prefix + draft)[:, starts[row] :]
            offset += size
            if window:
                queries = batch.positions[row * draft : (row + 1) * draft]
                keys = torch.cat([torch.arange(starts[row], prefix, device=self.device), queries])
                mask = mask & (queries[:, None] - keys[None, :] < (self.geometry.model.window or 0))
            masks.append(mask)
        return masks

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        if batch.save_kv:
            self.pool.write(layer, batch.out_cache_loc[layer.group], k, v)
        group = self.pool.groups[layer.group]
        out = torch.empty(q.shape[0], layer.q_heads, layer.v_head_dim, dtype=q.dtype, device=q.device)
        caches = (group.k[layer.index], group.v[layer.index])
        paging = (self.field(f"kv_indptr.{layer.group}"), self.field(f"kv_indices.{layer.group}"))
        mask = self.tensors.get(f"custom_mask.{layer.group}")
        features: dict[str, Any] = {
            "scale": layer.scale,
            "softcap": layer.softcap or 0.0,
            "window": -1 if layer.window is None or mask is not None else layer.window,
            "sinks": layer.sinks,
            "k_scale": layer.k_scale,
            "v_scale": layer.v_scale,
        }
        if self.decoding:
            triton_ops.decode_attention(q, *caches, *paging, out, **features)
        else:
            triton_ops.extend_attention(
                q,
                k,
                v,
                *caches,
                self.field("qo_indptr"),
                *paging,
                out,
                max_extend_len=self.max_extend_len,
                custom_mask=mask,
                mask_indptr=self.tensors.get(f"mask_indptr.{layer.group}"),
                **features,
            )
        return out
