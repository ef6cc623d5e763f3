"""Run with ``python -m orchestrator.bench``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator import packages
from orchestrator.bench import page
from orchestrator.bench.measuring import Measured, Setting, gpus_here, measure
from orchestrator.devices import LANES, PER_DEVICE, cpu_count
from orchestrator.errors import OrchestratorError


def numbers(text: str) -> list[int]:
    """``1,2,4`` as numbers."""
    found = [int(word) for word in text.split(",")]
    if not found or min(found) < 1:
        raise ValueError(text)
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.bench", description="Time the matrix.")
    parser.add_argument("--tests", type=Path, default=Path("generated_tests"), metavar="DIR", help="generated folder")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default .attnmatrix/bench/<time>")
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="runs of each setting (default 3)")
    parser.add_argument("--gpus", type=numbers, metavar="N,N", help="numbers of GPUs (default: 1 and all)")
    parser.add_argument(
        "--workers", type=numbers, default=[4, 8, PER_DEVICE], metavar="N,N", help="workers on each GPU"
    )
    parser.add_argument("--cpu-workers", type=numbers, metavar="N,N", help="workers on the CPU (default: as in a run)")
    parser.add_argument("--no-cpu", action="store_true", help="leave the CPU out")
    parser.add_argument("-k", dest="keyword", default="", metavar="EXPR", help="only these subtests")
    return parser


def settings(arguments: argparse.Namespace) -> list[Setting]:
    """What to measure on this host."""
    here = gpus_here()
    counts = arguments.gpus or (sorted({1, here}) if here else [])
    wanted = [Setting("cuda", gpus, workers) for gpus in counts for workers in arguments.workers]
    if not arguments.no_cpu:
        for workers in arguments.cpu_workers or [min(LANES, cpu_count())]:
            wanted.append(Setting("cpu", 0, workers))
    too_many = [count for count in arguments.gpus or () if count > here]
    if too_many:
        asked = ",".join(map(str, too_many))
        raise OrchestratorError(
            "O402", f"--gpus {asked}: only {here} GPUs may be used here",
            "name smaller numbers" if here else "leave --gpus out to measure the CPU",
        )  # fmt: skip
    if not wanted:
        raise OrchestratorError("O402", "there is no GPU here, and --no-cpu leaves nothing to measure")
    return wanted


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    output = arguments.output or Path(".attnmatrix/bench") / time.strftime("%Y%m%d-%H%M%S")
    try:
        packages.require("run", packages.SUBTESTS)
        wanted = settings(arguments)
        runs: list[Measured] = []
        for setting, number in turns(wanted, arguments.repetitions):
            label = "first, to fill caches" if number == 0 else f"run {number} of {arguments.repetitions}"
            print(f"{setting}: {label}", flush=True)
            folder = output / "runs" / f"{setting.slug}-{number}"
            runs.append(measure(setting, number, arguments.tests, folder, output / "durations.json", arguments.keyword))
            print(f"    {runs[-1].wall:.2f} s, exit code {runs[-1].exit_code}, {runs[-1].said}", flush=True)
            (output / "bench.json").write_text(json.dumps(page.as_dict(runs), indent=1) + "\n", encoding="utf-8")
            (output / "bench.md").write_text(page.render(runs), encoding="utf-8")
    except OrchestratorError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(page.render(runs))
    print(f"wrote {output / 'bench.md'} and {output / 'bench.json'}")
    return 0 if all(run.exit_code == 0 for run in runs) else 1


def turns(wanted: Sequence[Setting], repetitions: int) -> list[tuple[Setting, int]]:
    """All settings in turns, so that a slow minute of the host hits all alike. Number 0 fills the caches of a kind of
    device and is not counted; it runs with the most workers."""
    first = {setting.device: setting for setting in sorted(wanted, key=lambda s: (s.gpus * s.workers, s.workers))}
    order = [(setting, 0) for setting in first.values()]
    for number in range(1, repetitions + 1):
        order += [(setting, number) for setting in (wanted if number % 2 else reversed(wanted))]
    return order


if __name__ == "__main__":
    raise SystemExit(main())
