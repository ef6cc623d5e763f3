"""How adapters translate the pool's request table into a kernel's layout. Host-side work, outside any graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kits.batches import Batch
from kits.pools import KVGroup


def indptr(lens: torch.Tensor) -> torch.Tensor:
    """int32 ``(B + 1,)``: 0, then the running sum of ``lens``."""
    ends = torch.cumsum(lens, dim=0, dtype=torch.int32)
    return torch.cat([torch.zeros(1, dtype=torch.int32, device=lens.device), ends])


def gather_slots(group: KVGroup, batch: Batch, starts: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
    """int32: the slots of positions ``starts[r]..ends[r]`` of each row, rows one after the other."""
    table = group.req_to_token[batch.req_pool_indices]
    pieces = [table[row, start:end] for row, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]
    if not pieces:
        return torch.empty(0, dtype=torch.int32, device=table.device)
    return torch.cat(pieces)


def page_rows(group: KVGroup, batch: Batch, columns: int) -> torch.Tensor:
    """int32 ``(B, columns)``: the page of every ``page_size``-th position of each row.

    A page table can only say this much: slots within a page must follow one another.
    """
    table = group.req_to_token[batch.req_pool_indices]
    return table[:, : columns * group.page_size : group.page_size] // group.page_size


def is_draft_decode(batch: Batch) -> bool:
    """Whether the batch is a multi-step draft decode: several steps of ``topk`` branches inside one graph."""
    return batch.mode == "DECODE" and batch.spec_info is not None


def draft_lens(batch: Batch, step: int) -> torch.Tensor:
    """int32 ``(B,)``: keys each branch of a row sees at ``step``: the prefix and, where drafts are cached, its own."""
    return batch.seq_lens + (step + 1 if batch.save_kv else 0)


def gather_draft_slots(group: KVGroup, batch: Batch, step: int) -> torch.Tensor:
    """int32: the slots each of the ``B * topk`` branches sees at ``step``, branch after branch.

    The request table holds the prefix, then the draft slots as ``(topk, steps)``, as SGLang's draft workers fill it.
    """
    spec_info = batch.spec_info
    assert spec_info is not None
    table = group.req_to_token[batch.req_pool_indices]
    own = step + 1 if batch.save_kv else 0
    pieces = []
    for row, prefix in enumerate(batch.seq_lens.tolist()):
        for branch in range(spec_info.topk):
            first = prefix + branch * spec_info.steps
            pieces += [table[row, :prefix], table[row, first : first + own]]
    return torch.cat(pieces)
