"""``python -m orchestrator``: the command line, and nothing but that."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator import errors, packages
from orchestrator.availability import parse_kinds
from orchestrator.devices import Lanes, choose_lanes, foresee_lanes
from orchestrator.errors import OrchestratorError
from orchestrator.folder import Folder, Run
from orchestrator.manifest import Manifest, short
from orchestrator.merging import merge
from orchestrator.planning import MAX_SHARDS, SHARDS, Plan
from orchestrator.progress import choose_progress
from orchestrator.reports import text, write_reports
from orchestrator.running import PRELOAD, Request, default_output, describe, execute, prepare, remember, reopen
from orchestrator.selection import Selection
from orchestrator.verdict import Verdict, build_verdict, read_ledger
from orchestrator.wording import count

EPILOG = """exit codes:
  0  every planned subtest ended as expected, or is unavailable for a reason that is allowed
  1  failed                 6  flaky
  2  wrong usage            7  not run
  3  crashed                8  unavailable for another reason than --allow-unavailable names
  4  timed out              9  nothing was tested: no subtest that must pass did
  5  unexpected pass       10  plan, 11 run folder, 12 merge, 13 devices, 14 processes or recording, 130 interrupted
The gravest outcome decides: failed, crashed, timed out, unexpected pass, flaky, not run, unavailable, nothing."""
LACKING = "comma-separated reasons for which a subtest may be unavailable: architecture, package, no_device; or none"

RESUMPTION = {
    "argv", "command", "durations", "max_restarts", "new_interpreters", "plain", "plugin", "preload", "resume",
    "start_limit", "tests", "wait", "workers", "workers_per_device",
}  # fmt: skip
"""Options of ``run`` that mean something when a run is continued: where and with what to run, not what to run or how
often."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator", description="Run the matrix on supervised workers.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    shape = {"epilog": EPILOG, "formatter_class": argparse.RawDescriptionHelpFormatter}
    run = commands.add_parser("run", help="plan and run subtests", **shape)  # type: ignore[arg-type]
    add_selection(run)
    run.add_argument("--output", type=Path, metavar="DIR", help="run folder (default .attnmatrix/runs/<time>)")
    run.add_argument("--resume", type=Path, metavar="DIR", help="finish a run that was interrupted")
    run.add_argument("--deadline", type=float, metavar="S", help="seconds a subtest may take (120; on a GPU 300)")
    run.add_argument("--confirm", type=int, metavar="N", help="run a failure N times more in new processes")
    run.add_argument("--repeat", type=int, metavar="N", help="run everything N times")
    run.add_argument("--fresh-process", action="store_true", default=None, help="a new process for each attempt")
    usual = "on a GPU architecture; on a CPU package where Triton cannot be installed, else none"
    run.add_argument("--allow-unavailable", metavar="KINDS", help=f"{LACKING} (default: {usual})")
    run.add_argument("--max-restarts", type=int, default=100, metavar="N", help="workers to replace before giving up")
    run.add_argument("--wait", type=float, default=600.0, metavar="S", help="wait for a free GPU (default 600)")
    run.add_argument("--plugin", action="append", default=[], metavar="MODULE", help="pytest plugin for the workers")
    run.add_argument("--new-interpreters", action="store_true", help="start workers anew instead of forking them")
    run.add_argument("--plain", action="store_true", help="plain lines even in a terminal")
    run.add_argument("--preload", default=",".join(PRELOAD), help=argparse.SUPPRESS)
    run.add_argument("--start-limit", type=float, default=120.0, help=argparse.SUPPRESS)
    plan = commands.add_parser("plan", help="print the shards without running anything")
    add_selection(plan)
    join = commands.add_parser("merge", help="join the run folders of several runners into one verdict")
    join.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    join.add_argument("--output", type=Path, metavar="DIR", help="merged folder (default .attnmatrix/runs/<time>)")
    join.add_argument("--allow-unavailable", metavar="KINDS", help=f"{LACKING} (default: what all runs allowed)")
    said = "0: they are written. The verdict's own exit code is printed, and stands in results.json."
    report = commands.add_parser("report", help="write a run's reports anew and print its verdict", epilog=said)
    report.add_argument("folder", type=Path, metavar="DIR")
    commands.add_parser("errors", help="list the error codes")
    return parser


