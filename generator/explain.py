"""Everything about one subtest, for a person and for a program."""

from __future__ import annotations

import dataclasses
from typing import Any

from generator.committed import GENERATED
from generator.manifest import node
from generator.matrix import Project
from generator.modules import stated
from generator.problems import Loc
from generator.subtests import Subtest


def fields(subtest: Subtest) -> dict[str, Any]:
    """Every field of a subtest as plain data."""
    entry = subtest.known_failure
    return {
        "id": subtest.id,
        "node": node(subtest, GENERATED),
        "method": subtest.method,
        "backend": subtest.backend,
        "sweep": subtest.sweep,
        "runner": subtest.runner,
        "seq_lens": subtest.seq_lens,
        "layout": subtest.layout,
        "pad_style": subtest.pad_style,
        "multiplier": subtest.multiplier,
        "adapter": subtest.adapter,
        "model": dataclasses.asdict(subtest.model),
        "case": dataclasses.asdict(subtest.case),
        "tolerance": {"atol": subtest.tolerance.atol, "rtol": subtest.tolerance.rtol},
        "requires": list(subtest.requires),
        "native": dataclasses.asdict(subtest.native) if subtest.native is not None else None,
        "known_failure": entry.id if entry else None,
        "known_failure_action": entry.action if entry else None,
        "fingerprint": subtest.fingerprint,
    }


def explanation(project: Project, subtest: Subtest, spec_name: str) -> str:
    """A subtest for a person: what it runs, and which lines of the spec say so."""

    def line(loc: Loc) -> str:
        return f"{spec_name}:{project.document.positions.find(loc, key=True)[0]}"

    case, model = subtest.case, subtest.model
    rows: list[tuple[str, object]] = [
        ("declared at", line(subtest.loc)),
        ("case", f"{case.name}, {case.mode}, {line(subtest.case_loc)}"),
        ("lengths", f"prefix {case.prefix_lens} -> extend {case.extend_lens}, pages of {case.page_size}"),
        ("runner", subtest.runner),
        ("seq_lens", subtest.seq_lens),
        ("layout", subtest.layout),
    ]
    if case.speculation is not None:
        name = subtest.speculation or ""
        rows.append(("speculation", f"{name}: {told(case.speculation)}, {line(('speculations', name))}"))
    if subtest.pad_style is not None:
        rows.append(("padding", f"{subtest.pad_style}, captured at {subtest.multiplier}x the real batch"))
    rows += [
        ("model", told(model)),
        ("backend", f"{subtest.adapter}, {line(('backends', subtest.backend))}"),
        ("tolerance", f"atol {subtest.tolerance.atol}, rtol {subtest.tolerance.rtol}"),
        ("requires", ", ".join(subtest.requires) or "nothing more"),
        ("on a GPU", told(subtest.native) if subtest.native is not None else "nothing more"),
    ]
    entry = subtest.known_failure
    if entry is not None:
        at = project.spec.known_failure.index(entry)
        rows.append(("known failure", f"{entry.id} ({entry.action}): {' '.join(entry.reason.split())}"))
        rows.append(("", line(("known_failure", at))))
    rows += [
        ("fingerprint", subtest.fingerprint),
        ("run it", f"python -m pytest '{node(subtest, GENERATED)}'"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join([subtest.id, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def told(value: Any) -> str:
    """The fields of a dataclass that are set, as ``name=value``."""
    pairs = (
        (name, ",".join(map(str, item)) if isinstance(item, tuple) else item) for name, item in stated(value).items()
    )
    return " ".join(f"{name}={item}" for name, item in pairs)
