"""Checks of values that contradict each other within one table."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator

from generator.index import Index
from generator.problems import Loc, Problem, quote
from generator.spec import Backend, Case, KnownFailure, Method, Speculation

SPECIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\s*((===?|~=|!=|<=|>=|<|>)\s*[A-Za-z0-9.*+!_-]+\s*(,\s*(?=\S)|$))*")


def check_values(index: Index, today: datetime.date) -> Iterator[Problem]:
    """All problems within single tables; ``today`` decides what has expired."""
    for name, method in index.spec.methods.items():
        yield from in_method(method, ("methods", name))
    for name, backend in index.spec.backends.items():
        yield from in_backend(backend, ("backends", name))
    for name, speculation in index.spec.speculations.items():
        yield from in_speculation(speculation, ("speculations", name))
    for at, case in enumerate(index.spec.case):
        yield from in_case(case, ("case", at))
    for at, entry in enumerate(index.spec.known_failure):
        yield from in_known_failure(entry, ("known_failure", at), today)


def in_method(method: Method, loc: Loc) -> Iterator[Problem]:
    """Heads, dims, window and scale of a model."""
    if method.q_heads % method.kv_heads:
        yield Problem(
            "E-heads", (*loc, "q_heads"), f"{method.q_heads} query heads are no multiple of {method.kv_heads} KV heads"
        )
    if method.v_head_dim is not None and method.v_head_dim >= method.head_dim:
        message = f"v_head_dim {method.v_head_dim} is not smaller than head_dim {method.head_dim}"
        yield Problem("E-head-dim", (*loc, "v_head_dim"), message, "leave it out where both are equal")
    windowed = "window" in method.layers
    if windowed and method.window is None:
        yield Problem("E-window", (*loc, "layers"), "a window layer needs the key window")
    if not windowed and method.window is not None:
        yield Problem("E-window", (*loc, "window"), "no layer of the model has a window", 'add "window" to layers')
    yield from hidden_scale(method.scale, method.head_dim, (*loc, "scale"))


def hidden_scale(scale: float, head_dim: int, loc: Loc) -> Iterator[Problem]:
    """Scales that a kernel may use by mistake, which the suite could then not see."""
    default = 1 / math.sqrt(head_dim)
    if math.isclose(scale, 1.0, rel_tol=0.01) or math.isclose(scale, default, rel_tol=0.01):
        message = f"softmax scale {scale} is what a kernel falls back to (1 or 1/sqrt({head_dim}) = {default:.4g})"
        yield Problem("E-hidden-scale", loc, message, "choose another, so that a kernel that ignores it is seen")


def in_backend(backend: Backend, loc: Loc) -> Iterator[Problem]:
    """Page sizes, features and requirements of a backend."""
    for method, features in backend.lacks.items():
        if method not in backend.methods:
            message = f"the backend does not implement {quote(method)}"
            yield Problem("E-lacks", (*loc, "lacks", method), message, f"its methods are {', '.join(backend.methods)}")
        for at, feature in enumerate(features):
            if feature not in backend.features:
                message = f"{quote(feature)} is none of the backend's features, so no method needs to lack it"
                yield Problem("E-lacks", (*loc, "lacks", method, at), message, "delete it")
    if backend.page_size not in backend.page_sizes:
        message = f"page_size {backend.page_size} is not in page_sizes"
        yield Problem("E-page-default", (*loc, "page_size"), message, f"known are {listing(backend.page_sizes)}")
    yield from requirements(backend.requires, (*loc, "requires"))
    if backend.native is not None:
        yield from requirements(backend.native.packages, (*loc, "native", "packages"))


def requirements(listed: list[str], loc: Loc) -> Iterator[Problem]:
    """Requirement specifiers that cannot be read."""
    for at, text in enumerate(listed):
        if not SPECIFIER.fullmatch(text):
            yield Problem(
                "E-bad-requirement", (*loc, at), f"{quote(text)} is no requirement", 'write it like "flash-attn-4>=4.0"'
            )


def in_speculation(speculation: Speculation, loc: Loc) -> Iterator[Problem]:
    """The tree of a draft, and the numbers that go with it."""
    parents = speculation.parents
    if parents and len(parents) != speculation.draft_tokens:
        message = f"{len(parents)} parents for {speculation.draft_tokens} draft tokens"
        yield Problem("E-bad-tree", (*loc, "parents"), message)
    for at, parent in enumerate(parents):
        if (at == 0) != (parent == -1):
            yield Problem(
                "E-bad-tree", (*loc, "parents", at), f"token {at} has parent {parent}", "token 0, and only it, has -1"
            )
        elif parent >= at:
            yield Problem(
                "E-bad-tree",
                (*loc, "parents", at),
                f"token {at} has parent {parent}",
                "a parent comes before its children",
            )
    widest = max((parents.count(parent) for parent in parents if parent >= 0), default=1)
    if speculation.kind == "eagle" and parents and widest != speculation.topk:
        message = f"topk is {speculation.topk}, but the tree branches by {widest}"
        yield Problem("E-bad-topk", (*loc, "topk"), message)
    if speculation.kind != "eagle" and speculation.topk != 1:
        yield Problem("E-bad-topk", (*loc, "topk"), f"topk is {speculation.topk}, but only eagle drafts branch by topk")


def in_case(case: Case, loc: Loc) -> Iterator[Problem]:
    """The lengths of a case against each other and against its mode."""
    rows = len(case.prefix_lens)
    if case.extend_lens is not None and len(case.extend_lens) != rows:
        message = f"{rows} prefix_lens but {len(case.extend_lens)} extend_lens"
        yield Problem("E-lens-mismatch", (*loc, "extend_lens"), message, "one of each per request")
    if case.mode in ("EXTEND", "MIXED", "DRAFT_EXTEND") and case.extend_lens is None:
        yield Problem("E-lens-mode", loc, f"{quote(case.name)} needs extend_lens: {case.mode} does not imply them")
    if case.mode == "DECODE":
        if case.extend_lens is not None and set(case.extend_lens) != {1}:
            yield Problem(
                "E-lens-mode", (*loc, "extend_lens"), "DECODE adds one token per request", "leave extend_lens out"
            )
        if 0 in case.prefix_lens:
            yield Problem("E-lens-mode", (*loc, "prefix_lens"), "DECODE needs a prefix for every request")


def in_known_failure(entry: KnownFailure, loc: Loc, today: datetime.date) -> Iterator[Problem]:
    """Dates, expected ranges and requirements of a known failure."""
    name = quote(entry.id)
    if entry.expires is not None and entry.expires < entry.since:
        yield Problem(
            "E-known-dates", (*loc, "expires"), f"{name} expires {entry.expires}, before its start {entry.since}"
        )
    elif entry.expires is not None and entry.expires < today:
        message = f"{name} expired on {entry.expires}"
        yield Problem(
            "E-known-expired", (*loc, "expires"), message, "check whether it still fails; delete it or move the date"
        )
    yield from requirements(entry.when.packages, (*loc, "when", "packages"))
    if entry.expect is not None and entry.raises != "MismatchError":
        message = f"{name} expects a difference, but raises {entry.raises}"
        yield Problem("E-known-expect", (*loc, "expect"), message, "ranges belong to MismatchError")
    if entry.expect is None and entry.raises == "MismatchError" and entry.action == "xfail":
        message = f"{name} needs expect: without max_abs and wrong it could fail for another reason"
        yield Problem("E-known-expect", loc, message)
    if entry.exit is not None and entry.action != "crash":
        yield Problem(
            "E-known-expect",
            (*loc, "exit"),
            f"{name} has exit, but its action is {entry.action}",
            "only a crash ends a process",
        )
    if entry.expect is not None:
        for key, top in (("max_abs", math.inf), ("wrong", 1.0)):
            bounds = getattr(entry.expect, key)
            if bounds is None:
                continue
            low, high = bounds
            if low > high or high > top:
                bound = "" if top == math.inf else ", at most 1"
                message = f"{key} is [{low}, {high}], but must be [low, high]{bound}"
                yield Problem("E-known-range", (*loc, "expect", key), message)


def listing(values: list[int]) -> str:
    """``1, 16 and 32``."""
    *rest, last = [str(value) for value in values]
    return f"{', '.join(rest)} and {last}" if rest else last
