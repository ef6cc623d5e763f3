"""Launchers of slow libraries: workers that begin with one find it imported, and a run never depends on that."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator import crew, launcher, processes, running
from orchestrator.campaign.acts import until
from orchestrator.campaign.audit import survivors
from orchestrator.campaign.fakesuite import passing
from orchestrator.devices import Lanes
from orchestrator.events import EventTail
from orchestrator.handles import LauncherHandle, Worker
from orchestrator.manifest import Planned
from orchestrator.planning import LIBRARIES, Block
from orchestrator.running import Ended, launched
from orchestrator.scheduling import Scheduler
from tests.orchestrator.conftest import ROOT, planned

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

    def start(library: str = "", ids: list[str] = IDS, **options: Any) -> Ended:
        (tmp_path / "flashinfer.py").write_text(IMPORTED + library)
        usual = {"kind": "NVIDIA H200", "prelude": prelude, "shards": 4, "deadline": 60.0}
        return run_here(ids, *GPUS, **usual | options)

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


@pytest.mark.parametrize("unkillable", [False, True], ids=["hangs", "hangs in the kernel"])
def test_a_library_that_never_comes_up_is_left_to_the_workers(run, tmp_path, monkeypatch, unkillable) -> None:
    monkeypatch.setattr(crew, "START_LIMIT", 6.0)
    monkeypatch.setattr(crew, "END_LIMIT", 0.5)
    held: list[LauncherHandle] = []
    if unkillable:
        monkeypatch.setattr(LauncherHandle, "kill", lambda self: held.append(self))
    ended = run("import time; time.sleep(600)")
    for handle in held:
        handle.process.kill()
        handle.process.wait()
    assert ended.verdict.counts == {"passed": len(IDS)}
    assert ended.verdict.remarks == []
    assert log(tmp_path) == "the launcher of flashinfer is not up after 6 s; declined\n"


def test_a_launcher_that_says_nothing_more_costs_nobody_his_time(run) -> None:
    """Its line is closed, and it lives on: whoever waited for it would find all others over their deadline."""
    ids = [f"dense.{name}.eager.slow_{number}" for name in (SLOW, QUICK) for number in range(12)]
    ended = run("import time; os.closerange(3, 64); time.sleep(600)", ids, deadline=4.0)
    assert ended.verdict.counts == {"passed": len(ids)}


def test_what_a_library_has_started_ends_with_its_launcher(run, tmp_path) -> None:
    child = (
        f"import subprocess; open({str(tmp_path / 'child')!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    )
    assert run(f"{child}; os._exit(3)").verdict.counts == {"passed": len(IDS)}
    assert processes.dead(int((tmp_path / "child").read_text()))


def test_workers_that_never_were_are_no_restarts(run) -> None:
    assert run("os._exit(3)", max_restarts=0).verdict.counts == {"passed": len(IDS)}


def test_a_launcher_that_cannot_be_started_is_done_without(run, tmp_path, monkeypatch) -> None:
    start = subprocess.Popen

    def refuse(argv, **options):
        if "--library" in argv:
            raise OSError(12, "Cannot allocate memory")
        return start(argv, **options)

    monkeypatch.setattr("orchestrator.handles.subprocess.Popen", refuse)
    assert run().verdict.counts == {"passed": len(IDS)}
    assert "cannot start the launcher of flashinfer: Cannot allocate memory" in log(tmp_path)


def test_new_interpreters_are_forked_from_no_library(run, tmp_path) -> None:
    assert run(ids=passing(1, (SLOW, QUICK)), interpreters=True).verdict.counts == {"passed": 2}
    assert not list(tmp_path.glob("imported.*"))


def test_a_first_launcher_that_initialised_cuda_ends_the_run(run_here, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "driven.py").write_text(DRIVEN)
    ended = run_here(passing(2), preload=("driven", "pytest"))
    assert ended.error is not None
    assert ended.error.code == "O502"
    assert "importing driven, pytest initialised CUDA" in str(ended.error)
    assert ended.verdict.counts == {"not_run": 4}


def test_a_supervisor_that_is_killed_leaves_no_launcher_that_imports(bench) -> None:
    """It would keep the folder locked."""
    suite = bench(passing(1))
    suite.env["PYTHONPATH"] = str(suite.home)
    (suite.home / "endless.py").write_text(IMPORTED + "import time; time.sleep(600)")
    process = suite.start("--preload", "endless")
    until(lambda: list(suite.marks.glob("imported.*")))
    process.kill()
    suite.finish(process)
    until(lambda: not survivors(str(suite.marks)), 5)
    assert suite.run("--resume", str(suite.home / "run")).code == 0


# One crew by itself


@pytest.fixture
def crew_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A crew with a library of this source, which may begin once ``go`` is there, and a worker that waits for it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    began: list[crew.Crew] = []

    def begin(library: str = "") -> tuple[crew.Crew, Worker]:
        wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        (tmp_path / "flashinfer.py").write_text(wait + library)
        mine = crew.Crew(("pytest",), {}, tmp_path, (), ["flashinfer"])
        began.append(mine)
        ours, theirs = socket.socketpair()
        worker = Worker(
            "w0001", 0, "GPU-a", False, ours, EventTail(tmp_path / "w0001.jsonl"), tmp_path / "w0001.log",
            mine.launcher_of("flashinfer"), since=0.0,
        )  # fmt: skip
        mine.spawn({"name": worker.name, "fresh": False}, worker, theirs)
        return mine, worker

    yield begin
    (tmp_path / "go").touch()
    for mine in began:
        mine.stop()


def listen(mine: crew.Crew, ready: Callable[[], object]) -> list[Worker]:
    """Hear news until ``ready``; returns who has ended."""
    ended: list[Worker] = []

    def heard() -> object:
        ended.extend(mine.wait(0.05)[1])
        return ready()

    until(heard)
    return ended


def test_a_worker_is_waited_for_from_when_its_launcher_is_up(crew_of, tmp_path) -> None:
    mine, worker = crew_of()
    (tmp_path / "go").touch()
    listen(mine, lambda: worker.launcher.up)
    assert worker.since > 0
    assert worker.launcher.library == "flashinfer"


def test_a_launcher_that_declines_hands_over_who_waits(crew_of, tmp_path) -> None:
    mine, worker = crew_of("raise RuntimeError")
    main = mine.launcher_of("")
    listen(mine, lambda: main.up)
    busy = Worker("w0002", 1, "cpu", False, worker.channel, worker.tail, worker.log, main, pid=1, since=0.0)
    mine.workers["w0002"] = busy
    (tmp_path / "go").touch()
    listen(mine, lambda: "flashinfer" not in mine.launchers)
    del mine.workers["w0002"]
    assert worker.launcher is main
    assert worker.since > 0
    assert busy.since == 0, "whoever is at work gets no more time"
    listen(mine, lambda: worker.pid)


def test_a_worker_that_is_killed_before_it_was_forked_has_ended(crew_of, tmp_path) -> None:
    """And its launcher, which has done nothing wrong, goes on."""
    mine, worker = crew_of()
    mine.kill(worker, "device")
    assert not worker.launcher.pending
    assert mine.wait(0.05)[1] == [worker]
    assert worker.status == signal.SIGKILL
    mine.kill(worker, "device")
    mine.forget(worker)
    assert mine.wait(0.05)[1] == []
    (tmp_path / "go").touch()
    assert listen(mine, lambda: mine.launchers["flashinfer"].up) == []


def test_a_worker_that_was_lost_with_its_launcher_ends_once(crew_of) -> None:
    mine, worker = crew_of()
    mine.kill(worker, "device")
    assert mine.replace(worker.launcher) == [worker]
    mine.forget(worker)
    assert mine.wait(0.05)[1] == []


def test_an_end_waits_for_no_import(crew_of, monkeypatch) -> None:
    mine, worker = crew_of()
    monkeypatch.setattr(LauncherHandle, "reap", lambda *_: None)
    mine.stop()
    assert worker.launcher.process.wait(timeout=10) == -signal.SIGKILL
    monkeypatch.undo()


def test_after_the_end_nobody_is_killed_by_an_id_that_may_be_anothers(crew_of, tmp_path, monkeypatch) -> None:
    mine, worker = crew_of()
    (tmp_path / "go").touch()
    listen(mine, lambda: worker.pid)
    mine.stop()
    killed: list[int] = []
    monkeypatch.setattr(processes, "kill_group", killed.append)
    mine.kill(worker, "device")
    assert not killed


def test_who_ended_beside_a_launcher_that_died_is_told_too(crew_of) -> None:
    """Once each; only who was at work is the launcher's loss."""
    mine, lost = crew_of()
    both = dataclasses.replace(lost, name="w0002", killed="deadline", status=signal.SIGKILL)
    other = dataclasses.replace(lost, name="w0003", launcher=mine.launcher_of(""))
    mine.workers |= {worker.name: worker for worker in (both, other)}
    died = lost.launcher
    died.kill()
    until(died.dead)
    mine.withdrawn = [other, both]
    _, ended, gone = mine.wait(0.0)
    assert gone == [died]
    assert ended == [other, lost, both]
    assert [worker.killed for worker in ended] == ["", "launcher", "deadline"]
    assert [worker.status for worker in ended] == [None, signal.SIGKILL, signal.SIGKILL]


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


