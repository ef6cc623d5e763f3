"""Checks a finished run against what its subtests left behind, without the orchestrator's own reading code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from orchestrator.campaign.acts import RESULTS

OUTCOMES = {
    "passed", "failed", "known_failure", "unexpected_pass", "skipped_known", "flaky", "unavailable", "crashed",
    "timeout", "not_run",
}  # fmt: skip
EXPECTED = {"passed", "known_failure", "skipped_known"}


def audit(folder: Path, ids: Sequence[str], marks: Path, exit_code: int, hits: int, condemned: str = "") -> list[str]:
    """Everything that is wrong with a run; empty for a good one. ``hits`` subtests may have been struck from outside;
    those of the module ``condemned`` all count as crashed."""
    try:
        results = json.loads((folder / "results.json").read_text())
    except (OSError, ValueError) as error:
        return [f"results.json cannot be read: {error}"]
    rows = results["subtests"]
    found = Counter(row["id"] for row in rows)
    wrong = [f"{id} is lost" for id in ids if not found[id]]
    wrong += [f"{id} is counted {count} times" for id, count in found.items() if count > 1]
    wrong += [f"{id} was never planned" for id in found if id not in set(ids)]
    wrong += [f"{row['id']} ended as {row['outcome']}" for row in rows if row["outcome"] not in OUTCOMES]
    if sum(results["counts"].values()) != len(ids):
        wrong.append(f"the counts {results['counts']} do not add up to {len(ids)}")
    good = all(row["outcome"] in EXPECTED for row in rows)
    if good != (exit_code == 0) or exit_code != results["exit_code"]:
        wrong.append(f"exit code {exit_code} does not fit: {results['counts']}")
    struck = 0
    for row in rows:
        id, outcome = row["id"], row["outcome"]
        ran = (marks / f"{id}.ran").exists()
        if outcome in ("passed", "failed", "flaky", "timeout", "unexpected_pass", "known_failure") and not ran:
            wrong.append(f"{id} is {outcome} and never ran")
        if outcome == wanted(id, condemned):
            continue
        if outcome in ("crashed", "timeout") and struck < hits:
            struck += 1
        elif outcome == "not_run" and hits >= 100:
            continue
        else:
            wrong.append(f"{id} is {outcome}, not {wanted(id, condemned)}")
    return wrong


def wanted(id: str, condemned: str) -> str:
    """What must become of a subtest, by its name."""
    method, backend, _, case = id.split(".", 3)
    if condemned == f"test_{method}_{backend}.py":
        return "crashed"
    words = case.split("_")
    # What happens only once happens in the first process that gets there: that attempt is the one that counts.
    act = words[1] if words[0] == "once" else words[0]
    return "passed" if act == "killlauncher" else RESULTS[act]


def survivors(mark: str) -> list[int]:
    """Live processes whose environment carries a mark."""
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes() and " Z " not in (entry / "stat").read_text():
                    out.append(int(entry.name))
            except OSError:
                continue
    return out
