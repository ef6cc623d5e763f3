"""The command line of the measurement."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator import packages, processes
from orchestrator.devices import cpu_count
from orchestrator.errors import OrchestratorError
from orchestrator.power import page
from orchestrator.power.results import BROKEN, CAUGHT, GOOD, FaultResult, Report
from orchestrator.wording import count

ROOT = Path(__file__).parents[2]
EXIT_BROKEN, EXIT_SHORT = 2, 1
REQUIRED = 0.95
"""Share of the counted bugs that must be caught. Whatever else was caught before must be so again."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m orchestrator.power", description="Plant each seeded fault and see which subtests catch it."
    )
    made.add_argument("faults", nargs="*", metavar="FAULT", help="ids (default: all, and results are written)")
    made.add_argument(
        "--all",
        action="store_true",
        help="go on after the first subtest that catches a fault; of faults that are named, print every one",
    )
    made.add_argument("--weaker", nargs="*", metavar="NAME", help="measure weaker configurations too (default: each)")
    made.add_argument("--list", action="store_true", help="print the faults and end")
    made.add_argument("--tests", type=Path, default=ROOT / "generated_tests", metavar="DIR")
    made.add_argument("--workers", type=int, default=cpu_count(), metavar="N", help="processes (default: one per core)")
    made.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for one subtest")
    made.add_argument("--output", type=Path, default=ROOT, metavar="DIR", help="where POWER.md and results/ go")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """0: measured, and enough was caught; 1: less than ``REQUIRED``, or than before, or a control was reported;
    2: the measurement proves nothing."""
    chosen = parser().parse_args(arguments)
    try:
        packages.require("power", packages.SUBTESTS)
    except OrchestratorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    os.environ.update(dict.fromkeys(processes.THREADS, "1"))
    sys.path.insert(0, str(ROOT))
    from orchestrator.power.measuring import Measurement

    measurement = Measurement(chosen.tests, workers=max(1, chosen.workers), timeout=chosen.timeout)
    if chosen.list:
        for fault in measurement.faults.values():
            print(f"{fault.id:5} {'control' if fault.control else measurement.kinds[fault.kind]:28} {fault.title}")
        return 0
    from kits.faults import UnknownFaultError, find

    try:
        ids = [find(name).id for name in chosen.faults] or list(measurement.faults)
    except UnknownFaultError as error:
        print(error, file=sys.stderr)
        return EXIT_BROKEN
    names = _weakenings(chosen.weaker, list(measurement.weaken.WEAKENINGS))
    if isinstance(names, str):
        print(names, file=sys.stderr)
        return EXIT_BROKEN
    report = measurement.measure(ids, everything=chosen.all, progress=_tell)
    whole = not chosen.faults
    report.weaker = _earlier(chosen.output, report) if whole else {}
    for name in names:
        print(f"weaker: {name}", flush=True)
        report.weaker[name], red = measurement.compare(ids, name, progress=_tell)
        report.red.update({f"{name}: {subtest}": message for subtest, message in red.items()})
    if chosen.all and chosen.faults:
        for result in report.results:
            _tell_all(result)
    print(page.headline(report))
    for subtest, message in report.red.items():
        print(f"red without a fault: {subtest}: {message}")
    lost = _lost(report, _committed())
    for result in lost:
        print(f"caught in the committed results, now {result.status}: {result.fault.id} ({result.fault.title})")
    if whole:
        _write(chosen.output, report, measurement)
    return _exit_code(report, lost)


def _weakenings(wanted: list[str] | None, known: list[str]) -> list[str] | str:
    if wanted is None:
        return []
    unknown = [name for name in wanted if name not in known]
    if unknown:
        return f"no weaker configuration is called {unknown[0]!r}; known: {', '.join(known)}"
    return wanted or known


def _tell(weakening: str | None, result: FaultResult) -> None:
    """One line as each fault is done."""
    trials = f"{len(result.trials)} of {result.touched} subtests, {result.seconds:.1f} s"
    line = f"{result.fault.id:5} {result.status:13} {trials}"
    if result.status == BROKEN:
        line += f": {result.why_broken}"
    elif result.kills:
        line += f": {result.kills[0].id} ({result.kills[0].check})"
    print(f"{weakening}: {line}" if weakening else line, flush=True)


def _tell_all(result: FaultResult) -> None:
    """Every subtest that catches a fault, in the order in which they ran."""
    print(f"{result.fault.id} is caught by {count(len(result.kills), 'subtest')}")
    names = ", ".join(kill.id for kill in result.kills)
    for line in textwrap.wrap(names, 118, break_long_words=False, break_on_hyphens=False):
        print(f"  {line}", flush=True)


def _earlier(output: Path, report: Report) -> dict[str, dict[str, str]]:
    """What was measured of weaker configurations before, if it was over this matrix and these faults."""
    try:
        earlier: dict[str, Any] = json.loads((output / "results" / "power.json").read_text(encoding="utf-8"))
        same = earlier["manifest_sha256"] == report.manifest_sha256
        ids = {result.fault.id for result in report.results}
        return {name: found for name, found in earlier["weaker"].items() if same and set(found) == ids}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def _committed() -> dict[str, str]:
    """Status of each fault in the results that this checkout came with."""
    try:
        raw = json.loads((ROOT / "results" / "power.json").read_text(encoding="utf-8"))
        return {str(found["id"]): str(found["status"]) for found in raw["faults"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _lost(report: Report, before: Mapping[str, str]) -> list[FaultResult]:
    """What was caught before, counted or spare, and is not any more."""
    return [r for r in report.results if before.get(r.fault.id) == CAUGHT and r.status != CAUGHT]


def _write(output: Path, report: Report, measurement: Any) -> None:
    summaries = {name: found.summary for name, found in measurement.weaken.WEAKENINGS.items()}
    (output / "results").mkdir(parents=True, exist_ok=True)
    data = json.dumps(report.as_dict(), indent=1) + "\n"
    (output / "results" / "power.json").write_text(data, encoding="utf-8")
    (output / "POWER.md").write_text(page.render(report, summaries), encoding="utf-8")
    page.fill_readme(output / "README.md", report)
    print(f"wrote {output / 'POWER.md'} and {output / 'results' / 'power.json'}")


def _exit_code(report: Report, lost: Sequence[FaultResult]) -> int:
    if not report.healthy:
        return EXIT_BROKEN
    counted = report.counted
    enough = not counted or sum(row.caught for row in counted) >= REQUIRED * len(counted)
    quiet = all(result.status in GOOD for result in report.controls)
    return 0 if enough and quiet and not lost else EXIT_SHORT
