"""POWER.md, and the headline of README.md."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.power.results import CAUGHT, CLEAN, REPORTED, FaultResult, Report

BEGIN = "<!-- power: begin; written by `nox -s power` -->"
END = "<!-- power: end -->"

INTRODUCTION = (
    "Each row is a public bug, planted on purpose by the smallest change that reproduces its mechanism in a backend, a "
    "kernel emulation or a runner of the kit (`kits/faults/`). A fault counts as caught when a subtest of the profile "
    "`{profile}` that is green without it fails with it, and when the changed code is seen to have changed a value "
    "there. Cheap subtests run first, and the first that catches ends the row; `nox -s power -- --all` goes on. "
    "Seconds are CPU time up to the catch. A bug with several mutants counts once, and only if all are caught."
)


def headline(report: Report) -> str:
    """The figures in one sentence each."""
    counted, spares, controls = report.counted, report.spares, report.controls
    parts = []
    if counted:
        caught = sum(row.caught for row in counted)
        share = 100 * caught / len(counted)
        parts.append(f"{caught} of {len(counted)} catalogued public bugs caught ({share:.0f} %)")
    if spares:
        parts.append(f"{sum(result.status == CAUGHT for result in spares)} of {len(spares)} further ones")
    if controls:
        reported = sum(result.status == REPORTED for result in controls)
        parts.append(f"{reported} of {len(controls)} harmless changes reported")
    return ", ".join(parts) + "."


def render(report: Report, summaries: Mapping[str, str]) -> str:
    """The whole page."""
    missed = [result for result in report.results if result.status not in (CAUGHT, CLEAN)]
    lines = [
        "# What the suite catches",
        "",
        "<!-- Written by `nox -s power`; do not edit. -->",
        "",
        f"**{headline(report)}**",
        "",
        *textwrap.wrap(INTRODUCTION.format(profile=report.profile), 120),
        "",
        "## Counted",
        "",
        *_table([result for result in report.results if result.fault.counted]),
        "",
        "## Further bugs",
        "",
        *_table(report.spares),
        "",
        "## Controls",
        "",
        "Changes that no output can show. None may be reported, though the changed code ran and changed a value.",
        "",
        "| control | reference | change | subtests | changed a value in | result |",
        "|---|---|---|---:|---:|---|",
        *(_control(result) for result in report.controls),
        "",
    ]
    if missed:
        lines += ["## Not caught", "", *(_miss(result) for result in missed), ""]
    if report.weaker:
        lines += _weaker(report, summaries)
    return "\n".join(lines).rstrip() + "\n"


def _table(results: Sequence[FaultResult]) -> list[str]:
    lines = [
        "| fault | reference | kind | bug | caught by sweep | check | seconds |",
        "|---|---|---|---|---|---|---:|",
    ]
    for result in results:
        fault = result.fault
        first = f"{fault.id} | {fault.references[0]} | {fault.kind_name} | {fault.title}"
        if result.kills:
            kill = result.kills[0]
            lines.append(f"| {first} | {kill.sweep} | {kill.check} | {result.seconds:.1f} |")
        else:
            lines.append(f"| {first} | **{result.status}** | | {result.seconds:.1f} |")
    return lines


def _control(result: FaultResult) -> str:
    fault = result.fault
    return (
        f"| {fault.id} | {fault.references[0]} | {fault.title} | {len(result.trials)} | {result.exercised} "
        f"| {result.status} |"
    )


def _miss(result: FaultResult) -> str:
    fault = result.fault
    return (
        f"- **{fault.id}** ({fault.title}): {result.status} in {len(result.trials)} of {result.touched} subtests, "
        f"changed a value in {result.exercised}. Said to need: {fault.axes}."
    )


def _weaker(report: Report, summaries: Mapping[str, str]) -> list[str]:
    """What each weaker configuration misses of the counted faults, measured over the same faults."""
    counted = report.counted
    lines = [
        "## Weaker configurations",
        "",
        "The same faults, measured against what public suites do less of. `nox -s power -- --weaker` repeats it.",
        "",
        "| configuration | caught | missed |",
        "|---|---:|---|",
        f"| profile `{report.profile}` | {sum(row.caught for row in counted)} | "
        f"{', '.join(row.id for row in counted if not row.caught)} |",
    ]
    for name, statuses in report.weaker.items():
        missed = [row.id for row in counted if any(statuses.get(r.fault.id) != CAUGHT for r in row.results)]
        label = f"{name}: {summaries.get(name, '')}"
        lines.append(f"| {label} | {len(counted) - len(missed)} | {', '.join(missed)} |")
    return [*lines, ""]


def fill_readme(path: Path, report: Report) -> None:
    """Write the headline between the markers of README.md; without markers, leave it alone."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        path.write_text(f"{before}{BEGIN}\n{headline(report)}\n{END}{after}", encoding="utf-8")
