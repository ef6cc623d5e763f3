"""Join the run folders of several runners into one, and prove first that they are parts of one plan."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.errors import OrchestratorError
from orchestrator.files import open_plain
from orchestrator.folder import Folder, Run, bulk
from orchestrator.planning import Plan
from orchestrator.wording import count

SAME = (
    ("spec_sha256", "O302", "specs"),
    ("manifest_sha256", "O302", "generated suites"),
    ("commit", "O303", "commits"),
    ("profile", "O309", "profiles"),
    ("selection", "O309", "selections"),
    ("repeat", "O309", "numbers of repetitions"),
    ("fault", "O309", "planted faults"),
)


@bulk()
def merge(
    paths: Sequence[Path], output: Path, allow_unavailable: list[str] | None = None
) -> tuple[Folder, Run, Plan, str]:
    """Copy the parts' events into a new folder. Returns it, with one line about what the parts cover.

    ``allow_unavailable`` stands for what the parts say; without it, what all of them allow is allowed.
    """
    if not paths:
        raise OrchestratorError("O301", "nothing to merge: name at least one run folder")
    folders = [Folder(path) for path in paths]
    first, plan = folders[0].load()
    data = folders[0].read("plan.json")
    loaded = [(first, plan), *(folder.load((data, plan)) for folder in folders[1:])]
    for path, (run, other) in zip(paths[1:], loaded[1:], strict=True):
        for field, code, noun in SAME:
            mine, theirs = getattr(first, field), getattr(run, field)
            if mine != theirs:
                raise OrchestratorError(code, f"different {noun}: {paths[0]} has {mine}, {path} has {theirs}")
        if len(plan.shards) != len(other.shards):
            raise OrchestratorError(
                "O307", f"{paths[0]} was cut into {len(plan.shards)} shards, {path} into {len(other.shards)}"
            )
        if plan.sha256 != other.sha256:
            raise OrchestratorError(
                "O304", f"{paths[0]} and {path} cut the plan differently",
                "give all runners the same durations file (--durations)",
            )  # fmt: skip
    parts = cover(paths, [run for run, _ in loaded], plan)
    folder = Folder(output)
    folder.create()
    for part, source in parts.items():
        for path in [*source.event_files(), *source.journals()]:
            copy_events(path, folder.events / f"s{part:03d}-{path.name}")
    lacking = sorted(set(range(1, len(plan.shards) + 1)) - set(parts)) if 0 not in parts else []
    missing = sum(len(block.subtests) for shard in lacking for block in plan.shards[shard - 1])
    total = len(plan.subtests)
    if lacking:
        names = ", ".join(f"{shard}/{len(plan.shards)}" for shard in lacking)
        line = f"missing: shard {names} ({missing} of {count(total, 'subtest')})"
    else:
        line = (
            f"{count(len(paths), 'run')} {'partitions' if len(paths) == 1 else 'partition'} the plan: "
            f"{count(total, 'subtest')}, none missing, none twice "
            f"(spec {first.spec_sha256[:12]}, commit {first.short_commit})"
        )
    kinds = sorted({run.device_kind for run, _ in loaded})
    devices = sorted({device for run, _ in loaded for device in run.devices})
    allowed = set.intersection(*(set(run.allow_unavailable) for run, _ in loaded))
    merged = replace(
        first, allow_unavailable=sorted(allowed) if allow_unavailable is None else allow_unavailable,
        part=None, merged=len(paths), device_kind=", ".join(kinds), devices=devices,
        started=min(run.started for run, _ in loaded), confirm=max(run.confirm for run, _ in loaded),
        workers=sum(run.workers for run, _ in loaded),
    )  # fmt: skip
    folder.save(merged, plan)
    return folder, merged, plan, line


def cover(paths: Sequence[Path], runs: Sequence[Run], plan: Plan) -> dict[int, Folder]:
    """Which folder holds which shard (counted from 1); 0 stands for the whole plan. Two for one shard is an error."""
    parts: dict[int, Folder] = {}
    for path, run in zip(paths, runs, strict=True):
        if run.merged:
            raise OrchestratorError("O308", f"{path} was merged already", "merge the runners' own folders")
        part = run.part[0] if run.part else 0
        if part in parts and part:
            both = f"{parts[part].path} and {path}"
            raise OrchestratorError("O305", f"shard {part}/{len(plan.shards)} is there twice: {both}")
        if parts and (part == 0 or 0 in parts):
            other = next(iter(parts.values())).path
            raise OrchestratorError("O308", f"{path} overlaps with {other}: one of them is a whole run")
        parts[part] = Folder(path)
    return parts


def copy_events(source: Path, target: Path) -> None:
    """Copy plain files only: an artifact from elsewhere must not make this process read through a link."""
    try:
        fd = open_plain(source)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OrchestratorError("O211", f"{source} is no plain file: {error.strerror}") from None
    try:
        with open(fd, "rb") as file, open(target, "wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
    except OSError as error:
        raise OrchestratorError("O210", f"{source}: {error.strerror}") from None
