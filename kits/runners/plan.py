"""The replay plan: which batches a captured graph must answer, in which order."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kits.subtest import Case

Lens = list[tuple[int, int]]
"""``(prefix, extend)`` of each row."""


@dataclass(frozen=True)
class Step:
    """One replay: the captured size it is padded to, and its live rows."""

    name: str
    size: int
    lens: Lens


@dataclass(frozen=True)
class ReplayPlan:
    """Sizes to capture, largest first, with the rows each is captured on; then the replays."""

    captures: list[tuple[int, Lens]]
    steps: list[Step]
    neighbours: Lens
    tokens_per_row: int

    @property
    def max_rows(self) -> int:
        return max(size for size, _ in self.captures)

    @property
    def max_len(self) -> int:
        rows = [row for _, lens in self.captures for row in lens]
        rows += [row for step in self.steps for row in step.lens] + self.neighbours
        return max(prefix + extend for prefix, extend in rows)


def tokens_per_row(case: Case) -> int:
    """N: new tokens a captured row has room for."""
    return case.speculation.draft_tokens if case.speculation is not None else max(case.extend_lens)


def make_plan(case: Case, multiplier: int, rng: random.Random) -> ReplayPlan:
    """Lengths of all captures and replays of a case at a capture multiplier.

    Multiplier 1: own, 4x padded, own grown. Otherwise: own, 4x full of live rows, smallest, own grown. Captures see
    shorter rows than any replay of the case's own, so that a length kept from capture always shows.
    """
    own = list(zip(case.prefix_lens, case.extend_lens, strict=True))
    real, tokens = len(own), tokens_per_row(case)
    growth = case.page_size + 5
    grown = [(prefix + growth, extend) for prefix, extend in own]

    def extend_of(row: int) -> int:
        """Ragged counts stay ragged: accepted tokens differ from the case's own."""
        uniform = len(set(case.extend_lens)) == 1 and case.extend_lens[0] == tokens
        return tokens if uniform else 1 + (case.extend_lens[row % real] + row) % tokens

    def shorter(row: int) -> tuple[int, int]:
        prefix = case.prefix_lens[row % real]
        return rng.randint(prefix // 2, max(prefix // 2, prefix - 1)), extend_of(row)

    def any_length(row: int) -> tuple[int, int]:
        return rng.randint(1, max(case.prefix_lens) + growth), extend_of(row)

    sizes = sorted({real, multiplier * real, 4 * real}, reverse=True)
    captures = [(size, [shorter(row) for row in range(size)]) for size in sizes]
    own_size = multiplier * real
    if multiplier == 1:
        middle = [Step("4x padded", 4 * real, [any_length(row) for row in range(real)])]
    else:
        middle = [
            Step("4x full", 4 * real, [any_length(row) for row in range(4 * real)]),
            Step("smallest", real, [any_length(row) for row in range(real)]),
        ]
    return ReplayPlan(
        captures=captures,
        steps=[Step("own", own_size, own), *middle, Step("own grown", own_size, grown)],
        neighbours=[any_length(row) for row in range(real)],
        tokens_per_row=tokens,
    )
