"""Measurements that lie beside the suite, and whether they are of this one.

They need torch or a GPU, so the generator cannot make them anew; it can only tell that they are of another matrix.
"""

from __future__ import annotations

import hashlib
import json

from generator.committed import GENERATED, MANIFEST
from generator.outputs import Tree

POWER = "results/power.json"


def stale(tree: Tree) -> str | None:
    """That the measured power is of another matrix than the one in ``tree``; None where it is not, or was not measured.

    A remark, no error: a case is complete without a measurement that takes minutes.
    """
    path = tree.root / POWER
    manifest = tree.files.get(tree.root / GENERATED / MANIFEST)
    if manifest is None or not path.exists():
        return None
    try:
        of = json.loads(path.read_bytes())["manifest_sha256"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        of = None
    if of == hashlib.sha256(manifest.encode()).hexdigest():
        return None
    return f"{POWER} was measured on another matrix; `nox -s power` renews it"
