"""Which subtests of the manifest a run plans: ids, sweeps, backends, methods and ``-k`` expressions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.errors import OrchestratorError
from orchestrator.manifest import Planned, short

TOKEN = re.compile(r"\s*(?:(\()|(\))|([A-Za-z0-9_.\[\]:*-]+))")


@dataclass(frozen=True)
class Selection:
    """Filters that are joined by *and*; the values inside one filter by *or*. Empty filters select everything."""

    ids: tuple[str, ...] = ()
    keyword: str = ""
    methods: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    sweeps: tuple[str, ...] = ()
    profile: str | None = None
    """A profile whose subtests are all in the manifest, other than the manifest's own; None for all of them."""

    def arguments(self) -> list[str]:
        """The command line that makes this selection."""
        out: list[str] = [*self.ids, *(["--profile", self.profile] if self.profile else [])]
        for option, values in (("--method", self.methods), ("--backend", self.backends), ("--sweep", self.sweeps)):
            for value in values:
                out += [option, value]
        return [*out, "-k", self.keyword] if self.keyword else out


def select(subtests: Sequence[Planned], selection: Selection) -> list[Planned]:
    """The chosen subtests, in the manifest's order. A name that does not exist is an error, not an empty choice."""
    chosen: Iterable[Planned] = subtests
    if selection.profile is not None:
        known = {profile for planned in subtests for profile in planned.profiles}
        if selection.profile not in known:
            error = unknown("profile", selection.profile, known)
            error.hint = error.hint or "one that has more subtests is generated into a folder of its own; see --tests"
            raise error
        chosen = [planned for planned in chosen if selection.profile in planned.profiles]
    if selection.ids:
        wanted = resolve_ids(subtests, selection.ids)
        chosen = [planned for planned in chosen if planned.id in wanted]
    for field, values in (
        ("method", selection.methods), ("backend", selection.backends), ("sweep", selection.sweeps),
    ):  # fmt: skip
        if values:
            known = {getattr(planned, field) for planned in subtests}
            for value in values:
                if value not in known:
                    raise unknown(field, value, known)
            chosen = [planned for planned in chosen if getattr(planned, field) in values]
    if selection.keyword:
        matches = parse_keyword(selection.keyword)
        chosen = [planned for planned in chosen if matches(planned.id)]
    result = list(chosen)
    if not result:
        raise OrchestratorError("O112", "no subtest matches the selection", f"selected: {selection.arguments()}")
    return result


def resolve_ids(subtests: Sequence[Planned], names: Sequence[str]) -> set[str]:
    """Ids or pytest nodes as given by the caller."""
    known = {planned.id for planned in subtests}
    wanted: set[str] = set()
    nodes: dict[str, str] | None = None
    for name in names:
        if name in known:
            wanted.add(name)
            continue
        if nodes is None:
            nodes = {f"{planned.file}::{planned.test}": planned.id for planned in subtests}
        id = nodes.get(name.rsplit("/", 1)[-1])
        if id is None:
            raise unknown("id", name, known)
        wanted.add(id)
    return wanted


def unknown(field: str, value: str, known: Iterable[str]) -> OrchestratorError:
    near = difflib.get_close_matches(value, list(known)[:20_000], n=1, cutoff=0.4)
    return OrchestratorError(
        "O113", f"there is no {field} {short(value, 120)}", f"did you mean {near[0]}?" if near else ""
    )


def parse_keyword(text: str) -> Callable[[str], bool]:
    """``fa3 and not (eager or layouts)``: words match as parts of an id; ``*`` stands for anything inside a word."""
    tokens: list[str] = []
    position = 0
    while text[position:].strip():
        match = TOKEN.match(text, position)
        if not match:
            raise OrchestratorError("O114", f"-k {short(text)}: cannot read {short(text[position:].strip())}")
        tokens.append(next(group for group in match.groups() if group))
        position = match.end()
        if len(tokens) > 200:
            raise OrchestratorError("O114", "-k: more than 200 words")

    def fail() -> OrchestratorError:
        found = repr(tokens[0]) if tokens else "the end"
        return OrchestratorError("O114", f"-k {short(text)}: expected a word, `not` or `(` before {found}")

    def either() -> Callable[[str], bool]:
        parts = [both()]
        while tokens and tokens[0] == "or":
            tokens.pop(0)
            parts.append(both())
        return lambda id: any(part(id) for part in parts)

    def both() -> Callable[[str], bool]:
        parts = [atom()]
        while tokens and tokens[0] == "and":
            tokens.pop(0)
            parts.append(atom())
        return lambda id: all(part(id) for part in parts)

    def atom() -> Callable[[str], bool]:
        if not tokens or tokens[0] in (")", "and", "or"):
            raise fail()
        token = tokens.pop(0)
        if token == "not":
            inner = atom()
            return lambda id: not inner(id)
        if token == "(":
            inner = either()
            if not tokens or tokens.pop(0) != ")":
                raise OrchestratorError("O114", f"-k {short(text)}: a parenthesis is not closed")
            return inner
        pattern = re.compile(".*".join(map(re.escape, token.split("*"))))
        return lambda id: pattern.search(id) is not None

    expression = either()
    if tokens:
        raise OrchestratorError("O114", f"-k {short(text)}: cannot read on at {tokens[0]!r}")
    return expression
