"""Runner mode ``cuda_graph_multi_step``: all steps of a draft in one graph, metadata of each step built beforehand.

As SGLang's draft runners do it: ``topk`` branches of each row decode one token a step; the write slots of all steps
come as one ``(rows, topk, steps)`` list; the graph switches from step to step by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from kits.asking import seeing, settle
from kits.backends.base import Backend
from kits.batches import Batch, describe_rows, eager_batch
from kits.invariants import metadata_check
from kits.layers import Layer
from kits.runners.common import SubtestRun
from kits.runners.cuda_graph import GraphSubtest
from kits.runners.graph import GraphRunner
from kits.subtest import Speculation
from kits.world import Request, inputs_of


def run_multi_step(run: SubtestRun) -> None:
    """The lifecycle of ``cuda_graph`` over a graph of several draft steps."""
    MultiStepSubtest(run).run()


def step_tokens(values: torch.Tensor, rows: int, speculation: Speculation, step: int) -> torch.Tensor:
    """The tokens of one step, row after row and branch after branch, out of a ``(rows, topk, steps)`` list."""
    shape = (rows, speculation.topk, speculation.steps, *values.shape[1:])
    return values.view(shape)[:, :, step].reshape(rows * speculation.topk, *values.shape[1:])


def request_order(steps: Sequence[torch.Tensor], rows: int, speculation: Speculation) -> torch.Tensor:
    """The inverse: outputs of each step back in the requests' own order, ``(rows, topk, steps)`` flattened."""
    stacked = torch.stack(list(steps)).view(speculation.steps, rows, speculation.topk, *steps[0].shape[1:])
    return stacked.movedim(0, 2).reshape(-1, *steps[0].shape[1:])


def run_steps(
    backend: Backend,
    layers: Sequence[Layer],
    batch: Batch,
    draft: Speculation,
    inputs: Callable[[Layer], Iterable[torch.Tensor]],
) -> Iterator[tuple[int, Layer, torch.Tensor]]:
    """All forwards of a draft, with step and layer of each. ``inputs`` gives q, k and v of a layer for all steps,
    ``(rows * topk * steps, heads, dim)``."""
    rows, slots, positions = batch.batch_size, batch.out_cache_loc, batch.positions
    for step in range(draft.steps):
        backend.advance_draft(step)
        batch.out_cache_loc = {name: step_tokens(loc, rows, draft, step) for name, loc in slots.items()}
        batch.positions = step_tokens(positions, rows, draft, step)
        for layer in layers:
            q, k, v = (step_tokens(values, rows, draft, step) for values in inputs(layer))
            yield step, layer, backend.attend(q, k, v, layer, batch)
    batch.out_cache_loc, batch.positions = slots, positions


class MultiStepRunner(GraphRunner):
    """``tokens_per_row`` is ``topk * steps``; each step of the graph sees the ``topk`` tokens of each row."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        assert self.speculation is not None
        self.draft = self.speculation

    def static_batch(self, size: int) -> Batch:
        batch = super().static_batch(size)
        batch.num_tokens = size * self.draft.topk
        batch.save_kv = self.draft.caches_drafts
        return batch

    def forward(self, batch: Batch) -> None:
        tokens = batch.batch_size * self.tokens_per_row

        def inputs(layer: Layer) -> list[torch.Tensor]:
            return [self.buffers[f"{name}.{layer.index}"][:tokens] for name in ("q", "k", "v")]

        by_step = self.seen["positions"][:tokens].view(batch.batch_size, self.draft.topk, self.draft.steps)
        self.seen["input_ids"][:tokens] = batch.input_ids
        for step, layer, result in run_steps(self.backend, self.world.layers, batch, self.draft, inputs):
            by_step[:, :, step] = batch.positions.view(batch.batch_size, self.draft.topk)
            out = self.buffers[f"out.{layer.index}"][:tokens]
            into = out.view(batch.batch_size, self.draft.topk, self.draft.steps, *out.shape[1:])[:, :, step]
            into.copy_(result.view(into.shape))


class MultiStepSubtest(GraphSubtest):
    """States only what differs: several forwards a batch, and drafts that may write no KV."""

    runner_class = MultiStepRunner

    def __init__(self, run: SubtestRun) -> None:
        super().__init__(run)
        assert self.speculation is not None
        self.draft = self.speculation
        self.writes_kv = self.draft.caches_drafts

    def eager_outputs(self, own: Sequence[Request]) -> list[torch.Tensor]:
        suite, backend, draft = self.suite, self.suite.backend, self.draft
        rows = describe_rows(own, self.convention, draft, suite.mode)
        batch = eager_batch(suite.world.pool, rows, suite.mode, draft, save_kv=self.writes_kv)
        batch.num_tokens = len(own) * draft.topk
        backend.prepare(batch)
        with suite.notes.phase("invariants"):
            settle(metadata_check(backend, batch, own))
        before = suite.snapshot()
        by_layer: list[list[torch.Tensor]] = [[] for _ in suite.world.layers]
        for _, layer, result in run_steps(
            backend, suite.world.layers, batch, draft, lambda layer: inputs_of(own, layer.index).values()
        ):
            by_layer[layer.index].append(result)
        outputs = [request_order(steps, len(own), draft) for steps in by_layer]
        with suite.notes.phase("integrity"):
            _, outputs = settle(
                suite.kv_integrity_check(before, own, writes=self.writes_kv, what="eager draft"),
                seeing(outputs),
            )
        return outputs
