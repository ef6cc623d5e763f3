"""A fake suite on demand, and the orchestrator as its users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.campaign.fakesuite import write_suite
from orchestrator.devices import Lanes
from orchestrator.folder import Folder
from orchestrator.manifest import Planned
from orchestrator.running import Ended, Request, describe, execute, prepare

ROOT = Path(__file__).parents[2]


def planned(number: int, backend: str = "aa") -> Planned:
    id = f"dense.{backend}.eager.case_{number}"
    return Planned(id, f"test_dense_{backend}.py", f"test_eager[case_{number}]", "dense", backend, "eager")


@dataclass
class Done:
    """One finished command."""

    code: int
    out: str
    folder: Path
    results: dict[str, Any] = field(default_factory=dict)

    def outcomes(self) -> dict[str, str]:
        return {row["id"]: row["outcome"] for row in self.results["subtests"]}

    def row(self, id: str) -> dict[str, Any]:
        return next(row for row in self.results["subtests"] if row["id"] == id)


@dataclass
class Bench:
    """A suite with its environment. ``run`` starts ``python -m orchestrator run``."""

    home: Path
    suite: Path
    env: dict[str, str]

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "orchestrator", *arguments]

    def arguments(self, *more: str, output: str = "run") -> list[str]:
        fixed = ["--tests", str(self.suite), "--preload", "pytest", "--durations", str(self.home / "durations.json")]
        where = [] if "--resume" in more else ["--output", str(self.home / output)]
        return ["run", *fixed, *where, *more]

    def start(self, *more: str, output: str = "run", **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*self.arguments(*more, output=output)), cwd=ROOT, env=self.env, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
        )  # fmt: skip

    def run(self, *more: str, output: str = "run", timeout: float = 60) -> Done:
        return self.finish(self.start(*more, output=output), output, timeout)

    def finish(self, process: subprocess.Popen[str], output: str = "run", timeout: float = 60) -> Done:
        try:
            out, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return self.read(process.returncode, out, output)

    def call(self, *arguments: str, output: str = "run") -> Done:
        done = subprocess.run(
            self.command(*arguments), cwd=ROOT, env=self.env, text=True, capture_output=True, timeout=60, check=False
        )
        return self.read(done.returncode, done.stdout + done.stderr, output)

    def read(self, code: int, out: str, output: str) -> Done:
        path = self.home / output / "results.json"
        return Done(code, out, self.home / output, json.loads(path.read_text()) if path.exists() else {})

    @property
    def marks(self) -> Path:
        return Path(self.env["ATTNMATRIX_FAKE_MARKS"])

    def ran(self, id: str) -> list[str]:
        """The processes (and devices) in which a subtest ran."""
        path = self.marks / f"{id}.ran"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Bench]:
    """Make a bench: ``bench(["dense.aa.eager.pass_1", ...], known=..., prelude=...)``."""

    def make(ids: list[str], *, env: dict[str, str] | None = None, **options: Any) -> Bench:
        marks = tmp_path / "marks"
        marks.mkdir(exist_ok=True)
        ours = {"ATTNMATRIX_FAKE_MARKS": str(marks), "ATTNMATRIX_DEVICE": "cpu", "TERM": "dumb"} | (env or {})
        return Bench(tmp_path, write_suite(tmp_path / "suite", ids, **options), {**os.environ, **ours})

    return make


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Run a fake suite with this process as the supervisor, on lanes of these devices."""
    monkeypatch.setenv("ATTNMATRIX_FAKE_MARKS", str(tmp_path))

    def run(
        ids: list[str], *devices: str, kind: str = "cpu", prelude: dict[str, str] | None = None, **options: Any
    ) -> Ended:
        suite = write_suite(tmp_path / "suite", ids, prelude=prelude)
        request = Request(**{"tests": suite, "shards": 1, "preload": ("pytest",), "deadline": 2.0} | options)
        lanes = Lanes(list(devices or ["cpu"]), kind, "")
        manifest, plan = prepare(request, kind)
        folder = Folder(tmp_path / "run")
        folder.create()
        described = describe(request, manifest, plan, lanes)
        folder.save(described, plan)
        return execute(request, folder, described, plan, lanes, folder.lock(), lambda supervisor, attempt: None)

    return run
