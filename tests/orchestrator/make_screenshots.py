"""Pictures for docs/: ``python tests/orchestrator/make_screenshots.py [TESTS [IDS...]]`` runs a suite and shoots.

The terminal is drawn by rich from the very frames of the run, and turned into pixels by the browser.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from browser import Browser
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from orchestrator import progress, running  # noqa: E402
from orchestrator.devices import choose_lanes  # noqa: E402
from orchestrator.folder import Folder  # noqa: E402
from orchestrator.reports import text, write_reports  # noqa: E402
from orchestrator.running import Request, describe, execute, prepare  # noqa: E402
from orchestrator.selection import Selection  # noqa: E402

WIDTH = 118


class Recorder(progress.LiveProgress):
    """Live progress that keeps what a terminal would show two thirds into the run."""

    def __init__(self) -> None:
        super().__init__(open(os.devnull, "w"))  # noqa: SIM115
        self.sheet = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
        self.taken = False

    def say(self, line: str) -> None:
        if not self.taken:
            self.sheet.print(line, markup=False, highlight=False, style="red" if line[:1].isupper() else None)

    def draw(self, supervisor) -> None:
        if not self.taken and self.done >= 2 * supervisor.left and all(w.inside for w in supervisor.workers.values()):
            self.sheet.print(self.render(supervisor))
            self.taken = True


def svg(console: Console, path: Path, title: str) -> Path:
    path.write_text(f"<!doctype html><style>body{{margin:0}}</style>{console.export_svg(title=title)}")
    return path


def main() -> None:
    tests = Path(sys.argv[1] if len(sys.argv) > 1 else "generated_tests")
    target = ROOT / "docs"
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, choose_lanes(None) as lanes:
        home = Path(temporary)
        request = Request(tests=tests, selection=Selection(ids=tuple(sys.argv[2:])))
        manifest, plan = prepare(request, lanes.kind)
        folder = Folder(home / "run")
        folder.create()
        run = describe(request, manifest, plan, lanes)
        folder.save(run, plan)
        recorder = Recorder()
        recorder.say(f"{len(plan.subtests)} subtests in {len(plan.shards)} shards. {lanes.sentence}")
        ended = execute(request, folder, run, plan, lanes, folder.lock(), recorder, recorder.start)
        recorder.end()
        running.remember(run, ended.verdict, None)
        write_reports(folder, ended.verdict)
        final = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
        final.print(Text(text.summary(ended.verdict, ended.wall)))
        pictures = {
            "terminal_live.png": svg(recorder.sheet, home / "live.html", "nox -s gpu_matrix"),
            "terminal_summary.png": svg(final, home / "summary.html", "nox -s gpu_matrix"),
        }
        tab = Browser(home, 1300, 1000)
        try:
            for name, page in pictures.items():
                tab.open(page, ready="true")
                tab.shoot(target / name, "svg")
            tab.open(folder.path / "index.html")
            for scheme in ("light", "dark"):
                tab.scheme(scheme)
                tab.shoot(target / f"page_{scheme}.png")
            tab.scheme("light")
            tab.click("#matrix tbody tr:nth-child(5) td:nth-of-type(2) button")
            tab.shoot(target / "page_detail.png")
        finally:
            tab.close()


if __name__ == "__main__":
    main()
