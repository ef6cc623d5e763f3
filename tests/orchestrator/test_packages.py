"""What has to be installed where: the dependency groups, and what is said when something is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from orchestrator import packages
from orchestrator.campaign.fakesuite import passing, write_suite
from orchestrator.campaign.pretend import pretend_run

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
GROUPS: dict[str, list[Any]] = PYPROJECT["dependency-groups"]


def names(group: str) -> set[str]:
    """The packages that a group names, those of included groups among them."""
    out: set[str] = set()
    for item in GROUPS[group]:
        out |= names(item["include-group"]) if isinstance(item, dict) else {Requirement(item).name}
    return out


def closure(wanted: Iterable[str]) -> set[str]:
    """Packages with all that they need in turn."""
    out: set[str] = set()
    todo = list(wanted)
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in out:
            continue
        out.add(name)
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return out


def site_of(folder: Path, wanted: Iterable[str]) -> Path:
    """A folder in which Python finds these packages and what they need, and nothing else."""
    folder.mkdir()
    for name in closure(wanted):
        files = metadata.files(name) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (folder / top).symlink_to(metadata.distribution(name).locate_file(top))  # type: ignore[arg-type]
    return folder


def orchestrator(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The orchestrator in an interpreter that has the packages of ``site`` only."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "ATTNMATRIX_DEVICE": "cpu"}
    return subprocess.run(
        [sys.executable, "-S", "-m", "orchestrator", *map(str, arguments)], cwd=site, env=env, text=True,
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_groups_are_what_is_looked_for():
    assert names("orchestrator") >= set(packages.REPORTS)
    assert names("runner") == set(packages.RUN)
    whole = {Requirement(text).name: text for text in PYPROJECT["project"]["dependencies"]}
    for item in [*GROUPS["orchestrator"], *GROUPS["runner"]]:
        assert isinstance(item, dict) or whole[Requirement(item).name] == item


def test_the_gpu_workflow_installs_the_groups_pinned():
    """Nothing runs it here, so that at least what it must not lose is looked for."""
    text = (ROOT / ".github" / "workflows" / "gpu.yml").read_text(encoding="utf-8")
    installs = [line.strip() for line in text.splitlines() if "pip install" in line and "pip>=" not in line]
    assert len(installs) == 2
    assert all("-c constraints.txt" in line for line in installs)
    assert "nox --group runner" in installs[0]
    assert installs[1].endswith("--group orchestrator")
    assert "--allow-unavailable" in text


def test_merging_and_reporting_need_the_group_alone(tmp_path):
    suite = write_suite(tmp_path / "suite", passing(4))
    parts = [pretend_run(suite, tmp_path / f"p{n}", (n, 2)).path for n in (1, 2)]
    site = site_of(tmp_path / "site", names("orchestrator"))
    done = orchestrator(site, "merge", *parts, "--output", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "merged" / "index.html").stat().st_size > 1000
    done = orchestrator(site, "report", parts[0])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["run", "merge", "report"])
def test_what_is_missing_is_said_before_anything_runs(tmp_path, command):
    """On a GPU host nothing is installed, and what only the reports import would be missed when the run is over."""
    suite = write_suite(tmp_path / "suite", passing(2))
    part = pretend_run(suite, tmp_path / "part").path
    arguments = ["--tests", suite, "--output", tmp_path / "run"] if command == "run" else [part]
    site = site_of(tmp_path / "site", set(packages.RUN) - {"jinja2", "junitparser"})
    done = orchestrator(site, command, *arguments)
    assert done.returncode == 14
    missing, group = ("jinja2, junitparser, torch", "runner")
    if command != "run":
        missing, group = "jinja2, junitparser", "orchestrator"
    assert f"error O509: {missing} are not installed here\n" in done.stderr
    assert "install them, or run with the `python` that has them; for jinja2, junitparser:\n" in done.stderr
    assert done.stderr.endswith(f"  python -m pip install -c constraints.txt --group {group}\n")
    assert not (tmp_path / "run").exists()
    bare = orchestrator(tmp_path / "suite", command, *arguments)
    assert "O509" in bare.stderr, "without any package too"


def test_torch_is_missed_before_workers_die_for_want_of_it(tmp_path):
    suite = write_suite(tmp_path / "suite", passing(2))
    site = site_of(tmp_path / "site", packages.RUN)
    done = orchestrator(site, "run", "--tests", suite, "--output", tmp_path / "run")
    assert done.returncode == 14
    hint = "install it, or run with the `python` that has it"
    assert done.stderr == f"error O509: torch is not installed here\n  {hint}\n"
    assert not (tmp_path / "run").exists()
    done = orchestrator(site, "run", "--tests", suite, "--output", tmp_path / "run", "--preload", "pytest")
    assert done.returncode == 0, "what subtests do not need is not asked for"
