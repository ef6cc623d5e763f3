"""Subtests to the view of a test module: what the template prints, decided and named."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from generator.literals import Call, Ref, assignment, source
from generator.spec import DEFAULT_LAYOUT, KnownFailure, Tolerance
from generator.subtests import (
    CasePoint,
    ModelPoint,
    NativePoint,
    SpeculationPoint,
    Subtest,
    differences,
    module_file,
)

RESERVED = frozenset(
    {"ADAPTER", "MODEL", "NATIVE", "TOLERANCE", "run", "pytest", "partial", "replace", "str", "subtest"}
)
SHORT = {"q_heads": "Q", "kv_heads": "KV", "head_dim": "D", "hidden": "HIDDEN"}
DEFAULTS: Mapping[str, object] = {
    "layout": DEFAULT_LAYOUT,
    "pad_style": None,
    "multiplier": 1,
    "known_failure": None,
    "requires": (),
    "native": None,
}


@dataclass(frozen=True)
class SweepView:
    """One sweep of a module: what its subtests share, and the subtests."""

    function: str
    test: str
    listing: str
    shared: str
    rows: str


@dataclass(frozen=True)
class ModuleView:
    """One generated module."""

    file: str
    method: str
    backend: str
    imports: tuple[str, ...]
    standard: tuple[tuple[str, str], ...]
    constants: tuple[str, ...]
    cases: tuple[str, ...]
    known_failures: tuple[str, ...]
    sweeps: tuple[SweepView, ...]


@dataclass
class Namer:
    """Gives each value a constant's name, once, and each name to one value only."""

    taken: set[str] = field(default_factory=lambda: set(RESERVED))
    names: dict[object, str] = field(default_factory=dict)

    def claim(self, wanted: str) -> str:
        """``wanted``, or the next free name like it."""
        name, number = wanted, 2
        while name in self.taken or keyword.iskeyword(name):
            name, number = f"{wanted}_{number}", number + 1
        self.taken.add(name)
        return name

    def case_name(self, case: CasePoint) -> str:
        """The case's own name, with its page size where the same case ran with another one before."""
        name = case.name.upper()
        return f"{name}_P{case.page_size}" if name in self.taken else name

    def of(self, value: object, wanted: str) -> Ref:
        """The name of ``value``, made from ``wanted`` the first time."""
        if value not in self.names:
            self.names[value] = self.claim(wanted)
        return Ref(self.names[value])


def module_views(subtests: Iterable[Subtest]) -> list[ModuleView]:
    """One view for each method and backend, in the order of the subtests."""
    groups: dict[tuple[str, str], list[Subtest]] = {}
    for subtest in subtests:
        groups.setdefault((subtest.method, subtest.backend), []).append(subtest)
    return [module_view(method, backend, group) for (method, backend), group in groups.items()]


def module_view(method: str, backend: str, subtests: list[Subtest]) -> ModuleView:
    """The view of one module."""
    native = subtests[0].native
    namer = Namer()
    namer.taken.update(f"test_{subtest.sweep}" for subtest in subtests)  # these names are part of the node ids
    base = plain_model(subtests)
    models = {base: Ref("MODEL")}
    cases: dict[CasePoint, Ref] = {}
    entries: dict[str, tuple[Ref, KnownFailure]] = {}
    for subtest in subtests:
        if subtest.model not in models:
            models[subtest.model] = namer.of(subtest.model, model_name(subtest.model, base))
        if subtest.case not in cases:
            cases[subtest.case] = namer.of(subtest.case, namer.case_name(subtest.case))
        entry = subtest.known_failure
        if entry is not None and entry.id not in entries:
            entries[entry.id] = (namer.of(entry.id, entry.id.upper().replace("-", "_")), entry)
    by_sweep: dict[str, list[Subtest]] = {}
    for subtest in subtests:
        by_sweep.setdefault(subtest.sweep, []).append(subtest)
    tolerances: dict[str, Ref] = {}
    for subtest in subtests:  # the first dtype is the backend's own, unless every sweep has that axis
        dtype = subtest.model.dtype
        if dtype not in tolerances:
            tolerances[dtype] = Ref(f"TOLERANCE_{dtype.upper()}" if tolerances else "TOLERANCE")
    of_dtype = {subtest.model.dtype: subtest.tolerance for subtest in subtests}
    constants = [
        assignment("ADAPTER", subtests[0].adapter),
        *([assignment("NATIVE", Call("Native", differences(native, NativePoint())))] if native is not None else []),
        *(assignment(ref.name, tolerance_call(of_dtype[dtype])) for dtype, ref in tolerances.items()),
        assignment("MODEL", Call("Model", stated(base))),
        *(
            assignment(ref.name, Call("replace", differences(model, base), (Ref("MODEL"),)))
            for model, ref in models.items()
            if model is not base
        ),
    ]
    sweeps = tuple(
        sweep_view(namer, sweep, group, Names(models, cases, tolerances, {id: ref for id, (ref, _) in entries.items()}))
        for sweep, group in by_sweep.items()
    )
    speculative = any(case.speculation is not None for case in cases)
    return ModuleView(
        file=module_file(method, backend),
        method=method,
        backend=backend,
        imports=tuple(
            name
            for name, used in (
                ("Case", True),
                ("KnownFailure", bool(entries)),
                ("Model", True),
                ("Native", native is not None),
                ("Speculation", speculative),
                ("Subtest", True),
                ("Tolerance", True),
                ("run", True),
            )
            if used
        ),
        standard=tuple(
            item
            for item, used in ((("dataclasses", "replace"), len(models) > 1), (("functools", "partial"), True))
            if used
        ),
        constants=tuple(constants),
        cases=tuple(assignment(ref.name, case_call(case)) for case, ref in cases.items()),
        known_failures=tuple(assignment(ref.name, known_call(entry)) for ref, entry in entries.values()),
        sweeps=sweeps,
    )


