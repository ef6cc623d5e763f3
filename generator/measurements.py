"""Measurements that lie beside the suite, and whether they are of this one.

They need torch or a GPU, so the generator cannot make them anew; it can only tell that they are of another matrix.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from generator.committed import GENERATED, MANIFEST
from generator.outputs import Tree
from generator.problems import Problem

POWER = "results/power.json"


def stale(tree: Tree) -> Iterator[Problem]:
    """The measured power of another matrix than the one in ``tree``. A suite that never measured it has none."""
    path = tree.root / POWER
    manifest = tree.files.get(tree.root / GENERATED / MANIFEST)
    if manifest is None or not path.exists():
        return
    hint = "run `nox -s power`"
    try:
        of = json.loads(path.read_bytes())["manifest_sha256"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        yield Problem("E-stale-power", (), "it names no matrix that was measured", hint, path=POWER)
        return
    if of != hashlib.sha256(manifest.encode()).hexdigest():
        yield Problem("E-stale-power", (), "it was measured on another matrix than suite.toml's", hint, path=POWER)
