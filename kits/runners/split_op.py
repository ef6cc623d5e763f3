"""Runner modes ``pcg`` and ``bcg``: an extend whose attention runs between graphs, on a token-padded static batch.

Metadata come from the raw batch, the forward sees static tensors padded to the captured number of tokens: what a
backend derives from one must fit the other. A piecewise graph captures each piece by itself; a breakable graph
captures the whole forward once and is broken at each attention, which then runs eagerly in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kits.backends.base import Backend
from kits.batches import Batch, describe_rows, eager_batch
from kits.compare import changed
from kits.graphs import PointerGuard, new_graph
from kits.layers import Layer
from kits.record import phase
from kits.runners.common import SubtestRun
from kits.runners.cuda_graph import GraphSubtest
from kits.runners.graph import fused_inputs
from kits.scratch import fill_with_padding_nan, scratch
from kits.world import Request, World, inputs_of

Piece = Callable[[], None]


def run_pcg(run: SubtestRun) -> None:
    """Piecewise: a graph before, between and after the attention calls."""
    SplitSubtest(run, PiecewiseGraph).run()


def run_bcg(run: SubtestRun) -> None:
    """Breakable: one capture of the whole forward, broken at each attention call."""
    SplitSubtest(run, BreakableGraph).run()


class SplitGraph:
    """Graphs and eager calls in their order of execution; counts as one graph for the lifecycle."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[Any] = []
        self.replays = 0
        self.captures = 0

    def record(self, pieces: Sequence[Piece], attention: Sequence[Piece]) -> None:
        """Capture ``pieces[0]``, ``attention[0]``, ``pieces[1]``, ... so that ``replay`` runs them again."""
        raise NotImplementedError

    def _capture(self, piece: Piece) -> Any:
        graph = new_graph(self.device)
        with graph.capture():
            piece()
        return graph

    def replay(self) -> None:
        for part in self.parts:
            if callable(part):
                part()
            else:
                part.replay()
        self.replays += 1


class PiecewiseGraph(SplitGraph):
    """Pieces are captured one by one, without running what lies between them."""

    def record(self, pieces: Sequence[Piece], attention: Sequence[Piece]) -> None:
        graphs = [self._capture(piece) for piece in pieces]
        self.parts = [graphs[0]]
        for call, graph in zip(attention, graphs[1:], strict=True):
            self.parts += [call, graph]
        self.captures = 1


class BreakableGraph(SplitGraph):
    """At each break the capture ends, what it recorded runs, the eager call runs, and a new capture begins."""

    def record(self, pieces: Sequence[Piece], attention: Sequence[Piece]) -> None:
        for position, piece in enumerate(pieces):
            graph = self._capture(piece)
            self.parts.append(graph)
            graph.replay()
            if position < len(attention):
                attention[position]()
                self.parts.append(attention[position])
        self.captures = 1


@dataclass
class CapturedSplit:
    """One captured number of tokens; ``batch`` is the raw batch of the current replay."""

    graph: SplitGraph
    static: Batch
    batch: Batch
    guards: list[PointerGuard] = field(default_factory=list)

    @property
    def guard(self) -> CapturedSplit:
        return self

    def check(self) -> None:
        for guard in self.guards:
            guard.check()


