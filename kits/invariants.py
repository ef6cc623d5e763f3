"""What must hold of any backend's metadata, for all B rows, before a graph is replayed over them.

Best effort and backend-agnostic: a field that is missing or is no tensor is passed over. All violations come in one
error that names field, batch size, worst value and a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kits.batches import Batch
from kits.errors import MetadataError
from kits.pools import KVGroup
from kits.world import Request

OFFSETS = (
    "kv_indptr",
    "qo_indptr",
    "mask_indptr",
    "window_kv_indptr",
    "window_mask_indptr",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "encoder_cu_seqlens_k",
)
"""Start at 0 and never decrease over the first B + 1 entries."""

LENGTHS = ("cache_seqlens_int32", "encoder_lens_int32", "local_seqused_k", "max_seq_len_k", "kv_lens")
"""Never negative over the first B entries."""

INDEX_LISTS = (("kv_indptr", "kv_indices", "full"), ("window_kv_indptr", "window_kv_indices", "window"))
PAGE_TABLES = (("page_table", "full"), ("window_page_table", "window"))


def check_metadata(metadata: dict[str, Any], batch: Batch, live: Sequence[Request]) -> None:
    """Raise a MetadataError that lists every violation; ``live`` are the requests of the first rows.

    A name may carry a part (``step1.kv_indptr``): each draft step is checked like a forward of its own, with as many
    rows as it has branches. A part with a query offset for each token has a row per token (``tree.``, or a backend that
    expands rows to tokens).
    """
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in metadata.items():
        if isinstance(value, torch.Tensor):
            part, _, field = name.rpartition(".")
            parts.setdefault(part, {})[field] = value.cpu()
    problems = _host_mirrors(batch)
    for part, fields in parts.items():
        if part.startswith("step"):
            fields = parts.get("", {}) | fields
        size, owners = _rows_of(part, fields, batch, live)
        label = f"{part}." if part else ""
        page_size = 1 if part == "tree" else batch.pool.page_size
        problems += [label + problem for problem in _check_part(fields, size, batch, owners, page_size)]
    if problems:
        raise MetadataError(f"{len(problems)} metadata invariant(s) broken:\n" + "\n".join(f"  {p}" for p in problems))


def check_padding(batch: Batch, live: Sequence[Request], padded: Sequence[Request]) -> None:
    """What the runner left in the rows and tokens behind the live ones must be nobody's but the padding's.

    Padded rows may name request 0 or a request that exists to pad, their tokens may write to slot 0, the null slot -1
    or the slots of such a request, and every position lies within the request table. The live part must be the live
    requests' own.
    """
    size, problems = batch.batch_size, []
    rows = batch.req_pool_indices.tolist()
    indices = [request.index for request in live]
    strangers = set(rows[len(live) :]) - {0, *(request.index for request in padded)}
    if rows[: len(live)] != indices or strangers:
        problems.append(f"req_pool_indices (B={size}): {rows}; live are {indices}, the rest must be padding's")
    tokens = sum(request.extend_len for request in live)
    for name, slots in batch.out_cache_loc.items():
        own = [slot for request in live for slot in request.slots[name][request.prefix_len :].tolist()]
        free = {0, -1, *(slot for request in padded for slot in request.slots[name][request.prefix_len :].tolist())}
        written = slots.tolist()
        if written[:tokens] != own or set(written[tokens:]) - free:
            problems.append(
                f"out_cache_loc of {name} (B={size}): {written}; live tokens own {own}, the rest must be padding's"
            )
    positions = batch.positions.tolist()
    if positions and not 0 <= min(positions) <= max(positions) < batch.pool.max_len:
        problems.append(f"positions (B={size}): {positions} leave the request table of {batch.pool.max_len}")
    if problems:
        raise MetadataError(f"{len(problems)} batch invariant(s) broken:\n" + "\n".join(f"  {p}" for p in problems))


def _rows_of(
    part: str, fields: dict[str, torch.Tensor], batch: Batch, live: Sequence[Request]
) -> tuple[int, list[Request]]:
    """Rows of a part and the owner of each live one. A branch of a draft belongs to its request, as a token does."""
    if part.startswith("step") and "kv_indptr" in fields:
        assert batch.spec_info is not None
        return batch.num_tokens, [request for request in live for _ in range(batch.spec_info.topk)]
    offsets = next((fields[name] for name in ("qo_indptr", "cu_seqlens_q") if name in fields), None)
    if offsets is not None and len(offsets) - 1 == batch.num_tokens != batch.batch_size:
        return batch.num_tokens, [request for request in live for _ in range(request.extend_len)]
    return batch.batch_size, list(live)


def _check_part(
    fields: dict[str, torch.Tensor], size: int, batch: Batch, live: Sequence[Request], page_size: int
) -> list[str]:
    problems = [*_offsets(fields, size), *_lengths(fields, size)]
    for offsets, indices, group_name in INDEX_LISTS:
        if offsets in fields and indices in fields and group_name in batch.pool.groups:
            problems += _index_list(fields, offsets, indices, size, batch.pool.groups[group_name], live)
    lens = next((fields[name] for name in LENGTHS if name in fields), None)
    for table, group_name in PAGE_TABLES:
        if table in fields and lens is not None and group_name in batch.pool.groups:
            problems += _page_table(fields[table], table, lens, size, batch.pool.groups[group_name], live, page_size)
    return problems


def _offsets(fields: dict[str, torch.Tensor], size: int) -> list[str]:
    problems = []
    for name in OFFSETS:
        if name not in fields:
            continue
        values = fields[name][: size + 1].long()
        if len(values) < size + 1:
            problems.append(f"{name} (B={size}): holds {len(values)} entries, needs {size + 1}")
            continue
        if int(values[0]) != 0:
            problems.append(f"{name} (B={size}): starts at {int(values[0])}, not at 0: {values.tolist()}")
        steps = values.diff()
        if bool((steps < 0).any()):
            row = int(steps.argmin())
            problems.append(f"{name} (B={size}): decreases by {-int(steps[row])} behind row {row}: {values.tolist()}")
    return problems


def _lengths(fields: dict[str, torch.Tensor], size: int) -> list[str]:
    problems = []
    for name in LENGTHS:
        if name not in fields:
            continue
        values = fields[name].flatten()[:size].long()
        if len(values) and int(values.min()) < 0:
            problems.append(f"{name} (B={size}): worst value {int(values.min())} is negative: {values.tolist()}")
    return problems


def _host_mirrors(batch: Batch) -> list[str]:
    problems = []
    size, device = batch.batch_size, batch.seq_lens.cpu()
    if not torch.equal(batch.seq_lens_cpu.to(device.dtype), device):
        problems.append(
            f"seq_lens_cpu (B={size}): {batch.seq_lens_cpu.tolist()} differs from the device's {device.tolist()}"
        )
    if batch.seq_lens_sum != int(device.sum()):
        problems.append(f"seq_lens_sum (B={size}): {batch.seq_lens_sum}, but seq_lens sum to {int(device.sum())}")
    if batch.extend_seq_lens is not None and batch.extend_seq_lens_cpu is not None:
        extend = batch.extend_seq_lens.tolist()
        if extend != batch.extend_seq_lens_cpu:
            problems.append(
                f"extend_seq_lens_cpu (B={size}): {batch.extend_seq_lens_cpu} differs from the device's {extend}"
            )
    return problems


def _index_list(
    fields: dict[str, torch.Tensor],
    offsets_name: str,
    indices_name: str,
    size: int,
    group: KVGroup,
    live: Sequence[Request],
) -> list[str]:
    offsets, indices = fields[offsets_name][: size + 1].long(), fields[indices_name].long()
    end = int(offsets[-1])
    if end > len(indices):
        return [f"{indices_name} (B={size}): {offsets_name} ends at {end}, but there are {len(indices)} indices"]
    problems = []
    for row in range(size):
        start, stop = int(offsets[row]), int(offsets[row + 1])
        if 0 <= start <= stop <= len(indices):
            problems += _ids(indices_name, size, row, indices[start:stop], group.num_slots, _owned(live, row, group, 1))
    return problems


def _page_table(
    table: torch.Tensor,
    name: str,
    lens: torch.Tensor,
    size: int,
    group: KVGroup,
    live: Sequence[Request],
    page_size: int,
) -> list[str]:
    problems = []
    for row in range(size):
        pages = -(-int(lens[row]) // page_size)
        if pages > table.shape[1]:
            problems.append(
                f"{name} (B={size}): row {row} needs {pages} pages for {int(lens[row])} tokens, has {table.shape[1]}"
            )
        elif pages > 0:
            owned = _owned(live, row, group, page_size)
            problems += _ids(name, size, row, table[row, :pages].long(), group.num_slots // page_size, owned)
    return problems


def _owned(live: Sequence[Request], row: int, group: KVGroup, unit: int) -> torch.Tensor | None:
    """Slots (``unit`` 1) or pages that the request of a live row owns; None for a padded row."""
    if row >= len(live):
        return None
    slots = live[row].slots[group.name].cpu()
    return slots if unit == 1 else torch.unique(slots // unit)


def _ids(name: str, size: int, row: int, ids: torch.Tensor, limit: int, owned: torch.Tensor | None) -> list[str]:
    outside = (ids < 0) | (ids >= limit)
    if bool(outside.any()):
        worst = int(ids[outside][0])
        return [f"{name} (B={size}): row {row} holds id {worst} outside the pool of {limit}: {ids[:16].tolist()}"]
    if owned is not None:
        foreign = ~torch.isin(ids, owned)
        if bool(foreign.any()):
            return [
                f"{name} (B={size}): row {row} holds id {int(ids[foreign][0])}, which its request does not own: "
                f"{ids[:16].tolist()}"
            ]
    return []
