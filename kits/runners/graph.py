"""A graph runner as engines have it: static buffers, one captured graph per batch size, padding, in-place refresh."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kits.backends.base import Backend
from kits.batches import Batch, Rows, SpecInfo, describe_rows, input_ids_at
from kits.compare import Pair
from kits.graphs import Graph, PointerGuard, host_tensor, new_graph
from kits.layers import Layer
from kits.padding import scratch_row
from kits.record import phase
from kits.scratch import fill_with_padding_nan, scratch
from kits.subtest import Speculation
from kits.transfer import send, upload
from kits.world import Request, World, inputs_of


@dataclass
class CapturedGraph:
    """One captured batch size."""

    graph: Graph
    batch: Batch
    guard: PointerGuard

    @property
    def static(self) -> Batch:
        """The batch that the forward sees, padding included."""
        return self.batch


class GraphRunner:
    """Captures ``tokens_per_row`` new tokens for each of ``size`` rows, and replays smaller batches padded to it.

    Buffers hold garbage until written. ``q``, ``k``, ``v`` and ``out`` are per layer ``(tokens, heads, dim)``.
    """

    def __init__(
        self,
        world: World,
        backend: Backend,
        *,
        mode: str,
        convention: str,
        speculation: Speculation | None,
        tokens_per_row: int,
        max_rows: int,
        pad_style: str,
        pad_requests: Sequence[Request],
    ) -> None:
        self.world, self.backend = world, backend
        self.mode, self.convention, self.speculation = mode, convention, speculation
        self.tokens_per_row, self.pad_style = tokens_per_row, pad_style
        self.pad_requests = list(pad_requests)
        device, tokens, dtype = world.device, max_rows * tokens_per_row, world.dtype

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return scratch(*shape, dtype=dtype, device=device)

        self.buffers: dict[str, torch.Tensor] = {
            "req_pool_indices": buffer(max_rows, dtype=torch.int64),
            "seq_lens": buffer(max_rows, dtype=torch.int32),
            "extend_seq_lens": buffer(max_rows, dtype=torch.int32),
            "accepted": buffer(max_rows, dtype=torch.int32),
            "positions": buffer(tokens, dtype=torch.int64),
            "input_ids": buffer(tokens, dtype=torch.int64),
        }
        if mode == "TARGET_VERIFY":
            # A bool buffer has no garbage of its own: True everywhere lets a misplaced row see too much.
            self.buffers["custom_mask"] = torch.ones(tokens * world.max_len, dtype=torch.bool, device=device)
        for group in world.pool.groups:
            self.buffers[f"out_cache_loc.{group}"] = buffer(tokens, dtype=torch.int64)
        for layer in world.layers:
            self.buffers |= fused_inputs(layer, tokens, dtype, device)
            self.buffers[f"out.{layer.index}"] = buffer(tokens, layer.q_heads, layer.v_head_dim, dtype=dtype)
        self.seen = {name: buffer(tokens, dtype=torch.int64) for name in ("positions", "input_ids")}
        self.captured: dict[int, CapturedGraph] = {}

    def capture(self, size: int, requests: Sequence[Request], *, warm_ups: int = 2) -> list[torch.Tensor]:
        """Warm up ``warm_ups`` times, then capture ``size`` rows on the data of ``requests``.

        Returns what the last warm-up put out, per layer.
        """
        batch = self.static_batch(size)
        self.load(batch, requests)
        self.backend.prepare_capture(batch)
        with phase("warm_up"):
            for _ in range(warm_ups):
                self.forward(batch)
        outputs = self._outputs(requests)
        graph = new_graph(self.world.device)
        self.backend.prepare_capture(batch)
        with graph.capture():
            self.forward(batch)
        guard = PointerGuard(graph, {"backend": self.backend, "buffers": self.buffers, "batch": batch})
        self.captured[size] = CapturedGraph(graph, batch, guard)
        return outputs

    def takes(self, mode: str, rows: int, tokens: int) -> bool:
        """Whether a batch belongs into one of the graphs: by its mode, never by its shape alone."""
        return mode == self.mode and any(
            rows <= size and tokens <= size * self.tokens_per_row for size in self.captured
        )

    def _outputs(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        tokens = sum(request.extend_len for request in requests)
        return [self.buffers[f"out.{layer.index}"][:tokens].clone() for layer in self.world.layers]

    def static_batch(self, size: int) -> Batch:
        tokens, buffers, decode = size * self.tokens_per_row, self.buffers, self.mode == "DECODE"
        spec_info = None
        if self.speculation is not None:
            spec_info = SpecInfo(
                kind=self.speculation.kind,
                topk=self.speculation.topk,
                draft_tokens=self.speculation.draft_tokens,
                steps=self.speculation.steps,
                custom_mask=buffers.get("custom_mask"),
                extend_seq_lens=buffers["accepted"][:size],
            )
        return Batch(
            mode=self.mode,
            pool=self.world.pool,
            batch_size=size,
            num_tokens=tokens,
            req_pool_indices=buffers["req_pool_indices"][:size],
            seq_lens=buffers["seq_lens"][:size],
            seq_lens_cpu=host_tensor([0] * size, torch.int32),
            seq_lens_sum=0,
            extend_seq_lens=None if decode else buffers["extend_seq_lens"][:size],
            extend_seq_lens_cpu=None if decode else [self.tokens_per_row] * size,
            positions=buffers["positions"][:tokens],
            input_ids=buffers["input_ids"][:tokens],
            out_cache_loc={name: buffers[f"out_cache_loc.{name}"][:tokens] for name in self.world.pool.groups},
            spec_info=spec_info,
        )

    def forward(self, batch: Batch) -> None:
        tokens = batch.num_tokens
        self.seen["positions"][:tokens] = batch.positions
        self.seen["input_ids"][:tokens] = batch.input_ids
        for layer in self.world.layers:
            q, k, v, out = (self.buffers[f"{name}.{layer.index}"][:tokens] for name in ("q", "k", "v", "out"))
            out.copy_(self.backend.attend(q, k, v, layer, batch))

    def load(self, batch: Batch, requests: Sequence[Request]) -> None:
        """Copy the live rows into the static buffers, pad the rest in the runner's style, refresh host mirrors."""
        rows = describe_rows(requests, self.convention, self.speculation, self.mode)
        count = batch.batch_size - len(requests)
        if self.pad_style == "small_real" and count:
            padding = describe_rows(self.pad_requests[:count], self.convention, self.speculation, self.mode)
            rows = _joined(rows, padding)
        self._store(rows)
        self._fill_tail(batch, len(rows.seq_lens), len(rows.positions))
        self._refresh_host_mirrors(batch)
        self._load_values(batch, requests)

    def _store(self, rows: Rows) -> None:
        """Write ``rows`` to the front of the static buffers."""
        device, buffers, tokens = self.world.device, self.buffers, len(rows.positions)
        values = {
            "req_pool_indices": rows.req_pool_indices,
            "seq_lens": rows.seq_lens,
            "extend_seq_lens": rows.extend_seq_lens,
            "accepted": rows.accepted,
            "positions": rows.positions,
            "input_ids": input_ids_at(rows.positions),
        }
        flat = upload(list(itertools.chain(*values.values())), torch.int64, device)
        for name, part in zip(values, flat.split(list(map(len, values.values()))), strict=True):
            buffers[name][: len(part)] = part
        for name, slots in rows.out_cache_loc.items():
            buffers[f"out_cache_loc.{name}"][:tokens] = slots
        if rows.custom_mask is not None:
            buffers["custom_mask"][: len(rows.custom_mask)] = send(rows.custom_mask, device)

    def _fill_tail(self, batch: Batch, rows: int, tokens: int) -> None:
        """Fill the rows from ``rows`` on in the runner's style, and the tokens from ``tokens`` on.

        Ragged rows leave tokens over even where no row is padded.
        """
        buffers, end = self.buffers, batch.batch_size * self.tokens_per_row
        slot = 0
        if rows < batch.batch_size:
            pad = scratch_row(self.pad_style, self.backend.capabilities.pad_seq_len, self.tokens_per_row)
            buffers["req_pool_indices"][rows : batch.batch_size] = pad.req_pool_index
            buffers["seq_lens"][rows : batch.batch_size] = pad.seq_len
            buffers["extend_seq_lens"][rows : batch.batch_size] = pad.extend_seq_len
            buffers["accepted"][rows : batch.batch_size] = pad.extend_seq_len
            slot = pad.slot
        buffers["positions"][tokens:end] = 0
        buffers["input_ids"][tokens:end] = 0
        for name in self.world.pool.groups:
            buffers[f"out_cache_loc.{name}"][tokens:end] = slot

    def _refresh_host_mirrors(self, batch: Batch) -> None:
        own, accepted = (self.buffers[name][: batch.batch_size] for name in ("extend_seq_lens", "accepted"))
        seq_lens, extend, counts = torch.stack([batch.seq_lens, own, accepted]).cpu()
        batch.seq_lens_cpu.copy_(seq_lens)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        if batch.extend_seq_lens is not None:
            batch.extend_seq_lens_cpu = extend.tolist()
        if batch.spec_info is not None:
            batch.spec_info.extend_seq_lens_cpu = counts.tolist()

    def _load_values(self, batch: Batch, requests: Sequence[Request]) -> None:
        """q, k and v of the live rows; NaN in those of padded rows and in what the graph must write."""
        for tokens in self.seen.values():
            tokens.fill_(-1)
        for layer in self.world.layers:
            index = layer.index
            for name in ("q", "k", "v", "out"):
                fill_with_padding_nan(self.buffers[f"{name}.{index}"][: batch.batch_size * self.tokens_per_row])
            for name, values in inputs_of(requests, index).items():
                self.buffers[f"{name}.{index}"][: len(values)] = values

    def inputs(self, captured: CapturedGraph, requests: Sequence[Request]) -> dict[str, Pair]:
        """q, k and v of the live rows as they lie in the buffers, which all sizes share, and as ``load`` put them."""
        return {
            f"{name} of layer {layer.index}": (self.buffers[f"{name}.{layer.index}"][: len(values)], values)
            for layer in self.world.layers
            for name, values in inputs_of(requests, layer.index).items()
        }

    def prepare(self, size: int, requests: Sequence[Request]) -> CapturedGraph:
        """Everything before a replay that happens on the host."""
        captured = self.captured[size]
        self.load(captured.batch, requests)
        self.backend.prepare_replay(captured.batch)
        return captured

    def run(self, captured: CapturedGraph, requests: Sequence[Request]) -> list[torch.Tensor]:
        """Replay; per layer a copy of the output of the live rows."""
        captured.graph.replay()
        return self._outputs(requests)


