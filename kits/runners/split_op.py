"""Runner modes ``pcg`` and ``bcg``: an extend whose attention runs between graphs, on a token-padded static batch.

Metadata come from the raw batch, the forward sees static tensors padded to the captured number of tokens: what a
backend derives from one must fit the other. A piecewise graph captures each piece by itself, and the pieces meet in
buffers that were there before. A breakable graph follows one forward pass: at each attention the capture is broken, the
call runs eagerly, and the next capture reads what it returned. So its q, k and v lie in memory of the graph, and what
the call returns later must be copied to where the first result was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kits.backends.base import Backend
from kits.batches import Batch, describe_rows, eager_batch
from kits.compare import Pair
from kits.graphs import Graph, PointerGuard, new_graph
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


class SplitGraph(ABC):
    """Graphs and eager calls in their order of execution; counts as one graph for the lifecycle.

    ``ready`` holds what crosses a break, by names such as ``q.0``: q, k and v of a layer, and its ``out``.
    """

    def __init__(self, device: torch.device, ready: dict[str, torch.Tensor]) -> None:
        self.device = device
        self.ready = ready
        self.parts: list[Graph | Piece] = []

    @abstractmethod
    def record(self, pieces: Sequence[Piece], attention: Sequence[Piece]) -> None:
        """Capture ``pieces[0]``, ``attention[0]``, ``pieces[1]``, ... so that ``replay`` runs them again."""

    @abstractmethod
    def hand_over(self, name: str, values: torch.Tensor) -> None:
        """Called by a piece: leave ``values`` in ``ready`` for the attention."""

    @abstractmethod
    def hand_back(self, name: str, result: torch.Tensor, size: int) -> None:
        """Called after the attention: leave its result in ``ready``, as the first of ``size`` rows."""

    @property
    def graphs(self) -> list[Graph]:
        return [part for part in self.parts if isinstance(part, Graph)]

    @property
    def captures(self) -> int:
        """Captures of the whole forward: what every single graph of it went through."""
        return min((graph.captures for graph in self.graphs), default=0)

    @property
    def replays(self) -> int:
        """Replays of the whole forward since it was recorded."""
        return min((graph.replays for graph in self.graphs), default=0)

    def replay(self) -> None:
        for part in self.parts:
            if isinstance(part, Graph):
                part.replay()
            else:
                part()

    def _capture(self, piece: Piece) -> Graph:
        graph = new_graph(self.device)
        with graph.capture():
            piece()
        return graph


class PiecewiseGraph(SplitGraph):
    """Pieces are captured one by one, without running what lies between them."""

    def record(self, pieces: Sequence[Piece], attention: Sequence[Piece]) -> None:
        first, *others = (self._capture(piece) for piece in pieces)
        self.parts = [first]
        for call, graph in zip(attention, others, strict=True):
            self.parts += [call, graph]

    def hand_over(self, name: str, values: torch.Tensor) -> None:
        self.ready[name].copy_(values)

    def hand_back(self, name: str, result: torch.Tensor, size: int) -> None:
        self.ready[name][: len(result)] = result


class BreakableGraph(SplitGraph):
    """At each break the capture ends, what it recorded runs, the eager call runs, and a new capture begins."""

    def __init__(self, device: torch.device, ready: dict[str, torch.Tensor]) -> None:
        super().__init__(device, {})  # the graph's own memory
        self.recorded = 0

    def record(self, pieces: Sequence[Piece], attention: Sequence[Piece]) -> None:
        for position, piece in enumerate(pieces):
            graph = self._capture(piece)
            self.parts.append(graph)
            graph.replay()
            if position < len(attention):
                attention[position]()
                self.parts.append(attention[position])
        self.recorded = 1

    @property
    def replays(self) -> int:
        return super().replays - self.recorded

    def hand_over(self, name: str, values: torch.Tensor) -> None:
        self.ready[name] = values.clone()

    def hand_back(self, name: str, result: torch.Tensor, size: int) -> None:
        if not self.recorded:
            self.ready[name] = result.new_empty(size, *result.shape[1:])
            fill_with_padding_nan(self.ready[name])
        self.ready[name][: len(result)] = result


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
        self.seen = {name: scratch(tokens, dtype=torch.int64, device=device) for name in ("positions", "input_ids")}
        self.captured: dict[int, CapturedSplit] = {}

    def capture(self, size: int, requests: Sequence[Request], *, warm_ups: int = 2) -> list[torch.Tensor]:
        """Warm up, then capture the pieces over ``size`` tokens; returns what the last warm-up put out."""
        raw, static = self._load(size, requests)
        ready = {
            f"{name}.{layer.index}": self._at(f"ready.{name}", layer, size)
            for layer in self.world.layers
            for name in ("q", "k", "v", "out")
        }
        captured = CapturedSplit(self.graph_class(self.world.device, ready), static, raw)
        self.captured[size] = captured
        layers = self.world.layers
        pieces = [self._piece(layer, size, captured.graph, before=index > 0) for index, layer in enumerate(layers)]
        pieces.append(lambda: self._finish(layers[-1], size, captured.graph))
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
            PointerGuard(graph, {"buffers": self.buffers, "ready": captured.graph.ready})
            for graph in captured.graph.graphs
        ]
        return outputs

    def takes(self, mode: str, rows: int, tokens: int) -> bool:
        """Batches between replays belong to nobody's pieces: the eager runner takes them."""
        return False

    def _piece(self, layer: Layer, size: int, graph: SplitGraph, *, before: bool) -> Piece:
        """What the model does before a layer's attention: finish the previous layer, make this one's q, k and v."""

        def piece() -> None:
            if before:
                self._finish(self.world.layers[layer.index - 1], size, graph)
            else:
                for name, tokens in self.seen.items():
                    tokens[:size] = self.buffers[name][:size]
            for name in ("q", "k", "v"):
                graph.hand_over(f"{name}.{layer.index}", self._at(f"given.{name}", layer, size))

        return piece

    def _finish(self, layer: Layer, size: int, graph: SplitGraph) -> None:
        self._at("given.out", layer, size).copy_(graph.ready[f"out.{layer.index}"])

    def _attention(self, layer: Layer, size: int, captured: CapturedSplit) -> Piece:
        def attend() -> None:
            q, k, v = (captured.graph.ready[f"{name}.{layer.index}"] for name in ("q", "k", "v"))
            result = self.backend.attend(q, k, v, layer, captured.static)
            captured.graph.hand_back(f"out.{layer.index}", result, size)

        return attend

    def _at(self, name: str, layer: Layer, size: int) -> torch.Tensor:
        return self.buffers[f"{name}.{layer.index}"][:size]

    def _load(self, size: int, requests: Sequence[Request]) -> tuple[Batch, Batch]:
        """The raw batch and its token-padded twin; NaN in all values that nobody may use."""
        rows = describe_rows(requests, "total", None, self.mode)
        raw = eager_batch(self.world.pool, rows, self.mode, None)
        tokens, buffers = raw.num_tokens, self.buffers
        for read in self.seen.values():
            read.fill_(-1)
        for name, values in (("positions", raw.positions), ("input_ids", raw.input_ids)):
            buffers[name][:tokens] = values
            buffers[name][tokens:size] = 0
        for group, slots in raw.out_cache_loc.items():
            buffers[f"out_cache_loc.{group}"][:tokens] = slots
            buffers[f"out_cache_loc.{group}"][tokens:size] = 0
        for layer in self.world.layers:
            for name in ("q", "k", "v", "out"):
                fill_with_padding_nan(self._at(f"given.{name}", layer, size))
            for name, values in inputs_of(requests, layer.index).items():
                self._at(f"given.{name}", layer, tokens).copy_(values)
        for values in self.captured[size].graph.ready.values() if size in self.captured else ():
            fill_with_padding_nan(values)
        static = replace(
            raw,
            num_tokens=size,
            positions=buffers["positions"][:size],
            input_ids=buffers["input_ids"][:size],
            out_cache_loc={name: buffers[f"out_cache_loc.{name}"][:size] for name in raw.out_cache_loc},
        )
        return raw, static

    def inputs(self, captured: CapturedSplit, requests: Sequence[Request]) -> dict[str, Pair]:
        """q, k and v of the live rows as the attention left them, and as they were handed over."""
        ready = captured.graph.ready
        return {
            f"{name} of layer {layer.index}": (ready[f"{name}.{layer.index}"][: len(values)], values)
            for layer in self.world.layers
            for name, values in inputs_of(requests, layer.index).items()
        }

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
        return [self._at("given.out", layer, tokens).clone() for layer in self.world.layers]


class SplitSubtest(GraphSubtest):
    """States only what differs: sizes count tokens, and attention is not inside a graph."""

    def __init__(self, run: SubtestRun, graph_class: type[SplitGraph]) -> None:
        super().__init__(run)
        self.graph_class = graph_class

    def make_runner(self) -> Any:
        suite = self.suite
        return SplitRunner(suite.world, suite.backend, self.graph_class, suite.mode, self.plan.max_tokens)
