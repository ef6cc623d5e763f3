"""Read ``generated_tests/manifest.json``: what is planned. Ids and nodes are checked here once, and trusted later."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import OrchestratorError
from orchestrator.files import read_plain

FORMAT = 1
MAX_BYTES = 512 << 20
ACTIONS = ("xfail", "skip", "crash")
ID = re.compile(r"[a-z0-9_]+(?:\.[a-z0-9_]+){3,}")


@dataclass(slots=True)
class Planned:
    """One subtest of the manifest. ``file`` and ``test`` are the two halves of its pytest node."""

    id: str
    file: str
    test: str
    method: str
    backend: str
    sweep: str
    weight: float = 1.0
    known_failure: str | None = None
    action: str | None = None
    required_exit: str | None = None
    """For the action ``crash``: ``SIGSEGV``, ``exit:3`` or ``cuda_error``; None accepts any death."""
    profiles: tuple[str, ...] = ()
    """The profiles, besides the manifest's own, that have it."""


@dataclass(slots=True)
class Manifest:
    """All subtests of one generated folder, in its order."""

    folder: Path
    profile: str
    spec_sha256: str
    sha256: str
    subtests: list[Planned]


def load_manifest(folder: Path) -> Manifest:
    """Read and check ``folder/manifest.json``."""
    path = folder / "manifest.json"
    hint = "write it with `python -m generator generate`, or name the folder with --tests DIR"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise OrchestratorError("O119", f"{path} is larger than 512 MiB")
        data = read_plain(path, MAX_BYTES, follow=True)
    except FileNotFoundError:
        raise OrchestratorError("O101", f"no manifest at {path}", hint) from None
    except (OSError, ValueError) as error:
        raise OrchestratorError("O102", f"cannot read {str(path)!r}: {error}", hint) from None
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise OrchestratorError("O103", f"{path} is not JSON: {error}", hint) from None
    return parse_manifest(raw, folder, hashlib.sha256(data).hexdigest())


def parse_manifest(raw: object, folder: Path, sha256: str) -> Manifest:
    """Turn decoded JSON into a checked manifest."""
    if not isinstance(raw, dict):
        raise OrchestratorError("O104", f"the manifest must be an object, not {type(raw).__name__}")
    if raw.get("format") != FORMAT or isinstance(raw.get("format"), bool):
        raise OrchestratorError(
            "O104", f"manifest format {short(raw.get('format'))}; this version reads format {FORMAT}"
        )
    profile, spec = raw.get("profile"), raw.get("spec_sha256")
    if not printable(profile) or not printable(spec):
        raise OrchestratorError("O104", "the manifest needs the strings `profile` and `spec_sha256`")
    rows = raw.get("subtests")
    if not isinstance(rows, list):
        raise OrchestratorError("O104", "the manifest needs a list `subtests`")
    if not rows:
        raise OrchestratorError("O120", "the manifest holds no subtests")
    subtests = [parse_row(row, number) for number, row in enumerate(rows, 1)]
    seen: set[str] = set()
    for planned in subtests:  # a node is made from its id, so that equal nodes are equal ids
        if planned.id in seen:
            raise OrchestratorError("O108", f"the manifest names {planned.id} twice")
        seen.add(planned.id)
    check_counts(raw.get("counts"), subtests)
    return Manifest(folder, str(profile), str(spec), sha256, subtests)


def parse_row(row: object, number: int) -> Planned:
    """Check one entry of ``subtests``; ``number`` counts from 1 and is only for messages."""
    where = f"subtest {number}"
    if not isinstance(row, dict):
        raise OrchestratorError("O105", f"{where} must be an object, not {type(row).__name__}")
    for name in ("id", "node", "method", "backend", "sweep"):
        if not isinstance(row.get(name), str):
            raise OrchestratorError("O105", f"{where}: `{name}` must be a string, got {short(row.get(name))}")
    id = row["id"]
    if len(id) > 300 or not ID.fullmatch(id):
        raise OrchestratorError("O106", f"{where}: {short(id)} is no id (method.backend.sweep.rest, [a-z0-9_])")
    method, backend, sweep, rest = id.split(".", 3)
    if (method, backend, sweep) != (row["method"], row["backend"], row["sweep"]):
        raise OrchestratorError("O107", f"{id}: method, backend and sweep do not spell the id")
    file, test = f"test_{method}_{backend}.py", f"test_{sweep}[{rest}]"
    if not row["node"].endswith(f"{file}::{test}"):
        raise OrchestratorError("O107", f"{id}: node {short(row['node'])} should end in {file}::{test}")
    weight = row.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise OrchestratorError("O110", f"{id}: weight {short(weight)} is not a positive finite number")
    known, action = row.get("known_failure"), row.get("known_failure_action")
    required = row.get("known_failure_exit")
    profiles = row.get("profiles", [])
    if not isinstance(profiles, list) or not all(map(printable, profiles)):
        raise OrchestratorError("O105", f"{id}: `profiles` must be a list of strings, got {short(profiles)}")
    within = tuple(profiles)
    if known is None and action is None and required is None:
        return Planned(id, file, test, method, backend, sweep, float(weight), profiles=within)
    if not printable(known) or action not in ACTIONS or not (required is None or printable(required)):
        raise OrchestratorError(
            "O111", f"{id}: known failure {short(known)} with action {short(action)}; actions are {', '.join(ACTIONS)}"
        )
    return Planned(id, file, test, method, backend, sweep, float(weight), known, action, required, within)


def check_counts(counts: object, subtests: list[Planned]) -> None:
    """The manifest's own counts must be those of its rows."""
    if counts is None:
        return
    known = sum(planned.known_failure is not None for planned in subtests)
    found = {"must_pass": len(subtests) - known, "known_failures": known}
    if not isinstance(counts, dict) or any(counts.get(name, value) != value for name, value in found.items()):
        raise OrchestratorError(
            "O109",
            f"the manifest counts {short(counts)}, but lists {found['must_pass']} that must pass and {known} known",
        )


def printable(value: object) -> bool:
    """Whether a foreign value is a string that may be shown: short, and free of control characters."""
    return isinstance(value, str) and len(value) <= 1000 and value.isprintable()


def short(value: object, limit: int = 80) -> str:
    """``repr`` of a foreign value, cut and free of line breaks."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."
