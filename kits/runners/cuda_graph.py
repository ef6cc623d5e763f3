"""Runner mode ``cuda_graph``: capture for real, replay a plan for real, and look at everything a replay can spoil."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from kits.asking import Check, seeing, settle
from kits.batches import Batch, describe_rows, input_ids_at
from kits.compare import difference, differing, same_bits
from kits.errors import InputError, NeighbourError, NothingReplayedError, OutputError, RepeatError, during
from kits.invariants import metadata_check, padding_check
from kits.padding import scratch_row
from kits.runners.common import SubtestRun, input_check
from kits.runners.graph import GraphRunner, misread_tokens
from kits.runners.plan import ReplayPlan, Step, plan_of
from kits.world import Request


def run_cuda_graph(run: SubtestRun) -> None:
    """Eager leg, captures largest first, the replay plan with eager batches between, neighbour independence."""
    GraphSubtest(run).run()


class GraphSubtest:
    """The lifecycle of one graph subtest."""

    runner_class: type[GraphRunner] = GraphRunner
    writes_kv = True

    def __init__(self, run: SubtestRun) -> None:
        self.suite = run
        self.convention, self.speculation = run.subtest.seq_lens, run.speculation
        self.pad_style = run.subtest.pad_style or "prod_fill"
        self.handed_out: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.plan: ReplayPlan = plan_of(run.subtest, random.Random(run.subtest.seed))

    def run(self) -> None:
        suite, plan = self.suite, self.plan
        pads = plan.max_rows - len(suite.case.prefix_lens)
        suite.open(
            max_rows=plan.max_rows,
            max_tokens=plan.max_tokens,
            max_len=plan.max_len,
            live_rows=plan.max_rows + pads,
            sizes=[size for size, _ in plan.captures],
        )
        small = [(1 + row % 3, plan.tokens_per_row) for row in range(pads)]
        self.pad_requests = suite.world.add_requests(small) if suite.subtest.pad_style == "small_real" else []
        self.runner = self.make_runner()
        own = suite.world.add_requests(plan.steps[0].lens)
        eager = self._eager_leg(own)
        self._capture_all()
        self._replay_all(own, eager)
        self._require_replayed()

    def _replay_all(self, own: list[Request], eager: Sequence[torch.Tensor]) -> None:
        """All steps; between two that do not continue each other, a batch of other requests runs."""
        suite, steps, requests = self.suite, self.plan.steps, own
        outputs: Sequence[torch.Tensor] = ()
        for position, step in enumerate(steps):
            before = outputs
            if step.continues:
                suite.world.accept_first_tokens(requests, cached=self.writes_kv)
            elif position > 0 and not step.repeats:
                suite.world.free(requests)
                self._interlude()
                requests = suite.world.add_requests(step.lens)
            outputs = self._replay(step, requests)
            if position == 0:
                lens = [request.extend_len for request in requests]
                suite.compare_with("replay of own against the eager leg", outputs, eager, lens)
            if step.repeats:
                self._require_repeated(step, before, outputs)
        # A wrong row would look like a dependent one.
        suite.finish()
        self._check_neighbours(steps[-1], requests, outputs)

    def _require_repeated(self, step: Step, before: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        for layer, first, second in zip(self.suite.world.layers, before, outputs, strict=True):
            if not same_bits(first, second):
                self.suite.finish()  # a wrong row is that first
                found = difference(second, first, self.suite.subtest.tolerance, [len(first)])
                raise RepeatError(
                    f"replay of {step.name}, layer {layer.index}: the same batch gave other bits the second time, "
                    f"by up to {found.max_abs:.4g} (margin {found.margin:.3g})"
                )

    def make_runner(self) -> GraphRunner:
        suite = self.suite
        return self.runner_class(
            suite.world,
            suite.backend,
            mode=suite.mode,
            convention=self.convention,
            speculation=self.speculation,
            tokens_per_row=self.plan.tokens_per_row,
            max_rows=self.plan.max_rows,
            pad_style=self.pad_style,
            pad_requests=self.pad_requests,
        )

    def eager_outputs(self, own: Sequence[Request]) -> list[torch.Tensor]:
        """The case's own rows, run eagerly on the same backend."""
        return self.suite.forward_eagerly(own, self.suite.mode, self.convention, self.speculation)

    def _eager_leg(self, own: Sequence[Request]) -> list[torch.Tensor]:
        suite = self.suite
        with suite.notes.phase("eager"):
            outputs = self.eager_outputs(own)
        suite.compare("eager leg", outputs, own, suite.mode, self.speculation)
        suite.world.forget_new_tokens(own)
        return outputs

    def _capture_all(self) -> None:
        """Capture each size on other requests than any replay has, then free them."""
        suite = self.suite
        for size, lens in self.plan.captures:
            requests = suite.world.add_requests(lens)
            before = suite.snapshot()
            with suite.notes.phase("capture"), during(f"warm-up and capture of {size}"):
                warmed = self.runner.capture(size, requests)
            what = f"warm-up of {size}"
            with suite.notes.phase("integrity"):
                _, warmed = settle(
                    suite.kv_integrity_check(before, requests, writes=self.writes_kv, what=what),
                    seeing(warmed),
                )
            suite.notes.captures += self.runner.captured[size].graph.captures
            if suite.mode not in suite.backend.capabilities.fills_at_capture:
                suite.compare(what, warmed, requests, suite.mode, self.speculation)
            suite.world.free(requests)

    def _replay(self, step: Step, requests: Sequence[Request]) -> list[torch.Tensor]:
        suite = self.suite
        what = f"replay of {step.name} ({len(requests)} rows padded to {step.size})"
        with during(what):
            outputs = self._replay_checked(what, step.size, requests)
        suite.compare(what, outputs, requests, suite.mode, self.speculation)
        return outputs

    def _replay_checked(self, what: str, size: int, requests: Sequence[Request]) -> list[torch.Tensor]:
        """Prepare, check metadata and pointers, replay, check the pool; the outputs on the host."""
        suite = self.suite
        with suite.notes.phase("prepare"):
            captured = self.runner.prepare(size, requests)
        with suite.notes.phase("invariants"):
            padded = self.pad_requests[: size - len(requests)]
            settle(
                padding_check(captured.static, requests, padded, self._expected(captured.static, requests, padded)),
                metadata_check(suite.backend, captured.batch, requests),
            )
            captured.guard.check()
            before = suite.snapshot()
        with suite.notes.phase("replay"):
            outputs = self.runner.run(captured, requests)
            suite.notes.replays = sum(captured.graph.replays for captured in self.runner.captured.values())
        with suite.notes.phase("integrity"):
            *_, outputs = settle(
                suite.kv_integrity_check(before, requests, padded=padded, writes=self.writes_kv, what=what),
                input_check(self.runner.inputs(captured, requests), what),
                self._returned_check(outputs),
                self._seen_check(requests),
                seeing(outputs),
            )
        return outputs

    def _returned_check(self, outputs: Sequence[torch.Tensor]) -> Check[None]:
        """A replay leaves alone what the one before it returned, which is its caller's. ``outputs`` are its own."""
        before, self.handed_out = self.handed_out, [(output, output.clone()) for output in outputs]
        found = yield differing(dict(enumerate(before)))
        for index, differs in found.items():
            if bool(differs):
                raise OutputError(f"it overwrote what the replay before had returned, output {index}")

    def _seen_check(self, requests: Sequence[Request]) -> Check[None]:
        """A replay gives the model behind it the live tokens."""
        positions = self.suite.positions(requests, self.suite.mode, self.speculation)
        found = yield {name: tokens[: len(positions)] for name, tokens in self.runner.seen.items()}
        for misread in misread_tokens({name: tokens.tolist() for name, tokens in found.items()}, positions):
            raise InputError(f"the model was given {misread}")

    def _expected(self, batch: Batch, requests: Sequence[Request], padded: Sequence[Request]) -> dict[str, list[int]]:
        """What a batch of ``requests``, padded by requests or in the runner's style, holds for its rows and tokens."""
        rows = describe_rows([*requests, *padded], self.convention, self.speculation, self.suite.mode)
        tokens, count = len(rows.positions), batch.batch_size - len(rows.seq_lens)
        pad_seq_len = self.suite.backend.capabilities.pad_seq_len
        pad = scratch_row(self.pad_style, pad_seq_len, self.plan.tokens_per_row) if count else None
        rest = [0] * (len(batch.positions) - tokens)
        return {
            "seq_lens": rows.seq_lens + ([pad.seq_len] * count if pad else []),
            "extend_seq_lens": rows.extend_seq_lens + ([pad.extend_seq_len] * count if pad else []),
            "accepted": rows.accepted + ([pad.extend_seq_len] * count if pad else []),
            "positions": rows.positions + rest,
            "input_ids": input_ids_at(rows.positions) + rest,
        }

    def _interlude(self) -> None:
        """A batch of other requests on the same instance between two replays: as many new tokens a row as a captured
        one, but of another mode, so that only a runner that looks at shapes alone would replay it."""
        suite = self.suite
        mode = "EXTEND" if "EXTEND" in suite.backend.capabilities.forward_modes else "DECODE"
        tokens = self.plan.tokens_per_row if mode == "EXTEND" else 1
        rows = min(2, len(suite.case.prefix_lens))
        requests = suite.world.add_requests([(3 * row if tokens > 1 else 3 + row, tokens) for row in range(rows)])
        if self.runner.takes(mode, rows, rows * tokens) and mode != suite.mode:
            size = min(size for size in self.runner.captured if size >= rows)
            outputs = self.runner.run(self.runner.prepare(size, requests), requests)
        else:
            with suite.notes.phase("eager"):
                outputs = suite.forward_eagerly(requests, mode, "total", None)
        suite.compare(f"eager {mode} between replays", outputs, requests, mode, None)
        suite.world.free(requests)

    def _check_neighbours(self, step: Step, requests: Sequence[Request], outputs: Sequence[torch.Tensor]) -> None:
        """The same graph and one same row, all other rows of other lengths and NaN: the row must not change."""
        suite = self.suite
        if len(requests) < 2:
            return
        kept = suite.world.rng.randrange(len(requests))
        others = [request for row, request in enumerate(requests) if row != kept]
        suite.world.free(others)
        strangers = suite.world.add_requests([lens for row, lens in enumerate(self.plan.neighbours) if row != kept])
        for stranger in strangers:
            suite.world.poison_history(stranger)
            for layer in suite.world.layers:
                for values in (stranger.q, stranger.k, stranger.v):
                    values[layer.index] = torch.full_like(values[layer.index], float("nan"))
        rows = [*strangers[:kept], requests[kept], *strangers[kept:]]
        what = f"replay of {step.name} with row {kept} kept and its neighbours replaced"
        with during(what):
            replaced = self._replay_checked(what, step.size, rows)
        start = sum(request.extend_len for request in requests[:kept])
        moved = sum(request.extend_len for request in rows[:kept])
        count = requests[kept].extend_len
        for layer, before, after in zip(suite.world.layers, outputs, replaced, strict=True):
            self._require_same(kept, layer.index, before[start : start + count], after[moved : moved + count])

    def _require_same(self, row: int, layer: int, before: torch.Tensor, after: torch.Tensor) -> None:
        tolerance = self.suite.subtest.tolerance
        exact = self.suite.backend.capabilities.batch_invariant
        if same_bits(before, after):
            return
        found = difference(after, before, tolerance, [len(before)])
        if exact or found.margin > 1:
            rule = "bit for bit (the backend says batch_invariant)" if exact else "within tolerance"
            raise NeighbourError(
                f"row {row}, layer {layer} must not depend on its neighbours {rule}, but changed by up to "
                f"{found.max_abs:.4g} (margin {found.margin:.3g}) when they were replaced"
            )

    def _require_replayed(self) -> None:
        notes = self.suite.notes
        planned = len(self.plan.steps) + (len(self.suite.case.prefix_lens) > 1)
        replays = sum(captured.graph.replays for captured in self.runner.captured.values())
        if replays != planned or notes.captures != len(self.plan.captures):
            raise NothingReplayedError(
                f"{notes.captures} captures and {replays} replays happened, {len(self.plan.captures)} and "
                f"{planned} were planned: something ran eagerly instead"
            )
