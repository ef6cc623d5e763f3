"""Libraries are imported once, before the device is used, and a broken one is left to the kernel that asks for it."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from generator.matrix import Project
from kits import backends, opening
from kits.opening import open_libraries
from orchestrator.planning import LIBRARIES

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


class Driver:
    """Notes the calls that reach the driver; ``fails`` names one that returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuDeviceGet":
                arguments[0]._obj.value = 70 + arguments[1]
            if name == "cuDevicePrimaryCtxRetain":
                self.calls.append(str(arguments[1].value))
            return int(name == self.fails)

        return call


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ("", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "73"]),
        ("cuDeviceGet", ["cuInit", "cuDeviceGet"]),
        ("cuInit", ["cuInit"]),
    ],
)
def test_the_context_is_that_of_the_device(fails: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(fails)
    monkeypatch.setattr(opening.ctypes, "CDLL", lambda name: driver)
    opening.make_context(3)
    assert driver.calls == calls


def test_a_host_without_a_driver_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(opening.ctypes, "CDLL", load)
    opening.make_context(0)


def test_the_planner_counts_what_backends_import() -> None:
    """It cannot ask them: they need torch."""
    spec = Project.open(Path(__file__).parents[2] / "suite.toml").spec
    slow = {name: backends.load(backend.adapter).libraries for name, backend in spec.backends.items()}
    assert {name for name, modules in slow.items() if modules} == set(LIBRARIES)
    for name, (library, _) in LIBRARIES.items():
        shared = {other for other, (theirs, _) in LIBRARIES.items() if theirs == library}
        assert shared == {other for other, modules in slow.items() if modules[:1] == slow[name][:1]}
