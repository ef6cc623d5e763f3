"""Start, continue and finish a run: the steps between a command line and a verdict."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator import outcomes
from orchestrator.availability import accepted_here
from orchestrator.devices import Lanes
from orchestrator.durations import LOCAL, SEED, estimate, load_durations, save_durations
from orchestrator.errors import OrchestratorError
from orchestrator.folder import Folder, Run, bulk
from orchestrator.ledger import Attempt, Ledger
from orchestrator.manifest import Manifest, load_manifest, short
from orchestrator.planning import SHARDS, Plan, library_cost, make_plan, queues_of
from orchestrator.scheduling import Scheduler
from orchestrator.selection import Selection, select
from orchestrator.supervisor import Options, Supervisor, Watch
from orchestrator.verdict import Verdict, build_verdict, read_ledger, settle
from orchestrator.wording import count

PRELOAD = ("kits.preload", "torch", "pytest")
"""What the launcher imports before it forks, so that no worker pays for it. A module that cannot be had is left out."""
COMMIT, NO_VENV = "ATTNMATRIX_COMMIT", "ATTNMATRIX_NO_VENV"
"""Variables: the commit, where there is no git; set by noxfile.py under ``--no-venv``, which nox tells nobody."""
SHA = re.compile(r"[0-9a-f]{40}(-dirty)?")


@dataclass(kw_only=True)
class Request:
    """What the caller asks for. Numbers are checked by then."""

    tests: Path
    selection: Selection = field(default_factory=Selection)
    shards: int = SHARDS
    part: tuple[int, int] | None = None
    deadline: float | None = None
    repeat: int = 1
    confirm: int = 0
    fresh: bool = False
    allow_unavailable: list[str] | None = None
    """None: what is usual on this kind of device."""
    durations: Path | None = None
    start_limit: float = 120.0
    max_restarts: int = 100
    plugins: tuple[str, ...] = ()
    preload: tuple[str, ...] = PRELOAD
    interpreters: bool = False
    argv: list[str] = field(default_factory=list)
    """The arguments of the command line as they were typed."""


@dataclass
class Ended:
    """How a run ended: its verdict, and what cut it short, if anything did."""

    verdict: Verdict
    error: OrchestratorError | None
    stopped: str
    wall: float | None
    """None where nothing was left to run."""


@bulk()
def prepare(request: Request, kind: str) -> tuple[Manifest, Plan]:
    """Read the manifest, select, and cut the selection into shards for this kind of device."""
    manifest = load_manifest(request.tests)
    if request.selection.profile == manifest.profile:  # all of them, then
        request.selection = replace(request.selection, profile=None)
    chosen = select(manifest.subtests, request.selection)
    for file in sorted({planned.file for planned in chosen}):
        if not (manifest.folder / file).is_file():
            hint = "run `python -m generator generate`"
            raise OrchestratorError("O116", f"{manifest.folder / file} is missing", hint)
    shards = request.part[1] if request.part else min(request.shards, len(chosen))
    if shards > len(chosen):
        raise OrchestratorError("O115", f"{count(shards, 'shard')} for {count(len(chosen), 'subtest')}")
    seconds = estimate(chosen, recorded(request, kind, alike=request.part is not None))
    return manifest, make_plan(chosen, seconds, shards, libraries=kind != "cpu")


def recorded(request: Request, kind: str, alike: bool) -> dict[str, float]:
    """Recorded durations. Several runners must cut ``alike``, so ``--shard`` leaves out what only this host knows."""
    if request.durations is not None:
        return load_durations(kind, [request.durations])
    return load_durations(kind, [SEED] if alike else [SEED, LOCAL])


def describe(request: Request, manifest: Manifest, plan: Plan, lanes: Lanes) -> Run:
    """What ``run.json`` says."""
    allowed = accepted_here(lanes.kind) if request.allow_unavailable is None else request.allow_unavailable
    return Run(
        tests=str(request.tests), profile=request.selection.profile or manifest.profile,
        spec_sha256=manifest.spec_sha256,
        manifest_sha256=manifest.sha256, plan_sha256=plan.sha256, commit=commit_of(request.tests),
        selection=request.selection.arguments(), part=list(request.part) if request.part else None,
        repeat=request.repeat, confirm=request.confirm, fresh=request.fresh,
        deadline=request.deadline or (120.0 if lanes.kind == "cpu" else 300.0), device_kind=lanes.kind,
        devices=sorted(set(lanes.devices)), workers=len(lanes.devices), started=round(time.time(), 3),
        fault=os.environ.get("ATTNMATRIX_FAULT", ""), allow_unavailable=allowed,
        command=command_of(os.environ), argv=request.argv,
    )  # fmt: skip


def reopen(folder: Folder, tests: Path, kind: str) -> tuple[Run, Plan]:
    """Load a run to continue it. The caller names the suite, and it must be the one that the run began with; so must
    the kind of device, or one verdict would mix what two of them gave."""
    folder.reopen()
    run, plan = folder.load()
    if run.tests != str(tests):
        raise OrchestratorError("O209", f"{folder.path} ran {run.tests!r}, not {str(tests)!r}", "name it with --tests")
    if run.fault != os.environ.get("ATTNMATRIX_FAULT", ""):
        raise OrchestratorError("O209", f"{folder.path} ran with ATTNMATRIX_FAULT={run.fault!r}", "set the same")
    if run.device_kind != kind:
        hint = "set ATTNMATRIX_DEVICE=cpu" if run.device_kind == "cpu" else "continue it on such a device, or run anew"
        raise OrchestratorError("O209", f"{folder.path} ran on {run.device_kind!r}, not on {kind!r}", hint)
    if run.merged:
        raise OrchestratorError("O209", f"{folder.path} is a merged run; continue the runners' own folders")
    manifest = load_manifest(Path(run.tests))
    now = commit_of(Path(run.tests))
    if manifest.sha256 != run.manifest_sha256 or now != run.commit:
        what = "suite" if manifest.sha256 != run.manifest_sha256 else "commit"
        raise OrchestratorError("O209", f"the {what} changed since {folder.path} began", "start a new run")
    return run, plan


def execute(
    request: Request, folder: Folder, run: Run, plan: Plan, lanes: Lanes, lock: int, watch: Watch,
    prelude: Callable[[int], None] = lambda left: None,
) -> Ended:  # fmt: skip
    """Run what the folder's events do not settle yet, then judge everything from the events."""
    began = time.monotonic()
    ledger = read_ledger(folder, plan)
    known = recorded(request, run.device_kind, alike=False)
    scheduler = schedule(run, plan, ledger, len(lanes.devices), known)
    prelude(scheduler.waiting)
    if not scheduler.waiting:
        return Ended(build_verdict(run, plan, ledger), None, "", None)
    options = Options(
        tests=Path(run.tests).resolve(), deadline=run.deadline, start_limit=request.start_limit, confirm=run.confirm,
        repeat=run.repeat, fresh=run.fresh, interpreters=request.interpreters or sys.platform != "linux",
        preload=request.preload, plugins=request.plugins, max_restarts=request.max_restarts,
    )  # fmt: skip
    supervisor = Supervisor(folder, scheduler, ledger, lanes.devices, options, lock, watch)
    supervisor.run()
    verdict = build_verdict(run, plan, read_ledger(folder, plan))
    return Ended(verdict, supervisor.error, supervisor.stopping, time.monotonic() - began)


