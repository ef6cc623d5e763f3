"""Which subtests to try against which fault, and in which order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.manifest import load_manifest

FIELDS = ("id", "method", "backend", "sweep", "runner", "mode", "layout", "pad_style", "multiplier", "weight")

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Matrix:
    """The subtests of a generated folder as its manifest lists them."""

    folder: Path
    profile: str
    sha256: str
    entries: tuple[Entry, ...]


def read_matrix(folder: Path) -> Matrix:
    """Check the manifest as a run would, then take the fields that faults are matched by."""
    manifest = load_manifest(folder)
    raw = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    entries = tuple({name: row[name] for name in FIELDS} for row in raw["subtests"])
    return Matrix(folder, manifest.profile, manifest.sha256, entries)


def order(entries: Iterable[Entry]) -> list[Entry]:
    """Cheap and likely first: by weight, and in turns over sweeps and backends, so that no axis waits for another.

    Among equals, production's padding comes first: it holds what ``small_real`` shows and more.
    """
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in sorted(entries, key=_preference):
        groups.setdefault((entry["weight"], entry["sweep"], entry["backend"], entry["method"]), []).append(entry)
    ranked = [(entry["weight"], turn, entry) for group in groups.values() for turn, entry in enumerate(group)]
    return [entry for _, _, entry in sorted(ranked, key=lambda item: (_step(item[0]), item[1]))]


def _preference(entry: Entry) -> tuple[float, bool, int]:
    return entry["weight"], entry["pad_style"] == "small_real", {2: 0, 4: 1}.get(entry["multiplier"], 2)


def _step(weight: float) -> int:
    """Weights in steps of a factor of four: within one, turns matter more than the last second."""
    step = 0
    while weight > 1.5 * 4**step:
        step += 1
    return step


def touched(matrix: Matrix, covers: Callable[[Entry], bool], keeps: Callable[[Entry], bool]) -> tuple[str, ...]:
    """Ids of the subtests that can run the changed code, within what a weaker configuration keeps."""
    return tuple(entry["id"] for entry in order(entry for entry in matrix.entries if covers(entry) and keeps(entry)))
