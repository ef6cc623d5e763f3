"""The views behind README's tables and KNOWN_FAILURES.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from generator.matrix import Matrix, Project
from generator.spec import RUNNERS, KnownFailure
from generator.subtests import Subtest
from generator.support import RUNNER_MODES

COLUMNS = {
    "eager": "eager",
    "cuda_graph": "graph",
    "cuda_graph_multi_step": "multi-step graph",
    "pcg": "piecewise graph",
    "bcg": "breakable graph",
}
BEGIN = "<!-- matrix: begin; written by `nox -s generate` -->"
END = "<!-- matrix: end -->"
RUNS_BEGIN = "<!-- reference runs: begin; written by `nox -s generate` -->"
RUNS_END = "<!-- reference runs: end -->"


@dataclass(frozen=True)
class Table:
    """A Markdown table, already in cells; the first ``words`` columns are left-aligned, the others centred."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 2

    def text(self) -> str:
        """The table."""
        rule = ["---" if column < self.words else ":-:" for column in range(len(self.header))]
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.header, rule, *self.rows))


@dataclass(frozen=True)
class ReadmeView:
    """What stands between the markers of README.md."""

    must_pass: int
    known_failures: int
    backends: str
    sweeps: str
    profiles: str
    blocked: tuple[str, ...]


def readme_view(project: Project, matrix: Matrix) -> ReadmeView:
    """The tables, and the reasons of what is blocked."""
    blocked: dict[tuple[str, str], list[str]] = {}
    runners = [runner for runner in RUNNERS if any(subtest.runner == runner for subtest in matrix.subtests)]
    rows = []
    for method, backend in dict.fromkeys((subtest.method, subtest.backend) for subtest in matrix.subtests):
        mine = [subtest for subtest in matrix.subtests if (subtest.method, subtest.backend) == (method, backend)]
        cells = []
        for runner in runners:
            here = [subtest for subtest in mine if subtest.runner == runner]
            declared = project.spec.backends[backend]
            reason = declared.blocked.get(runner)  # type: ignore[call-overload]
            if here or reason is None:
                applies = here or not RUNNER_MODES[runner].isdisjoint(declared.modes)
                cells.append(count_cell(here) if applies else "n/a")
                continue
            columns = blocked.setdefault((backend, reason), [])
            if COLUMNS[runner] not in columns:
                columns.append(COLUMNS[runner])
            cells.append(f"blocked ({list(blocked).index((backend, reason)) + 1})")
        rows.append([method, f"`{backend}`", *cells, count_cell(mine)])
    totals = [count_cell([item for item in matrix.subtests if item.runner == runner]) for runner in runners]
    rows.append(["**total**", "", *totals, f"**{count_cell(matrix.subtests)}**"])
    header = ["method", "backend", *(COLUMNS[runner] for runner in runners), "all"]
    return ReadmeView(
        must_pass=matrix.must_pass,
        known_failures=matrix.known_failures,
        backends=Table(header, rows).text(),
        sweeps=sweep_table(project, matrix).text(),
        profiles=profile_table(project).text(),
        blocked=tuple(
            f"{number}. `{backend}`, {', '.join(columns)}: {inline(reason)}"
            for number, ((backend, reason), columns) in enumerate(blocked.items(), 1)
        ),
    )


def sweep_table(project: Project, matrix: Matrix) -> Table:
    """One row for each sweep."""
    rows = []
    for variant in project.index.variants:
        if variant.name not in matrix.by_sweep:
            continue
        must_pass, known = matrix.by_sweep[variant.name]
        rows.append([f"`{variant.name}`", inline(variant.summary), str(must_pass), str(known or "")])
    rows.append(["**total**", "", f"**{matrix.must_pass}**", f"**{matrix.known_failures or ''}**".replace("****", "")])
    return Table(["sweep", "what it runs", "must pass", "known failures"], rows)


def profile_table(project: Project) -> Table:
    """One row for each profile."""
    rows = []
    for name, profile in project.spec.profiles.items():
        matrix = project.matrix(name)
        option = "" if name == project.default_profile else f" -- --profile {name}"
        command = f"`nox -s gpu_matrix{option}`"
        rows.append(
            [
                f"`{name}`",
                inline(profile.summary or ""),
                command,
                str(matrix.must_pass),
                str(matrix.known_failures or ""),
            ]
        )
    return Table(["profile", "what it has", "run it", "must pass", "known failures"], rows, words=3)


def count_cell(subtests: Sequence[Subtest]) -> str:
    """``24``, ``24 + 2 known`` or a dash where there are none."""
    known = sum(subtest.known_failure is not None for subtest in subtests)
    must_pass = len(subtests) - known
    if not subtests:
        return "–"
    return f"{must_pass} + {known} known" if known else str(must_pass)


@dataclass(frozen=True)
class KnownView:
    """One section of KNOWN_FAILURES.md."""

    id: str
    count: int
    action: str
    kind: str
    facts: tuple[tuple[str, str], ...]
    references: tuple[str, ...]
    ids: tuple[str, ...]


ACTIONS = {
    "xfail": "runs, and must fail as stated",
    "skip": "is not run",
    "crash": "runs in a process of its own, which must end as stated",
}


def known_views(project: Project, matrix: Matrix) -> list[KnownView]:
    """All entries with the subtests they match in the profile, or in the one that an entry names instead."""
    views = []
    for entry in project.spec.known_failure:
        mine = project.matrix(entry.profile) if entry.profile is not None else matrix
        views.append(known_view(entry, [item.id for item in mine.subtests if item.known_failure is entry]))
    return views


def known_view(entry: KnownFailure, ids: Sequence[str]) -> KnownView:
    """One entry."""
    where = [f"`{code(item)}`" for item in entry.when.packages]
    if entry.when.capability is not None:
        where.append(f"device capability `{code(entry.when.capability)}`")
    facts = [
        ("what fails", inline(entry.reason)),
        ("root cause", inline(entry.root_cause)),
        ("required change", inline(entry.required_change)),
        ("treatment", ACTIONS[entry.action]),
        ("must raise", f"`{entry.raises}`"),
    ]
    if entry.expect is not None:
        few, many = entry.expect.wrong
        ranges = [f"share of wrong values {few} to {many}"]
        if entry.expect.max_abs is not None:
            low, high = entry.expect.max_abs
            ranges.insert(0, f"largest difference {low} to {high}")
        facts.append(("within", ", ".join(ranges)))
    if entry.exit is not None:
        facts.append(("process ends by", f"`{code(entry.exit)}`"))
    if where:
        facts.append(("only with", ", ".join(where)))
    if entry.profile is not None:
        facts.append(("profile", f"`{entry.profile}`"))
    facts.append(("since", entry.since.isoformat()))
    if entry.expires is not None:
        facts.append(("expires", entry.expires.isoformat()))
    return KnownView(
        id=entry.id,
        count=len(ids),
        action=entry.action,
        kind=entry.kind,
        facts=tuple(facts),
        references=tuple(inline(item) for item in entry.references),
        ids=tuple(ids),
    )


def inline(text: str) -> str:
    """Foreign text as Markdown that stays on its line and in its cell, and cannot become markup."""
    return re.sub(r"([\\`*\[\]<>|]|\b_|_\b)", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """Foreign text inside backticks."""
    return " ".join(text.replace("`", "'").replace("|", "\\|").split())