@pytest.mark.parametrize("before", [None, "0"])
def test_how_torch_asks_is_the_users_again_afterwards(monkeypatch, before) -> None:
    monkeypatch.setenv(launcher.ASK_NVML, before or "")  # so that it is restored
    if before is None:
        monkeypatch.delenv(launcher.ASK_NVML)
    assert launcher.open_library("json") == ""
    assert os.environ.get(launcher.ASK_NVML) == before


def test_launchers_are_for_gpus_with_cores_to_spare(monkeypatch) -> None:
    """The slowest libraries first; none that is not installed, or with which no lane begins."""
    rows = [planned(number, backend) for number, backend in enumerate([*LIBRARIES, "triton"])]

    def wanted(queues: list[list[Planned]], lanes: int = 16, kind: str = "NVIDIA H200", fresh: bool = False):
        blocks = [[Block(0, row.file, [row], 1.0) for row in queue] for queue in queues]
        scheduler = Scheduler(blocks, 1, fresh, lambda *_: False)
        return launched(scheduler, Lanes(["x"] * lanes, kind, ""))

    queues = [[row] for row in rows]
    monkeypatch.setattr(running, "installed", lambda name: True)
    monkeypatch.setattr(running, "cpu_count", lambda: 16)
    everything = ("torch._inductor.compile_fx", "flashinfer", "flash_attn.cute")
    assert wanted(queues) == wanted([rows], fresh=True) == everything
    assert wanted(queues, kind="cpu") == wanted([rows[::-1]]) == ()
    assert wanted(queues, lanes=2) == ("torch._inductor.compile_fx", "flash_attn.cute")
    monkeypatch.setattr(running, "installed", lambda name: name != "flash_attn")
    for cores, number in ((16, 2), (6, 2), (5, 1), (4, 1), (2, 0), (1, 0)):
        monkeypatch.setattr(running, "cpu_count", lambda cores=cores: cores)
        assert wanted(queues) == everything[:number]


@pytest.mark.parametrize(("answer", "initialised"), [(0, True), (3, False)])
def test_cuda_past_torch_is_seen(tmp_path, answer: int, initialised: bool) -> None:
    """The driver answers with 3, CUDA_ERROR_NOT_INITIALIZED, before ``cuInit``. Its file has a longer name than the one
    by which it is loaded."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    any_library = next(line.split()[-1] for line in mapped if ".so" in line)
    (tmp_path / "libcuda.so.570.86.15").write_bytes(Path(any_library).read_bytes())
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.570.86.15")
    code = f"""
import ctypes, types
from orchestrator import launcher
driver = types.SimpleNamespace(cuDeviceGetCount=lambda count: {answer})
load, ctypes.CDLL = ctypes.CDLL, lambda name: driver
assert launcher.cuda_is_initialized() is False, "what is not loaded cannot be initialised"
load({str(tmp_path / "libcuda.so.1")!r})
assert launcher.cuda_is_initialized() is {initialised}
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
