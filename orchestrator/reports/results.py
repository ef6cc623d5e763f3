"""``results.json``: one entry per planned subtest, for other programs."""

from __future__ import annotations

import json
from dataclasses import asdict

from orchestrator import outcomes
from orchestrator.verdict import Verdict

FORMAT = 1


def render(verdict: Verdict) -> str:
    """Sorted by id, so that two runs can be compared line by line."""
    rows = []
    for result in sorted(verdict.results, key=lambda result: result.planned.id):
        shown = result.shown
        rows.append(
            {
                "id": result.planned.id,
                "outcome": result.outcome,
                "shard": result.shard + 1,
                "seconds": round(result.seconds, 4),
                "margin": result.margin,
                "max_abs": shown.max_abs if shown else None,
                "ran": sorted({kind for attempt in result.attempts for kind in attempt.ran}),
                "captures": sum(attempt.captures for attempt in result.attempts),
                "replays": sum(attempt.replays for attempt in result.attempts),
                "known_failure": result.planned.known_failure,
                "unavailable_kind": shown.kind if shown and result.outcome == outcomes.UNAVAILABLE else None,
                "check": shown.check if shown else None,
                "message": result.message if result.outcome != outcomes.PASSED else "",
                "attempts": dict(result.tally),
                "devices": sorted({attempt.device for attempt in result.attempts}),
            }
        )
    cost = None if verdict.cost is None else {**asdict(verdict.cost), "own": round(verdict.cost.own, 4)}
    head = {
        "format": FORMAT,
        "run": asdict(verdict.run),
        "exit_code": verdict.exit_code,
        "counts": {name: verdict.counts[name] for name in outcomes.ORDER if verdict.counts[name]},
        "ran": dict(verdict.ran),
        "cost": cost,
        "remarks": verdict.remarks,
        "foreign_lines": verdict.noted,
    }
    body = ",\n".join(json.dumps(row, allow_nan=False, separators=(",", ":")) for row in rows)
    return json.dumps(head, allow_nan=False, indent=1)[:-2] + f',\n "subtests": [\n{body}\n ]\n}}\n'
