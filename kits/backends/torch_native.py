"""PyTorch's own scaled_dot_product_attention, a request at a time. Eager only."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kits.backends.base import Backend, Capabilities
from kits.batches import Batch
from kits.layers import Layer


class TorchNativeBackend(Backend):
    """Gathers each request's slots and runs one SDPA call over them."""

    capabilities = Capabilities(
        forward_modes=frozenset({"EXTEND", "DECODE", "MIXED"}),
        graph="never",
        dtypes=frozenset({"float16", "bfloat16", "float32"}),
        batch_invariant=True,
    )

    def prepare(self, batch: Batch) -> None:
        extend_lens = batch.extend_seq_lens.tolist() if batch.extend_seq_lens is not None else [1] * batch.batch_size
        self._lens = list(zip(batch.seq_lens.tolist(), extend_lens, strict=True))
        self._kv_lens = batch.seq_lens

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        if batch.save_kv:
            self.pool.write(layer, batch.out_cache_loc[layer.group], k, v)
        group = self.pool.groups[layer.group]
        outputs, start = [], 0
        for row, (total, extend) in enumerate(self._lens):
            slots = group.req_to_token[batch.req_pool_indices[row], :total].long()
            keys, values = group.k[layer.index][slots], group.v[layer.index][slots]
            positions = torch.arange(total - extend, total, device=self.device)
            visible = torch.arange(total, device=self.device)[None, :] <= positions[:, None]
            out = scaled_dot_product_attention(
                q[start : start + extend].transpose(0, 1),
                keys.transpose(0, 1),
                values.transpose(0, 1),
                attn_mask=visible,
                scale=layer.scale,
                enable_gqa=layer.q_heads != layer.kv_heads,
            )
            outputs.append(out.transpose(0, 1))
            start += extend
        return torch.cat(outputs)

    def metadata(self) -> dict[str, Any]:
        return {"kv_lens": self._kv_lens}
