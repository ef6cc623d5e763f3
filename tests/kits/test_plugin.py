"""What plain pytest says of a subtest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kits
from kits import record
from tests.kits.subtests import make

ROOT = Path(__file__).parents[2]
NODE = "generated_tests/test_dense_triton.py::test_draft_extend_v2_cg[eagle_chain.total.prod_fill.x2]"


def test_a_failure_says_what_was_checked_and_how_far_it_got() -> None:
    env = {**os.environ, "ATTNMATRIX_FAULT": "F01", "ATTNMATRIX_DEVICE": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", NODE]
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=120, check=False)
    assert done.returncode == 1
    said = done.stdout.partition("attnmatrix dense.triton.draft_extend_v2_cg.eagle_chain.total.prod_fill.x2")[2]
    assert "check: metadata_invariants" in said
    assert "kv_indptr (B=4): decreases by 2 behind row 2" in said
    assert "ran: interpreted; 3 captures, " in said


def test_an_adapter_without_kernels_of_the_kit_ran_natively() -> None:
    subtest = make("kits.backends.torch_native:TorchNativeBackend", runner="eager")
    kits.run(subtest)
    assert record.latest(subtest.id).ran == {"native"}
