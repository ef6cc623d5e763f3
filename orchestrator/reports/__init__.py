"""What is written from a verdict: text, JUnit XML, Markdown, GitHub annotations and one HTML page.

Every report reads a ``Verdict`` and nothing else. Names and messages come from foreign code: each writer escapes them
for its own format.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from orchestrator.folder import Folder
from orchestrator.reports import github, junit, markdown, page, results
from orchestrator.verdict import Verdict

WRITERS: dict[str, Callable[[Verdict], str]] = {
    "results.json": results.render,
    "junit.xml": junit.render,
    "summary.md": markdown.render,
    "index.html": page.render,
}


def write_reports(folder: Folder, verdict: Verdict) -> None:
    """Write all files into the run folder, and what a GitHub job shows."""
    for name, render in WRITERS.items():
        folder.write_text(name, render(verdict))
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with open(summary, "a", encoding="utf-8") as file:
                file.write((folder.path / "summary.md").read_text(encoding="utf-8"))
        except OSError as error:
            print(f"the job summary cannot be written: {error}", file=sys.stderr)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        print("\n".join(github.lines(verdict)))
