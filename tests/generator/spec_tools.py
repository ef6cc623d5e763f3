"""What the tests of the generator share."""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path

from generator.matrix import Project
from generator.outputs import build, write
from generator.problems import SpecError, render

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SMALL = HERE / "small.toml"
TODAY = datetime.date(2026, 12, 1)


def project_at(path: Path) -> Project:
    """The project of a spec, every profile checked."""
    project = Project.open(path, TODAY)
    project.check_all(None)
    return project


def errors_of(path: Path) -> str:
    """What the generator says about a spec, as if it were called suite.toml; empty where it says nothing."""
    try:
        project_at(path)
    except SpecError as error:
        return render(error.problems, error.positions, "suite.toml") + "\n"
    return ""


def codes_in(text: str) -> list[str]:
    """The error codes in a message."""
    return re.findall(r"error\[(E-[a-z-]+)\]", text)


def repository(folder: Path, spec: str) -> Path:
    """A folder with a spec, a README and everything generated; returns the path of the spec."""
    path = folder / "suite.toml"
    path.write_text(spec, encoding="utf-8")
    shutil.copy(ROOT / "README.md", folder / "README.md")
    done, problems = write(build(project_at(path), "ci"))
    assert done
    assert not problems
    return path


def generator(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in ``cwd``."""
    return subprocess.run(
        [sys.executable, "-m", "generator", *map(str, args)],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
