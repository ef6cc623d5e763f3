"""PyTorch's flex_attention with a mask given as a tensor: the contract of the flex_attention backend.

Convention source: ``torch.nn.attention.flex_attention.flex_attention`` and ``create_block_mask``. One call serves one
request. On CUDA the compiled kernel runs; the eager function of a CPU would be recorded as its many parts, some of
which refuse a capture, so there this is one operator with an emulation.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kits.kernels import _ops, provenance
from kits.kernels._attend import attend

BLOCK = 128
"""Queries and keys of a block of the library's mask."""


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """``query`` (1, Hq, T, D), ``key`` (1, Hkv, N, D), ``value`` (1, Hkv, N, Dv) -> (1, Hq, T, Dv), fresh.

    ``mask`` (T, N) bool, True where a query sees a key, None for all: the tensor behind the block mask, read when the
    kernel executes. Hq is a multiple of Hkv (``enable_gqa``). ``softcap``: ``softcap * tanh(score / softcap)`` as
    the score modification, 0 for none. ``scale`` defaults to ``D ** -0.5``.

    On CUDA both lengths are padded to whole blocks with a mask that hides the rest, so that one compilation serves all.

    A query that sees nothing gets zeros. Hidden keys are loaded with their block and weighted 0, so a NaN among the
    values of a hidden key reaches the result, as in the compiled kernel. ValueError where shapes do not fit.
    """
    batch, q_heads, tokens, _ = query.shape
    keys = key.shape[2]
    if batch != 1 or q_heads % key.shape[1] or value.shape[:3] != key.shape[:3] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"flex_attention: query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} do not fit"
        )
    if mask is not None and (mask.shape != (tokens, keys) or mask.dtype != torch.bool):
        raise ValueError(f"flex_attention: mask must be bool {(tokens, keys)}, not {mask.dtype} {tuple(mask.shape)}")
    result: torch.Tensor = _op(query, key, value, mask, query.shape[3] ** -0.5 if scale is None else scale, softcap)
    return result


def _emulate(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    provenance.note(provenance.EMULATED)
    out, _ = attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scale,
        visible=mask,
        softcap=softcap,
    )
    return out.to(query.dtype).transpose(0, 1).unsqueeze(0).contiguous()


@functools.cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention as library

    # Whole, and as often as it takes: past the limit the uncompiled function would run in its place.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(library, dynamic=False, fullgraph=True)


def _native(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    from torch.nn.attention.flex_attention import create_block_mask

    provenance.note(provenance.NATIVE)
    tokens, keys = query.shape[2], key.shape[2]
    more_tokens, more_keys = -tokens % BLOCK, -keys % BLOCK
    if mask is None:
        mask = torch.ones(tokens, keys, dtype=torch.bool, device=query.device)
    mask = torch.nn.functional.pad(mask, (0, more_keys, 0, more_tokens))
    query = torch.nn.functional.pad(query, (0, 0, 0, more_tokens))
    key, value = (torch.nn.functional.pad(x, (0, 0, 0, more_keys)) for x in (key, value))

    def sees(batch: Any, head: Any, query_index: Any, key_index: Any) -> Any:
        return mask[query_index, key_index]

    block_mask = create_block_mask(sees, None, None, tokens + more_tokens, keys + more_keys, device=query.device)

    def cap(score: Any, batch: Any, head: Any, query_index: Any, key_index: Any) -> Any:
        return softcap * torch.tanh(score / softcap)

    out: torch.Tensor = _compiled()(
        query,
        key,
        value,
        score_mod=cap if softcap else None,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[:, :, :tokens].contiguous()


def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_rest: object) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


_op = _ops.define(
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, float softcap) -> Tensor",
    cpu=_emulate,
    cuda=_native,
    fake=_fake,
)
