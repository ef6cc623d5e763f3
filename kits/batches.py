"""The batch an engine hands to a backend, for one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kits.graphs import host_tensor
from kits.pools import KVPool
from kits.subtest import Speculation
from kits.transfer import send, upload
from kits.world import Request


@dataclass(eq=False)
class SpecInfo:
    """What speculative decoding adds to a batch.

    ``custom_mask`` is bool, flat: per request ``(draft_tokens, prefix + draft_tokens)`` row-major, requests one after
    the other, as SGLang's verify input has it. ``extend_seq_lens`` (int32 ``(B,)``) and its host list are the
    accepted-token counts of a draft extend: the new tokens of a row, but in DRAFT_EXTEND_V2, where a row has all that
    was drafted, how many of them count.
    """

    kind: str
    topk: int
    draft_tokens: int
    steps: int
    custom_mask: torch.Tensor | None = None
    extend_seq_lens: torch.Tensor | None = None
    extend_seq_lens_cpu: list[int] = field(default_factory=list)
    step: int = 0


@dataclass(eq=False)
class Batch:
    """B requests with T new tokens, as SGLang's ``ForwardBatch`` and vLLM's ``CommonAttentionMetadata`` describe them.

    A backend sees no difference between live and padded rows. Device tensors: ``req_pool_indices`` int64 ``(B,)``,
    ``seq_lens`` int32 ``(B,)``, ``extend_seq_lens`` int32 ``(B,)`` (new tokens per row; None for DECODE), ``positions``
    and ``input_ids`` int64 ``(T,)``, ``out_cache_loc[group]`` int64 ``(T,)``. Host mirrors: ``seq_lens_cpu``,
    ``seq_lens_sum``, ``extend_seq_lens_cpu``.

    What ``seq_lens`` means is the cell's ``seq_lens`` convention. Production has: EXTEND, DECODE, DRAFT_EXTEND and
    DRAFT_EXTEND_V2 ``total``, TARGET_VERIFY ``prefix``.
    """

    mode: str
    pool: KVPool
    batch_size: int
    num_tokens: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    seq_lens_sum: int
    extend_seq_lens: torch.Tensor | None
    extend_seq_lens_cpu: list[int] | None
    positions: torch.Tensor
    input_ids: torch.Tensor
    out_cache_loc: dict[str, torch.Tensor]
    spec_info: SpecInfo | None = None
    save_kv: bool = True


@dataclass(frozen=True)
class Rows:
    """Host-side values of a batch's rows, from which eager batches and graph buffers are filled alike."""

    req_pool_indices: list[int]
    seq_lens: list[int]
    extend_seq_lens: list[int]
    accepted: list[int]
    positions: list[int]
    out_cache_loc: dict[str, torch.Tensor]
    custom_mask: torch.Tensor | None


def describe_rows(requests: Sequence[Request], convention: str, speculation: Speculation | None, mode: str) -> Rows:
    """Rows of ``requests``; ``convention`` is ``prefix`` or ``total`` and says what ``seq_lens`` counts."""
    positions: list[int] = []
    tree = mode == "TARGET_VERIFY" and speculation is not None
    drafts = mode == "DECODE" and speculation is not None
    for request in requests:
        if tree:
            positions += [request.prefix_len + sum(seen) - 1 for seen in tree_rows(request.parents)]
        elif drafts and speculation:
            advance = range(speculation.steps) if speculation.caches_drafts else [-1] * speculation.steps
            positions += [request.prefix_len + by for _ in range(speculation.topk) for by in advance]
        else:
            positions += range(request.prefix_len, request.total_len)
    groups = requests[0].slots
    return Rows(
        req_pool_indices=[request.index for request in requests],
        seq_lens=[request.prefix_len if convention == "prefix" else request.total_len for request in requests],
        extend_seq_lens=[request.extend_len for request in requests],
        accepted=[
            1 + request.prefix_len % request.extend_len if mode == "DRAFT_EXTEND_V2" else request.extend_len
            for request in requests
        ],
        positions=positions,
        out_cache_loc={
            name: torch.cat([request.slots[name][request.prefix_len :] for request in requests]) for name in groups
        },
        custom_mask=verify_mask(requests) if tree else None,
    )


def tree_rows(parents: Sequence[int]) -> list[list[bool]]:
    """``(draft, draft)``: which draft tokens each draft token sees, filled from the parents row by row."""
    rows: list[list[bool]] = []
    for token, parent in enumerate(parents):
        seen = list(rows[parent]) if parent >= 0 else [False] * len(parents)
        seen[token] = True
        rows.append(seen)
    return rows


def verify_mask(requests: Sequence[Request]) -> torch.Tensor:
    """The flat custom mask of a verify batch: the producer's side of the contract, not the reference's."""
    flat: list[bool] = []
    for request in requests:
        for seen in tree_rows(request.parents):
            flat += [True] * request.prefix_len + seen
    return torch.tensor(flat, dtype=torch.bool)


def input_ids_at(positions: Sequence[int]) -> list[int]:
    """Ids that tell tokens of other positions apart, of which only the model takes notice."""
    return [7 + position for position in positions]


def eager_batch(pool: KVPool, rows: Rows, mode: str, speculation: Speculation | None, *, save_kv: bool = True) -> Batch:
    """A batch of exactly these rows, in tensors of its own."""
    device, rows_count = pool.device, len(rows.seq_lens)
    short = upload([*rows.seq_lens, *rows.extend_seq_lens, *rows.accepted], torch.int32, device)
    seq_lens, extend_seq_lens, of_spec = short.view(3, rows_count).unbind()
    tokens = [*rows.req_pool_indices, *rows.positions, *input_ids_at(rows.positions)]
    req_pool_indices, positions, input_ids = upload(tokens, torch.int64, device).split(
        [rows_count, len(rows.positions), len(rows.positions)]
    )
    spec_info = None
    if speculation is not None:
        spec_info = SpecInfo(
            kind=speculation.kind,
            topk=speculation.topk,
            draft_tokens=speculation.draft_tokens,
            steps=speculation.steps,
            custom_mask=None if rows.custom_mask is None else send(rows.custom_mask, device),
            extend_seq_lens=of_spec,
            extend_seq_lens_cpu=list(rows.accepted),
        )
    return Batch(
        mode=mode,
        pool=pool,
        batch_size=len(rows.seq_lens),
        num_tokens=len(rows.positions),
        req_pool_indices=req_pool_indices,
        seq_lens=seq_lens,
        seq_lens_cpu=host_tensor(rows.seq_lens, torch.int32),
        seq_lens_sum=sum(rows.seq_lens),
        extend_seq_lens=None if mode == "DECODE" else extend_seq_lens,
        extend_seq_lens_cpu=None if mode == "DECODE" else list(rows.extend_seq_lens),
        positions=positions,
        input_ids=input_ids,
        out_cache_loc=dict(rows.out_cache_loc),
        spec_info=spec_info,
        save_kv=save_kv,
    )
