"""Mistakes in a spec as values: collected, placed in the source, and printed together."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from generator.literals import string

if TYPE_CHECKING:
    from generator.positions import Positions

Loc = tuple[str | int, ...]
"""A path into the parsed file, as pydantic writes it: ``("sweep", 0, "cell", 2, "backends", 1)``."""

CODES = {
    # the file itself
    "E-no-file": "the spec does not exist or cannot be read",
    "E-encoding": "the spec is not UTF-8",
    "E-syntax": "the spec is not TOML",
    # the shape of a table
    "E-unknown-key": "a table has a key that means nothing",
    "E-missing-key": "a table lacks a key that it needs",
    "E-wrong-type": "a value has another type than its key asks for",
    "E-bad-value": "a value is not one of the few that its key allows",
    "E-out-of-range": "a number is outside the range of its key",
    "E-empty": "a list or string that must hold something is empty",
    "E-too-long": "a list or string is longer than its key allows",
    "E-unsafe-name": "a name uses characters that an id cannot hold",
    "E-bad-adapter": "an adapter is no dotted path package.module:Class",
    "E-bad-requirement": "a package or capability requirement cannot be read",
    # names that lead nowhere, or to two places
    "E-unknown-method": "no [methods] table has this name",
    "E-unknown-backend": "no [backends] table has this name",
    "E-unknown-case": "no [[case]] has this name",
    "E-unknown-set": "no entry of [case_sets] has this name",
    "E-unknown-speculation": "no [speculations] table has this name",
    "E-unknown-pad-style": "no [pad_styles] table has this name",
    "E-unknown-sweep": "no [[sweep]] has this name",
    "E-unknown-profile": "no [profiles] table has this name",
    "E-duplicate-name": "two tables of one kind have the same name",
    "E-repeated": "a list names one thing twice",
    "E-unused": "no sweep leads to a table",
    "E-set-cycle": "a case set includes itself",
    "E-profile-cycle": "a profile extends itself",
    # values that contradict each other
    "E-heads": "the query heads are no multiple of the KV heads",
    "E-head-dim": "the value head dim of an MLA model is not smaller than its head dim, or an axis changes one",
    "E-window": "a window without a windowed layer, or a windowed layer without a window",
    "E-hidden-scale": "a softmax scale of 1 or 1/sqrt(head_dim) would hide a kernel that ignores it",
    "E-no-tolerance": "the method states no tolerance for a dtype that a backend runs it in",
    "E-page-default": "a backend's own page size is not among those it supports",
    "E-lens-mismatch": "prefix_lens and extend_lens have different lengths",
    "E-lens-mode": "the lengths do not fit the forward mode",
    "E-bad-tree": "the parents are no tree of the draft tokens",
    "E-bad-topk": "topk or the number of draft tokens does not fit the speculative kind",
    "E-cell-cases": "a cell names neither cases nor spec, or both",
    "E-cell-shape": "a cell with spec has no shape, or a cell without spec has one",
    "E-case-needs-spec": "a case of a speculative mode is listed without a speculation",
    "E-case-no-spec": "a case of a plain mode is used with a speculation",
    "E-axis-twice": "an axis is stated by both the sweep and its cell",
    "E-seq-lens-unstated": "a cell does not say what seq_lens means",
    "E-seq-lens-twice": "seq_lens is stated more than once",
    "E-seq-lens-mode": "the seq_lens convention does not exist for this forward mode",
    "E-pad-axis": "a padded axis without its partner, or on a runner that captures nothing",
    "E-runner-mode": "the runner cannot run this forward mode",
    "E-backend-method": "a backend does not implement the method",
    "E-backend-mode": "a backend does not support the forward mode",
    "E-backend-runner": "a backend does not support the runner mode",
    "E-backend-page": "a backend does not have the page size",
    "E-backend-dtype": "a backend does not support the dtype",
    "E-backend-head-dim": "a backend does not support the head dim",
    "E-backend-feature": "a backend does not have a feature that the model or the speculation needs",
    "E-lacks": "a backend lacks a feature, or for a method, that it does not state to have",
    "E-latent-scales": "K and V scales differ where values are a part of the keys",
    "E-base": "the base point of a sweep does not name one value of each of its axes",
    "E-collapse": "a profile collapses a sweep that has no base point or no axes",
    # the matrix as a whole
    "E-duplicate-id": "two subtests have the same id",
    "E-same-inputs": "two subtests have the same kernel inputs and replay plan",
    "E-count": "a profile has another number of subtests than it pins",
    "E-known-count": "a known failure matches another number of subtests than it says",
    "E-known-nothing": "a known failure matches nothing",
    "E-known-twice": "two known failures match one subtest",
    "E-known-expired": "a known failure has expired",
    "E-known-dates": "a known failure expires before it began",
    "E-known-match": "a known failure matches everything, or by a value that no subtest has",
    "E-known-expect": "a known failure states its expected error by halves",
    "E-known-range": "an expected range is empty or impossible",
    # what is written from it
    "E-drift": "a generated file differs from what the spec generates",
    "E-missing-file": "a generated file is missing",
    "E-stale-file": "a generated file no longer comes from the spec",
    "E-foreign-file": "a file in the generated folder was not written by the generator",
    "E-markers": "README.md lacks the pair of marker lines that the table goes between",
    "E-output": "an output file or folder cannot be written or used",
    "E-results": "a file in results/runs/ is no reference run",
    "E-run-folder": "a run folder cannot become a reference run",
    # the command line
    "E-unknown-id": "no subtest has this id",
}
"""Every code with its meaning. A code is never reused for another meaning."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. ``loc`` says where in the spec, ``hint`` what to do, ``notes`` what else helps to see it."""

    code: str
    loc: Loc
    message: str
    hint: str | None = None
    notes: tuple[str, ...] = ()
    at_key: bool = False
    """Point at the key rather than at its value."""
    path: str | None = None
    """The file the problem is about, where that is not the spec."""
    at: tuple[int, int] | None = None
    """Line and column where they are known without a ``loc`` (a syntax error)."""

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code

    def moved(self, loc: Loc) -> Problem:
        """The same problem at another place."""
        return replace(self, loc=loc)


