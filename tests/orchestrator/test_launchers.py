"""Launchers of slow libraries: workers that begin with one find it imported, and a run never depends on that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import crew, launcher, running
from orchestrator.campaign.fakesuite import passing
from orchestrator.planning import LIBRARIES, Block, slow_libraries
from orchestrator.running import Ended, launched
from orchestrator.scheduling import Scheduler
from tests.orchestrator.test_warm_starts import planned

GPUS = ("GPU-a", "GPU-b", "GPU-a", "GPU-b")
SLOW, QUICK = "flashinfer", "aa"
IDS = passing(12, (SLOW, QUICK))
NOTE = """
import os, sys
open(os.path.join(os.environ["ATTNMATRIX_FAKE_MARKS"], f"{name}.{{os.getpid()}}.{{'flashinfer' in sys.modules}}"), "w")
"""
"""What a module of the fake suite leaves behind when a worker collects it."""
IMPORTED = """
import os
open(os.path.join(os.environ["ATTNMATRIX_FAKE_MARKS"], f"imported.{os.getpid()}"), "w")
"""


@pytest.fixture
def run(run_here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Run on pretended GPUs, with a library of this source."""
    monkeypatch.setattr(running, "cpu_count", lambda: 16)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    prelude = {f"test_dense_{name}.py": NOTE.format(name=name) for name in (SLOW, QUICK)}

    def start(library: str = "", ids: list[str] = IDS) -> Ended:
        (tmp_path / "flashinfer.py").write_text(IMPORTED + library)
        return run_here(ids, *GPUS, kind="NVIDIA H200", prelude=prelude, shards=4, deadline=60.0)

    return start


def notes(home: Path, name: str) -> dict[int, bool]:
    """By process: whether it found the library imported."""
    return {int(path.suffixes[0][1:]): path.suffix == ".True" for path in home.glob(f"{name}.*.*")}


def log(home: Path) -> str:
    return (home / "run" / "logs" / "launcher-flashinfer.log").read_text()


def test_a_slow_library_is_imported_once_and_found_by_its_workers(run, tmp_path) -> None:
    ended = run()
    assert ended.verdict.counts == {"passed": len(IDS)}
    assert ended.verdict.remarks == []
    assert len(list(tmp_path.glob("imported.*"))) == 1
    assert len(notes(tmp_path, SLOW)) > 1
    assert all(notes(tmp_path, SLOW).values())
    assert not all(notes(tmp_path, QUICK).values()), "the others did not wait for it"
    assert "declined" not in log(tmp_path)


DRIVEN = """
import sys, types
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))
"""
THREADED = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("raise RuntimeError('no driver')", "flashinfer cannot be imported: RuntimeError('no driver')"),
        ("import sys; sys.exit(2)", "flashinfer cannot be imported: SystemExit(2)"),
        (DRIVEN, "importing flashinfer initialised CUDA"),
        (THREADED, "importing flashinfer started a thread"),
    ],
    ids=["raises", "exits", "initialises CUDA", "starts a thread"],
)
def test_a_library_that_cannot_be_had_this_way_is_left_to_the_workers(run, tmp_path, library, words) -> None:
    ended = run(library)
    assert ended.verdict.counts == {"passed": len(IDS)}
    assert ended.verdict.remarks == [], "it is a matter of seconds, not of the verdict"
    assert notes(tmp_path, SLOW)
    assert not any(notes(tmp_path, SLOW).values())
    assert f"declined: {words}" in log(tmp_path)


def test_a_library_that_kills_its_launcher_is_left_to_the_workers(run, tmp_path) -> None:
    ended = run("os._exit(3)")
    assert ended.verdict.counts == {"passed": len(IDS)}
    assert ended.verdict.remarks == ["the launcher of flashinfer died; its workers were replaced"]
    assert not any(notes(tmp_path, SLOW).values())


def test_a_library_that_never_comes_up_is_left_to_the_workers(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(crew, "START_LIMIT", 6.0)
    ended = run("import time; time.sleep(600)")
    assert ended.verdict.counts == {"passed": len(IDS)}
    assert ended.verdict.remarks == ["the launcher of flashinfer died; its workers were replaced"]


def test_the_launcher_of_a_library_may_die_at_work(run, tmp_path) -> None:
    """Its workers run again, forked from the one that every run has."""
    ids = [*IDS, f"dense.{SLOW}.eager.once_killlauncher"]
    ended = run(ids=ids)
    assert ended.verdict.counts == {"passed": len(ids)}
    assert "the launcher of flashinfer died; its workers were replaced" in ended.verdict.remarks
    assert "the launcher died; its workers were replaced" not in ended.verdict.remarks
    assert set(notes(tmp_path, SLOW).values()) == {True, False}


def test_while_a_library_is_imported_torch_leaves_cuda_alone(run, tmp_path) -> None:
    run(f"import os; assert os.environ[{launcher.ASK_NVML!r}] == '1'")
    assert "declined" not in log(tmp_path)
    assert launcher.ASK_NVML not in os.environ


def test_launchers_are_for_gpus_with_cores_to_spare(monkeypatch) -> None:
    """The slowest libraries first; none that is not installed."""
    rows = [planned(number, backend) for number, backend in enumerate([*LIBRARIES, "triton"])]
    blocks = [Block(0, row.file, [row], 1.0) for row in rows]
    scheduler = Scheduler([blocks], 1, False, lambda *_: False)
    everything = slow_libraries(rows)
    assert everything == ["torch._inductor.compile_fx", "flashinfer", "flash_attn.cute"]
    monkeypatch.setattr(running, "installed", lambda name: name != "flash_attn")
    for cores, number in ((16, 2), (6, 2), (5, 1), (4, 1), (2, 0), (1, 0)):
        monkeypatch.setattr(running, "cpu_count", lambda cores=cores: cores)
        assert launched(scheduler, "NVIDIA H200") == tuple(everything[:number])
        assert launched(scheduler, "cpu") == ()
    assert launched(Scheduler([[blocks[-1]]], 1, False, lambda *_: False), "NVIDIA H200") == ()


@pytest.mark.parametrize(("answer", "initialised"), [(0, True), (3, False)])
def test_cuda_past_torch_is_seen(monkeypatch, answer: int, initialised: bool) -> None:
    """The driver answers with 3, CUDA_ERROR_NOT_INITIALIZED, before ``cuInit``."""

    class Driver:
        def __init__(self, name: str) -> None:
            pass

        def cuDeviceGetCount(self, count: object) -> int:
            return answer

    assert launcher.cuda_is_initialized() is False
    monkeypatch.setattr(launcher, "DRIVER", "libc.so")
    monkeypatch.setattr(launcher.ctypes, "CDLL", Driver)
    assert launcher.cuda_is_initialized() is initialised
    monkeypatch.setattr(launcher, "DRIVER", "libnothing.so")
    assert launcher.cuda_is_initialized() is False, "what is not loaded cannot be initialised"