def misread_tokens(seen: Mapping[str, list[int]], positions: Sequence[int]) -> list[str]:
    """What the model behind a graph was given for the live tokens that was not theirs: it embeds and rotates by these,
    which no attention shows. ``seen`` is a runner's record of it, ``positions`` are where those tokens stand."""
    wanted = {"positions": list(positions), "input_ids": input_ids_at(positions)}
    return [
        f"{name} {tokens} for live tokens that have {wanted[name]}"
        for name, tokens in seen.items()
        if tokens != wanted[name]
    ]


def fused_inputs(
    layer: Layer, tokens: int, dtype: torch.dtype, device: torch.device, role: str = ""
) -> dict[str, torch.Tensor]:
    """q, k and v of a layer as views of one buffer, as a fused QKV projection leaves them: rows are not contiguous."""
    widths = {
        "q": (layer.q_heads, layer.head_dim),
        "k": (layer.kv_heads, layer.head_dim),
        "v": (layer.kv_heads, layer.v_head_dim),
    }
    whole = scratch(tokens, sum(heads * dim for heads, dim in widths.values()), dtype=dtype, device=device)
    parts = whole.split([heads * dim for heads, dim in widths.values()], dim=1)
    return {
        f"{role}{name}.{layer.index}": part.view(tokens, *widths[name])
        for name, part in zip(widths, parts, strict=True)
    }


def _joined(first: Rows, second: Rows) -> Rows:
    masks = [rows.custom_mask for rows in (first, second) if rows.custom_mask is not None]
    return Rows(
        req_pool_indices=first.req_pool_indices + second.req_pool_indices,
        seq_lens=first.seq_lens + second.seq_lens,
        extend_seq_lens=first.extend_seq_lens + second.extend_seq_lens,
        accepted=first.accepted + second.accepted,
        positions=first.positions + second.positions,
        out_cache_loc={
            name: torch.cat([slots, second.out_cache_loc[name]]) for name, slots in first.out_cache_loc.items()
        },
        custom_mask=torch.cat(masks) if masks else None,
    )
