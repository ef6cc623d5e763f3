"""What is generated against what is on disk, in both directions, and against what pytest collects."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from spec_tools import ROOT, SMALL, project_at, repository, with_one_line

from generator.outputs import Tree, build, drift, write
from generator.problems import Problem
from generator.tables import BEGIN, END


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository of the small spec; the path of its suite.toml."""
    return repository(tmp_path, SMALL.read_text(encoding="utf-8"))


def tree_of(path: Path) -> Tree:
    """What a spec generates for its default profile."""
    return build(project_at(path), "ci")


def found(path: Path) -> list[tuple[str, str | None]]:
    """Code and file of each difference."""
    return [(problem.code, problem.path) for problem in drift(tree_of(path))]


def test_the_committed_files_are_what_the_suite_generates() -> None:
    assert [problem.path for problem in drift(tree_of(ROOT / "suite.toml"))] == []


def test_nothing_differs_after_generating(small: Path) -> None:
    assert found(small) == []


def test_a_second_generate_writes_nothing(small: Path) -> None:
    assert write(tree_of(small)) == ([], [])


def test_changed_file(small: Path) -> None:
    module = small.parent / "generated_tests/test_dense_fa3.py"
    module.write_text(module.read_text().replace("scale=0.2", "scale=0.3"))
    (problem,) = drift(tree_of(small))
    assert (problem.code, problem.path) == ("E-drift", "generated_tests/test_dense_fa3.py")
    assert any(note.startswith("-") and "scale=0.3" in note for note in problem.notes)
    assert any(note.startswith("+") and "scale=0.2" in note for note in problem.notes)


@pytest.mark.parametrize(
    "name",
    [
        "generated_tests/manifest.json",
        "KNOWN_FAILURES.md",
        "suite.schema.json",
        "docs/suite.md",
        "generated_tests/test_dense_native.py",
    ],
)
def test_missing_file(small: Path, name: str) -> None:
    (small.parent / name).unlink()
    assert found(small) == [("E-missing-file", name)]
    write(tree_of(small))
    assert found(small) == []


def test_stale_file_is_reported_then_removed(small: Path) -> None:
    stale = small.parent / "generated_tests/test_dense_gone.py"
    stale.write_text((small.parent / "generated_tests/test_dense_fa3.py").read_text())
    assert found(small) == [("E-stale-file", "generated_tests/test_dense_gone.py")]
    done, problems = write(tree_of(small))
    assert (done, problems) == (["removed generated_tests/test_dense_gone.py"], [])
    assert not stale.exists()


@pytest.mark.parametrize("name", ["test_mine.py", "notes.md", "deeper/test_more.py"])
def test_foreign_file_is_reported_and_never_removed(small: Path, name: str) -> None:
    mine = small.parent / "generated_tests" / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("# written by hand\n")
    assert found(small) == [("E-foreign-file", f"generated_tests/{name}")]
    (small.parent / "KNOWN_FAILURES.md").unlink()
    done, problems = write(tree_of(small))
    assert (done, [problem.code for problem in problems]) == ([], ["E-foreign-file"])
    assert mine.exists()
    assert not (small.parent / "KNOWN_FAILURES.md").exists(), "nothing is written while something is in the way"


def test_bytecode_is_no_foreign_file(small: Path) -> None:
    cache = small.parent / "generated_tests/__pycache__"
    cache.mkdir()
    (cache / "test_dense_fa3.pyc").write_bytes(b"")
    assert found(small) == []


def test_readme_keeps_what_is_outside_the_markers(small: Path) -> None:
    readme = small.parent / "README.md"
    readme.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter | \\1 {{{{ x }}}}\n")
    assert found(small) == [("E-drift", "README.md")]
    write(tree_of(small))
    text = readme.read_text()
    assert text.startswith(f"before\n\n{BEGIN}\n")
    assert text.endswith(f"\n{END}\n\nafter | \\1 {{{{ x }}}}\n")
    assert "17 subtests must pass, and 8 more" in text
    assert "old" not in text


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_readme_without_one_pair_of_markers(small: Path, text: str) -> None:
    (small.parent / "README.md").write_text(text)
    assert found(small) == [("E-markers", "README.md")]
    done, problems = write(tree_of(small))
    assert done == []
    assert [problem.code for problem in problems] == ["E-markers"]


def test_a_change_of_the_spec_is_drift_until_generated(small: Path) -> None:
    text = with_one_line(small.read_text()).replace("subtests = 17", "subtests = 19")
    small.write_text(text)
    changed = {path for code, path in found(small) if code == "E-drift"}
    assert {"README.md", "generated_tests/manifest.json", "generated_tests/test_dense_fa3.py"} <= changed
    write(tree_of(small))
    assert found(small) == []
    assert "19 subtests must pass" in (small.parent / "README.md").read_text()
    assert "dense.fa3.eager.page_edge" in (small.parent / "generated_tests/test_dense_fa3.py").read_text()


def test_a_comment_in_the_spec_changes_nothing(small: Path) -> None:
    small.write_text(small.read_text() + "\n# a remark\n")
    assert found(small) == []


def test_ids_and_collected_nodes_are_one_to_one() -> None:
    manifest = json.loads((ROOT / "generated_tests/manifest.json").read_text())
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "generated_tests"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    collected = [line for line in run.stdout.splitlines() if "::" in line]
    nodes = [row["node"] for row in manifest["subtests"]]
    assert sorted(collected) == sorted(nodes)
    assert len(set(nodes)) == len(nodes) == len({row["id"] for row in manifest["subtests"]})


def test_manifest_counts_are_those_of_its_rows() -> None:
    manifest = json.loads((ROOT / "generated_tests/manifest.json").read_text())
    known = [row for row in manifest["subtests"] if row["known_failure"]]
    assert manifest["counts"] == {"must_pass": len(manifest["subtests"]) - len(known), "known_failures": len(known)}
    assert all(row["known_failure_action"] in ("xfail", "skip", "crash") for row in known)
    assert sum(must_pass for must_pass, _ in manifest["profiles"]["ci"].values()) == manifest["counts"]["must_pass"]


def test_generated_modules_hold_data_and_one_call() -> None:
    """No branch, loop or comprehension: a module only names values and hands each to ``run``."""
    allowed = (ast.Assign, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Expr)
    for path in (ROOT / "generated_tests").glob("test_*.py"):
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, allowed) for node in body)
        for node in body:
            if isinstance(node, ast.FunctionDef):
                assert ast.unparse(node.body[0]) == "run(subtest)"
                assert len(node.body) == 1


def test_generated_modules_need_no_formatter(tmp_path: Path) -> None:
    project = project_at(ROOT / "suite.toml")
    for profile in project.spec.profiles:
        write(build(project, profile, tmp_path / profile))
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--diff",
        "--config",
        str(ROOT / "pyproject.toml"),
        str(tmp_path),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout


def test_every_problem_of_drift_says_what_to_do(small: Path) -> None:
    (small.parent / "generated_tests/manifest.json").unlink()
    problems: list[Problem] = list(drift(tree_of(small)))
    assert all(problem.hint for problem in problems)
