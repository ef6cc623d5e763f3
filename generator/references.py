"""Checks that names lead somewhere, and to one thing only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from generator.index import Index
from generator.loading import Document, Names
from generator.problems import Loc, Problem, did_you_mean, quote
from generator.spec import LAYOUTS, MODES, RUNNERS, SEQ_LENS, Axes, Cell, KnownFailure


def check_references(document: Document, index: Index) -> Iterator[Problem]:
    """All problems with names."""
    spec, names = index.spec, document.names
    yield from duplicates(index)
    yield from known(
        "E-unknown-profile", "profile", spec.suite.default_profile, names.profiles, ("suite", "default_profile")
    )
    for name, backend in spec.backends.items():
        yield from each("E-unknown-method", "method", backend.methods, names.methods, ("backends", name, "methods"))
        for key in ("modes", "runners", "page_sizes", "features"):
            yield from repeated(getattr(backend, key), ("backends", name, key))
    for at, case in enumerate(spec.case):
        yield from each("E-unknown-set", "case set", case.sets, names.case_sets, ("case", at, "sets"))
    yield from case_sets(index, names)
    for at, sweep in enumerate(spec.sweep):
        loc: Loc = ("sweep", at)
        yield from each("E-unknown-profile", "profile", sweep.profiles or (), names.profiles, (*loc, "profiles"))
        if sweep.shape is not None:
            yield from known("E-unknown-case", "case", sweep.shape, names.cases, (*loc, "shape"))
        for variant in (v for v in index.variants if v.index == at):
            yield from each(
                "E-unknown-pad-style",
                "pad style",
                variant.axes.pad_style or (),
                names.pad_styles,
                (*variant.loc, "axes", "pad_style"),
            )
            yield from axes_repeated(variant.axes, (*variant.loc, "axes"))
            if variant.runner_varies:
                yield from repeated(variant.runners, (*variant.loc, "runner"))
        for number, cell in enumerate(sweep.cell):
            yield from in_cell(cell, (*loc, "cell", number), names)
    for at, entry in enumerate(spec.known_failure):
        yield from in_match(entry, at, names)
    yield from profiles(index, names)


def known(code: str, kind: str, name: str, names: Collection[str], loc: Loc) -> Iterator[Problem]:
    """A problem unless ``name`` is one of ``names``."""
    if name not in names:
        yield Problem(code, loc, f"there is no {kind} {quote(name)}", did_you_mean(name, names))


def each(code: str, kind: str, listed: Iterable[str], names: Collection[str], loc: Loc) -> Iterator[Problem]:
    """The same for each item of a list, which must not repeat itself either."""
    listed = list(listed)
    for at, name in enumerate(listed):
        yield from known(code, kind, name, names, (*loc, at))
    yield from repeated(listed, loc)


def repeated(listed: Iterable[object], loc: Loc) -> Iterator[Problem]:
    """A problem for each item that the list has before."""
    seen: set[object] = set()
    for at, item in enumerate(listed):
        if item in seen:
            yield Problem("E-repeated", (*loc, at), f"{quote(item)} is listed twice")
        seen.add(item)


def axes_repeated(axes: Axes, loc: Loc) -> Iterator[Problem]:
    """A problem for each value that an axis has twice."""
    for name in type(axes).model_fields:
        yield from repeated(getattr(axes, name) or (), (*loc, name))


def duplicates(index: Index) -> Iterator[Problem]:
    """Lists of tables whose names must differ."""
    spec = index.spec
    kinds: list[tuple[str, list[tuple[str, Loc]]]] = [
        ("case", [(case.name, ("case", at, "name")) for at, case in enumerate(spec.case)]),
        ("sweep", [(variant.name, (*variant.loc, "name")) for variant in index.variants]),
        ("known failure", [(entry.id, ("known_failure", at, "id")) for at, entry in enumerate(spec.known_failure)]),
    ]
    for kind, entries in kinds:
        seen: set[str] = set()
        for name, loc in entries:
            if name in seen:
                yield Problem("E-duplicate-name", loc, f"there is another {kind} {quote(name)}")
            seen.add(name)


def case_sets(index: Index, names: Names) -> Iterator[Problem]:
    """Members of case sets, and sets that include themselves."""
    sets = index.spec.case_sets
    for name, listed in sets.items():
        loc: Loc = ("case_sets", name)
        yield from repeated(listed, loc)
        for at, member in enumerate(listed):
            if member.startswith("@"):
                yield from known("E-unknown-set", "case set", member[1:], names.case_sets, (*loc, at))
            else:
                yield from known("E-unknown-case", "case", member, names.cases, (*loc, at))
        cycle = find_cycle(name, sets)
        if cycle and min(cycle) == name:  # reported once, at one of its sets
            yield Problem("E-set-cycle", loc, f"the set includes itself: {' -> '.join([*cycle, name])}")


def find_cycle(start: str, sets: dict[str, list[str]]) -> list[str]:
    """The sets on a way from ``start`` back to itself, or nothing."""
    trail: list[tuple[str, list[str]]] = [(start, [start])]
    seen: set[str] = set()
    while trail:
        name, way = trail.pop()
        for member in sets.get(name, ()):
            inner = member[1:]
            if not member.startswith("@"):
                continue
            if inner == start:
                return way
            if inner not in seen:
                seen.add(inner)
                trail.append((inner, [*way, inner]))
    return []


def in_cell(cell: Cell, loc: Loc, names: Names) -> Iterator[Problem]:
    """The names that a cell uses."""
    yield from known("E-unknown-method", "method", cell.method, names.methods, (*loc, "method"))
    yield from each("E-unknown-backend", "backend", cell.backends, names.backends, (*loc, "backends"))
    if isinstance(cell.cases, str):
        yield from known("E-unknown-set", "case set", cell.cases, names.case_sets, (*loc, "cases"))
    elif cell.cases is not None:
        yield from each("E-unknown-case", "case", cell.cases, names.cases, (*loc, "cases"))
    if cell.spec is not None:
        yield from each("E-unknown-speculation", "speculation", cell.spec, names.speculations, (*loc, "spec"))
    if cell.shape is not None:
        yield from known("E-unknown-case", "case", cell.shape, names.cases, (*loc, "shape"))
    yield from each(
        "E-unknown-pad-style", "pad style", cell.axes.pad_style or (), names.pad_styles, (*loc, "axes", "pad_style")
    )
    yield from axes_repeated(cell.axes, (*loc, "axes"))


def in_match(entry: KnownFailure, at: int, names: Names) -> Iterator[Problem]:
    """The names that a known failure matches by."""
    loc: Loc = ("known_failure", at)
    if entry.profile is not None:
        yield from known("E-unknown-profile", "profile", entry.profile, names.profiles, (*loc, "profile"))
    kinds: dict[str, tuple[str, str, Collection[str]]] = {
        "method": ("E-unknown-method", "method", names.methods),
        "backend": ("E-unknown-backend", "backend", names.backends),
        "sweep": ("E-unknown-sweep", "sweep", names.sweeps),
        "case": ("E-unknown-case", "case", names.cases),
        "spec": ("E-unknown-speculation", "speculation", names.speculations),
        "pad_style": ("E-unknown-pad-style", "pad style", names.pad_styles),
        "runner": ("E-known-match", "runner mode", RUNNERS),
        "mode": ("E-known-match", "forward mode", MODES),
        "seq_lens": ("E-known-match", "seq_lens convention", SEQ_LENS),
        "layout": ("E-known-match", "layout", LAYOUTS),
    }
    if all(getattr(entry.match, key) is None for key in type(entry.match).model_fields):
        yield Problem(
            "E-known-match", (*loc, "match"), f"{quote(entry.id)} has an empty match, so it matches everything"
        )
    for key, (code, kind, valid) in kinds.items():
        value = getattr(entry.match, key)
        if isinstance(value, str):
            yield from known(code, kind, value, valid, (*loc, "match", key))
        elif value is not None:
            yield from each(code, kind, value, valid, (*loc, "match", key))


def profiles(index: Index, names: Names) -> Iterator[Problem]:
    """What profiles name, and profiles that extend themselves."""
    spec = index.spec
    for name, profile in spec.profiles.items():
        loc: Loc = ("profiles", name)
        yield from each("E-unknown-sweep", "sweep", profile.collapse, names.sweeps, (*loc, "collapse"))
        yield from each("E-unknown-sweep", "sweep", profile.sweeps or (), names.sweeps, (*loc, "sweeps"))
        if profile.extends is None:
            continue
        yield from known("E-unknown-profile", "profile", profile.extends, names.profiles, (*loc, "extends"))
        way = [name]
        while (above := spec.profiles.get(way[-1])) and above.extends and above.extends not in way:
            way.append(above.extends)
        if above and above.extends == name and min(way) == name:
            yield Problem(
                "E-profile-cycle", (*loc, "extends"), f"the profile extends itself: {' -> '.join([*way, name])}"
            )


def check_unused(index: Index) -> Iterator[Problem]:
    """Tables that no sweep leads to: whoever wrote them believes that they run."""
    spec = index.spec
    used: dict[str, set[str]] = {
        kind: set() for kind in ("method", "backend", "case", "speculation", "pad style", "case set")
    }
    for variant in index.variants:
        used["pad style"].update(variant.axes.pad_style or ())
        for number, cell in enumerate(variant.sweep.cell):
            used["method"].add(cell.method)
            used["backend"].update(cell.backends)
            used["pad style"].update(cell.axes.pad_style or ())
            used["case"].update(
                choice.case.name for choice in index.choices(variant, cell, ("sweep", variant.index, "cell", number))
            )
            used["speculation"].update(cell.spec or ())
            if isinstance(cell.cases, str):
                used["case set"].update(index.below(cell.cases))
    declared: list[tuple[str, str, Loc]] = [
        *(("method", name, ("methods", name)) for name in spec.methods),
        *(("backend", name, ("backends", name)) for name in spec.backends),
        *(("pad style", name, ("pad_styles", name)) for name in spec.pad_styles),
        *(("speculation", name, ("speculations", name)) for name in spec.speculations),
        *(("case set", name, ("case_sets", name)) for name in spec.case_sets),
        *(("case", case.name, ("case", at, "name")) for at, case in enumerate(spec.case)),
    ]
    for kind, name, loc in declared:
        if name not in used[kind]:
            yield Problem(
                "E-unused",
                loc,
                f"no sweep uses the {kind} {quote(name)}",
                "name it in a cell, or delete it",
                at_key=kind != "case",
            )
