"""Runner mode ``cuda_graph_multi_step``: all steps of a draft in one graph, metadata of each step built beforehand.

As SGLang's draft runners do it: ``topk`` branches of each row decode one token a step; the write slots of all steps
come as one ``(rows, topk, steps)`` list; the graph switches from step to step by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kits.batches import Batch, describe_rows, eager_batch
from kits.invariants import check_metadata
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
        rows, slots, positions = batch.batch_size, batch.out_cache_loc, batch.positions
        tokens = rows * self.tokens_per_row
        for step in range(self.draft.steps):
            self.backend.advance_draft(step)
            batch.out_cache_loc = {name: step_tokens(loc, rows, self.draft, step) for name, loc in slots.items()}
            batch.positions = step_tokens(positions, rows, self.draft, step)
            for layer in self.world.layers:
                q, k, v, out = (self.buffers[f"{name}.{layer.index}"][:tokens] for name in ("q", "k", "v", "out"))
                result = self.backend.forward(
                    step_tokens(q, rows, self.draft, step),
                    step_tokens(k, rows, self.draft, step),
                    step_tokens(v, rows, self.draft, step),
                    layer,
                    batch,
                )
                into = out.view(rows, self.draft.topk, self.draft.steps, *out.shape[1:])[:, :, step]
                into.copy_(result.view(into.shape))
        batch.out_cache_loc, batch.positions = slots, positions


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
        check_metadata(backend.metadata(), batch, own)
        before, slots, positions = suite.snapshot(), batch.out_cache_loc, batch.positions
        by_layer: list[list[torch.Tensor]] = [[] for _ in suite.world.layers]
        for step in range(draft.steps):
            backend.advance_draft(step)
            batch.out_cache_loc = {name: step_tokens(loc, len(own), draft, step) for name, loc in slots.items()}
            batch.positions = step_tokens(positions, len(own), draft, step)
            for layer in suite.world.layers:
                given = inputs_of(own, layer.index)
                q, k, v = (step_tokens(values, len(own), draft, step) for values in given.values())
                by_layer[layer.index].append(backend.forward(q, k, v, layer, batch))
        suite.check_kv_integrity(before, own, writes=self.writes_kv, what="eager draft")
        return [request_order(steps, len(own), draft) for steps in by_layer]
