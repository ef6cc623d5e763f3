"""PyTorch's flex_attention, a request at a time with its mask as a tensor. Never inside a graph."""

from __future__ import annotations

from typing import Any

import torch

from kits.backends.base import Backend, Capabilities
from kits.batches import Batch
from kits.kernels.flex import flex_attention
from kits.layers import Layer


class FlexAttentionBackend(Backend):
    """Gathers each request's slots; the causal block mask is made from positions when the batch is prepared."""

    capabilities = Capabilities(
        forward_modes=frozenset({"EXTEND", "DECODE", "MIXED"}),
        graph="split",
        softcap=True,
        batch_invariant=True,
    )

    libraries = ("torch._dynamo", "torch._inductor.compile_fx", "torch.nn.attention.flex_attention")

    def prepare(self, batch: Batch) -> None:
        extend_lens = batch.extend_seq_lens.tolist() if batch.extend_seq_lens is not None else [1] * batch.batch_size
        self.rows = list(zip(batch.seq_lens.tolist(), extend_lens, strict=True))
        self.kv_lens = batch.seq_lens
        self.masks = [
            torch.arange(total, device=self.device)[None, :]
            <= torch.arange(total - extend, total, device=self.device)[:, None]
            for total, extend in self.rows
        ]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        if batch.save_kv:
            self.pool.write(layer, batch.out_cache_loc[layer.group], k, v)
        group = self.pool.groups[layer.group]
        outputs, start = [], 0
        for row, (total, extend) in enumerate(self.rows):
            slots = group.req_to_token[batch.req_pool_indices[row], :total].long()
            out = flex_attention(
                q[start : start + extend].transpose(0, 1).unsqueeze(0),
                group.k[layer.index][slots].transpose(0, 1).unsqueeze(0),
                group.v[layer.index][slots].transpose(0, 1).unsqueeze(0),
                mask=self.masks[row],
                scale=layer.scale,
                softcap=layer.softcap or 0.0,
            )
            outputs.append(out[0].transpose(0, 1))
            start += extend
        return torch.cat(outputs)

    def metadata(self) -> dict[str, Any]:
        return {"kv_lens": self.kv_lens}