def add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", nargs="*", metavar="ID", help="subtest ids or pytest nodes; all if none are given")
    parser.add_argument("--tests", type=Path, default=Path("generated_tests"), metavar="DIR", help="generated folder")
    parser.add_argument("--profile", metavar="NAME", help="only what this profile of suite.toml has")
    parser.add_argument("-k", dest="keyword", default="", metavar="EXPR", help="words of ids with and, or, not, ( )")
    for name in ("method", "backend", "sweep"):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="NAME", help=f"only this {name}")
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes at a time")
    parser.add_argument("--workers-per-device", type=int, metavar="N", help="the same for each GPU")
    parser.add_argument("--shards", type=int, metavar="N", help="shards to plan (default 4; on GPUs one per worker)")
    parser.add_argument("--shard", metavar="I/N", help="run only shard I of N: one of N runners")
    parser.add_argument("--durations", type=Path, metavar="FILE", help="recorded durations to plan with")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
    commands = {"run": run_command, "plan": plan_command, "merge": merge_command, "report": report_command}
    try:
        if arguments.command == "errors":
            say("\n".join(f"{code}  {meaning}" for code, meaning in errors.CODES.items()))
            return 0
        preload = (getattr(arguments, "preload", None) or "").split(",")
        packages.require(arguments.command, [name for name in packages.SUBTESTS if name in preload])
        return commands[arguments.command](arguments)
    except OrchestratorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return errors.EXIT_INTERRUPTED


def run_command(arguments: argparse.Namespace) -> int:
    request = request_of(arguments)
    if arguments.resume is not None:
        check_resumption(arguments)
    with choose_lanes(arguments.workers, arguments.workers_per_device, arguments.wait) as lanes:
        if arguments.resume is not None:
            folder = Folder(arguments.resume)
            folder.reopen()
            lock = folder.lock()
            run, plan = reopen(folder, arguments.tests, lanes.kind)
        else:
            manifest, plan = plan_on(lanes, request, arguments.shards)
            run = describe(request, manifest, plan, lanes)
            folder = Folder(arguments.output or default_output())
            folder.create()
            lock = folder.lock()
            folder.save(run, plan)
        progress = choose_progress(arguments.plain)
        try:

            def begin(left: int) -> None:
                say(f"{describe_plan(run, plan, left)}.{f' {lanes.sentence}' if left else ''}")
                progress.start(left)

            ended = execute(request, folder, run, plan, lanes, lock, progress, begin)
        finally:
            progress.end()
    say(text.summary(ended.verdict, ended.wall))
    remember(run, ended.verdict, arguments.durations)
    try:
        write_reports(folder, ended.verdict)
        say(f"page: {folder.path / 'index.html'}")
    except OrchestratorError as error:
        ended.error = ended.error or error
    if ended.error is not None:
        print(ended.error, file=sys.stderr)
        return ended.error.exit_code
    if ended.stopped:
        command = f"{text.rerun(run)} --resume {shlex.quote(str(folder.path))}"
        say(f"interrupted by {ended.stopped}; continue with: {command}")
        return errors.EXIT_INTERRUPTED
    return ended.verdict.exit_code


def check_resumption(arguments: argparse.Namespace) -> None:
    """Refuse what a run folder decides. That is every option but those that ``RESUMPTION`` names, also one that is
    new; ``--resume`` tells it by a value, so the parser gives them no default of their own."""
    given = {name for name, value in vars(arguments).items() if value not in (None, [], "")}
    decided = sorted({"ids": "ids", "keyword": "-k"}.get(n, f"--{n.replace('_', '-')}") for n in given - RESUMPTION)
    if decided:
        what = ", ".join(decided)
        raise OrchestratorError("O508", f"--resume continues a run, which decides this already: {what}", "leave it out")


def say(line: str) -> None:
    """Print; a reader that went away, or a full disk behind stdout, must not change the exit code."""
    try:
        print(line, flush=True)
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def describe_plan(run: Run, plan: Plan, left: int) -> str:
    total = len(plan.subtests)
    if run.part:
        mine = sum(len(block.subtests) for block in plan.shards[run.part[0] - 1])
        head = f"shard {run.part[0]}/{run.part[1]}: {mine} of {count(total, 'subtest')}"
    else:
        head = f"{count(total, 'subtest')} in {count(len(plan.shards), 'shard')}"
    if not left:
        return f"{head}, nothing left to run"
    return head if left == total * run.repeat or run.part else f"{head}, {count(left, 'run')} to go"


