"""What each command of the command line does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence

from generator.committed import GENERATED, MANIFEST, read_manifest
from generator.matrix import Matrix, Project
from generator.problems import CODES, Problem, SpecError, did_you_mean, quote
from generator.subtests import Subtest

EXIT_OK = 0


def check(options: argparse.Namespace) -> int:
    """Check the spec and the files on disk; say what was measured on another matrix."""
    from generator.measurements import stale
    from generator.outputs import build, drift

    project = opened(options)
    tree = build(project, project.default_profile)
    problems = list(drift(tree))
    if problems:
        raise SpecError(problems)
    counts = summary(project.matrix(project.default_profile))
    print(f"{options.spec.name}: {counts}; {len(tree.files)} generated files are up to date")
    remark = stale(tree)
    if remark is not None:
        print(f"note: {remark}")
    return EXIT_OK


def generate(options: argparse.Namespace) -> int:
    """Write what the spec generates."""
    from generator.outputs import build, write

    if options.pin:
        from generator.pins import repin

        for line in repin(Project.open(options.spec)):
            print(line)
    project = opened(options)
    profile = chosen(project, options.profile)
    if profile != project.default_profile and options.output is None:
        message = f"profile {quote(profile)} is not the default one, whose tests are committed"
        raise SpecError([Problem("E-output", (), message, "name a folder for it with --output", path="generate")])
    if options.output is not None and options.output.exists() and not options.output.is_dir():
        raise SpecError([Problem("E-output", (), "the output is no folder", path=str(options.output))])
    tree = build(project, profile, options.output, options.only)
    done, problems = write(tree)
    if problems:
        raise SpecError(problems)
    for line in done:
        print(line)
    print(f"{options.spec.name}: {summary(project.matrix(profile))}; {len(done) or 'no'} files changed")
    return EXIT_OK


def list_ids(options: argparse.Namespace) -> int:
    """Print ids, or every field of the subtests."""
    project = Project.open(options.spec)
    matrix = project.matrix(chosen(project, options.profile))
    filters = {"method": options.method, "backend": options.backend, "sweep": options.sweep}
    declared: dict[str, Collection[str]] = {
        "method": project.spec.methods,
        "backend": project.spec.backends,
        "sweep": [variant.name for variant in project.index.variants],
    }
    for kind, names in filters.items():
        require(f"E-unknown-{kind}", kind, names or (), declared[kind])
    subtests = [
        subtest
        for subtest in matrix.subtests
        if (options.known_failures or subtest.known_failure is None)
        and all(not names or getattr(subtest, kind) in names for kind, names in filters.items())
    ]
    if not options.json:
        sys.stdout.write("".join(f"{subtest.id}\n" for subtest in subtests))
        return EXIT_OK
    import json

    from generator.explain import fields

    rows = ",\n".join(f"  {json.dumps(fields(subtest))}" for subtest in subtests)
    sys.stdout.write(f"[\n{rows}\n]\n" if rows else "[]\n")
    return EXIT_OK


def explain(options: argparse.Namespace) -> int:
    """Print everything about one subtest."""
    from generator.explain import explanation

    project = Project.open(options.spec)
    matrix = project.matrix(chosen(project, options.profile))
    found = {subtest.id: subtest for subtest in matrix.subtests}
    require("E-unknown-id", "subtest", [options.id], found, f"in profile {matrix.profile}")
    print(explanation(project, found[options.id], options.spec.name))
    return EXIT_OK


def diff(options: argparse.Namespace) -> int:
    """Print which ids only one of two profiles has, and which are known failures in one only."""
    project = Project.open(options.spec)
    first, second = (project.matrix(chosen(project, name)) for name in (options.first, options.second))
    mine, theirs = ({subtest.id: subtest for subtest in matrix.subtests} for matrix in (first, second))
    for id in mine:
        if id not in theirs:
            print(f"-{id}")
    for id in theirs:
        if id not in mine:
            print(f"+{id}")
    for id in mine:
        if id in theirs and treatment(mine[id]) != treatment(theirs[id]):
            print(f"!{id} ({treatment(mine[id])} in {first.profile}, {treatment(theirs[id])} in {second.profile})")
    for matrix, ids, others in ((first, mine, theirs), (second, theirs, mine)):
        print(f"{matrix.profile}: {summary(matrix)}, {len(ids.keys() - others.keys())} only here", file=sys.stderr)
    return EXIT_OK


def add_result(options: argparse.Namespace) -> int:
    """Make a reference run of a run folder, and write README's table of them anew."""
    from generator.outputs import build, write
    from generator.results import add

    project = opened(options)
    path = add(options.folder, options.spec.resolve().parent, replace=options.replace)
    tree = build(project, project.default_profile, only="readme")
    done, problems = write(tree)
    print("\n".join([f"wrote {tree.shown(path)}", *done]))
    if problems:
        raise SpecError(problems)
    return EXIT_OK


def errors(options: argparse.Namespace) -> int:
    """Print the table of error codes."""
    width = max(map(len, CODES))
    for code, meaning in CODES.items():
        print(f"{code:<{width}}  {meaning}")
    return EXIT_OK


def opened(options: argparse.Namespace) -> Project:
    """The project with every profile checked."""

    project = Project.open(options.spec)
    project.check_all(read_manifest(options.spec.resolve().parent / GENERATED / MANIFEST))
    return project


def chosen(project: Project, profile: str | None) -> str:
    """The profile named on the command line, or the default one."""
    name = profile or project.default_profile
    require("E-unknown-profile", "profile", [name], project.spec.profiles)
    return name


def require(code: str, kind: str, names: Sequence[str], valid: Collection[str], where: str = "") -> None:
    """Every name of the command line exists."""
    problems = [
        Problem(
            code,
            (),
            f"there is no {kind} {quote(name)}{' ' * bool(where)}{where}",
            did_you_mean(name, valid),
            path="command line",
        )
        for name in names
        if name not in valid
    ]
    if problems:
        raise SpecError(problems)


def treatment(subtest: Subtest) -> str:
    """How a subtest counts."""
    return f"known failure {subtest.known_failure.id}" if subtest.known_failure else "must pass"


def summary(matrix: Matrix) -> str:
    """``535 must pass, 17 known failures``."""
    known = matrix.known_failures
    return f"{matrix.must_pass} must pass" + (f", {known} known failure{'s' * (known != 1)}" if known else "")
