"""The verdict as plain text: shards, totals, what ran, margins, and a command for each failure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable

from orchestrator import outcomes
from orchestrator.folder import Run
from orchestrator.verdict import Result, Verdict
from orchestrator.wording import count

MAX_FAILURES = 60
MAX_LINES = 12
NOTHING = "NOTHING WAS TESTED: no subtest that must pass did"


def count_line(counts: Counter[str]) -> str:
    """``531 passed, 17 known failures``, the expected first."""
    return ", ".join(outcomes.say(name, counts[name]) for name in reversed(outcomes.ORDER) if counts[name]) or "nothing"


def rerun(run: Run) -> str:
    """The command that runs single subtests under supervision; their ids follow it."""
    fault = f"ATTNMATRIX_FAULT={shlex.quote(run.fault)} " if run.fault else ""
    where = "" if run.tests == "generated_tests" else f" --tests {shlex.quote(run.tests)}"
    return f"{fault}{run.command}{where}"


def reproduce(verdict: Verdict, result: Result) -> str:
    """One command that runs exactly this subtest again: pytest alone, unless it may take its process along or the user
    has the environment only inside nox."""
    run, planned = verdict.run, result.planned
    alone = result.outcome in (outcomes.FAILED, outcomes.UNEXPECTED_PASS) and planned.action != "crash"
    if alone and run.command == Run.command:
        env = [f"ATTNMATRIX_FAULT={shlex.quote(run.fault)}"] if run.fault else []
        env += ["ATTNMATRIX_DEVICE=cpu"] if run.device_kind == "cpu" else []
        return " ".join([*env, "python -m pytest", shlex.quote(f"{run.tests}/{planned.file}::{planned.test}")])
    return f"{rerun(run)} {planned.id}"


def failure_lines(verdict: Verdict, result: Result) -> Iterable[str]:
    """One failure: what, why, by how much, where, and the command."""
    yield f"{outcomes.PHRASES[result.outcome][0].upper()} {result.planned.id}"
    shown = result.shown
    if shown is not None:
        lines = [line for line in shown.message.splitlines() if line.strip()]
        yield from (f"    {line}" for line in lines[:MAX_LINES])
        facts = []
        if shown.margin is not None and shown.outcome != outcomes.UNEXPECTED_PASS:
            facts.append(f"{shown.margin:.3g} x the tolerance")
        if shown.max_abs is not None:
            facts.append(f"max abs {shown.max_abs:.3g}")
        if shown.row is not None:
            facts.append(f"row {shown.row}")
        if facts:
            yield f"    {', '.join(facts)}"
    if result.outcome == outcomes.UNEXPECTED_PASS and not result.message:  # of one that was to crash: nothing is said
        yield f"    it passes now: delete the entry {result.planned.known_failure} from suite.toml, or narrow it"
    if len(result.attempts) > 1:
        yield f"    {len(result.attempts)} attempts: {count_line(result.tally)}"
    yield f"    rerun: {reproduce(verdict, result)}"


def shard_lines(verdict: Verdict) -> Iterable[str]:
    """One line per shard."""
    by_shard: dict[int, list[Result]] = {}
    for result in verdict.results:
        by_shard.setdefault(result.shard, []).append(result)
    number = len(verdict.plan.shards)
    for shard in sorted(by_shard):
        results = by_shard[shard]
        seconds = sum(result.seconds for result in results)
        counts = Counter(result.outcome for result in results)
        noun = f"{'subtest' if len(results) == 1 else 'subtests':8}"
        yield f"shard {shard + 1}/{number}  {len(results):5d} {noun}  {seconds:7.1f} s  {count_line(counts)}"


def attempts_line(results: Iterable[Result], repeat: int) -> str:
    """``5 of 5 attempts passed``; what did not pass follows."""
    tally: Counter[str] = Counter()
    for result in results:
        tally += result.tally
        tally[outcomes.NOT_RUN] += max(0, repeat - len(result.attempts))
    passed, total = tally.pop(outcomes.PASSED, 0), tally.total()
    return f"{passed} of {passed + total} attempts passed" + (f", {count_line(tally)}" if total else "")


def noted(verdict: Verdict) -> str:
    are = "is no event and counts" if verdict.noted == 1 else "are no events and count"
    return f"{count(verdict.noted, 'line')} in the events files {are} for nothing"


def summary(verdict: Verdict, wall: float | None = None) -> str:
    """Everything that is printed after a run."""
    lines = [*shard_lines(verdict), ""]
    counts = verdict.counts
    own = f", {verdict.cost.own:.0%} of it the orchestrator's own" if verdict.cost is not None else ""
    took = f" in {wall:.1f} s{own}" if wall is not None else ""
    lines.append(f"{len(verdict.results)} planned{took}: {count_line(counts)}")
    if verdict.run.repeat > 1:
        lines.append(attempts_line(verdict.results, verdict.run.repeat))
    ran = verdict.ran
    if ran:
        lines.append("ran: " + ", ".join(f"{count} {kind}" for kind, count in ran.most_common()))
    unavailable = Counter(kind for r in verdict.results if r.outcome == outcomes.UNAVAILABLE for kind in r.lacking)
    if unavailable:
        kinds = ", ".join(f"{count} {kind}" for kind, count in unavailable.most_common())
        lines.append(f"UNAVAILABLE on this host, and so not tested: {kinds}")
        unwanted = sorted(unavailable.keys() - set(verdict.run.allow_unavailable))
        if unwanted:
            both = ",".join(sorted({*verdict.run.allow_unavailable, *unwanted}))
            lines.append(f"  not allowed: {', '.join(unwanted)}; where it is meant: --allow-unavailable {both}")
    if verdict.nothing_tested:
        lines.append(NOTHING)
    thin = verdict.thinnest()
    if thin:
        lines += ["", "thinnest margins (largest error as a share of its tolerance):"]
        lines += [f"  {result.margin:6.3f}  {result.planned.id}" for result in thin]
    failures = verdict.failures
    if failures:
        lines.append("")
        for result in [f for f in failures if f.outcome != outcomes.NOT_RUN][:MAX_FAILURES]:
            lines += failure_lines(verdict, result)
        rest = len([f for f in failures if f.outcome != outcomes.NOT_RUN]) - MAX_FAILURES
        if rest > 0:
            lines.append(f"... and {rest} more; see the reports")
        if counts[outcomes.NOT_RUN]:
            names = [result.planned.id for result in failures if result.outcome == outcomes.NOT_RUN]
            lines.append(f"NOT RUN: {len(names)}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")
    lines += [f"note: {remark}" for remark in verdict.remarks]
    if verdict.noted:
        lines.append(f"note: {noted(verdict)}:")
        lines += [f"  {note}" for note in verdict.notes[:5]]
    return "\n".join(lines)
