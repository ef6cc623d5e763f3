"""The command line: run both sides, or read what was run, compare, and write the table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator import outcomes, packages, processes
from orchestrator.agreement import page, verdicts
from orchestrator.agreement.trials import ENOUGH
from orchestrator.agreement.verdicts import AGREE, DISAGREE, EMULATION_ONLY, Limit, Pair, Seen, Table
from orchestrator.caches import cache_env
from orchestrator.devices import choose_lanes, cpu_count
from orchestrator.errors import OrchestratorError
from orchestrator.manifest import load_manifest

SIDES = {"recorder": "cpu", "cuda": "cuda"}
LIMITS = Path(__file__).with_name("limits.toml")
FIRST_OWN_ERROR = 10
"""Exit codes of a run from here on say that it did not take place; below, that subtests failed."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.agreement",
        description="Run every subtest and every seeded fault on the recorder and on CUDA graphs, and compare.",
    )
    parser.add_argument("--tests", type=Path, default=Path("generated_tests"), metavar="DIR", help="generated folder")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default .attnmatrix/agreement/<time>")
    for side in SIDES:
        parser.add_argument(f"--{side}", type=Path, metavar="DIR", help=f"a finished run on {side}, not to be repeated")
        parser.add_argument(
            f"--{side}-faults", type=Path, metavar="FILE", help=f"faults-{side}.json of an earlier call"
        )
    parser.add_argument("--no-faults", action="store_true", help="compare the subtests only")
    parser.add_argument("--only", choices=SIDES, help="run one side and compare nothing: the other is another host's")
    parser.add_argument("--workers", type=int, metavar="N", help="processes on the CPU (default: one per core)")
    parser.add_argument("--fault-workers", type=int, default=8, metavar="N", help="processes with faults on the GPU")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds for a subtest with a fault")
    parser.add_argument("--limits", type=Path, default=LIMITS, metavar="FILE", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0: the sides agree, but for stated limits; 1: they do not, or nothing native was there to compare; 10 and up: the
    runs did not take place."""
    arguments = build_parser().parse_args(argv)
    output: Path = arguments.output or Path(".attnmatrix/agreement") / time.strftime("%Y%m%d-%H%M%S")
    try:
        output.mkdir(parents=True, exist_ok=True)
        if arguments.only is not None:
            run_one_side(arguments, output)
            return 0
        table = agreement(arguments, output)
    except OrchestratorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(page.headline(table))
    if not any(pair.fault is None for pair in table.compared):
        print("NOTHING COMPARED: no subtest is native here")
    for pair in table.disagreements:
        print(f"DISAGREE {pair.name}: {pair.note}")
        for side, seen in pair.sides:
            print(f"    {side}: {seen.message.splitlines()[0] if seen and seen.message else '-'}")
    for limit in table.unused:
        print(f"UNUSED LIMIT {limit}: nothing needs it any more; delete it")
    return table.exit_code


def run_one_side(arguments: argparse.Namespace, output: Path) -> None:
    """Leave in ``output`` what the other host's call takes: a run folder, and the trials of the seeded faults.

    The recorder tries every fault until it is caught; CUDA tries what the recorder's file says.
    """
    side, workers = arguments.only, arguments.workers or cpu_count()
    folder = run_side(arguments.tests, output / side, SIDES[side], workers)
    if arguments.no_faults:
        return
    green = [id for id, seen in verdicts.read_results(folder)[0].items() if seen.outcome == outcomes.PASSED]
    if side == "recorder":
        try_faults(arguments, output, side, green, None, workers)
        return
    if arguments.recorder_faults is None:
        raise OrchestratorError("O508", "--only cuda needs --recorder-faults FILE: it tries the same", "or --no-faults")
    try_faults(arguments, output, side, green, chosen(read_trials(arguments.recorder_faults)), arguments.fault_workers)


def agreement(arguments: argparse.Namespace, output: Path) -> Table:
    workers = arguments.workers or cpu_count()
    manifest, limits = load_manifest(arguments.tests), verdicts.read_limits(arguments.limits)
    found, runs, versions = {}, {}, {}
    for side, device in SIDES.items():
        folder = getattr(arguments, side) or run_side(arguments.tests, output / side, device, workers)
        found[side], runs[side] = verdicts.read_results(folder)
        versions[side] = verdicts.read_versions(folder)
        wrong = runs[side].get("manifest_sha256") != manifest.sha256
        if wrong or (runs[side].get("device_kind", device) == "cpu") != (device == "cpu"):
            what = "ran another manifest" if wrong else "ran on the other side"
            raise OrchestratorError("O209", f"{folder} {what}", f"--{side} names a run with ATTNMATRIX_DEVICE={device}")
    ids = [planned.id for planned in manifest.subtests]
    table = Table(verdicts.compare_subtests(ids, found["recorder"], found["cuda"], limits))
    table.device = str(runs["cuda"].get("device_kind", ""))
    table.versions = versions
    table.spec_sha256, table.manifest_sha256 = manifest.spec_sha256, manifest.sha256
    if not arguments.no_faults:
        usable = [pair.id for pair in table.subtests if pair.status == AGREE and passes(pair)]
        table.faults = compare_faults(*run_faults(arguments, output, usable, workers), limits)
        table.unused = verdicts.unused(limits, [*table.subtests, *table.faults])
    (output / "agreement.json").write_text(page.as_json(table), encoding="utf-8")
    (output / "agreement.md").write_text(page.render(table), encoding="utf-8")
    print(f"wrote {output / 'agreement.md'} and {output / 'agreement.json'}")
    return table


def passes(pair: Pair) -> bool:
    return pair.cuda is not None and pair.cuda.outcome == outcomes.PASSED


def run_side(tests: Path, output: Path, device: str, workers: int) -> Path:
    """The whole matrix on one side. Subtests may fail there; that is what is compared."""
    packages.require("run", packages.SUBTESTS)
    command = [sys.executable, "-m", "orchestrator", "run", "--plain", "--tests", str(tests), "--output", str(output)]
    command += ["--workers", str(workers)] if device == "cpu" else []
    print(f"on {device}: {' '.join(command[1:])}", flush=True)
    done = subprocess.run(command, env={**os.environ, "ATTNMATRIX_DEVICE": device}, check=False)
    if done.returncode >= FIRST_OWN_ERROR or done.returncode < 0 or done.returncode == 2:
        raise OrchestratorError("O503", f"the run on {device} ended with {done.returncode}", f"its folder: {output}")
    return output


Trials = dict[str, dict[str, Any]]


def run_faults(arguments: argparse.Namespace, output: Path, ids: list[str], workers: int) -> tuple[Trials, Trials]:
    """Every fault on the recorder until it is caught, then the same subtests on CUDA."""
    if arguments.recorder_faults is not None:
        recorder = read_trials(arguments.recorder_faults)
    else:
        recorder = try_faults(arguments, output, "recorder", ids, None, workers)
    same = chosen(recorder)
    for name, fault in recorder.items():
        fault["trials"] = [trial for trial in fault["trials"] if trial["id"] in same[name]]
    if arguments.cuda_faults is not None:
        return recorder, read_trials(arguments.cuda_faults)
    return recorder, try_faults(arguments, output, "cuda", ids, same, arguments.fault_workers)


def chosen(recorder: Trials) -> dict[str, list[str]]:
    """Of each fault the subtests to compare: the one that caught it, and the last before it in which it did a thing."""
    same = {}
    for name, fault in recorder.items():
        exercised = [trial["id"] for trial in fault["trials"] if trial["exercised"] or trial["killed"]]
        same[name] = (exercised or [trial["id"] for trial in fault["trials"]])[-ENOUGH:]
    return same


def read_trials(path: Path) -> Trials:
    """Trials that another call wrote."""
    try:
        trials: Trials = json.loads(path.read_text(encoding="utf-8"))
        return trials
    except (OSError, ValueError) as error:
        raise OrchestratorError("O202", f"{path}: {error}") from None


def try_faults(
    arguments: argparse.Namespace,
    output: Path,
    side: str,
    ids: list[str],
    faults: dict[str, list[str]] | None,
    workers: int,
) -> Trials:
    plan, out = output / f"faults-{side}-plan.json", output / f"faults-{side}.json"
    tests = str(arguments.tests.resolve())
    options = {"tests": tests, "workers": workers, "timeout": arguments.timeout, "ids": ids, "faults": faults}
    plan.write_text(json.dumps(options), encoding="utf-8")
    env = {**os.environ, **processes.WORKER_ENV, "ATTNMATRIX_DEVICE": SIDES[side]}
    env.pop("ATTNMATRIX_FAULT", None)
    command = [sys.executable, "-m", "orchestrator.agreement.trials", str(plan), str(out)]
    print(f"seeded faults on {SIDES[side]}", flush=True)
    with choose_lanes(1, 1, 60.0, env) as lanes:
        if SIDES[side] == "cuda":
            env |= {"CUDA_VISIBLE_DEVICES": lanes.devices[0], **cache_env(env)}
        done = subprocess.run(command, env=env, check=False)
    if done.returncode:
        raise OrchestratorError("O503", f"the seeded faults on {SIDES[side]} ended with {done.returncode}")
    return read_trials(out)


def compare_faults(recorder: Trials, cuda: Trials, limits: Sequence[Limit]) -> list[Pair]:
    """One pair for each fault and subtest. A fault that touches nothing that is native here has one pair without id."""
    pairs = []
    for name, fault in recorder.items():
        there = {trial["id"]: trial for trial in cuda.get(name, {}).get("trials", [])}
        error = fault["error"] or cuda.get(name, {}).get("error")
        if error:
            pairs.append(Pair("-", None, None, name, DISAGREE, f"the fault could not be tried: {error}"))
        elif not fault["trials"]:
            pairs.append(Pair("-", None, None, name, verdicts.ELSEWHERE, "touches no subtest that is native here"))
        for trial in fault["trials"]:
            other = there.get(trial["id"])
            pair = Pair(trial["id"], seen(trial), seen(other) if other else None, name)
            if other and other["outcome"] == outcomes.UNAVAILABLE:
                pairs.append(Pair(pair.id, pair.recorder, pair.cuda, name, verdicts.ELSEWHERE, other["message"]))
            elif other and fault["emulation"] and not other["killed"]:
                note = "all that it changes stands for a library's own code, which does not know of it"
                pairs.append(Pair(pair.id, pair.recorder, pair.cuda, name, EMULATION_ONLY, note))
            else:
                pairs.append(verdicts.judge(pair, limits))
    return pairs


def seen(trial: dict[str, Any]) -> Seen:
    return Seen(trial["outcome"], trial["check"], trial["message"])
