"""What is written from a verdict: text, JUnit XML, Markdown, GitHub annotations and one HTML page.

Every report reads a ``Verdict`` and nothing else. Names and messages come from foreign code: each writer escapes them
for its own format.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys

from orchestrator.folder import Folder
from orchestrator.verdict import Verdict

WRITERS = {"results.json": "results", "junit.xml": "junit", "summary.md": "markdown", "index.html": "page"}
"""File names and the modules here that write them, imported when they are needed: templates and XML take a while."""


def render(name: str, verdict: Verdict) -> str:
    """The text of one report."""
    text: str = importlib.import_module(f"orchestrator.reports.{WRITERS[name]}").render(verdict)
    return text


def write_reports(folder: Folder, verdict: Verdict) -> None:
    """Write all files into the run folder, and what a GitHub job shows."""
    then = f"`python -m orchestrator report {shlex.quote(str(folder.path))}`"
    for name in WRITERS:
        folder.write_text(name, render(name, verdict), then)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with open(summary, "a", encoding="utf-8") as file:
                file.write((folder.path / "summary.md").read_text(encoding="utf-8"))
        except OSError as error:
            print(f"the job summary cannot be written: {error}", file=sys.stderr)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        from orchestrator.reports import github

        print("\n".join(github.lines(verdict)))