@dataclass(frozen=True)
class Names:
    """What the constants of a module are called."""

    models: Mapping[ModelPoint, Ref]
    cases: Mapping[CasePoint, Ref]
    tolerances: Mapping[str, Ref]
    entries: Mapping[str, Ref]


def sweep_view(namer: Namer, sweep: str, subtests: list[Subtest], names: Names) -> SweepView:
    """What the subtests of a sweep share goes into a partial; each row states its id and the rest."""
    rows = [arguments(subtest, names) for subtest in subtests]
    shared = {
        name: value
        for name, value in rows[0].items()
        if name not in ("id", "case") and all(row[name] == value for row in rows)
    }
    function = namer.claim(f"make_{sweep}" if sweep.startswith("test") else sweep)  # pytest would collect test_*
    given = {name: value for name, value in shared.items() if DEFAULTS.get(name, "") != value}
    calls = [
        Call(
            function,
            {
                name: value
                for name, value in row.items()
                if name not in shared and (name not in DEFAULTS or DEFAULTS[name] != value)
            },
        )
        for row in rows
    ]
    listing = namer.claim(sweep.upper())
    lines = [f"{listing} = ["]
    lines += [f"    {source(call, indent=4, after=1)}," for call in calls]
    return SweepView(
        function=function,
        test=f"test_{sweep}",
        listing=listing,
        shared=assignment(function, Call("partial", given, (Ref("Subtest"),))),
        rows="\n".join([*lines, "]"]),
    )


def arguments(subtest: Subtest, names: Names) -> dict[str, object]:
    """The keywords of ``kits.Subtest``, all of them."""
    entry = subtest.known_failure
    return {
        "id": subtest.id,
        "adapter": Ref("ADAPTER"),
        "model": names.models[subtest.model],
        "case": names.cases[subtest.case],
        "runner": subtest.runner,
        "seq_lens": subtest.seq_lens,
        "layout": subtest.layout,
        "pad_style": subtest.pad_style,
        "multiplier": subtest.multiplier,
        "tolerance": names.tolerances[subtest.model.dtype],
        "requires": subtest.requires,
        "native": Ref("NATIVE") if subtest.native is not None else None,
        "known_failure": names.entries[entry.id] if entry is not None else None,
    }


def plain_model(subtests: list[Subtest]) -> ModelPoint:
    """The model with the fewest features and heads, so that the names of others say what they have beyond it."""
    counts = Counter(subtest.model for subtest in subtests)
    return min(counts, key=lambda model: (len(stated(model)), model.q_heads, -counts[model]))


def model_name(model: ModelPoint, base: ModelPoint) -> str:
    """A name that says what differs: ``MODEL_Q10_KV2``, ``MODEL_FLOAT16``, ``MODEL_SINKS``."""
    parts = []
    for name, value in differences(model, base).items():
        if name == "dtype":
            parts.append(str(value).upper())
        elif name in SHORT and value is not None:
            parts.append(f"{SHORT[name]}{value}")
        elif name != "v_head_dim" or model.v_head_dim != model.head_dim:
            parts.append(name.upper())
    return "_".join(["MODEL", *parts])


def stated(value: object) -> dict[str, object]:
    """The fields of a dataclass that differ from their defaults, or have none."""
    return {
        item.name: getattr(value, item.name)
        for item in fields(value)  # type: ignore[arg-type]
        if getattr(value, item.name) != item.default
    }


def case_call(case: CasePoint) -> Call:
    """``Case(...)``."""
    keywords = stated(case)
    if isinstance(case.speculation, SpeculationPoint):
        keywords["speculation"] = Call("Speculation", stated(case.speculation))
    return Call("Case", keywords)


def tolerance_call(tolerance: Tolerance) -> Call:
    """``Tolerance(...)``."""
    return Call("Tolerance", {"atol": tolerance.atol, "rtol": tolerance.rtol})


def known_call(entry: KnownFailure) -> Call:
    """``KnownFailure(...)``, with what a run needs of an entry."""
    keywords: dict[str, object] = {
        "id": entry.id,
        "action": entry.action,
        "kind": entry.kind,
        "reason": entry.reason,
        "raises": entry.raises,
    }
    if entry.expect is not None:
        if entry.expect.max_abs is not None:
            keywords["max_abs"] = tuple(entry.expect.max_abs)
        keywords["wrong"] = tuple(entry.expect.wrong)
    if entry.when.packages:
        keywords["packages"] = tuple(entry.when.packages)
    if entry.when.capability is not None:
        keywords["capability"] = entry.when.capability
    return Call("KnownFailure", keywords)
