"""How fast the generator is: ``python -m generator.bench``, or ``nox -s bench``.

Each measurement runs in a process of its own, as a user would start it; medians of several are printed, with the
lowest and the highest beside them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
LAYOUTS = ("contiguous", "shuffled_pages", "interleaved_pages", "non_monotonic_extend")
PER_CASE = 10 * len(LAYOUTS) * 2 * 5  # backends x layouts x pad styles x multipliers


def synthetic(count: int) -> str:
    """A spec of about ``count`` subtests: one sweep of 10 backends, two pad styles, five multipliers, four layouts."""
    cases = [
        f'    {{ name = "c{n}", mode = "DECODE", prefix_lens = [{n + 1}, {n % 7 + 1}] }},'
        for n in range(-(-count // PER_CASE))
    ]
    backends = [
        f'[backends.b{n}]\nadapter = "kits.backends.some:Backend{n}"\nmethods = ["dense"]\nmodes = ["DECODE"]\n'
        'runners = ["cuda_graph"]\ndtype = "bfloat16"\npage_size = 16\npage_sizes = [16]\n'
        for n in range(10)
    ]
    names = json.dumps([f"b{n}" for n in range(10)])
    members = json.dumps([f"c{n}" for n in range(len(cases))])
    head = """
[suite]
format = 1
[profiles.ci]
[methods.dense]
summary = "dense"
q_heads = 4
kv_heads = 4
head_dim = 64
scale = 0.2
tolerance.bfloat16 = { atol = 2e-2, rtol = 2e-2 }
[pad_styles]
small_real = { summary = "s" }
prod_fill = { summary = "p" }
"""
    sweep = f"""
[[sweep]]
name = "decode_cg"
summary = "s"
runner = "cuda_graph"
seq_lens = "total"
axes = {{ layout = {json.dumps(LAYOUTS)}, pad_style = ["small_real", "prod_fill"], multiplier = [1, 2, 4, 8, 16] }}
cell = [{{ method = "dense", backends = {names}, cases = {members} }}]
"""
    return "\n".join(["case = [", *cases, "]", head, *backends, sweep])


def expand_once(spec: Path) -> dict[str, float]:
    """In this process: read, check and expand a spec; seconds of each step and megabytes at the peak."""
    began = time.perf_counter()
    from generator.matrix import Project

    imported = time.perf_counter()
    project = Project.open(spec)
    opened = time.perf_counter()
    count = len(project.matrix("ci").subtests)
    return {
        "subtests": count,
        "import_s": imported - began,
        "read_s": opened - imported,
        "expand_s": time.perf_counter() - opened,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        / (1 << 20 if sys.platform == "darwin" else 1 << 10),
    }


def in_a_process(*arguments: str) -> tuple[str, float]:
    """Standard output and seconds of a Python process in the root of the repository."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout, time.perf_counter() - began


def repeated(measure: Callable[[], Mapping[str, float]], times: int) -> dict[str, list[float]]:
    """Every figure of ``measure``, as often as asked."""
    runs = [measure() for _ in range(times)]
    return {name: [run[name] for run in runs] for name in runs[0]}


def said(values: Sequence[float], unit: str) -> str:
    """``0.81 s (0.79 to 0.90)``."""
    return f"{median(values):.2f} {unit} ({min(values):.2f} to {max(values):.2f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m generator.bench", description="Time the generator.")
    parser.add_argument(
        "--count", type=int, default=100_000, metavar="N", help="subtests of the synthetic spec (100000)"
    )
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each measurement (3)")
    parser.add_argument("--expand", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.expand is not None:
        print(json.dumps(expand_once(options.expand)))
        return 0
    print(f"medians of {options.repeat} runs, each in a process of its own")
    with tempfile.TemporaryDirectory() as folder:
        for count in (options.count // 4, options.count // 2, options.count):
            spec = Path(folder) / f"{count}.toml"
            spec.write_text(synthetic(count), encoding="utf-8")

            def expand(spec: Path = spec) -> dict[str, float]:
                out, _ = in_a_process("-m", "generator.bench", "--expand", str(spec))
                figures: dict[str, float] = json.loads(out)
                return figures

            found = repeated(expand, options.repeat)
            peak = median(found["peak_mb"])
            print(
                f"expand {int(found['subtests'][0])} subtests: {said(found['expand_s'], 's')}, read and checked in "
                f"{said(found['read_s'], 's')}, peak {peak:.0f} MB, {1024 * peak / found['subtests'][0]:.2f} KB each"
            )
        out = Path(folder) / "tests"
        for name, arguments in (
            ("generate the tests", ("generate", "--output", str(out))),
            ("check", ("check",)),
            ("list", ("list",)),
        ):

            def run(arguments: tuple[str, ...] = arguments) -> dict[str, float]:
                for path in out.glob("*"):
                    path.unlink()
                return {"s": in_a_process("-m", "generator", *arguments)[1]}

            print(f"{name} of suite.toml, start of Python included: {said(repeated(run, options.repeat)['s'], 's')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
