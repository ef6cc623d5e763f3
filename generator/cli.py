"""The command line: check, generate, list, explain, diff, results, errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

EXIT_OK = 0
EXIT_PROBLEMS = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Problems go to standard error, all of them; the exit code says whether there were any."""
    options = parser().parse_args(argv)
    try:
        if options.command == "list_ids" and listed(options):
            return EXIT_OK
        return run(options)
    except BrokenPipeError:  # `list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def listed(options: argparse.Namespace) -> bool:
    """Print the ids from the manifest, where it was generated from this very spec: no models have to be built."""
    from generator.committed import committed_ids

    ids = committed_ids(options)
    if ids is None:
        return False
    sys.stdout.write("".join(f"{id}\n" for id in ids))
    return True


def run(options: argparse.Namespace) -> int:
    """Run a command on the spec itself."""
    from generator import commands
    from generator.problems import SpecError, render

    try:
        return int(getattr(commands, options.command)(options))
    except SpecError as error:
        print(render(error.problems, error.positions, str(options.spec)), file=sys.stderr)
        count = len(error.problems)
        print(f"{count} error{'s' * (count != 1)}", file=sys.stderr)
        return EXIT_PROBLEMS


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    top = argparse.ArgumentParser(prog="python -m generator", description="suite.toml to test modules and tables.")
    top.add_argument("--spec", type=Path, default=Path("suite.toml"), metavar="FILE", help="the spec (suite.toml)")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    check = commands.add_parser("check", help="check the spec, and that the generated files are its own")
    check.set_defaults(command="check")

    generate = commands.add_parser("generate", help="write everything that the spec generates")
    generate.add_argument("--profile", metavar="NAME", help="another profile; needs --output")
    generate.add_argument("--output", type=Path, metavar="DIR", help="write the tests alone, into this folder")
    generate.add_argument(
        "--only", choices=("tests", "readme", "known-failures", "schema"), help="write this part only"
    )
    generate.add_argument("--pin", action="store_true", help="write the counts that hold into the spec first")
    generate.set_defaults(command="generate")

    lister = commands.add_parser("list", help="print the ids of subtests, one per line")
    lister.add_argument("--profile", metavar="NAME")
    lister.add_argument("--method", action="append", metavar="NAME")
    lister.add_argument("--backend", action="append", metavar="NAME")
    lister.add_argument("--sweep", action="append", metavar="NAME")
    lister.add_argument("--known-failures", action="store_true", help="print known failures too")
    lister.add_argument("--json", action="store_true", help="print every field, as JSON")
    lister.set_defaults(command="list_ids")

    explain = commands.add_parser("explain", help="print everything about one subtest")
    explain.add_argument("id")
    explain.add_argument("--profile", metavar="NAME")
    explain.set_defaults(command="explain")

    diff = commands.add_parser("diff", help="print the ids that two profiles do not share")
    diff.add_argument("first")
    diff.add_argument("second")
    diff.set_defaults(command="diff")

    results = commands.add_parser("results", help="keep the outcome of a run as a reference run")
    actions = results.add_subparsers(required=True, metavar="ACTION")
    add = actions.add_parser("add", help="write results/runs/DATE-PROFILE-DEVICE.json from the folder of a run")
    add.add_argument("folder", type=Path, metavar="RUN_DIR")
    add.add_argument("--replace", action="store_true", help="in the place of one of that day, profile and device")
    add.set_defaults(command="add_result")

    errors = commands.add_parser("errors", help="print every error code with its meaning")
    errors.set_defaults(command="errors")
    return top
