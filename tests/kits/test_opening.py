"""Libraries are imported once, before the device is used, and a broken one is left to the kernel that asks for it."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from kits import opening
from kits.opening import open_libraries

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Slow:
    libraries = ("attnmatrix_slow_library", "attnmatrix_broken_library", "attnmatrix_absent_library")


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two libraries on the path, and the ordinals of the devices that were given a context."""
    made: list[int] = []
    note = f"import gc, pathlib\nwith pathlib.Path({str(tmp_path)!r}, 'log').open('a') as log:\n    log.write("
    (tmp_path / "attnmatrix_slow_library.py").write_text(note + "f'slow {gc.isenabled()}\\n')\n")
    (tmp_path / "attnmatrix_broken_library.py").write_text(note + "'broken\\n')\nraise OSError('no such kernel')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(opening, "_tried", set())
    monkeypatch.setattr(opening, "make_context", made.append)
    monkeypatch.delitem(sys.modules, "attnmatrix_slow_library", raising=False)
    return made


def test_once_a_process_and_beside_the_context(contexts: list[int], tmp_path: Path) -> None:
    assert gc.isenabled()
    for _ in range(2):
        open_libraries(Slow(), CUDA)  # type: ignore[arg-type]
    assert (tmp_path / "log").read_text() == "slow False\nbroken\n"
    assert contexts == [0]
    assert gc.isenabled()


def test_the_recorder_needs_none(contexts: list[int], tmp_path: Path) -> None:
    open_libraries(Slow(), CPU)  # type: ignore[arg-type]
    assert not (tmp_path / "log").exists()
    assert contexts == []


def test_a_host_without_a_driver_has_no_context() -> None:
    opening.make_context(1 << 20)
