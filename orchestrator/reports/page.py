"""One self-contained HTML page: the matrix as a heat map with filters, plots, messages and commands.

It loads nothing and sends nothing. Data travel as JSON in a script element that no browser executes; the page's policy
names its one script and one style sheet by hash, so text from a subtest could not run even if it escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from pathlib import Path

from jinja2 import Environment

from orchestrator import outcomes
from orchestrator.reports.text import count_line, reproduce, rerun
from orchestrator.verdict import Result, Verdict
from orchestrator.wording import count

TEMPLATE = Path(__file__).parent / "template"
MAX_MESSAGE = 3000


def render(verdict: Verdict) -> str:
    script, style = (TEMPLATE / name for name in ("page.js", "page.css"))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((TEMPLATE / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        good=verdict.exit_code == 0,
        totals=f"{len(verdict.results)} planned: {count_line(verdict.counts)}",
        facts=facts(verdict),
        remarks=verdict.remarks,
        data=embed(matrix(verdict)),
        script=script.read_text(encoding="utf-8"),
        style=style.read_text(encoding="utf-8"),
        script_hash=fingerprint(script),
        style_hash=fingerprint(style),
    )


def fingerprint(path: Path) -> str:
    """As a content security policy spells it. The template puts the file's text between its tags unchanged."""
    digest = hashlib.sha256(path.read_text(encoding="utf-8").encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def embed(value: object) -> str:
    """JSON that can stand inside a script element: no tag can begin in it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def facts(verdict: Verdict) -> list[tuple[str, str]]:
    """The lines under the headline."""
    run = verdict.run
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.started)) if 0 < run.started < 1e11 else "unknown"
    ran = ", ".join(f"{count} {kind}" for kind, count in verdict.ran.most_common()) or "nothing"
    out = [("profile", run.profile), ("spec", run.spec_sha256[:12]), ("commit", run.short_commit), ("begun", when)]
    out += [("on", f"{run.device_kind}, {count(run.workers, 'worker')}"), ("ran", ran)]
    if verdict.cost is not None and not run.merged:
        out.append(("took", f"{verdict.cost.wall:.1f} s, {verdict.cost.own:.1%} of it the orchestrator's own"))
    return out


def matrix(verdict: Verdict) -> dict[str, object]:
    """Rows and columns of the heat map, and every subtest as a short list."""
    rows = {pair: number for number, pair in enumerate(verdict.rows)}
    sweeps = {sweep: number for number, sweep in enumerate(verdict.columns)}
    messages: dict[str, int] = {}
    subtests = []
    for result in verdict.results:
        planned = result.planned
        bad = result.outcome not in outcomes.EXPECTED
        message = message_of(result)
        subtests.append(
            [
                rows[planned.method, planned.backend],
                sweeps[planned.sweep],
                planned.id.split(".", 3)[3],
                outcomes.ORDER.index(result.outcome),
                None if result.margin is None else float(f"{result.margin:.4g}"),
                round(result.seconds, 4),
                messages.setdefault(message, len(messages)) if message else -1,
                result.shard + 1,
                reproduce(verdict, result) if bad else "",
            ]
        )
    return {
        "rows": list(rows),
        "sweeps": list(sweeps),
        "outcomes": [[name, outcomes.PHRASES[name][0], name in outcomes.EXPECTED] for name in outcomes.ORDER],
        "messages": list(messages),
        "subtests": subtests,
        "rerun": rerun(verdict.run),
    }


def message_of(result: Result) -> str:
    if result.outcome == outcomes.PASSED:
        return ""
    lines = [result.message[:MAX_MESSAGE]] if result.message else []
    if result.planned.known_failure:
        lines.append(f"entry: {result.planned.known_failure}")
    if len(result.attempts) > 1:
        lines.append(f"{len(result.attempts)} attempts: {count_line(result.tally)}")
    return "\n".join(lines)
