"""What the orchestrator itself needs installed, looked for before anything runs.

On a host with a GPU nothing is installed: the environment is the engine's own. A package that only the reports need
must be missed at the start and not when the run is over.
"""

from __future__ import annotations

from importlib.util import find_spec

from orchestrator.errors import OrchestratorError

REPORTS = ("jinja2", "junitparser")
RUN = ("filelock", "jinja2", "junitparser", "packaging", "pytest", "rich")
"""The groups ``orchestrator`` and ``runner`` of pyproject.toml; each package is imported by its own name."""
NEEDED = {"run": RUN, "merge": REPORTS, "report": REPORTS}


def require(command: str) -> None:
    """Raise O509 with the line that installs what ``command`` lacks here."""
    missing = [name for name in NEEDED.get(command, ()) if find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        verb = "is" if len(missing) == 1 else "are"
        raise OrchestratorError(
            "O509", f"{', '.join(missing)} {verb} not installed here",
            f"python -m pip install -c constraints.txt {names}",
        )  # fmt: skip