class SpecError(Exception):
    """Carries all problems of a spec to the command line, where they are printed together."""

    def __init__(self, problems: list[Problem], positions: Positions | None = None) -> None:
        super().__init__(f"{len(problems)} problems")
        self.problems, self.positions = problems, positions


def render(problems: Iterable[Problem], positions: Positions | None, spec_name: str) -> str:
    """All problems as text, in the order of their places in the file."""
    placed = [(position(problem, positions), problem) for problem in problems]
    placed.sort(key=lambda item: (item[1].path or "", item[0]))
    return "\n".join(entry(problem, at, spec_name) for at, problem in placed)


def position(problem: Problem, positions: Positions | None) -> tuple[int, int]:
    """Line and column of a problem, counted from 1; (1, 1) where nothing better is known."""
    if problem.at:
        return problem.at
    return positions.find(problem.loc, key=problem.at_key) if positions else (1, 1)


def entry(problem: Problem, at: tuple[int, int], spec_name: str) -> str:
    """One problem as text: a line that says all, then indented notes."""
    where = problem.path or f"{spec_name}:{at[0]}:{at[1]}"
    text = f"{where}: error[{problem.code}]: {problem.message}"
    if problem.hint:
        text += f"; {problem.hint}"
    return "\n".join([text, *(f"    {note}" for note in problem.notes)])


def did_you_mean(value: object, names: Collection[str]) -> str | None:
    """A hint with the nearest valid name, or with all of them where they are few and none is near."""
    import difflib

    near = difflib.get_close_matches(str(value), list(names), n=1, cutoff=0.6)
    if near:
        return f"did you mean {quote(near[0])}?"
    if not names:
        return "none is declared"
    shown = sorted(names)
    return "known are " + ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "")


def one_each(problems: list[Problem]) -> list[Problem]:
    """The first problem of each kind and place, saying how many more there are like it."""
    first: dict[tuple[str, Loc], Problem] = {}
    more: dict[tuple[str, Loc], int] = {}
    for problem in problems:
        key = (problem.code, problem.loc)
        if first.setdefault(key, problem) is not problem:
            more[key] = more.get(key, 0) + 1
    return [
        replace(problem, message=f"{problem.message} (and {more[key]} more)") if key in more else problem
        for key, problem in first.items()
    ]


def quote(value: object, limit: int = 80) -> str:
    """A value as it may be printed: on one line, in double quotes where it is a string, cut where it is long."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    else:
        text = string(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
