"""``python -m orchestrator.campaign``: attack the orchestrator a few hundred times and count what was lost.

Every run gets a small suite, one scenario and its own seed. Afterwards the run is continued until it is complete, and
audited: each planned subtest must have exactly one outcome, the right one, and no process may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.campaign.audit import audit, survivors
from orchestrator.campaign.fakesuite import write_suite
from orchestrator.campaign.scenarios import SCENARIOS, Attack, Scenario

ROOT = Path(__file__).parents[2]
LIMIT = 150.0
"""Seconds after which a run counts as hung."""
CONTINUE = (130, 11, 14, -9, -15)
"""Exit codes after which a run is continued: interrupted, cannot write reports or events, killed."""


@dataclass
class Outcome:
    number: int
    scenario: str
    planned: int
    wrong: list[str] = field(default_factory=list)
    invocations: int = 0
    seconds: float = 0.0


Process = subprocess.Popen[bytes]


def start(arguments: list[str], env: dict[str, str], log: Path, limit_file: int | None = None) -> Process:
    """One command of the orchestrator. With ``limit_file``, no file may grow beyond so many bytes."""
    command = [sys.executable, "-m", "orchestrator", *arguments]
    if limit_file is not None:
        command = ["/bin/sh", "-c", f'ulimit -f {limit_file // 512}; exec "$@"', "sh", *command]
    with open(os.devnull if limit_file is not None else log, "ab") as sink:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)


def suite_of(scenario: Scenario, rng: random.Random) -> list[str]:
    """Three modules of passing subtests with the scenario's acts among them."""
    ids = [
        f"dense.{backend}.{sweep}.{scenario.passing}_{n}"
        for backend in ("aa", "bb", "cc")
        for sweep in ("eager", "decode")
        for n in range(3)
    ]
    for n, act in enumerate(scenario.acts):
        ids.insert(rng.randint(0, len(ids)), f"dense.{rng.choice(('aa', 'bb', 'cc'))}.attack.{act}_{n}")
    return ids


def one_run(number: int, seed: int, home: Path) -> Outcome:
    """One run from suite to audit."""
    scenario = SCENARIOS[number % len(SCENARIOS)]
    rng = random.Random(f"{seed}/{number}")
    folder = home / f"{number:04d}"
    marks = folder / "marks"
    marks.mkdir(parents=True)
    ids = suite_of(scenario, rng)
    prelude = {"test_dense_bb.py": scenario.prelude} if scenario.prelude else {}
    suite = write_suite(folder / "suite", ids, prelude=prelude)
    env = {**os.environ, "ATTNMATRIX_FAKE_MARKS": str(marks), "ATTNMATRIX_DEVICE": "cpu"}
    outcome = Outcome(number, scenario.name, len(ids))
    began = time.monotonic()
    try:
        play(scenario, outcome, rng, folder, suite, ids, env)
    except subprocess.TimeoutExpired:
        outcome.wrong.append(f"no end after {LIMIT:g} s")
    until = time.monotonic() + 5
    while (left := survivors(str(marks))) and time.monotonic() < until:
        time.sleep(0.05)
    outcome.wrong += [f"process {pid} is left" for pid in left]
    outcome.seconds = time.monotonic() - began
    return outcome


def play(
    scenario: Scenario,
    outcome: Outcome,
    rng: random.Random,
    folder: Path,
    suite: Path,
    ids: list[str],
    env: dict[str, str],
) -> None:
    """Run, attack, continue, audit."""
    log, run = folder / "log.txt", folder / "run"
    common = ["--preload", "pytest", "--plain", "--durations", str(folder / "durations.json"), "--start-limit", "10"]
    options = [*common, "--deadline", "2.5", *scenario.options]
    if scenario.parts:
        code, hits = several(scenario, folder, suite, options, env, log), 0
        outcome.invocations = scenario.parts
    else:
        process = start(["run", "--tests", str(suite), "--output", str(run), *options], env, log, scenario.limit_file)
        attack = Attack(process, run, rng)
        if scenario.attack is not None:
            scenario.attack(attack)
        code, hits = process.wait(LIMIT), attack.hits
        outcome.invocations = 1
        damaged = scenario.after is not None
        if scenario.after is not None:
            scenario.after(run, rng)
        while (code in CONTINUE or damaged or (code == 7 and hits >= 100)) and outcome.invocations < 8:
            damaged = False
            began = (run / "run.json").exists()
            how = ["--resume", str(run), *common] if began else ["--output", str(run), *options]
            code = start(["run", "--tests", str(suite), *how], env, log).wait(LIMIT)
            outcome.invocations += 1
    condemned = "test_dense_bb.py" if scenario.prelude else ""
    outcome.wrong += audit(run, ids, folder / "marks", code, hits, condemned)


def several(scenario: Scenario, folder: Path, suite: Path, options: list[str], env: dict[str, str], log: Path) -> int:
    """Every shard as its own runner, then the merge; its exit code."""
    parts = [folder / f"part{part}" for part in range(1, scenario.parts + 1)]
    common = ["run", "--tests", str(suite), *options]
    runs = [
        start([*common, "--output", str(path), "--shard", f"{n}/{scenario.parts}"], env, log)
        for n, path in enumerate(parts, 1)
    ]
    for run in runs:
        run.wait(LIMIT)
    return start(["merge", *map(str, parts), "--output", str(folder / "run")], env, log).wait(LIMIT)


def report(outcomes: list[Outcome]) -> dict[str, float]:
    """Print the figures, and return them."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.scenario].append(outcome)
    print(f"{'scenario':34} {'runs':>5} {'invocations':>11} {'subtests':>9} {'wrong':>6}")
    for name, group in groups.items():
        wrong = sum(bool(outcome.wrong) for outcome in group)
        invocations, planned = sum(o.invocations for o in group), sum(o.planned for o in group)
        print(f"{name:34} {len(group):5} {invocations:11} {planned:9} {wrong:6}")
    bad = [outcome for outcome in outcomes if outcome.wrong]
    for outcome in bad:
        print(f"run {outcome.number} ({outcome.scenario}):", *outcome.wrong[:8], sep="\n  ")
    figures: dict[str, float] = {
        "runs": len(outcomes),
        "invocations": sum(outcome.invocations for outcome in outcomes),
        "subtests": sum(outcome.planned for outcome in outcomes),
        "wrong_runs": len(bad),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
    }
    fine = "each has exactly one outcome, nothing lost or counted twice"
    verdict = f"{len(bad)} runs are wrong" if bad else fine
    head = f"{figures['runs']} runs in {figures['invocations']} invocations, {figures['subtests']} planned subtests"
    print(f"{head}: {verdict}")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.campaign", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--only", type=int, help="this run only")
    parser.add_argument("--scenario", help="only scenarios whose name contains this")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the folders of all runs here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    numbers = list(range(arguments.runs)) if arguments.only is None else [arguments.only]
    if arguments.scenario:
        numbers = [n for n in numbers if arguments.scenario in SCENARIOS[n % len(SCENARIOS)].name]
    if not numbers:
        parser.error("no run is left: nothing would be shown")
    with tempfile.TemporaryDirectory(prefix="attnmatrix-campaign-") as temporary:
        home = arguments.keep or Path(temporary)
        home.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            outcomes = list(pool.map(lambda number: one_run(number, arguments.seed, home), numbers))
    figures = report(outcomes)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if figures["wrong_runs"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
