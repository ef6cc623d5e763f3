"""The ids of the committed manifest, for `list`.

Building the typed spec takes longer than everything else that `list` does. The manifest names the spec it was
generated from by hash, so where that hash is the one of the file at hand, its ids are the ids.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

FORMAT = 1
GENERATED = "generated_tests"
MANIFEST = "manifest.json"


def committed_ids(options: argparse.Namespace) -> list[str] | None:
    """The ids that ``list`` asks for, or None where the manifest cannot answer."""
    if options.json:
        return None
    manifest = read_manifest(options.spec.resolve().parent / GENERATED / MANIFEST)
    if manifest is None or manifest.get("format") != FORMAT or options.profile not in (None, manifest.get("profile")):
        return None
    import tomli

    try:
        data = tomli.loads(options.spec.read_bytes().decode())
    except (OSError, ValueError, RecursionError):
        return None  # the typed reader says what is wrong
    if manifest.get("spec_sha256") != spec_hash(data):
        return None
    filters = {"method": options.method, "backend": options.backend, "sweep": options.sweep}
    try:
        rows = manifest["subtests"]
        if any(name not in {row[kind] for row in rows} for kind, names in filters.items() for name in names or ()):
            return None  # a name that exists but runs nothing here, or a misspelt one
        return [
            row["id"]
            for row in rows
            if (options.known_failures or row["known_failure"] is None)
            and all(not names or row[kind] in names for kind, names in filters.items())
        ]
    except (KeyError, TypeError):
        return None


def spec_hash(data: dict[str, Any]) -> str:
    """A hash of what the spec says, so that comments and layout do not count."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=str)  # dates are the only other type
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest last written, or None where there is none that can be read."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
