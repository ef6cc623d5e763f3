"""Weaker configurations of this suite, as public ones are: what each would have missed is measured, not argued.

A weaker configuration drops subtests, blunts the kit, or both. It must stay green on a healthy backend.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from kits import invariants, scratch
from kits.asking import seeing
from kits.errors import NothingReplayedError
from kits.faults.registry import Changes
from kits.graphs import PointerGuard, memory
from kits.kernels import _flashinfer_schedule as schedule
from kits.pools import KVGroup
from kits.runners import common
from kits.runners.common import SubtestRun
from kits.runners.cuda_graph import GraphSubtest
from kits.runners.graph import GraphRunner
from kits.runners.split_op import SplitRunner
from kits.world import Request, World


def _everything(_entry: Mapping[str, Any]) -> bool:
    return True


def _nothing(_changes: Changes) -> None:
    pass


@dataclass(frozen=True)
class Weakening:
    """``keeps``: which subtests of the manifest are left; ``apply``: what the kit no longer does; ``profile``: whose
    manifest is run."""

    name: str
    summary: str
    keeps: Callable[[Mapping[str, Any]], bool] = _everything
    apply: Callable[[Changes], None] = _nothing
    profile: str = "ci"


def _one_replay(changes: Changes) -> None:
    """Capture one size, replay the case once, look at nothing afterwards."""

    def shorten(original: Any) -> Any:
        def __init__(self: GraphSubtest, *arguments: Any, **options: Any) -> None:
            original(self, *arguments, **options)
            first = self.plan.steps[0]
            captures = [(size, lens) for size, lens in self.plan.captures if size == first.size]
            self.plan = replace(self.plan, captures=captures, steps=[first])

        return __init__

    def nobody(original: Any) -> Any:
        return lambda self, lens: original(self, lens) if lens else []

    changes.replace(GraphSubtest, "__init__", shorten)
    # Without a larger size a plan may need no padding at all.
    changes.replace(World, "add_requests", nobody)
    _no_neighbours(changes)


def _no_neighbours(changes: Changes) -> None:
    """No row is replayed again among others; the count of replays allows for it."""

    def count(_original: Any) -> Any:
        def _require_replayed(self: GraphSubtest) -> None:
            replays = sum(captured.graph.replays for captured in self.runner.captured.values())
            if replays != len(self.plan.steps):
                raise NothingReplayedError(f"{replays} replays happened, {len(self.plan.steps)} were planned")

        return _require_replayed

    changes.replace(GraphSubtest, "_check_neighbours", _silent)
    changes.replace(GraphSubtest, "_require_replayed", count)


def _silent(_check: Any) -> Any:
    return lambda *_arguments, **_options: None


def _blind(_check: Any) -> Any:
    """In the place of a check that is settled with others: it looks at nothing."""
    return lambda *_arguments, **_options: seeing(())


def _real_rows(changes: Changes) -> None:
    """Compare outputs of live rows with the reference, and do nothing else."""
    for check in (invariants.metadata_check, invariants.padding_check, common.input_check):
        changes.replace_everywhere(check, _blind)
    for owner, name in (
        (SubtestRun, "kv_integrity_check"),
        (GraphSubtest, "_returned_check"),
        (GraphSubtest, "_seen_check"),
    ):
        changes.replace(owner, name, _blind)
    changes.replace(PointerGuard, "check", _silent)
    changes.replace(GraphSubtest, "_require_repeated", _silent)
    _no_neighbours(changes)


def _contiguous(changes: Changes) -> None:
    """Hand pages out in order; nobody owns the end of the pool."""
    import kits.world

    def in_order(original: Any) -> Any:
        def assign_slots(
            _layout: str, lens: Sequence[tuple[int, int]], free: list[int], page_size: int, rng: random.Random
        ) -> Any:
            return original("contiguous", lens, free, page_size, rng)

        return assign_slots

    def at_the_front(_original: Any) -> Any:
        def _add_bystander(self: World) -> Request:
            pages = {name: [free.pop(0)] for name, free in self._free_pages.items()}
            slots = {
                name: [[page * self.page_size + offset for offset in range(self.page_size)]]
                for name, (page,) in pages.items()
            }
            (bystander,) = self._new_requests(
                [(self.page_size, 0)], {name: [taken] for name, taken in pages.items()}, slots
            )
            return bystander

        return _add_bystander

    changes.replace(kits.world, "assign_slots", in_order)
    changes.replace(World, "_add_bystander", at_the_front)


def _zeroed(changes: Changes) -> None:
    """Every buffer, every slot that nobody owns, and what padded rows bring along, is zero."""

    def zero_table(original: Any) -> Any:
        def __init__(self: KVGroup, *arguments: Any, **options: Any) -> None:
            original(self, *arguments, **options)
            self.stray_slot = 0
            self.req_to_token.zero_()
            for whole in self._guarded.values():
                whole.zero_()

        return __init__

    def poison(original: Any) -> Any:
        return lambda self, slots, value=0.0: original(self, slots, 0.0)

    def zero_padding(original: Any) -> Any:
        def _load_values(self: GraphRunner, batch: Any, requests: Sequence[Request]) -> None:
            original(self, batch, requests)
            _zero_behind(self.buffers, sum(request.extend_len for request in requests))

        return _load_values

    def zero_split(original: Any) -> Any:
        def _load(self: SplitRunner, size: int, requests: Sequence[Request]) -> Any:
            loaded = original(self, size, requests)
            _zero_behind(self.buffers, sum(request.extend_len for request in requests))
            return loaded

        return _load

    def workspace(original: Any) -> Any:
        return lambda device: original(device).zero_()

    changes.replace_everywhere(
        scratch.scratch, lambda original: lambda *shape, **options: original(*shape, **options).zero_()
    )
    changes.replace(KVGroup, "__init__", zero_table)
    changes.replace(KVGroup, "poison", poison)
    changes.replace(GraphRunner, "_load_values", zero_padding)
    changes.replace(SplitRunner, "_load", zero_split)
    changes.replace(memory, "poison_byte", lambda _original: lambda dtype: 0)
    changes.replace(schedule, "new_workspace", workspace)


def _zero_behind(buffers: Mapping[str, torch.Tensor], tokens: int) -> None:
    """Zeros in q, k, v and out of all tokens from ``tokens`` on."""
    for buffer in buffers.values():
        if buffer.dtype.is_floating_point:
            buffer[tokens:] = 0


def _all(changes: Changes) -> None:
    for weaken in (_one_replay, _real_rows, _contiguous, _zeroed):
        weaken(changes)


WEAKENINGS = {
    weakening.name: weakening
    for weakening in (
        Weakening("ancestor", "the 525 subtests from before padding mirrored production", profile="ancestor"),
        Weakening("one replay", "one captured size, one replay of it, no neighbour check", apply=_one_replay),
        Weakening(
            "small_real", "padding by small, consistent requests only", keeps=lambda e: e["pad_style"] != "prod_fill"
        ),
        Weakening(
            "real rows",
            "outputs of live rows only: nobody looks at metadata, pointers, the KV pool or neighbours",
            apply=_real_rows,
        ),
        Weakening(
            "contiguous",
            "pages in order, and nothing live on the last one",
            keeps=lambda e: e["layout"] in ("shuffled_pages", "contiguous"),
            apply=_contiguous,
        ),
        Weakening("zeroed", "zeros wherever the suite leaves garbage", apply=_zeroed),
        Weakening(
            "all of them",
            "the ancestor with one replay, small_real, real rows, contiguous and zeroed",
            keeps=lambda e: e["pad_style"] != "prod_fill" and e["layout"] in ("shuffled_pages", "contiguous"),
            apply=_all,
            profile="ancestor",
        ),
    )
}


@contextmanager
def weakened(name: str) -> Iterator[None]:
    """Blunt the kit for the length of a block."""
    changes = Changes(name)
    try:
        WEAKENINGS[name].apply(changes)
        yield
    finally:
        changes.undo()
