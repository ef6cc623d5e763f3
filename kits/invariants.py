"""What must hold of any backend's metadata, for all B rows, before a graph is replayed over them.

Best effort and backend-agnostic: a field that is missing or is no tensor is passed over, but a backend that shows none
of them is refused. All violations come in one error that names field, batch size, worst value and a slice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kits.asking import Check
from kits.backends.base import Backend
from kits.batches import Batch
from kits.errors import KitError, MetadataError
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
CHECKED = {*OFFSETS, *LENGTHS, *(name for _, name, _ in INDEX_LISTS), *(name for name, _ in PAGE_TABLES)}
"""Fields that are looked at, and so fetched from the device."""


def metadata_check(backend: Backend, batch: Batch, live: Sequence[Request]) -> Check[None]:
    """Raises a MetadataError that lists every violation in what the backend shows, or a KitError if there is nothing
    here to look at; ``live`` are the requests of the first rows.

    A name may carry a part (``step1.kv_indptr``): each draft step is checked like a forward of its own, with as many
    rows as it has branches. A part with a query offset for each token has a row per token (``tree.``, or a backend that
    expands rows to tokens).
    """
    metadata = backend.metadata()
    tensors = {
        name: value
        for name, value in metadata.items()
        if isinstance(value, torch.Tensor) and name.rpartition(".")[2] in CHECKED
    }
    if not tensors:
        raise KitError(
            f"metadata() shows {', '.join(metadata) or 'nothing'}, of which the invariants know none; name the tensors "
            f"as engines do: {', '.join(sorted(CHECKED))}"
        )
    mirrored = {name: getattr(batch, name) for name in ("seq_lens", "extend_seq_lens")}
    if batch.extend_seq_lens is not None and batch.spec_info is not None:
        mirrored["accepted"] = batch.spec_info.extend_seq_lens
    hosts = yield {**tensors, **{("batch", name): v for name, v in mirrored.items() if v is not None}}
    problems = _host_mirrors(
        batch, {name: hosts["batch", name].tolist() for name, v in mirrored.items() if v is not None}
    )
    problems += _metadata_problems(list(tensors), hosts, batch, live)
    if problems:
        raise MetadataError(f"{len(problems)} metadata invariant(s) broken:\n" + "\n".join(f"  {p}" for p in problems))


def _metadata_problems(
    names: Iterable[str], hosts: Mapping[Any, torch.Tensor], batch: Batch, live: Sequence[Request]
) -> list[str]:
    """``hosts`` holds the metadata under their names, and the batch's own tensors under ``("batch", name)``."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name in names:
        part, _, field = name.rpartition(".")
        parts.setdefault(part, {})[field] = hosts[name]
    problems = []
    for part, fields in parts.items():
        if part.startswith("step"):
            fields = parts.get("", {}) | fields
        size, owners = _rows_of(part, fields, batch, live)
        label = f"{part}." if part else ""
        page_size = 1 if part == "tree" else batch.pool.page_size
        problems += [label + problem for problem in _check_part(fields, size, batch, owners, page_size)]
        queries = hosts.get(("batch", "extend_seq_lens")) if size == batch.batch_size else None
        problems += [label + problem for problem in _agreement(fields, size, queries)]
    return problems


def padding_check(
    batch: Batch, live: Sequence[Request], padded: Sequence[Request], expected: Mapping[str, Sequence[int]]
) -> Check[None]:
    """What the runner left in the rows and tokens behind the live ones must be nobody's but the padding's.

    Padded rows may name request 0 or a request that exists to pad, their tokens may write to slot 0, the null slot -1
    or the slots of such a request. The live part must be the live requests' own. ``expected`` holds ``seq_lens`` and
    ``extend_seq_lens`` of all B rows, the counts ``accepted`` that ``spec_info`` states of them, and ``positions`` and
    ``input_ids`` of all tokens, as they must be.
    """
    of_all = {name: getattr(batch, name) for name in expected if name != "accepted"}
    if batch.spec_info is not None:
        of_all["accepted"] = batch.spec_info.extend_seq_lens
    of_all = {name: values for name, values in of_all.items() if values is not None}
    slots = {("slots", name): of_group for name, of_group in batch.out_cache_loc.items()}
    found = yield {"req_pool_indices": batch.req_pool_indices, **slots, **of_all}
    held = {name: values.tolist() for name, values in found.items()}
    problems = _padding_problems(batch, live, padded, held)
    problems += [
        f"{name} (B={batch.batch_size}): {held[name]}; the live rows and the padding have {list(expected[name])}"
        for name in of_all
        if held[name] != list(expected[name])
    ]
    if problems:
        raise MetadataError(f"{len(problems)} batch invariant(s) broken:\n" + "\n".join(f"  {p}" for p in problems))


def _padding_problems(
    batch: Batch, live: Sequence[Request], padded: Sequence[Request], held: Mapping[Any, list[int]]
) -> list[str]:
    """``held`` are the values of ``req_pool_indices`` and, as ``("slots", group)``, of ``out_cache_loc``."""
    size, problems = batch.batch_size, []
    rows = held["req_pool_indices"]
    indices = [request.index for request in live]
    strangers = set(rows[len(live) :]) - {0, *(request.index for request in padded)}
    if rows[: len(live)] != indices or strangers:
        problems.append(f"req_pool_indices (B={size}): {rows}; live are {indices}, the rest must be padding's")
    for name in batch.out_cache_loc:
        own, free, written = _new_slots(live, name), {0, -1, *_new_slots(padded, name)}, held["slots", name]
        if written[: len(own)] != own or set(written[len(own) :]) - free:
            problems.append(
                f"out_cache_loc of {name} (B={size}): {written}; live tokens own {own}, the rest must be padding's"
            )
    return problems


