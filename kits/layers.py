"""The attention layers of a subtest's model, as a backend sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kits.subtest import Model
from kits.transfer import send

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer.

    ``group`` names the KV group its cache lives in. ``window`` counts the visible keys including the query's own,
    None for full attention. ``sinks`` are float32 logits, one per query head, that join each softmax without a value.
    The cache stores ``k / k_scale`` and ``v / v_scale``; a kernel multiplies them back.
    """

    index: int
    group: str
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    k_scale: float
    v_scale: float
    mla: bool
    host_sinks: torch.Tensor | None = None
    """The same sinks on the host, for the reference."""


def _of_layer(scale: float, index: int) -> float:
    """A checkpoint calibrates its scales layer by layer; 1 stands for a cache without."""
    return scale if scale == 1.0 else scale * 2.0**index


def build_layers(model: Model, device: torch.device, generator: torch.Generator) -> tuple[Layer, ...]:
    """The layers of ``model``, with sinks drawn from ``generator`` (float32, ``(q_heads,)``) where it has them."""
    layers = []
    for index, kind in enumerate(model.layers):
        if kind not in ("full", "window"):
            raise ValueError(f"layer {index} is {kind!r}; a layer is 'full' or 'window'")
        if kind == "window" and model.window is None:
            raise ValueError(f"layer {index} is a window layer, but the model states no window")
        # Spread like the scores themselves, so that leaving a sink out moves weights by more than rounding does.
        sinks = 2 * torch.randn(model.q_heads, generator=generator) if model.sinks else None
        layers.append(
            Layer(
                index=index,
                group=kind,
                q_heads=model.q_heads,
                kv_heads=model.kv_heads,
                head_dim=model.head_dim,
                v_head_dim=model.v_head_dim,
                scale=model.scale,
                window=model.window if kind == "window" else None,
                softcap=model.softcap,
                sinks=None if sinks is None else send(sinks, device),
                host_sinks=sinks,
                k_scale=_of_layer(model.k_scale, index),
                v_scale=_of_layer(model.v_scale, index),
                mla=model.method == "mla",
            )
        )
    return tuple(layers)
