"""``python -m orchestrator``: run, merge, report, errors."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator import errors, text
from orchestrator.devices import Lanes, choose_lanes
from orchestrator.durations import LOCAL, SEED, estimate, load_durations, save_durations
from orchestrator.errors import OrchestratorError
from orchestrator.folder import Folder, Run
from orchestrator.manifest import Manifest, load_manifest, short
from orchestrator.planning import Plan, make_plan
from orchestrator.scheduling import Scheduler
from orchestrator.selection import Selection, select
from orchestrator.supervisor import Options, Supervisor
from orchestrator.verdict import Verdict, build_verdict, read_ledger

EPILOG = """exit codes:
  0  every planned subtest ended as expected      6  flaky
  1  failed                                       7  not run
  2  wrong usage                                  8  unavailable, with --require-all
  3  crashed                                     10  plan, 11 run folder, 12 merge,
  4  timed out                                       13 devices, 14 processes or recording
  5  unexpected pass                            130  interrupted
The gravest outcome decides: failed, crashed, timed out, unexpected pass, flaky, not run, unavailable."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator", description="Run the matrix on supervised workers.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run", help="plan and run subtests", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    run.add_argument("ids", nargs="*", metavar="ID", help="subtest ids or pytest nodes; all if none are given")
    run.add_argument("--tests", type=Path, default=Path("generated_tests"), metavar="DIR", help="generated folder")
    run.add_argument("-k", dest="keyword", default="", metavar="EXPR", help="words of ids with and, or, not, ( )")
    for name in ("method", "backend", "sweep"):
        run.add_argument(
            f"--{name}", action="append", default=[], metavar="NAME", help=f"only this {name} (repeatable)"
        )
    run.add_argument("--shards", type=int, default=4, metavar="N", help="shards to cut the plan into (default 4)")
    run.add_argument("--workers", type=int, metavar="N", help="worker processes at a time")
    run.add_argument("--output", type=Path, metavar="DIR", help="run folder (default .attnmatrix/runs/<time>)")
    run.add_argument("--deadline", type=float, metavar="S", help="seconds a subtest may take (120; on a GPU 300)")
    run.add_argument("--require-all", action="store_true", help="a subtest that is unavailable here is an error")
    run.add_argument("--start-limit", type=float, default=120.0, help=argparse.SUPPRESS)
    run.add_argument("--max-restarts", type=int, default=100, metavar="N", help="workers to replace before giving up")
    run.add_argument("--plugin", action="append", default=[], metavar="MODULE", help="pytest plugin for the workers")
    run.add_argument("--preload", default="torch,pytest", help=argparse.SUPPRESS)
    run.add_argument("--new-interpreters", action="store_true", help="start workers anew instead of forking them")
    commands.add_parser("errors", help="list the error codes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        if arguments.command == "errors":
            print("\n".join(f"{code}  {meaning}" for code, meaning in errors.CODES.items()))
            return 0
        return run_command(arguments)
    except OrchestratorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return errors.EXIT_OK


def run_command(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    check_numbers(arguments)
    manifest = load_manifest(arguments.tests)
    selection = Selection(
        tuple(arguments.ids),
        arguments.keyword,
        tuple(arguments.method),
        tuple(arguments.backend),
        tuple(arguments.sweep),
    )
    chosen = select(manifest.subtests, selection)
    for file in sorted({planned.file for planned in chosen}):
        if not (manifest.folder / file).is_file():
            raise OrchestratorError(
                "O116", f"{manifest.folder / file} is missing", "run `python -m generator generate`"
            )
    with choose_lanes(arguments.workers, arguments.shards) as lanes:
        known = load_durations(lanes.kind, (SEED, LOCAL))
        plan = make_plan(chosen, estimate(chosen, known), min(arguments.shards, len(chosen)))
        run = describe(arguments, manifest, plan, selection, lanes)
        folder = Folder(arguments.output or default_output())
        folder.create()
        lock = folder.lock()
        folder.save(run, plan)
        print(f"{len(chosen)} subtests in {len(plan.shards)} shards. {lanes.sentence}", flush=True)
        return execute(arguments, folder, run, plan, lanes, lock, began)


def execute(
    arguments: argparse.Namespace, folder: Folder, run: Run, plan: Plan, lanes: Lanes, lock: int, began: float
) -> int:
    """Run what the folder's events do not settle yet, then judge everything."""
    ledger = read_ledger([folder], plan)
    scheduler = Scheduler(plan, run.repeat, run.fresh, lambda id, attempt: attempt in ledger.attempts.get(id, {}))
    options = Options(
        tests=Path(run.tests).resolve(), deadline=run.deadline, start_limit=arguments.start_limit, confirm=run.confirm,
        repeat=run.repeat, fresh=run.fresh, interpreters=arguments.new_interpreters or sys.platform != "linux",
        preload=tuple(filter(None, arguments.preload.split(","))), plugins=tuple(arguments.plugin),
        max_restarts=arguments.max_restarts,
    )  # fmt: skip
    supervisor = Supervisor(folder, scheduler, ledger, lanes.devices, options, lock)
    supervisor.run()
    wall = time.monotonic() - began
    verdict = build_verdict(run, plan, read_ledger([folder], plan), arguments.require_all)
    print(text.summary(verdict, wall))
    if supervisor.error is None and not supervisor.stopping:
        remember(run, verdict)
    if supervisor.error is not None:
        print(supervisor.error, file=sys.stderr)
        return supervisor.error.exit_code
    if supervisor.stopping:
        print(f"interrupted by {supervisor.stopping}; continue with: {text.main_command()} --resume {folder.path}")
        return errors.EXIT_INTERRUPTED
    print(f"details: {folder.path}")
    return verdict.exit_code


def remember(run: Run, verdict: Verdict) -> None:
    """Keep the times of what passed for the next plan; a run with a planted fault teaches nothing."""
    if run.fault:
        return
    times = {
        r.planned.id: r.attempts[0].seconds for r in verdict.results if len(r.attempts) == 1 and r.outcome == "passed"
    }
    with contextlib.suppress(OSError, OrchestratorError):
        save_durations(LOCAL, run.device_kind, times)


def describe(arguments: argparse.Namespace, manifest: Manifest, plan: Plan, selection: Selection, lanes: Lanes) -> Run:
    deadline = arguments.deadline or (120.0 if lanes.kind == "cpu" else 300.0)
    return Run(
        tests=str(arguments.tests), profile=manifest.profile, spec_sha256=manifest.spec_sha256,
        manifest_sha256=manifest.sha256, plan_sha256=plan.sha256, commit=commit_of(arguments.tests),
        selection=selection.arguments(), deadline=deadline, device_kind=lanes.kind, devices=sorted(set(lanes.devices)),
        workers=len(lanes.devices), started=round(time.time(), 3), fault=os.environ.get("ATTNMATRIX_FAULT", ""),
    )  # fmt: skip


def check_numbers(arguments: argparse.Namespace) -> None:
    for name, low, high in (
        ("shards", 1, 256), ("workers", 1, 1024), ("deadline", 0.05, 1e6), ("max_restarts", 0, 10**6),
        ("start_limit", 0.05, 1e6),
    ):  # fmt: skip
        value = getattr(arguments, name)
        if value is not None and not low <= value <= high:
            option = name.replace("_", "-")
            raise OrchestratorError("O508", f"--{option} {short(value)} is out of range ({low:g} to {high:g})")


def default_output() -> Path:
    return Path(".attnmatrix/runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def commit_of(folder: Path) -> str:
    """The commit that is tested, or ``unknown`` outside a repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