def _new_slots(requests: Iterable[Request], group: str) -> list[int]:
    return [slot for request in requests for slot in request.new_slot_ids(group)]


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
        values = fields[name][: size + 1].tolist()
        if len(values) < size + 1:
            problems.append(f"{name} (B={size}): holds {len(values)} entries, needs {size + 1}")
            continue
        if values[0] != 0:
            problems.append(f"{name} (B={size}): starts at {values[0]}, not at 0: {values}")
        steps = [stop - start for start, stop in itertools.pairwise(values)]
        if min(steps, default=0) < 0:
            row = steps.index(min(steps))
            problems.append(f"{name} (B={size}): decreases by {-steps[row]} behind row {row}: {values}")
    return problems


def _lengths(fields: dict[str, torch.Tensor], size: int) -> list[str]:
    problems = []
    for name in LENGTHS:
        if name not in fields:
            continue
        values = fields[name].flatten()[:size].tolist()
        if min(values, default=0) < 0:
            problems.append(f"{name} (B={size}): worst value {min(values)} is negative: {values}")
    return problems


def _agreement(fields: dict[str, torch.Tensor], size: int, queries: torch.Tensor | None) -> list[str]:
    """Offsets and lengths of the same rows say the same; ``queries`` are the batch's own new tokens of each row."""
    problems = []
    for name, source, lengths in (
        ("qo_indptr", "extend_seq_lens", queries),
        ("cu_seqlens_q", "extend_seq_lens", queries),
        ("cu_seqlens_k", "cache_seqlens_int32", fields.get("cache_seqlens_int32")),
    ):
        if name not in fields or lengths is None:
            continue
        values, lens = fields[name][: size + 1].tolist(), lengths.flatten()[:size].tolist()
        if [stop - start for start, stop in itertools.pairwise(values)] != lens:
            problems.append(f"{name} (B={size}): {values} are no offsets of rows with {source} {lens}")
    return problems


def _host_mirrors(batch: Batch, device: dict[str, list[int]]) -> list[str]:
    """``device``: what the device holds of the batch's own tensors."""
    problems = []
    size, lens, mirror = batch.batch_size, device["seq_lens"], batch.seq_lens_cpu.tolist()
    if mirror != lens:
        problems.append(f"seq_lens_cpu (B={size}): {mirror} differs from the device's {lens}")
    if batch.seq_lens_sum != sum(lens):
        problems.append(f"seq_lens_sum (B={size}): {batch.seq_lens_sum}, but seq_lens sum to {sum(lens)}")
    extend = device.get("extend_seq_lens")
    if extend is not None and batch.extend_seq_lens_cpu is not None and extend != batch.extend_seq_lens_cpu:
        problems.append(
            f"extend_seq_lens_cpu (B={size}): {batch.extend_seq_lens_cpu} differs from the device's {extend}"
        )
    accepted = device.get("accepted")
    if accepted is not None and batch.spec_info is not None and batch.spec_info.extend_seq_lens_cpu != accepted:
        problems.append(
            f"spec_info.extend_seq_lens_cpu (B={size}): {batch.spec_info.extend_seq_lens_cpu} differs from the "
            f"device's {accepted}"
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
    offsets, indices = fields[offsets_name][: size + 1].tolist(), fields[indices_name]
    end = offsets[-1] if offsets else 0
    if end > len(indices):
        return [f"{indices_name} (B={size}): {offsets_name} ends at {end}, but there are {len(indices)} indices"]
    problems = []
    for row, (start, stop) in enumerate(itertools.pairwise(offsets)):
        if 0 <= start <= stop <= len(indices):
            ids = indices[start:stop].tolist()
            problems += _ids(indices_name, size, row, ids, group.num_slots, _owned(live, row, group, 1))
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
    for row, length in enumerate(lens.flatten()[:size].tolist()):
        pages = -(-length // page_size)
        if pages > table.shape[1]:
            problems.append(
                f"{name} (B={size}): row {row} needs {pages} pages for {length} tokens, has {table.shape[1]}"
            )
        elif pages > 0:
            owned = _owned(live, row, group, page_size)
            problems += _ids(name, size, row, table[row, :pages].tolist(), group.num_slots // page_size, owned)
    return problems


def _owned(live: Sequence[Request], row: int, group: KVGroup, unit: int) -> set[int] | None:
    """Slots (``unit`` 1) or pages that the request of a live row owns; None for a padded row."""
    if row >= len(live):
        return None
    return {slot // unit for slot in live[row].slot_ids[group.name]}


def _ids(name: str, size: int, row: int, ids: list[int], limit: int, owned: set[int] | None) -> list[str]:
    worst = next((id for id in ids if not 0 <= id < limit), None)
    if worst is not None:
        return [f"{name} (B={size}): row {row} holds id {worst} outside the pool of {limit}: {ids[:16]}"]
    foreign = next((id for id in ids if id not in owned), None) if owned is not None else None
    if foreign is not None:
        return [f"{name} (B={size}): row {row} holds id {foreign}, which its request does not own: {ids[:16]}"]
    return []
