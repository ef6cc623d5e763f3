"""What a run says about where it came from: its commit and its command line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from orchestrator.campaign.fakesuite import passing
from orchestrator.errors import OrchestratorError
from orchestrator.running import commit_of

SHA = "0123456789abcdef" * 2 + "01234567"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_a_commit_and_whether_files_changed_since(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    git(tmp_path, "tag", "v1")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(tmp_path, {"ATTNMATRIX_COMMIT": SHA}) == head, "git knows better"
    (tmp_path / "other").write_text("not tracked")
    assert commit_of(tmp_path, {}) == head
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path, {}) == f"{head}-dirty"


def test_a_host_without_git_may_name_the_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path, {}) == "unknown"
    assert commit_of(tmp_path, {"ATTNMATRIX_COMMIT": SHA}) == SHA
    assert commit_of(tmp_path, {"ATTNMATRIX_COMMIT": f"{SHA}-dirty"}) == f"{SHA}-dirty"
    for wrong in ("main", SHA[:39], f"{SHA}\n", "; reboot"):
        with pytest.raises(OrchestratorError, match="ATTNMATRIX_COMMIT"):
            commit_of(tmp_path, {"ATTNMATRIX_COMMIT": wrong})


def test_a_run_keeps_its_command_line(bench):
    suite = bench(passing(1))
    done = suite.run("--workers", "1", "--confirm", "2")
    said = json.loads((done.folder / "run.json").read_text())["argv"]
    assert said == suite.arguments("--workers", "1", "--confirm", "2")
