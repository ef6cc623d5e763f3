"""What has to be installed, looked for before anything runs.

On a host with a GPU nothing is installed: the environment is the engine's own. A package that only the reports need
must be missed at the start and not when the run is over, and torch before workers die for want of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from orchestrator.errors import OrchestratorError

REPORTS = ("jinja2", "junitparser")
RUN = ("filelock", "jinja2", "junitparser", "packaging", "pytest", "rich")
"""What is used of the groups ``orchestrator`` and ``runner`` of pyproject.toml; each package is imported by its own
name."""
GROUPS = {"orchestrator": REPORTS, "runner": RUN}
NEEDED = {"run": "runner", "merge": "orchestrator", "report": "orchestrator"}
"""Which group a command needs."""
SUBTESTS = ("torch",)
"""What subtests need beside it. None of the groups brings that: on a GPU it is what is tested."""


def require(command: str, others: Sequence[str] = ()) -> None:
    """Raise O509 with all that ``command``, and beside it ``others``, lack here, and what helps."""
    group = NEEDED.get(command, "")
    lacking = [name for name in GROUPS.get(group, ()) if not installed(name)]
    missing = lacking + [name for name in others if name not in lacking and not installed(name)]
    if not missing:
        return
    verb, it = ("is", "it") if len(missing) == 1 else ("are", "them")
    hint = f"install {it}, or run with the `python` that has {it}"
    if lacking:
        hint += f"; for {', '.join(lacking)}:\n  python -m pip install -c constraints.txt --group {group}"
    raise OrchestratorError("O509", f"{', '.join(missing)} {verb} not installed here", hint)


def installed(name: str) -> bool:
    """Whether a package can be imported, without doing so."""
    return find_spec(name) is not None