class SplitRunner:
    """Static token buffers of each captured size; rows are whatever the raw batch has."""

    def __init__(self, world: World, backend: Backend, graph_class: type[SplitGraph], mode: str, tokens: int) -> None:
        self.world, self.backend, self.graph_class, self.mode = world, backend, graph_class, mode
        device, dtype = world.device, world.dtype
        self.buffers: dict[str, torch.Tensor] = {
            name: scratch(tokens, dtype=torch.int64, device=device)
            for name in ("positions", "input_ids", *(f"out_cache_loc.{group}" for group in world.pool.groups))
        }
        for layer in world.layers:
            for role in ("given.", "ready."):
                self.buffers |= fused_inputs(layer, tokens, dtype, device, role)
                self.buffers[f"{role}out.{layer.index}"] = scratch(
                    tokens, layer.q_heads, layer.v_head_dim, dtype=dtype, device=device
                )
        self.captured: dict[int, CapturedSplit] = {}

    def capture(self, size: int, requests: Sequence[Request], *, warm_ups: int = 2) -> list[torch.Tensor]:
        """Warm up, then capture the pieces over ``size`` tokens; returns what the last warm-up put out."""
        raw, static = self._load(size, requests)
        captured = CapturedSplit(self.graph_class(self.world.device), static, raw)
        self.captured[size] = captured
        layers = self.world.layers
        pieces = [self._piece(layer, size, before=index > 0) for index, layer in enumerate(layers)]
        pieces.append(self._last_piece(layers[-1], size))
        attention = [self._attention(layer, size, captured) for layer in layers]
        self.backend.prepare(raw)
        with phase("warm_up"):
            for _ in range(warm_ups):
                for piece, call in zip(pieces, attention, strict=False):
                    piece()
                    call()
                pieces[-1]()
        outputs = self._outputs(raw.num_tokens)
        captured.graph.record(pieces, attention)
        captured.guards = [
            PointerGuard(part, {"buffers": self.buffers}) for part in captured.graph.parts if not callable(part)
        ]
        return outputs

    def takes(self, mode: str, rows: int, tokens: int) -> bool:
        """Batches between replays belong to nobody's pieces: the eager runner takes them."""
        return False

    def _piece(self, layer: Layer, size: int, *, before: bool) -> Piece:
        """What the model does before a layer's attention: finish the previous layer, make this one's q, k and v."""

        def piece() -> None:
            if before:
                self._finish(self.world.layers[layer.index - 1], size)
            for name in ("q", "k", "v"):
                self._at("ready", name, layer, size).copy_(self._at("given", name, layer, size))

        return piece

    def _last_piece(self, layer: Layer, size: int) -> Piece:
        return lambda: self._finish(layer, size)

    def _finish(self, layer: Layer, size: int) -> None:
        self._at("given", "out", layer, size).copy_(self._at("ready", "out", layer, size))

    def _attention(self, layer: Layer, size: int, captured: CapturedSplit) -> Piece:
        def attend() -> None:
            q, k, v = (self._at("ready", name, layer, size) for name in ("q", "k", "v"))
            result = self.backend.forward(q, k, v, layer, captured.static)
            self._at("ready", "out", layer, size)[: len(result)] = result

        return attend

    def _at(self, role: str, name: str, layer: Layer, size: int) -> torch.Tensor:
        return self.buffers[f"{role}.{name}.{layer.index}"][:size]

    def _load(self, size: int, requests: Sequence[Request]) -> tuple[Batch, Batch]:
        """The raw batch and its token-padded twin; NaN in all values that nobody may use."""
        rows = describe_rows(requests, "total", None, self.mode)
        raw = eager_batch(self.world.pool, rows, self.mode, None)
        tokens, buffers = raw.num_tokens, self.buffers
        for name, values in (("positions", raw.positions), ("input_ids", raw.input_ids)):
            buffers[name][:tokens] = values
            buffers[name][tokens:size] = 0
        for group, slots in raw.out_cache_loc.items():
            buffers[f"out_cache_loc.{group}"][:tokens] = slots
            buffers[f"out_cache_loc.{group}"][tokens:size] = 0
        for layer in self.world.layers:
            for role in ("given", "ready"):
                for name in ("q", "k", "v", "out"):
                    fill_with_padding_nan(self._at(role, name, layer, size))
            for name, values in inputs_of(requests, layer.index).items():
                self._at("given", name, layer, tokens).copy_(values)
        static = replace(
            raw,
            num_tokens=size,
            positions=buffers["positions"][:size],
            input_ids=buffers["input_ids"][:size],
            out_cache_loc={name: buffers[f"out_cache_loc.{name}"][:size] for name in raw.out_cache_loc},
        )
        return raw, static

    def changed_inputs(self, requests: Sequence[Request]) -> list[str]:
        """Which of q, k and v of the live rows the attention changed."""
        return changed(
            {
                f"{name} of layer {layer.index}": (self._at("ready", name, layer, len(values)), values)
                for layer in self.world.layers
                for name, values in inputs_of(requests, layer.index).items()
            }
        )

    def prepare(self, size: int, requests: Sequence[Request]) -> CapturedSplit:
        """Everything before a replay that happens on the host."""
        captured = self.captured[size]
        captured.batch, captured.static = self._load(size, requests)
        self.backend.prepare(captured.batch)
        return captured

    def run(self, captured: CapturedSplit, requests: Sequence[Request]) -> list[torch.Tensor]:
        captured.graph.replay()
        return self._outputs(captured.batch.num_tokens)

    def _outputs(self, tokens: int) -> list[torch.Tensor]:
        return [self._at("given", "out", layer, tokens).clone() for layer in self.world.layers]


class SplitSubtest(GraphSubtest):
    """States only what differs: sizes count tokens, and attention is not inside a graph."""

    def __init__(self, run: SubtestRun, graph_class: type[SplitGraph]) -> None:
        super().__init__(run)
        self.graph_class = graph_class

    def make_runner(self) -> Any:
        suite = self.suite
        return SplitRunner(suite.world, suite.backend, self.graph_class, suite.mode, self.plan.max_tokens)