def schedule(run: Run, plan: Plan, ledger: Ledger, lanes: int, known: Mapping[str, float]) -> Scheduler:
    """What is left to do for so many lanes, confirmations of earlier failures included. ``known``: seconds by id."""
    mine = [blocks for n, blocks in enumerate(plan.shards, 1) if run.part is None or run.part[0] == n]
    subtests = [planned for blocks in mine for block in blocks for planned in block.subtests]
    queues = queues_of(mine, estimate(subtests, known), lanes, libraries=run.device_kind != "cpu")

    def done(id: str, attempt: int) -> bool:
        return attempt in ledger.attempts.get(id, {})

    opening = {} if run.device_kind == "cpu" else {"opening": library_cost}
    scheduler = Scheduler(queues, run.repeat, run.fresh, done, **opening)
    for planned in subtests:
        tries = ledger.attempts.get(planned.id, {})
        if run.confirm and 0 in tries and planned.action != "crash" and settle(planned, tries[0]) in outcomes.BAD:
            numbers = range(run.repeat, run.repeat + run.confirm)
            scheduler.confirm(planned, [number for number in numbers if number not in tries])
    return scheduler


def remember(run: Run, verdict: Verdict, target: Path | None) -> None:
    """Keep the times of what passed for the next plan; a run with a planted fault teaches nothing.

    Nor does the first subtest of a backend in a process: it paid for the library, which a plan counts by itself, and
    alone in its sweep it would look slow for ever.
    """
    if run.fault:
        return
    firsts: dict[tuple[str, str], Attempt] = {}
    for result in verdict.results:
        for attempt in result.attempts:
            place = (attempt.worker, result.planned.backend)
            firsts[place] = min(attempt, firsts.get(place, attempt), key=lambda attempt: attempt.started)
    times = {}
    for result in verdict.results:
        warm = [a.seconds for a in result.attempts if firsts[a.worker, result.planned.backend] is not a]
        if result.outcome in outcomes.EXPECTED and warm:
            times[result.planned.id] = sum(warm) / len(warm)
    with contextlib.suppress(OSError, OrchestratorError):
        save_durations(target or LOCAL, run.device_kind, times)


def command_of(env: Mapping[str, str]) -> str:
    """How this program was started. Under nox, only the session's environment is sure to have what the tests need.

    Other sessions than ``gpu_matrix`` (tests, bench, campaign) start runs too, but pass on no arguments of ours.
    """
    if env.get("NOX_CURRENT_SESSION") != "gpu_matrix":
        return Run.command
    return f"nox {'--no-venv ' if env.get(NO_VENV) else ''}-s gpu_matrix --"


def default_output() -> Path:
    return Path(".attnmatrix/runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def commit_of(folder: Path, env: Mapping[str, str] = os.environ) -> str:
    """The commit that is tested, with ``-dirty`` behind it where a file that git tracks has changed since.

    Where git cannot tell, on a host that got the files without their repository, ``ATTNMATRIX_COMMIT`` names it.
    """
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        named = env.get(COMMIT, "")
    if named and not SHA.fullmatch(named):
        raise OrchestratorError(
            "O508", f"{COMMIT} is {short(named, 80)}", "it takes 40 hex digits, and -dirty if need be"
        )
    return named or "unknown"
