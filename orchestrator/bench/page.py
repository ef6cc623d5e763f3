"""``bench.md`` and ``bench.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from orchestrator.bench.measuring import OTHER, Measured

PHASES = (
    "libraries",
    "context",
    "fixture",
    "eager",
    "warm_up",
    "capture",
    "prepare",
    "replay",
    "reference",
    "compare",
    "invariants",
    "integrity",
    OTHER,
)


def as_dict(runs: Sequence[Measured]) -> dict[str, Any]:
    return {"format": 1, "runs": [asdict(run) for run in runs]}


def render(runs: Sequence[Measured]) -> str:
    """Medians of the counted runs, with the least and the greatest; runs that filled caches apart."""
    counted = by_setting(run for run in runs if run.number)
    lines = ["# Time of the matrix", "", "<!-- Written by `nox -s bench`; do not edit. -->", ""]
    kinds = sorted({run.kind for run in runs})
    subtests = max((run.subtests for run in runs), default=0)
    lines += [
        f"{subtests} subtests on {', '.join(kinds)}. Medians [least-greatest] of interleaved runs, in seconds.",
        "",
    ]
    lines += ["| setting | runs | end to end | start | work | reports |", "|---|---:|---:|---:|---:|---:|"]
    for name, group in counted.items():
        cells = [spread(group, lambda run: run.wall)]
        cells += [f"{middle(group, pick):.2f}" for pick in (lambda r: r.start, lambda r: r.work, lambda r: r.end)]
        lines.append(f"| {name} | {len(group)} | {' | '.join(cells)} |")
    lines += ["", "Where the work goes: seconds summed over all subtests and workers (on a GPU the host's).", ""]
    shown = [phase for phase in PHASES if any(run.phases.get(phase) for run in runs)]
    lines += [f"| setting | {' | '.join(p.replace('_', ' ') for p in shown)} | idle |"]
    lines += ["|---|" + "---:|" * (len(shown) + 1)]
    for name, group in counted.items():
        cells = [f"{median(run.phases.get(phase, 0.0) for run in group):.1f}" for phase in shown]
        lines.append(f"| {name} | {' | '.join(cells)} | {middle(group, lambda run: run.idle):.1f} |")
    first = [run for run in runs if not run.number]
    if first:
        lines += ["", "First runs, which also fill the caches where they are empty:", ""]
        lines += [f"- {run.setting}: {run.wall:.1f} s, {run.said}" for run in first]
    bad = [run for run in runs if run.exit_code]
    if bad:
        lines += ["", "Not as expected:", ""]
        lines += [f"- {run.setting}, run {run.number}: exit code {run.exit_code}, {run.said}" for run in bad]
    return "\n".join(lines) + "\n"


def by_setting(runs: Iterable[Measured]) -> dict[str, list[Measured]]:
    groups: dict[str, list[Measured]] = {}
    for run in runs:
        groups.setdefault(str(run.setting), []).append(run)
    return groups


def middle(group: Sequence[Measured], pick: Callable[[Measured], float]) -> float:
    return median(pick(run) for run in group)


def spread(group: Sequence[Measured], pick: Callable[[Measured], float]) -> str:
    values = [pick(run) for run in group]
    return f"**{median(values):.2f}** [{min(values):.2f}-{max(values):.2f}]"
