"""The replay plan: which batches a captured graph must answer, in which order."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kits.subtest import Case, Subtest

Lens = list[tuple[int, int]]
"""``(prefix, extend)`` of each row."""


@dataclass(frozen=True)
class Step:
    """One replay: the captured size it is padded to, and its live rows."""

    name: str
    size: int
    lens: Lens
    repeats: bool = False
    """The very batch of the step before, which has to have the same bits again."""
    continues: bool = False
    """The requests of the step before, of whose new tokens the first was accepted; no other batch runs between."""


@dataclass(frozen=True)
class ReplayPlan:
    """Sizes to capture, largest first, with the rows each is captured on; then the replays.

    ``rows`` and ``tokens`` bound every batch; by default they follow from the largest captured size.
    """

    captures: list[tuple[int, Lens]]
    steps: list[Step]
    neighbours: Lens
    tokens_per_row: int
    rows: int | None = None
    tokens: int | None = None

    @property
    def max_rows(self) -> int:
        return self.rows or max(size for size, _ in self.captures)

    @property
    def max_tokens(self) -> int:
        return self.tokens or self.max_rows * self.tokens_per_row

    @property
    def max_len(self) -> int:
        rows = [row for _, lens in self.captures for row in lens]
        rows += [row for step in self.steps for row in step.lens] + self.neighbours
        return max(prefix + extend for prefix, extend in rows)


def plan_of(subtest: Subtest, rng: random.Random) -> ReplayPlan:
    """The plan of a graph subtest; what it draws comes from ``rng`` alone."""
    case, speculation = subtest.case, subtest.case.speculation
    if subtest.runner in ("pcg", "bcg"):
        return make_split_plan(case, rng)
    if speculation is None:
        tokens = max(case.extend_lens)
    elif subtest.runner == "cuda_graph_multi_step":
        tokens = speculation.topk * speculation.steps
    else:
        tokens = speculation.draft_tokens
    drafts_see_prefix_only = (
        subtest.runner == "cuda_graph_multi_step" and speculation is not None and not speculation.caches_drafts
    )
    return make_plan(
        case,
        multiplier=subtest.multiplier,
        padded=subtest.pad_style is not None,
        tokens=tokens,
        lowest=1 if drafts_see_prefix_only else 0,
        rng=rng,
        pads_once=subtest.runner == "cuda_graph_multi_step",
    )


def make_plan(
    case: Case,
    *,
    multiplier: int,
    padded: bool,
    tokens: int,
    lowest: int,
    rng: random.Random,
    pads_once: bool = False,
) -> ReplayPlan:
    """Lengths of all captures and replays of a case at a capture multiplier; rows have room for ``tokens`` new tokens.

    All begin with own, own once more, and own continued. Then, at multiplier 1: the same lengths on other requests, 4x
    padded, a single row, own grown. Otherwise: 4x full of live rows, smallest, own grown. A sweep without a pad style
    runs unpadded: the same lengths on other requests, 2x full, own grown; where it ``pads_once``, one more replay fills
    half of the larger size.

    Captures see shorter rows than any replay of the case's own, so that a length kept from capture always shows; those
    of the case's own size are the shortest there are, as in production, so that a choice made by length shows too. The
    longest row of all begins its last page with its last token, so that the widest table has no column to spare. No
    prefix is below ``lowest``.
    """
    real, page = len(case.prefix_lens), case.page_size
    ragged = case.mode == "DRAFT_EXTEND"
    own = list(zip(case.prefix_lens, case.extend_lens if ragged else [tokens] * real, strict=True))
    boundaries = [page - tokens + 1, page - tokens, lowest, page, page - 1, page + 1]
    last = case.prefix_lens.index(max(case.prefix_lens))
    # The last token of the longest row is the first of its page.
    longest = -(-(max(case.prefix_lens) + page + 4 + tokens) // page) * page + 1 - tokens

    def extend_of(row: int) -> int:
        """Ragged counts stay ragged, and differ from the case's own."""
        return 1 + (own[row % real][1] + row) % tokens if ragged else tokens

    def shorter(row: int) -> tuple[int, int]:
        prefix = case.prefix_lens[row % real]
        return max(lowest, rng.randint(prefix // 2, max(prefix // 2, prefix - 1))), extend_of(row)

    def varied(rows: int, extend: int | None = None) -> Lens:
        """Every second row stands at a page boundary, where page counts are most easily off by one, the others are
        long, so that lists of all rows fill their buffers. ``extend`` holds where rows are ragged."""
        return [
            (
                max(lowest, boundaries[row // 2 % len(boundaries)])
                if row % 2 == 0
                else rng.randint(longest - page // 2, longest),
                extend if ragged and extend is not None else extend_of(row),
            )
            for row in range(rows)
        ]

    own_size, largest = multiplier * real, (4 if padded else 2) * real
    sizes = {real, own_size, largest}
    if not padded:
        middle = [Step("2x full", largest, varied(largest, tokens))]
        middle += [Step("2x padded", largest, varied(real, 1))] if pads_once else []
    elif multiplier == 1:
        sizes.add(1)
        middle = [
            Step("4x padded", largest, varied(real, 1)),
            Step("single row", 1, varied(1, tokens)),
        ]
    else:
        middle = [Step("4x full", largest, varied(largest, tokens)), Step("smallest", real, varied(real, 1))]
    continued = [(prefix + 1, extend) for prefix, extend in own]
    again = [Step("own lengths, other requests", own_size, continued)] if multiplier == 1 else []
    grown = [(prefix + page + 5, extend) for prefix, extend in own]
    grown[last] = (longest + tokens - own[last][1], own[last][1])
    shortest = [(lowest, extend_of(row)) for row in range(own_size)]
    return ReplayPlan(
        captures=[
            (size, shortest if size == own_size else [shorter(row) for row in range(size)])
            for size in sorted(sizes, reverse=True)
        ],
        steps=[
            Step("own", own_size, own),
            Step("own once more", own_size, own, repeats=True),
            Step("own continued", own_size, continued, continues=True),
            *again,
            *middle,
            Step("own grown", own_size, grown),
        ],
        neighbours=varied(real),
        tokens_per_row=tokens,
    )


def make_split_plan(case: Case, rng: random.Random) -> ReplayPlan:
    """Captures and replays by padded tokens: own, the same once more, fewer rows in the larger size, own grown."""
    own = list(zip(case.prefix_lens, case.extend_lens, strict=True))
    tokens, growth = sum(case.extend_lens), case.page_size + 5
    small, large = tokens + 5, 2 * tokens + 7
    longest = max(case.prefix_lens) + growth
    shorter = [(prefix // 2, max(1, extend - 1)) for prefix, extend in own]
    fewer = [(rng.randint(1, longest), tokens)]
    other = [(rng.randint(1, longest), extend) for _, extend in own]
    return ReplayPlan(
        captures=[(large, [*shorter, (3, 2)]), (small, shorter)],
        steps=[
            Step("own", small, own),
            Step("own once more", small, own, repeats=True),
            Step("fewer rows", large, fewer),
            Step("other rows", large, [*other, (longest, 3)]),
            Step("own grown", small, [(prefix + growth, extend) for prefix, extend in own]),
        ],
        neighbours=[(rng.randint(1, longest), extend) for _, extend in own],
        tokens_per_row=max(case.extend_lens),
        rows=len(own) + 1,
        tokens=large,
    )
