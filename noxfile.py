"""Sessions of the project: ``nox -l`` lists them, ``nox -s NAME -- ARGS`` runs one.

The sessions share two environments below ``.nox/``: ``light`` for what reads and writes text, ``full`` (with torch)
for what runs attention. Each is installed once, and again when ``pyproject.toml`` or ``constraints.txt`` change.
On a host with a GPU, attention runs in the environment of the ``python`` on the PATH. ``nox --no-venv`` uses the
interpreter that runs nox for everything, and installs nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import nox
from filelock import FileLock

nox.needs_version = ">=2025.2.9"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
HEAVY = ("torch", "triton")
OLDEST = (3, 11)
MANIFEST = ROOT / "generated_tests" / "manifest.json"


@nox.session(python=False, tags=["matrix"])
def gpu_matrix(session: nox.Session) -> None:
    """Run the matrix of suite.toml over the GPUs of this host, or over its CPU cores where it has none."""
    tests, arguments = suite_of(session)
    # What a failure prints to be run again, and what a reference run names, begins as this session was called.
    env = {"ATTNMATRIX_NO_VENV": "1"} if installs_nothing(session) else {}
    session.run(matrix_python(session), "-m", "orchestrator", "run", "--tests", tests, *arguments, env=env)


@nox.session(python=False, default=False, tags=["write"])
def generate(session: nox.Session) -> None:
    """Write everything that comes from suite.toml: tests, manifest, schema and tables."""
    session.run(environment(session, "light"), "-m", "generator", "generate", *session.posargs)


@nox.session(python=False, default=False, tags=["write"])
def readme(session: nox.Session) -> None:
    """Write the generated tables of README.md only."""
    session.run(environment(session, "light"), "-m", "generator", "generate", "--only", "readme", *session.posargs)


@nox.session(python=False, tags=["quality"])
def check(session: nox.Session) -> None:
    """Check suite.toml, and that the committed files are what it generates."""
    session.run(environment(session, "light"), "-m", "generator", "check", *session.posargs)


@nox.session(python=False, tags=["quality"])
def tests(session: nox.Session) -> None:
    """Run the tests of generator, orchestrator and kits."""
    session.run(environment(session, "full"), "-m", "pytest", *(session.posargs or ["tests"]))


@nox.session(python=False, default=False, tags=["write"])
def power(session: nox.Session) -> None:
    """Plant the bugs of the past and see which subtests catch them; writes POWER.md and results/power.json."""
    session.run(environment(session, "full"), "-m", "orchestrator.power", *session.posargs)


@nox.session(python=False, default=False, tags=["gpu"])
def agreement(session: nox.Session) -> None:
    """Run every subtest and every seeded fault on the recorder and on CUDA graphs, and compare the verdicts."""
    session.run(matrix_python(session), "-m", "orchestrator.agreement", *session.posargs)


@nox.session(python=False, default=False, tags=["gpu"])
def bench(session: nox.Session) -> None:
    """Time the generator, then the matrix by number of GPUs and of workers, split into its phases; medians of runs."""
    session.run(environment(session, "light"), "-m", "generator.bench")
    session.run(matrix_python(session), "-m", "orchestrator.bench", *session.posargs)


@nox.session(python=False, default=False, tags=["quality"])
def campaign(session: nox.Session) -> None:
    """Kill, stop and corrupt runs of a fake suite, and count what is lost: nothing may be."""
    session.run(environment(session, "full"), "-m", "orchestrator.campaign", *session.posargs)


@nox.session(python=False, tags=["quality"])
def lint(session: nox.Session) -> None:
    """Check formatting, lint rules, types and workflows; ``nox -s lint -- --fix`` repairs what can be repaired."""
    python = environment(session, "light")
    fix = "--fix" in session.posargs
    session.run(python, "-m", "ruff", "check", *(["--fix"] if fix else []), ".")
    session.run(python, "-m", "ruff", "format", *([] if fix else ["--diff"]), ".")
    session.run(python, "-m", "mypy")
    workflows = sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    session.run(python, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    session.run(str(Path(python).with_name("zizmor")), "--offline", "--no-progress", *workflows)


def suite_of(session: nox.Session) -> tuple[str, list[str]]:
    """The folder of tests that ``session`` is to run, and the other arguments.

    A profile with more than the committed tests is generated into a folder of its own first.
    """
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--profile")
    chosen, others = options.parse_known_args(session.posargs)
    if not MANIFEST.is_file():
        session.error(f"{MANIFEST.relative_to(ROOT)} is missing: run `nox -s generate`")
    manifest = json.loads(MANIFEST.read_text(encoding="utf-8"))
    within = {manifest["profile"], *(name for row in manifest["subtests"] for name in row["profiles"])}
    if chosen.profile is None or chosen.profile in within:
        return "generated_tests", list(session.posargs)
    tests = f".attnmatrix/{chosen.profile}"
    generator = (environment(session, "light"), "-m", "generator", "generate")
    session.run(*generator, "--profile", chosen.profile, "--output", tests)
    return tests, others


def matrix_python(session: nox.Session) -> str:
    """The interpreter for a session that runs attention.

    On a host with a GPU that is the environment already there: the engine's own packages are what is tested.
    """
    if installs_nothing(session) or not has_gpu():
        return environment(session, "full")
    python = shutil.which("python") or sys.executable
    session.log(f"this host has a GPU: running in the environment that is there ({python})")
    return python


def environment(session: nox.Session, name: str) -> str:
    """The interpreter of the shared environment ``name``, made and installed where it is missing or out of date."""
    if sys.version_info < OLDEST:
        oldest, here = ".".join(map(str, OLDEST)), ".".join(map(str, sys.version_info[:3]))
        session.error(f"attnmatrix needs Python {oldest} or newer, and nox runs on {here} ({sys.executable})")
    if installs_nothing(session):
        return sys.executable
    home = ROOT / ".nox" / name
    python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    stamp = home / "attnmatrix.stamp"
    wanted = requirements(name)
    state = hashlib.sha256("\n".join([sys.version, *wanted, read("constraints.txt")]).encode()).hexdigest()
    home.parent.mkdir(exist_ok=True)
    with FileLock(f"{home}.lock"):
        if not (python.exists() and stamp.exists() and stamp.read_text() == state):
            session.log(f"installing the environment {home.relative_to(ROOT)}")
            session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(home))
            session.run(str(python), "-m", "pip", "install", "--quiet", "-c", "constraints.txt", *wanted)
            stamp.write_text(state)
    return str(python)


def installs_nothing(session: nox.Session) -> bool:
    """Whether nox was told ``--no-venv``, for which it has no public name: it sets this backend."""
    return bool(session._runner.global_config.force_venv_backend == "none")


def requirements(name: str) -> list[str]:
    """What pyproject.toml asks for; ``light`` leaves torch and Triton out."""
    pyproject = nox.project.load_toml(ROOT / "pyproject.toml")
    project = pyproject["project"]["dependencies"]
    if name == "light":
        return [item for item in project if not item.startswith(HEAVY)] + list(
            nox.project.dependency_groups(pyproject, "lint")
        )
    return project + list(nox.project.dependency_groups(pyproject, "test"))


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is visible, asked without importing torch or touching CUDA."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and Path("/dev/nvidiactl").exists()


def read(name: str) -> str:
    """The text of a file of this repository."""
    return (ROOT / name).read_text(encoding="utf-8")
