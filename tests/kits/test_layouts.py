"""Every layout gives each token a slot of its own, out of the request's own pages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.layouts import LAYOUTS, PagesExhausted, assign_slots

LENS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), lens=LENS, page_size=st.sampled_from([1, 4, 16]), seed=st.integers(0, 99))
def test_slots_are_distinct_and_owned(layout: str, lens: list[tuple[int, int]], page_size: int, seed: int) -> None:
    free = list(range(1, 400))
    slots, pages = assign_slots(layout, lens, free, page_size, random.Random(seed))
    flat = [slot for row in slots for slot in row]
    assert len(set(flat)) == len(flat) == sum(prefix + extend for prefix, extend in lens)
    for row, owned in zip(slots, pages, strict=True):
        assert {slot // page_size for slot in row} <= set(owned)
        assert not set(owned) & set(free)


def test_prefix_stays_in_page_order_and_extend_does_not() -> None:
    slots, _ = assign_slots("non_monotonic_extend", [(16, 8)], list(range(1, 40)), 16, random.Random(3))
    offsets = [slot % 16 for slot in slots[0]]
    assert offsets[:16] == list(range(16))
    assert offsets[16:] != sorted(offsets[16:])


def test_one_scattered_token_is_not_the_next_slot() -> None:
    slots, _ = assign_slots("non_monotonic_extend", [(3, 1)], list(range(1, 40)), 16, random.Random(3))
    assert slots[0][3] != slots[0][2] + 1


def test_interleaved_rows_take_turns() -> None:
    _, pages = assign_slots("interleaved_pages", [(30, 2), (30, 2)], list(range(1, 40)), 16, random.Random(0))
    assert pages == [[1, 3], [2, 4]]


def test_too_few_pages() -> None:
    with pytest.raises(PagesExhausted, match="3 pages needed, 2 free"):
        assign_slots("contiguous", [(40, 1)], [1, 2], 16, random.Random(0))
