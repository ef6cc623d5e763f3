"""What every runner mode shares: the fixture, the eager forward, the comparison, KV integrity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kits import reference
from kits.asking import Check, seeing, settle
from kits.backends.base import Backend, Geometry
from kits.batches import describe_rows, eager_batch
from kits.compare import Pair, bits, difference, differing, require_close
from kits.errors import InputError, KitError, KVIntegrityError, MismatchError
from kits.graphs import unobserved
from kits.invariants import metadata_check
from kits.layers import Layer
from kits.pools import GUARD_SLOTS, REQUEST_TABLE
from kits.record import Record
from kits.scratch import intact, spoiled
from kits.subtest import Speculation, Subtest
from kits.transfer import fetch
from kits.world import Request, World, inputs_of

RESERVED_SLOTS = 1
"""Slots at the start of the pool that padding may write: slot 0."""


class SubtestRun:
    """One subtest under way: its backend, its world, its record."""

    def __init__(self, subtest: Subtest, backend: Backend, device: torch.device, notes: Record) -> None:
        self.subtest, self.backend, self.device, self.notes = subtest, backend, device, notes
        self.case, self.mode = subtest.case, subtest.case.mode
        self.speculation: Speculation | None = subtest.case.speculation
        self._require_capable()
        self.mismatches: list[MismatchError] = []

    def _require_capable(self) -> None:
        """A cell the backend cannot run is a mistake of the spec, never a silent skip."""
        can, model, case = self.backend.capabilities, self.subtest.model, self.case
        missing = []
        if model.method not in can.methods:
            missing.append(f"method {model.method}")
        if case.mode not in can.forward_modes:
            missing.append(f"forward mode {case.mode}")
        if can.page_sizes is not None and case.page_size not in can.page_sizes:
            missing.append(f"page size {case.page_size}")
        if model.dtype not in can.dtypes:
            missing.append(f"dtype {model.dtype}")
        if self.speculation is not None and self.speculation.topk > can.topk:
            missing.append(f"topk {self.speculation.topk}")
        if model.window is not None and not can.window:
            missing.append("sliding window")
        if model.sinks and not can.sinks:
            missing.append("sinks")
        if model.softcap and not can.softcap:
            missing.append("softcap")
        if (model.k_scale, model.v_scale) != (1.0, 1.0) and not can.kv_scales:
            missing.append("K and V scales")
        if not _graph_supports(can.graph, self.subtest):
            missing.append(f"runner mode {self.subtest.runner} for {case.mode} (its graph support is {can.graph!r})")
        if missing:
            raise KitError(
                f"{self.subtest.id}: {type(self.backend).__name__} does not support {', '.join(missing)}; "
                "correct the cell in suite.toml or the backend's capabilities"
            )

    def open(self, *, max_rows: int, max_tokens: int, max_len: int, live_rows: int, sizes: Sequence[int] = ()) -> None:
        """Build the world for at most ``live_rows`` requests at a time, and open the backend on it."""
        page_size = self.case.page_size
        with self.notes.phase("fixture"):
            self.world = World(
                self.subtest,
                self.device,
                max_len=max(max_len, page_size),
                pages=2 + (live_rows + 4) * -(-max_len // page_size),
                requests=2 + live_rows + 4,
                reads_tail=self.backend.capabilities.reads_tail is not None,
            )
            geometry = Geometry(
                model=self.subtest.model,
                layers=self.world.layers,
                pool=self.world.pool,
                page_size=page_size,
                device=self.device,
                dtype=self.world.dtype,
                speculation=self.speculation,
            )
            self.backend.open(geometry, max_rows=max_rows, max_tokens=max_tokens, max_len=max_len, capture_sizes=sizes)

    def expected(
        self, requests: Sequence[Request], layer: Layer, mode: str, speculation: Speculation | None
    ) -> torch.Tensor:
        """The reference's answer for the new tokens of ``requests``: float32 ``(tokens, q_heads, v_head_dim)``, worked
        out on the host: another machine's arithmetic, and no wait."""
        rows = []
        for request in requests:
            prefix, window = request.prefix_len, layer.window
            if mode == "TARGET_VERIFY" and speculation is not None:
                allowed = reference.tree_mask(prefix, request.parents, window)
            elif mode == "DECODE" and speculation is not None:
                allowed = reference.draft_mask(
                    prefix, speculation.topk, speculation.steps, speculation.caches_drafts, window
                )
            else:
                allowed = reference.causal_mask(prefix, request.extend_len, window)
            rows.append(
                reference.attention(
                    *request.on_host[layer.index],
                    allowed,
                    scale=layer.scale,
                    softcap=layer.softcap,
                    sinks=layer.host_sinks,
                )
            )
        return torch.cat(rows)

    def positions(self, requests: Sequence[Request], mode: str, speculation: Speculation | None) -> list[int]:
        """Where the new tokens of ``requests`` stand."""
        found: list[int] = []
        for request in requests:
            if mode == "DECODE" and speculation is not None:
                found += reference.draft_positions(
                    request.prefix_len, speculation.topk, speculation.steps, speculation.caches_drafts
                )
            else:
                tree = request.parents if mode == "TARGET_VERIFY" and speculation is not None else ()
                found += reference.positions(request.prefix_len, request.extend_len, tree)
        return found

    def forward_eagerly(
        self, requests: Sequence[Request], mode: str, convention: str, speculation: Speculation | None
    ) -> list[torch.Tensor]:
        """One eager forward of exactly ``requests``; metadata and the pool are checked as in a replay. Returns the
        outputs on the host."""
        batch = eager_batch(self.world.pool, describe_rows(requests, convention, speculation, mode), mode, speculation)
        self.backend.prepare(batch)
        with self.notes.phase("invariants"):
            settle(metadata_check(self.backend, batch, requests))
        before = self.snapshot()
        outputs, inputs = [], {}
        for layer in self.world.layers:
            given = inputs_of(requests, layer.index)
            outputs.append(self.backend.attend(**given, layer=layer, batch=batch))
            for name, values in inputs_of(requests, layer.index).items():
                inputs[f"{name} of layer {layer.index}"] = given[name], values
        what = f"eager {mode}"
        with self.notes.phase("integrity"):
            *_, outputs = settle(
                input_check(inputs, what),
                self.kv_integrity_check(before, requests, what=what),
                seeing(outputs),
            )
        return outputs

    def snapshot(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of the pool, for ``kv_integrity_check``."""
        with self.notes.phase("integrity"):
            return {name: group.snapshot() for name, group in self.world.pool.groups.items()}

    def kv_integrity_check(
        self,
        before: dict[str, dict[str, torch.Tensor]],
        requests: Sequence[Request],
        *,
        padded: Sequence[Request] = (),
        writes: bool = True,
        what: str,
    ) -> Check[None]:
        """The pool, as raw bits, changed only in the batch's own write set and the reserved slot; and there it holds
        the new keys and values of ``requests``.

        The write set comes from the requests, not from the batch: a stale ``out_cache_loc`` must not excuse itself.
        """
        changed = {
            (name, buffer): rows
            for name, group in self.world.pool.groups.items()
            for buffer, rows in group.differences(before[name]).items()
        }
        held = self._own_writes(requests) if writes else {}
        found = yield {**changed, **held, "zones": intact()}
        self._check_write_set({key: found[key] for key in changed}, (*requests, *padded) if writes else (), what)
        if not bool(found["zones"]):
            raise KVIntegrityError(f"{what}: something wrote past the end of the {spoiled()[0]}")
        for label in held:
            for row, of_row in enumerate(found[label].split([request.extend_len for request in requests])):
                if not bool(of_row.all()):
                    raise KVIntegrityError(f"{what}: row {row}, {label}: the write slots do not hold the new tokens")

    def _check_write_set(
        self, changed: Mapping[tuple[str, str], torch.Tensor], writers: Sequence[Request], what: str
    ) -> None:
        allowed = {
            name: {*range(RESERVED_SLOTS), *(slot for request in writers for slot in request.new_slot_ids(name))}
            for name in self.world.pool.groups
        }
        for (name, buffer), rows in changed.items():
            if buffer == REQUEST_TABLE:
                if bool(rows.any()):
                    raise KVIntegrityError(f"{what}: req_to_token of KV group {name} was written to")
                continue
            slots = [slot - GUARD_SLOTS for slot in rows.nonzero().flatten().tolist()]
            foreign = [slot for slot in slots if slot not in allowed[name]]
            if foreign:
                raise KVIntegrityError(
                    f"{what}: {buffer} of KV group {name} changed in {len(foreign)} slot(s) outside the batch's "
                    f"write set, first {self._owner_of(name, foreign[0])}"
                )

    def _own_writes(self, requests: Sequence[Request]) -> dict[str, torch.Tensor]:
        """Per layer, for k and v: which new tokens the write slots hold, bool ``(tokens,)``. Bit for bit; only where
        the cache is scaled within what dividing by the scale rounds off."""
        holds = {}
        for layer in self.world.layers:
            group, new = self.world.pool.groups[layer.group], inputs_of(requests, layer.index)
            slots = torch.cat([request.slots[layer.group][request.prefix_len :] for request in requests])
            for label, buffer, scale in (("k", group.k, layer.k_scale), ("v", group.v, layer.v_scale)):
                stored, wanted = buffer[layer.index][slots], new[label]
                if scale == 1.0:
                    same = bits(stored) == bits(wanted)
                else:
                    rounding = torch.finfo(stored.dtype)
                    scaled_back = stored.float() * scale
                    same = torch.isclose(
                        scaled_back, wanted.float(), atol=rounding.tiny, rtol=2 * rounding.eps, equal_nan=True
                    )
                holds[f"{label} of layer {layer.index}"] = same.flatten(1).all(dim=1)
        return holds

    def _owner_of(self, group_name: str, slot: int) -> str:
        group = self.world.pool.groups[group_name]
        if not 0 <= slot < group.num_slots:
            return f"slot {slot} in the guard zone of a pool of {group.num_slots}"
        page = slot // group.page_size
        if page in self.world.bystander.pages[group_name]:
            return f"slot {slot}, which a live request outside the batch owns"
        return f"slot {slot} of page {page}"

    def compare(
        self,
        what: str,
        outputs: Sequence[torch.Tensor],
        requests: Sequence[Request],
        mode: str,
        speculation: Speculation | None,
    ) -> None:
        """Compare real rows with the reference; a mismatch is kept, so that later legs still run."""
        with self.notes.phase("reference"), unobserved():
            wanted = [self.expected(requests, layer, mode, speculation) for layer in self.world.layers]
        self.compare_with(what, outputs, wanted, [request.extend_len for request in requests])

    def compare_with(
        self, what: str, outputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], row_lens: Sequence[int]
    ) -> None:
        """As ``compare``, with given expected values per layer."""
        with self.notes.phase("compare"), unobserved():
            hosts = fetch(dict(enumerate([*outputs, *wanted])))
            for layer in self.world.layers:
                label = f"{what}, layer {layer.index} ({layer.group})"
                left = self._project(layer, hosts[layer.index])
                right = self._project(layer, hosts[len(outputs) + layer.index])
                found = difference(left, right, self.subtest.tolerance, row_lens)
                self.notes.note_difference(found.margin, found.max_abs)
                try:
                    require_close(label, found, self.subtest.tolerance)
                except MismatchError as mismatch:
                    self.mismatches.append(mismatch)

    def _project(self, layer: Layer, out: torch.Tensor) -> torch.Tensor:
        if self.world.projections is None:
            return out
        projected: torch.Tensor = self.world.projections.output[layer.index](out.float().flatten(1))
        return projected

    def finish(self) -> None:
        """Raise what the comparisons found: the first mismatch, with the worst figures of all of them."""
        if not self.mismatches:
            return
        first = self.mismatches[0]
        more = "".join(f"\nalso: {mismatch}" for mismatch in self.mismatches[1:6])
        raise MismatchError(
            f"{first}{more}",
            max_abs=max(mismatch.max_abs for mismatch in self.mismatches),
            wrong=max(mismatch.wrong for mismatch in self.mismatches),
            margin=max(mismatch.margin for mismatch in self.mismatches),
            row=first.row,
        )


def input_check(inputs: Mapping[str, Pair], what: str) -> Check[None]:
    """Inputs as they were given, and as they must be: a forward leaves them alone."""
    found = yield differing(inputs)
    for name, differs in found.items():
        if bool(differs):
            raise InputError(f"{what}: the forward changed {name}")


def _graph_supports(support: str, subtest: Subtest) -> bool:
    """Whether a backend of this graph support can run the subtest's runner mode."""
    if subtest.runner == "eager":
        return True
    if subtest.runner in ("pcg", "bcg"):
        return support != "never"
    if support == "single_token":
        return subtest.case.mode == "DECODE"
    if support == "uniform_query":
        return subtest.case.mode in ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")
    return support == "always"
