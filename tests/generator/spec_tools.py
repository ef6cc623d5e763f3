"""What the tests of the generator share."""

from __future__ import annotations

import contextlib
import datetime
import io
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from generator.cli import main
from generator.matrix import Project
from generator.outputs import build, write
from generator.problems import SpecError, render

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SMALL = HERE / "small.toml"
TODAY = datetime.date(2026, 12, 1)
ONE_LINE = (
    '    { name = "page_edge", mode = "EXTEND", prefix_lens = [16], extend_lens = [16], page_size = 16, '
    'sets = ["common"] },\n'
)
"""A line that adds a case to the small spec; it goes right behind ``case = [``."""


def project_at(path: Path) -> Project:
    """The project of a spec, every profile checked."""
    project = Project.open(path, TODAY)
    project.check_all(None)
    return project


def with_one_line(spec: str) -> str:
    """A spec with one more line."""
    assert "case = [\n" in spec
    return spec.replace("case = [\n", f"case = [\n{ONE_LINE}", 1)


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


@dataclass(frozen=True)
class Run:
    """What a call of the command line left behind."""

    returncode: int
    stdout: str
    stderr: str


def generator(*args: object, cwd: Path) -> Run:
    """The command line in ``cwd``, in this process: starting one costs more than what most commands do."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(arg) for arg in args])
    return Run(code, out.getvalue(), err.getvalue())
