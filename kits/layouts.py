"""Cache layouts: which slots of the pool a set of requests is given.

A layout maps lengths to slots and nothing else; pages come from a free list in an order the layout chooses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

LAYOUTS = ("contiguous", "shuffled_pages", "interleaved_pages", "non_monotonic_extend")


class PagesExhausted(RuntimeError):
    """The pool has fewer free pages than the requests need: the fixture sized it wrongly."""


def assign_slots(
    layout: str,
    lens: Sequence[tuple[int, int]],
    free_pages: list[int],
    page_size: int,
    rng: random.Random,
) -> tuple[list[list[int]], list[list[int]]]:
    """Slots of each position and pages of each request, for ``lens = [(prefix, extend), ...]``.

    Takes the pages out of ``free_pages``. All layouts but ``non_monotonic_extend`` fill a page in order.
    """
    counts = [-(-(prefix + extend) // page_size) for prefix, extend in lens]
    if sum(counts) > len(free_pages):
        raise PagesExhausted(f"{sum(counts)} pages needed, {len(free_pages)} free")
    pages = _PAGE_ORDERS[layout](counts, free_pages, rng)
    for taken in pages:
        for page in taken:
            free_pages.remove(page)
    slots = []
    for (prefix, extend), taken in zip(lens, pages, strict=True):
        in_order = [page * page_size + offset for page in taken for offset in range(page_size)]
        row = in_order[: prefix + extend]
        if layout == "non_monotonic_extend":
            row[prefix:] = _scatter(in_order[prefix:], extend, page_size, rng)
        slots.append(row)
    return slots, pages


def _scatter(candidates: list[int], count: int, page_size: int, rng: random.Random) -> list[int]:
    """``count`` slots of ``candidates`` in an order that is not the pages' own.

    At page size 1 a page table can still say it; at larger sizes the slots also leave gaps, so that none can.
    """
    chosen = rng.sample(candidates, count)
    if count > 1 and chosen == sorted(chosen):
        chosen.reverse()
    if page_size > 1 and count == 1 and len(candidates) > 1:
        chosen = [candidates[-1]]
    return chosen


def _contiguous(counts: Sequence[int], free: list[int], rng: random.Random) -> list[list[int]]:
    ordered = iter(sorted(free))
    return [[next(ordered) for _ in range(count)] for count in counts]


def _shuffled(counts: Sequence[int], free: list[int], rng: random.Random) -> list[list[int]]:
    drawn = iter(rng.sample(free, sum(counts)))
    return [[next(drawn) for _ in range(count)] for count in counts]


def _interleaved(counts: Sequence[int], free: list[int], rng: random.Random) -> list[list[int]]:
    ordered = iter(sorted(free))
    pages: list[list[int]] = [[] for _ in counts]
    for depth in range(max(counts, default=0)):
        for row, count in enumerate(counts):
            if depth < count:
                pages[row].append(next(ordered))
    return pages


_PAGE_ORDERS: dict[str, Callable[[Sequence[int], list[int], random.Random], list[list[int]]]] = {
    "contiguous": _contiguous,
    "shuffled_pages": _shuffled,
    "interleaved_pages": _interleaved,
    "non_monotonic_extend": _shuffled,
}