def plan_on(lanes: Lanes, request: Request, shards: int | None) -> tuple[Manifest, Plan]:
    """The plan for these lanes. ``shards``: how many the caller asked for, if any."""
    if shards is None and lanes.kind != "cpu":
        request.shards = max(SHARDS, len(lanes.devices))
    return prepare(request, lanes.kind)


def plan_command(arguments: argparse.Namespace) -> int:
    lanes = foresee_lanes(arguments.workers, arguments.workers_per_device)
    _, plan = plan_on(lanes, request_of(arguments), arguments.shards)
    for shard, blocks in enumerate(plan.shards, 1):
        modules = count(len({block.file for block in blocks}), "module")
        subtests = count(sum(len(block.subtests) for block in blocks), "subtest")
        say(f"shard {shard}/{len(plan.shards)}  {subtests}  {modules}  about {plan.cost(shard - 1):.1f} s")
    return 0


def merge_command(arguments: argparse.Namespace) -> int:
    allowed = kinds_of(arguments)
    folder, run, plan, line = merge(arguments.folders, arguments.output or default_output(), allowed)
    verdict = judge(folder, run, plan)
    say(line)
    return verdict.exit_code


def report_command(arguments: argparse.Namespace) -> int:
    folder = Folder(arguments.folder)
    run, plan = folder.load()
    verdict = judge(folder, run, plan)
    say(f"exit code of the run: {verdict.exit_code}")
    return 0


def judge(folder: Folder, run: Run, plan: Plan) -> Verdict:
    verdict = build_verdict(run, plan, read_ledger(folder, plan))
    say(text.summary(verdict))
    write_reports(folder, verdict)
    say(f"page: {folder.path / 'index.html'}")
    return verdict


def request_of(arguments: argparse.Namespace) -> Request:
    """Check the numbers and gather the options."""
    options = vars(arguments)
    for name, low, high in (
        ("shards", 1, MAX_SHARDS), ("workers", 1, 1024), ("workers_per_device", 1, 64), ("deadline", 0.05, 1e6),
        ("max_restarts", 0, 10**6), ("start_limit", 0.05, 1e6), ("repeat", 1, 10_000),
        ("confirm", 0, 1000), ("wait", 0, 1e7),
    ):  # fmt: skip
        value = options.get(name)
        if value is not None and not low <= value <= high:
            option = name.replace("_", "-")
            raise OrchestratorError("O508", f"--{option} {short(value)} is out of range ({low:g} to {high:g})")
    return Request(
        tests=arguments.tests,
        selection=Selection(
            tuple(arguments.ids), arguments.keyword,
            tuple(arguments.method), tuple(arguments.backend), tuple(arguments.sweep), arguments.profile,
        ),
        shards=arguments.shards or SHARDS, part=part_of(arguments.shard), durations=arguments.durations,
        deadline=options.get("deadline"), repeat=options.get("repeat") or 1, confirm=options.get("confirm") or 0,
        fresh=bool(options.get("fresh_process")), allow_unavailable=kinds_of(arguments),
        start_limit=options.get("start_limit", 120.0), max_restarts=options.get("max_restarts", 100),
        plugins=tuple(options.get("plugin", ())), preload=tuple(filter(None, options.get("preload", "").split(","))),
        interpreters=options.get("new_interpreters", False), argv=arguments.argv,
    )  # fmt: skip


def kinds_of(arguments: argparse.Namespace) -> list[str] | None:
    """What ``--allow-unavailable`` names; None if it is not given."""
    text = getattr(arguments, "allow_unavailable", None)
    return None if text is None else parse_kinds(text)


def part_of(text: str | None) -> tuple[int, int] | None:
    """``2/4`` as (2, 4)."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= MAX_SHARDS:
        raise OrchestratorError("O115", f"--shard {short(text)}: expected I/N, such as 2/4, N at most {MAX_SHARDS}")
    return int(match[1]), int(match[2])
