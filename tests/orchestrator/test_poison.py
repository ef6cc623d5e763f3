"""A kernel that really writes where no memory is: on a CPU its process dies, on a GPU its context does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IDS = [f"dense.triton.eager.{case}" for case in ("tiny_p1", "zero_page", "page_plus2")]


def test_a_kernel_out_of_bounds_takes_nothing_else_along(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "orchestrator",
        "run",
        "--plain",
        "--workers",
        "1",
        "--output",
        str(tmp_path / "run"),
    ]
    command += ["--plugin", "orchestrator.campaign.poison", "--durations", str(tmp_path / "durations.json"), *IDS]
    env = {**os.environ, "ATTNMATRIX_POISON": IDS[1]}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    rows = json.loads((tmp_path / "run" / "results.json").read_text())["subtests"]
    assert {row["id"]: row["outcome"] for row in rows} == {
        IDS[0]: "passed",
        IDS[1]: "crashed",
        IDS[2]: "passed",
    }
    (crashed,) = (row for row in rows if row["outcome"] == "crashed")
    assert "SIGSEGV" in crashed["message"] or "illegal memory access" in crashed["message"]
