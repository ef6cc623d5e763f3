"""Lookups over a typed spec: cases by name, members of case sets, sweeps with their twins, profiles as inherited."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from generator.problems import Loc
from generator.spec import Axes, Case, Cell, Point, Spec, Sweep


@dataclass(frozen=True)
class Variant:
    """A sweep, or the twin that it brings along: what a name in an id's third place stands for."""

    name: str
    summary: str
    runners: tuple[str, ...]
    runner_varies: bool
    axes: Axes
    base: Point | None
    sweep: Sweep
    index: int
    loc: Loc


@dataclass(frozen=True)
class Choice:
    """What one cell runs a backend on: a case, with a speculative kind where the cell names one."""

    case: Case
    case_index: int
    speculation: str | None
    loc: Loc
    """The place in the cell that asks for it."""


@dataclass(frozen=True)
class Selection:
    """A profile with everything that it inherits; ``names`` are its own and those of the profiles it extends."""

    names: frozenset[str]
    collapse: frozenset[str]
    sweeps: frozenset[str] | None
    cover: str | None

    def has(self, variant: Variant) -> bool:
        """Whether the profile has a sweep."""
        only = variant.sweep.profiles
        if only is not None and self.names.isdisjoint(only):
            return False
        return self.sweeps is None or variant.name in self.sweeps


@dataclass
class Index:
    """Lookups over ``spec``. Names that lead nowhere are passed over; ``references`` reports them."""

    spec: Spec
    _sets: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def cases(self) -> dict[str, tuple[int, Case]]:
        """Case by name, with its index."""
        return {case.name: (index, case) for index, case in enumerate(self.spec.case)}

    @cached_property
    def joined(self) -> dict[str, list[str]]:
        """For each case set, the cases that say themselves that they join it."""
        found: dict[str, list[str]] = {}
        for case in self.spec.case:
            for name in case.sets:
                found.setdefault(name, []).append(case.name)
        return found

    @cached_property
    def variants(self) -> list[Variant]:
        """All sweeps, each followed by its twin."""
        return [variant for index, sweep in enumerate(self.spec.sweep) for variant in variants(sweep, index)]

    def members(self, name: str) -> tuple[str, ...]:
        """The cases of a set: its own list with sets put in place, then those that join it. Each case once."""
        if name not in self._sets:
            self._sets[name] = tuple(dict.fromkeys(self._members(name, ())))
        return self._sets[name]

    def below(self, name: str) -> set[str]:
        """The set itself and every set that it includes."""
        found: set[str] = set()
        left = [name]
        while left:
            step = left.pop()
            if step not in found:
                found.add(step)
                left += [member[1:] for member in self.spec.case_sets.get(step, ()) if member.startswith("@")]
        return found

    def _members(self, name: str, above: tuple[str, ...]) -> Iterator[str]:
        if name in above:
            return
        for member in self.spec.case_sets.get(name, ()):
            if member.startswith("@"):
                yield from self._members(member[1:], (*above, name))
            else:
                yield member
        yield from self.joined.get(name, ())

    def choices(self, variant: Variant, cell: Cell, cell_loc: Loc) -> list[Choice]:
        """What a cell runs each of its backends on."""
        if cell.spec is not None:
            shape = cell.shape or variant.sweep.shape
            if shape not in self.cases:
                return []
            index, case = self.cases[shape]
            return [Choice(case, index, name, (*cell_loc, "spec", at)) for at, name in enumerate(cell.spec)]
        if isinstance(cell.cases, str):
            wanted = [(name, (*cell_loc, "cases")) for name in self.members(cell.cases)]
        else:
            wanted = [(name, (*cell_loc, "cases", at)) for at, name in enumerate(cell.cases or ())]
        return [
            Choice(self.cases[name][1], self.cases[name][0], None, loc) for name, loc in wanted if name in self.cases
        ]

    def selection(self, name: str) -> Selection:
        """A profile with what it has from those it extends."""
        collapse: set[str] = set()
        sweeps: list[str] | None = None
        cover: str | None = None
        seen: set[str] = set()
        step: str | None = name
        while step is not None and step in self.spec.profiles and step not in seen:
            seen.add(step)
            profile = self.spec.profiles[step]
            collapse.update(profile.collapse)
            sweeps = sweeps if sweeps is not None else profile.sweeps
            cover = cover or profile.cover
            step = profile.extends
        return Selection(frozenset(seen), frozenset(collapse), frozenset(sweeps) if sweeps is not None else None, cover)


def variants(sweep: Sweep, index: int) -> Iterator[Variant]:
    """The sweep itself, then its twin."""
    loc: Loc = ("sweep", index)
    yield Variant(
        name=sweep.name,
        summary=sweep.summary,
        runners=as_tuple(sweep.runner),
        runner_varies=not isinstance(sweep.runner, str),
        axes=sweep.axes,
        base=sweep.base,
        sweep=sweep,
        index=index,
        loc=loc,
    )
    if sweep.also is not None:
        yield Variant(
            name=sweep.also.name,
            summary=sweep.also.summary,
            runners=as_tuple(sweep.also.runner),
            runner_varies=not isinstance(sweep.also.runner, str),
            axes=sweep.also.axes,
            base=sweep.also.base,
            sweep=sweep,
            index=index,
            loc=(*loc, "also"),
        )


def as_tuple(value: str | Sequence[str]) -> tuple[str, ...]:
    """One value or several, as several."""
    return (value,) if isinstance(value, str) else tuple(value)


def axis_values(axes: Axes | Point) -> dict[str, list[object]]:
    """The axes that are stated, in the order of an id, each with its values."""
    found: dict[str, list[object]] = {}
    for name in type(axes).model_fields:
        value = getattr(axes, name)
        if value is not None:
            found[name] = value if isinstance(value, list) else [value]
    return found
