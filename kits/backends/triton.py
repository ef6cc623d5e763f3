"""Our Triton kernels behind flat slot-index metadata, as SGLang's triton backend builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kits.backends.base import Backend, Capabilities
from kits.backends.paging import gather_slots, indptr
from kits.backends.persistent import PersistentBuffers
from kits.batches import Batch
from kits.kernels import triton_ops
from kits.layers import Layer

INT32 = torch.int32


@dataclass
class TritonMetadata:
    """What one forward reads. ``kv_*`` cover the cached keys only in extend modes: new keys come as arguments."""

    decode: bool
    max_extend_len: int
    kv_indptr: dict[str, torch.Tensor]
    kv_indices: dict[str, torch.Tensor]
    qo_indptr: torch.Tensor | None = None
    custom_mask: torch.Tensor | None = None
    mask_indptr: torch.Tensor | None = None


class TritonBackend(Backend):
    """Paged decode and extend over ``kv_indptr``/``kv_indices``, one pair per KV group."""

    capabilities = Capabilities(
        forward_modes=frozenset({"EXTEND", "DECODE", "MIXED", "TARGET_VERIFY", "DRAFT_EXTEND_V2"}),
        methods=frozenset({"dense", "swa", "mla"}),
        dtypes=frozenset({"float16"}),
        topk=8,
        window=True,
        sinks=True,
        softcap=True,
        kv_scales=True,
        batch_invariant=True,
    )

    def open(self, geometry, *, max_rows, max_tokens, max_len, capture_sizes) -> None:  # type: ignore[no-untyped-def]
        super().open(
            geometry, max_rows=max_rows, max_tokens=max_tokens, max_len=max_len, capture_sizes=capture_sizes
        )
        self.persistent = PersistentBuffers(self.device)
        for group in self.pool.groups:
            self.persistent.allocate(f"kv_indptr.{group}", max_rows + 1, dtype=INT32)
            self.persistent.allocate(f"kv_indices.{group}", max_rows * max_len, dtype=INT32)
        self.persistent.allocate("qo_indptr", max_rows + 1, dtype=INT32)
        self.persistent.allocate("mask_indptr", max_rows + 1, dtype=INT32)
        self.persistent.allocate("custom_mask", max_tokens * max_len, dtype=torch.bool)
        self._captured: dict[int, TritonMetadata] = {}

    def prepare(self, batch: Batch) -> None:
        values = self._values(batch)
        groups = self.pool.groups
        self.current = TritonMetadata(
            decode=batch.mode == "DECODE",
            max_extend_len=max(batch.extend_seq_lens_cpu or [1]),
            kv_indptr={group: values[f"kv_indptr.{group}"] for group in groups},
            kv_indices={group: values[f"kv_indices.{group}"] for group in groups},
            qo_indptr=values.get("qo_indptr"),
            custom_mask=values.get("custom_mask"),
            mask_indptr=values.get("mask_indptr"),
        )

    def prepare_capture(self, batch: Batch) -> None:
        size, groups, bind = batch.batch_size, self.pool.groups, self.persistent.bind
        decode, verify = batch.mode == "DECODE", batch.mode == "TARGET_VERIFY"
        self._captured[size] = TritonMetadata(
            decode=decode,
            max_extend_len=batch.num_tokens // size,
            kv_indptr={group: bind(f"kv_indptr.{group}", size + 1) for group in groups},
            kv_indices={group: bind(f"kv_indices.{group}") for group in groups},
            qo_indptr=None if decode else bind("qo_indptr", size + 1),
            custom_mask=bind("custom_mask") if verify else None,
            mask_indptr=bind("mask_indptr", size + 1) if verify else None,
        )
        self.prepare_replay(batch)

    def prepare_replay(self, batch: Batch) -> None:
        self.persistent.fill(self._values(batch))
        self.current = self._captured[batch.batch_size]

    def _values(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Fresh metadata of ``batch``, by the names of the persistent buffers."""
        values: dict[str, torch.Tensor] = {}
        cached = self.cached_lens(batch)
        if batch.extend_seq_lens is not None:
            values["qo_indptr"] = indptr(batch.extend_seq_lens)
        if batch.mode == "TARGET_VERIFY":
            spec_info = batch.spec_info
            assert spec_info is not None and spec_info.custom_mask is not None
            draft = spec_info.draft_tokens
            values["mask_indptr"] = indptr(draft * (batch.seq_lens + draft))
            values["custom_mask"] = spec_info.custom_mask[: int(values["mask_indptr"][-1])]
        for name, group in self.pool.groups.items():
            visible = cached if name == "full" else self._window_lens(cached, batch)
            ends = cached.tolist()
            starts = (cached - visible).tolist()
            values[f"kv_indptr.{name}"] = indptr(visible)
            values[f"kv_indices.{name}"] = gather_slots(group, batch, starts, ends)
        return values

    def cached_lens(self, batch: Batch) -> torch.Tensor:
        """int32 ``(B,)``: keys each row finds in the pool.

        Padded rows come with ``seq_lens`` below ``extend_seq_lens``; without the clamp their prefix is negative and
        ``kv_indptr`` decreases behind the last live row.
        """
        if batch.mode in ("DECODE", "TARGET_VERIFY"):
            return batch.seq_lens
        assert batch.extend_seq_lens is not None
        return torch.clamp(batch.seq_lens - batch.extend_seq_lens, min=0)

    def _window_lens(self, cached: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Cached keys that some query of the row can see through the window."""
        window = self.geometry.model.window
        assert window is not None
        return torch.clamp(cached, max=window if batch.mode == "DECODE" else window - 1)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        if batch.save_kv:
            self.pool.write(layer, batch.out_cache_loc[layer.group], k, v)
        group, current = self.pool.groups[layer.group], self.current
        out = torch.empty(q.shape[0], layer.q_heads, layer.v_head_dim, dtype=q.dtype, device=q.device)
        features = {
            "scale": layer.scale,
            "softcap": layer.softcap or 0.0,
            "window": layer.window or -1,
            "sinks": layer.sinks,
            "k_scale": layer.k_scale,
            "v_scale": layer.v_scale,
        }
        caches = (group.k[layer.index], group.v[layer.index])
        paging = (current.kv_indptr[layer.group], current.kv_indices[layer.group])
        if current.decode:
            triton_ops.decode_attention(q, *caches, *paging, out, **features)
        else:
            triton_ops.extend_attention(
                q,
                k,
                v,
                *caches,
                current.qo_indptr,
                *paging,
                out,
                max_extend_len=current.max_extend_len,
                custom_mask=current.custom_mask,
                mask_indptr=current.mask_indptr,
                **features,
            )
        return out

    def metadata(self) -> dict[str, Any]:
        current, fields = self.current, {}
        for group in self.pool.groups:
            prefix = "" if group == "full" else f"{group}_"
            fields[f"{prefix}kv_indptr"] = current.kv_indptr[group]
            fields[f"{prefix}kv_indices"] = current.kv_indices[group]
        fields["qo_indptr"] = current.qo_indptr
        fields["custom_mask"] = current.custom_mask
        fields["mask_indptr"] = current.mask_indptr
        return fields
