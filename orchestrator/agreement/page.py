"""``agreement.md`` and ``agreement.json``."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict

from orchestrator.agreement.verdicts import AGREE, DISAGREE, ELSEWHERE, EMULATION_ONLY, EXPLAINED, Pair, Table

MAX_MESSAGE = 600


def headline(table: Table) -> str:
    """Both figures in one sentence."""
    parts = [_share(table.subtests, "subtests that are native here")]
    if table.faults:
        parts.append(_share(table.faults, "trials with a seeded fault"))
    text = f"Recorder and CUDA agree on {' and on '.join(parts)}."
    stated = sum(pair.status == EXPLAINED for pair in table.compared)
    return text + (f" {stated} differ by a stated limit." if stated else "")


def _share(pairs: list[Pair], what: str) -> str:
    counts = Counter(pair.status for pair in pairs)
    total = counts[AGREE] + counts[EXPLAINED] + counts[DISAGREE]
    return f"{counts[AGREE]} of {total} {what}"


def as_json(table: Table) -> str:
    out = {
        "format": 1,
        "headline": headline(table),
        "device": table.device,
        "versions": table.versions,
        "spec_sha256": table.spec_sha256,
        "manifest_sha256": table.manifest_sha256,
        "unused_limits": [asdict(limit) for limit in table.unused],
        "subtests": [pair.as_dict() for pair in table.subtests],
        "faults": [pair.as_dict() for pair in table.faults],
    }
    return json.dumps(out, indent=1) + "\n"


def render(table: Table) -> str:
    """Disagreements first, then the sums, then every single verdict."""
    lines = ["# Recorder and CUDA", "", "<!-- Written by `nox -s agreement`; do not edit. -->", ""]
    lines += [
        f"**{headline(table)}**",
        "",
        f"- CUDA: {_cell(table.device) or 'unknown device'}, {_versions(table, 'cuda')}",
        f"- recorder: CPU, {_versions(table, 'recorder')}",
        f"- suite: spec `{table.spec_sha256[:12]}`, manifest `{table.manifest_sha256[:12]}`",
        "",
        "Verdicts are compared by class: the outcome, and the check that failed. A subtest that one side has no",
        "verdict on is a disagreement.",
        "",
    ]
    lines += _differences("Disagreements", table, DISAGREE) + _differences("Stated limits", table, EXPLAINED)
    lines += ["## By backend", "", *_sums(table), ""]
    if table.faults:
        lines += ["## Seeded faults", "", *_faults(table), ""]
    absent = [pair for pair in table.subtests if pair.status == ELSEWHERE]
    if absent:
        counts = Counter((".".join(pair.id.split(".")[:2]), pair.note) for pair in absent)
        lines += ["## Not native here", "", "| backend | subtests | why |", "|---|---:|---|"]
        lines += [f"| {name} | {count} | {_cell(why)} |" for (name, why), count in sorted(counts.items())] + [""]
    lines += ["## Every verdict", "", "| subtest | recorder | CUDA | |", "|---|---|---|---|"]
    lines += [f"| `{pair.id}` | {_verdict(pair, 0)} | {_verdict(pair, 1)} | {pair.status} |" for pair in table.subtests]
    return "\n".join(lines) + "\n"


def _versions(table: Table, side: str) -> str:
    found = table.versions.get(side, {})
    return _cell(", ".join(f"{name} {version}" for name, version in found.items())) or "unknown versions"


def _differences(title: str, table: Table, status: str) -> list[str]:
    chosen = [pair for pair in table.compared if pair.status == status]
    if not chosen:
        return []
    lines = [f"## {title}", ""]
    for pair in chosen:
        lines += [f"- `{pair.name}`: {_cell(pair.note)}"]
        for side, seen in pair.sides:
            message = " ".join(seen.message.split())[:MAX_MESSAGE] if seen else "no verdict"
            lines.append(f"  - {side}: {seen.verdict if seen else 'missing'}{f': {_cell(message)}' if message else ''}")
    return [*lines, ""]


def _sums(table: Table) -> list[str]:
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for pair in table.subtests:
        rows[".".join(pair.id.split(".")[:2])][pair.status] += 1
    columns = (AGREE, EXPLAINED, DISAGREE, ELSEWHERE)
    lines = [f"| backend | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for name, counts in rows.items():
        lines.append(f"| {name} | {' | '.join(str(counts[column] or '') for column in columns)} |")
    return lines


def _faults(table: Table) -> list[str]:
    """One line per fault: the trial that decides it, which is the one that caught it, or the last."""
    lines = ["| fault | subtest | recorder | CUDA | |", "|---|---|---|---|---|"]
    by_fault: dict[str, list[Pair]] = defaultdict(list)
    for pair in table.faults:
        by_fault[pair.fault or ""].append(pair)
    for name, pairs in by_fault.items():
        pair = next((pair for pair in pairs if pair.status == DISAGREE), pairs[-1])
        status = pair.status if pair.status != EMULATION_ONLY else f"{EMULATION_ONLY}: no native counterpart"
        lines.append(f"| {name} | `{pair.id}` | {_verdict(pair, 0)} | {_verdict(pair, 1)} | {status} |")
    return lines


def _verdict(pair: Pair, side: int) -> str:
    seen = pair.sides[side][1]
    return seen.verdict if seen else "missing"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
