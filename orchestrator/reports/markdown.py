"""The Markdown job summary: failures first, then the table. Never larger than a GitHub job summary may be."""

from __future__ import annotations

import html
from collections import Counter, defaultdict

from orchestrator import outcomes
from orchestrator.reports.text import NOTHING, count_line, noted, reproduce, shard_lines
from orchestrator.verdict import Result, Verdict

MAX_BYTES = 1_000_000
"""GitHub refuses a summary above 1 MiB; steps share it."""
MAX_FAILURES = 200
MAX_MESSAGE = 1500
MARKS = {
    outcomes.FAILED: "✗", outcomes.CRASHED: "✗", outcomes.TIMEOUT: "✗", outcomes.UNEXPECTED_PASS: "!",
    outcomes.FLAKY: "~", outcomes.NOT_RUN: "?", outcomes.UNAVAILABLE: "–",
}  # fmt: skip


def render(verdict: Verdict) -> str:
    """Sections in the order of importance; whole failures are left out at the end if there is no room."""
    head = [headline(verdict), ""]
    tail = ["", *table(verdict), "", *shards(verdict), "", *margins(verdict)]
    room = MAX_BYTES - len("\n".join([*head, *tail]).encode())
    middle: list[str] = []
    failures = [result for result in verdict.failures if result.outcome != outcomes.NOT_RUN]
    for number, result in enumerate(failures):
        block = failure(verdict, result)
        room -= len(block.encode()) + 1
        if number >= MAX_FAILURES or room < 1000:
            middle.append(f"\n{len(failures) - number} more failures are left out here; `results.json` has them all.\n")
            break
        middle.append(block)
    return "\n".join([*head, *middle, *tail]) + "\n"


def headline(verdict: Verdict) -> str:
    good = verdict.exit_code == 0
    text = f"## Attention matrix: {'as expected' if good else 'not as expected'}\n\n"
    text += f"**{len(verdict.results)} planned: {count_line(verdict.counts)}**"
    ran = ", ".join(f"{count} {kind}" for kind, count in verdict.ran.most_common())
    text += f"  \nran: {ran}" if ran else ""
    text += f"\n\n**{NOTHING}**" if verdict.nothing_tested else ""
    missing = [result.planned.id for result in verdict.results if result.outcome == outcomes.NOT_RUN]
    if missing:
        text += f"\n\n**Not run:** {len(missing)}, the first `{missing[0]}`"
    for remark in verdict.remarks:
        text += f"\n\n> {html.escape(remark)}"
    if verdict.noted:
        text += f"\n\n> {noted(verdict)}"
    return text


def failure(verdict: Verdict, result: Result) -> str:
    """One failure, folded, its message fenced longer than any fence inside it."""
    body = f"{result.message[:MAX_MESSAGE]}\n\nrerun: {reproduce(verdict, result)}"
    if len(result.attempts) > 1:
        body = f"{len(result.attempts)} attempts: {count_line(result.tally)}\n{body}"
    fence = "```"
    while fence in body:
        fence += "`"
    phrase = outcomes.PHRASES[result.outcome][0]
    return (
        f"<details><summary>{MARKS.get(result.outcome, '')} <b>{phrase}</b> <code>{result.planned.id}</code></summary>"
        f"\n\n{fence}text\n{body}\n{fence}\n\n</details>\n"
    )


def table(verdict: Verdict) -> list[str]:
    """Backends down, sweeps across; a cell counts its subtests and marks what went wrong."""
    cells: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for result in verdict.results:
        planned = result.planned
        cells[f"{planned.method} {planned.backend}", planned.sweep][result.outcome] += 1
    rows = [f"{method} {backend}" for method, backend in verdict.rows]
    sweeps = verdict.columns
    lines = ["| | " + " | ".join(sweeps) + " |", "|---|" + "---|" * len(sweeps)]
    for row in rows[:400]:
        lines.append(f"| {row} | " + " | ".join(cell(cells.get((row, sweep))) for sweep in sweeps) + " |")
    return lines


def cell(counts: Counter[str] | None) -> str:
    if not counts:
        return ""
    good = sum(counts[name] for name in outcomes.EXPECTED)
    bad = [f"{counts[name]}{MARKS[name]}" for name in outcomes.ORDER if name in MARKS and counts[name]]
    return " ".join([*(f"**{text}**" for text in bad), str(good) if good or not bad else ""]).strip()


def shards(verdict: Verdict) -> list[str]:
    return ["```text", *shard_lines(verdict), "```"]


def margins(verdict: Verdict) -> list[str]:
    thin = verdict.thinnest()
    if not thin:
        return []
    lines = ["<details><summary>Thinnest margins</summary>", "", "| share of tolerance | subtest |", "|---|---|"]
    lines += [f"| {result.margin:.3f} | `{result.planned.id}` |" for result in thin]
    return [*lines, "", "</details>"]
