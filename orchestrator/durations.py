"""How long subtests took before: read, estimate the unknown ones, write back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from orchestrator.errors import OrchestratorError
from orchestrator.files import read_plain, write_whole
from orchestrator.manifest import MAX_BYTES, Planned

FORMAT = 1
LOCAL = Path(".attnmatrix/durations.json")
SEED = Path("results/durations.json")
OUTLIER = 4.0
"""A subtest counts as at most so many times the median of its backend and sweep."""
NEW_SHARE = 0.5
"""Weight of the newest time against the recorded one."""


def load_durations(device: str, files: Iterable[Path]) -> dict[str, float]:
    """Recorded seconds by id for one kind of device (``cpu`` or the GPU's name); later files win."""
    known: dict[str, float] = {}
    for path in files:
        known.update(read(path).get(device, {}))
    return known


def read(path: Path) -> dict[str, dict[str, float]]:
    """``{device: {id: seconds}}``; a missing file is an empty one."""
    try:
        raw = json.loads(read_plain(path, MAX_BYTES, follow=True))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise OrchestratorError(
            "O117", f"{path}: {error}", "delete the file; it is made anew by the next run"
        ) from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or not isinstance(raw.get("seconds"), dict):
        raise OrchestratorError("O117", f"{path} is no durations file of format {FORMAT}", "delete the file")
    out: dict[str, dict[str, float]] = {}
    for device, table in raw["seconds"].items():
        if not isinstance(table, dict) or not all(map(usable, table.values())):
            raise OrchestratorError(
                "O117", f"{path}: the times of {device!r} are no positive numbers", "delete the file"
            )
        out[device] = table
    return out


def usable(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def estimate(subtests: Sequence[Planned], known: Mapping[str, float]) -> dict[str, float]:
    """Seconds for every subtest: recorded, else by backend and sweep, else by sweep, else by weight."""
    groups: dict[tuple[str, ...], list[float]] = {}
    ratios = []
    for planned in subtests:
        seconds = known.get(planned.id)
        if seconds is not None:
            groups.setdefault((planned.method, planned.backend, planned.sweep), []).append(seconds)
            groups.setdefault((planned.sweep,), []).append(seconds)
            ratios.append(seconds / planned.weight)
    scale = median(ratios) if ratios else 1.0
    medians = {key: median(values) for key, values in groups.items()}
    out = {}
    for planned in subtests:
        value, usual = known.get(planned.id), medians.get((planned.method, planned.backend, planned.sweep))
        if value is not None and usual is not None:
            value = min(value, OUTLIER * usual)  # whoever was first in a process paid for its imports and compilers
        if value is None:
            value = usual if usual is not None else medians.get((planned.sweep,))
        if value is None:
            value = planned.weight * scale
        out[planned.id] = max(value, 1e-4)
    return out


def save_durations(path: Path, device: str, seconds: Mapping[str, float]) -> None:
    """Blend new times into a file; written whole or not at all."""
    table = read(path)
    mine = table.setdefault(device, {})
    for id, value in seconds.items():
        old = mine.get(id)
        mine[id] = round(value if old is None else old + NEW_SHARE * (value - old), 4)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"format": FORMAT, "seconds": table}, indent=1, sort_keys=True) + "\n")
