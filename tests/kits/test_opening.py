"""Libraries are imported once, before the device is used, and a broken one is left to the kernel that asks for it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import kits
from generator.matrix import Project
from kits import backends, opening, runners
from kits.errors import Unavailable
from kits.opening import open_gpu
from orchestrator.planning import LIBRARIES
from tests.kits.subtests import make

LIBRARIES_OF_THREE_KINDS = ("attnmatrix_slow_library", "attnmatrix_broken_library", "attnmatrix_absent_library")


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two libraries on the path, and the contexts that were made."""
    made: list[str] = []
    note = f"import gc, pathlib\nwith pathlib.Path({str(tmp_path)!r}, 'log').open('a') as log:\n    log.write("
    (tmp_path / "attnmatrix_slow_library.py").write_text(note + "f'slow {gc.isenabled()}\\n')\n")
    (tmp_path / "attnmatrix_broken_library.py").write_text(note + "'broken\\n')\nraise OSError('no such kernel')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(opening, "_tried", set())

    def make() -> None:
        made.append("context" if (tmp_path / "log").exists() else "context first")

    monkeypatch.setattr(opening, "make_context", make)
    monkeypatch.delitem(sys.modules, "attnmatrix_slow_library", raising=False)
    monkeypatch.setattr(opening, "_made", [])
    return made


def test_once_a_process_and_before_the_context(contexts: list[str], tmp_path: Path) -> None:
    assert gc.isenabled()
    for _ in range(2):
        open_gpu(LIBRARIES_OF_THREE_KINDS)
    assert (tmp_path / "log").read_text() == "slow False\nbroken\n"
    assert contexts == ["context"]
    assert gc.isenabled()


def test_without_a_library_there_is_a_context_all_the_same(contexts: list[str]) -> None:
    open_gpu(())
    assert contexts == ["context first"]


def test_a_gpu_is_opened_before_anything_asks_for_it(contexts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking whether there is one initialises the driver, out of turn."""
    monkeypatch.setenv("ATTNMATRIX_DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: contexts.append("asked") and False)
    with pytest.raises(Unavailable, match="torch sees no CUDA device"):
        kits.run(make("kits.backends.torch_native:TorchNativeBackend", runner="eager"))
    assert contexts == ["context first", "asked"]


def test_what_is_imported_is_the_backends(contexts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, ...]] = []
    monkeypatch.setenv("ATTNMATRIX_DEVICE", "cuda")
    monkeypatch.setattr(runners, "open_gpu", opened.append)
    for adapter in ("kits.backends.flex_attention:FlexAttentionBackend", "no.such.module:Backend"):
        with pytest.raises(Unavailable, match="torch sees no CUDA device"):
            kits.run(make(adapter, runner="eager"))
    assert opened == [backends.load("kits.backends.flex_attention:FlexAttentionBackend").libraries, ()]


def test_an_adapter_that_breaks_is_no_matter_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attnmatrix_broken_adapter.py").write_text("raise RuntimeError('No CUDA GPUs are available')")
    monkeypatch.syspath_prepend(tmp_path)
    assert backends.libraries_of("attnmatrix_broken_adapter:Backend") == ()


def test_the_recorder_needs_none(contexts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNMATRIX_DEVICE", "cpu")
    kits.run(make("kits.backends.torch_native:TorchNativeBackend", runner="eager"))
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
        ("", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "70"]),
        ("cuDeviceGet", ["cuInit", "cuDeviceGet"]),
        ("cuInit", ["cuInit"]),
    ],
)
def test_the_context_is_that_of_the_device(fails: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(fails)
    monkeypatch.setattr(opening.ctypes, "CDLL", lambda name: driver)

    @contextmanager
    def in_turn() -> Iterator[None]:
        driver.calls.append("turn")
        yield
        driver.calls.append("next")

    monkeypatch.setattr(opening, "in_turn", in_turn)
    opening.make_context()
    assert driver.calls == ["turn", *calls, "next"]


def test_a_host_without_a_driver_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(opening.ctypes, "CDLL", load)
    opening.make_context()


IN_TURN = """
import sys, time
from kits import opening
with opening.in_turn():
    print("in", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Another process whose turn it is, until its input ends."""
    monkeypatch.setattr(opening.tempfile, "gettempdir", lambda: str(tmp_path))
    pipe = subprocess.PIPE
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", IN_TURN], stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        yield process
        process.kill()


def test_contexts_are_made_one_after_the_other(holder: subprocess.Popen[str]) -> None:
    """The other's turn ends with its life, too."""
    entered: list[bool] = []

    def enter() -> None:
        with opening.in_turn():
            entered.append(True)

    waiting = threading.Thread(target=enter)
    waiting.start()
    waiting.join(0.2)
    assert not entered
    holder.kill()
    waiting.join(10.0)
    assert entered


def test_a_child_does_not_keep_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library has forked meanwhile lives on, with the same open file."""
    monkeypatch.setattr(opening.tempfile, "gettempdir", lambda: str(tmp_path))
    with opening.in_turn():
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        began = time.monotonic()
        with opening.in_turn():
            assert time.monotonic() - began < opening.PATIENCE / 2
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_nobody_waits_for_ever(holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "PATIENCE", 0.1)
    with opening.in_turn():
        assert holder.poll() is None


def test_nobody_waits_where_no_lock_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    with opening.in_turn():
        pass


def test_the_planner_counts_what_backends_import() -> None:
    """It cannot ask them: they need torch."""
    spec = Project.open(Path(__file__).parents[2] / "suite.toml").spec
    slow = {name: backends.load(backend.adapter).libraries for name, backend in spec.backends.items()}
    assert {name for name, modules in slow.items() if modules} == set(LIBRARIES)
    for name, (library, _) in LIBRARIES.items():
        shared = {other for other, (theirs, _) in LIBRARIES.items() if theirs == library}
        assert shared == {other for other, modules in slow.items() if modules[:1] == slow[name][:1]}
