"""What a spec generates, as a tree of texts: compared with the disk in both directions, or written to it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from generator.committed import GENERATED, MANIFEST, spec_hash
from generator.manifest import manifest_text
from generator.matrix import Project
from generator.modules import module_views
from generator.problems import Problem, SpecError, quote
from generator.reference import reference_text
from generator.rendering import known_failures_text, module_text, readme_text
from generator.schema import schema_text
from generator.tables import BEGIN, END, RUNS_BEGIN, RUNS_END, known_views, readme_view

MARK = "Generated from suite.toml"
IGNORED = frozenset({"__pycache__"})
PARTS = ("tests", "readme", "known-failures", "schema")
DIFF_LINES = 12


@dataclass
class Tree:
    """The texts of all generated files below ``root``, and the folder that holds nothing else.

    A ``lent`` folder was named on the command line, so it may be one that the generator never wrote to.
    """

    root: Path
    folder: Path | None
    lent: bool = False
    files: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def shown(self, path: Path) -> str:
        """A path as messages name it."""
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)


def build(project: Project, profile: str, output: Path | None = None, only: str | None = None) -> Tree:
    """Everything a profile generates. With ``output``, the tests alone, into that folder."""
    root = project.document.path.resolve().parent
    matrix = project.matrix(profile)
    wants = {only} if only else {"tests"} if output else set(PARTS)
    folder = output.resolve() if output else root / GENERATED
    tree = Tree(root, folder if "tests" in wants else None, lent=output is not None)
    if "tests" in wants:
        for view in module_views(matrix.subtests):
            tree.files[folder / view.file] = module_text(view)
        tree.files[folder / MANIFEST] = manifest_text(project, matrix, tree.shown(folder))
    if "known-failures" in wants:
        tree.files[root / "KNOWN_FAILURES.md"] = known_failures_text(known_views(project, matrix))
    if "schema" in wants:
        tree.files[root / "suite.schema.json"] = schema_text()
        tree.files[root / "docs" / "suite.md"] = reference_text()
    if "readme" in wants:
        add_readme(tree, readme_text(readme_view(project, matrix)), spec_hash(project.document.data))
    return tree


def add_readme(tree: Tree, matrix: str, spec_sha256: str) -> None:
    """README.md with each table between its markers. Where no run was ever kept, it need not have a place for them."""
    from generator.results import reference_runs, runs_text

    path = tree.root / "README.md"
    text = read(path) or ""
    runs, problems = reference_runs(tree.root)
    blocks = [(BEGIN, END, matrix)]
    if runs or RUNS_BEGIN in text or RUNS_END in text:
        blocks.append((RUNS_BEGIN, RUNS_END, runs_text(runs, spec_sha256)))
    for begin, end, table in blocks:
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            message = f"there must be one line {quote(begin)} and behind it one line {quote(end)}"
            problems.append(Problem("E-markers", (), message, path="README.md"))
            continue
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n\n{table}\n{end}{after}"
    tree.problems += problems
    if not problems:
        tree.files[path] = text


def drift(tree: Tree) -> Iterator[Problem]:
    """What differs between the tree and the disk: missing, changed and left-over files."""
    yield from tree.problems
    hint = "run `nox -s generate`"
    for path, text in tree.files.items():
        shown = tree.shown(path)
        found = read(path)
        if found is None:
            yield Problem("E-missing-file", (), "the file is missing", hint, path=shown)
        elif found != text:
            lines = tuple(first_differences(found, text))
            yield Problem("E-drift", (), "the file is not what suite.toml generates", hint, lines, path=shown)
    for path in leftovers(tree):
        if is_ours(path):
            yield Problem("E-stale-file", (), "suite.toml no longer generates this file", hint, path=tree.shown(path))
        else:
            yield foreign(tree, path)


def foreign(tree: Tree, path: Path) -> Problem:
    """A file that the generator neither wrote nor dares to remove."""
    return Problem(
        "E-foreign-file", (), "the generator did not write this file", "move it out of the generated folder",
        path=tree.shown(path),
    )  # fmt: skip


def write(tree: Tree) -> tuple[list[str], list[Problem]]:
    """Write what differs and remove what is stale. Returns what was done, and what stood in the way."""
    problems = list(tree.problems)
    left = leftovers(tree)
    inside = [path for path in tree.files if tree.lent and path.exists()]
    problems += [foreign(tree, path) for path in [*left, *inside] if not is_ours(path)]
    if problems:
        return [], problems
    done = []
    for path in left:
        path.unlink()
        done.append(f"removed {tree.shown(path)}")
    for path, text in tree.files.items():
        if read(path) == text:
            continue
        done.append(f"{'changed' if path.exists() else 'wrote'} {tree.shown(path)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, text)
        except OSError as error:
            raise SpecError(
                [Problem("E-output", (), f"cannot write: {error.strerror}", path=tree.shown(path))]
            ) from None
    return done, []


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_bytes(text.encode())
    draft.replace(path)


def leftovers(tree: Tree) -> list[Path]:
    """Files in the generated folder that the tree does not have."""
    if tree.folder is None or not tree.folder.is_dir():
        return []
    return sorted(
        path
        for path in tree.folder.rglob("*")
        if path not in tree.files and not path.is_dir() and not IGNORED.intersection(path.parts)
    )


def is_ours(path: Path) -> bool:
    """Whether the generator wrote a file, which it says in its first lines."""
    text = read(path) or ""
    if path.name == MANIFEST:
        return text.startswith('{\n  "format":')
    return path.suffix == ".py" and MARK in text[:300]


def read(path: Path) -> str | None:
    """The text of a file, or None where there is none."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return None


def first_differences(found: str, wanted: str) -> Iterator[str]:
    """The first lines of a diff, without its header."""
    lines = difflib.unified_diff(found.splitlines(), wanted.splitlines(), lineterm="", n=0)
    changed = [line[:160] for line in lines if not line.startswith(("---", "+++", "@@"))]
    yield from changed[:DIFF_LINES]
    if len(changed) > DIFF_LINES:
        yield f"... {len(changed) - DIFF_LINES} more lines"
