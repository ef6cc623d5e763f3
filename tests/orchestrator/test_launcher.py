"""The launcher, and the crew that it forks: who is waited for, who is killed, and what is left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import crew, processes
from orchestrator.campaign.acts import until
from orchestrator.campaign.audit import survivors
from orchestrator.campaign.fakesuite import passing
from orchestrator.events import EventTail
from orchestrator.handles import LauncherHandle, Worker
from tests.orchestrator.conftest import ROOT

IMPORTED = """
import os
open(os.path.join(os.environ["ATTNMATRIX_FAKE_MARKS"], f"imported.{os.getpid()}"), "w")
"""
DRIVEN = """
import sys, types
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: True))
"""


def test_a_launcher_that_initialised_cuda_ends_the_run(run_here, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "driven.py").write_text(DRIVEN)
    ended = run_here(passing(2), preload=("driven", "pytest"))
    assert ended.error is not None
    assert ended.error.code == "O502"
    assert "importing driven, pytest initialised CUDA" in str(ended.error)
    assert ended.verdict.counts == {"not_run": 4}


def test_a_launcher_that_never_comes_up_ends_the_run(run_here, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(crew, "START_LIMIT", 1.0)
    (tmp_path / "endless.py").write_text("import time; time.sleep(600)")
    ended = run_here(passing(1), preload=("endless",))
    assert str(ended.error).startswith("error O502: the launcher is not up after 1 s")


def test_a_launcher_that_cannot_be_started_ends_the_run(run_here, monkeypatch) -> None:
    def refuse(argv, **options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("orchestrator.handles.subprocess.Popen", refuse)
    ended = run_here(passing(1))
    assert str(ended.error).startswith("error O502: cannot start the launcher: Cannot allocate memory")


def test_workers_that_never_were_are_no_restarts(run_here, tmp_path, monkeypatch) -> None:
    """The launcher dies once while it imports, and the workers that it was asked for are asked for again."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    source = f"import os, pathlib\nmark = pathlib.Path({str(tmp_path / 'once')!r})\n"
    (tmp_path / "mortal.py").write_text(source + "if not mark.exists(): mark.touch(); os._exit(3)")
    ended = run_here(passing(2), preload=("mortal", "pytest"), max_restarts=0)
    assert ended.verdict.counts == {"passed": 4}
    assert ended.verdict.remarks == ["the launcher died; its workers were replaced"]


def test_a_launcher_that_dies_again_and_again_ends_the_run(run_here, tmp_path, monkeypatch) -> None:
    """What is reaped by then is not killed once more: its id may be another's."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "deadly.py").write_text("import os; os._exit(3)")
    killed: list[int] = []

    def kill_group(pid: int) -> None:
        assert not processes.dead(pid) or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        killed.append(pid)

    monkeypatch.setattr(processes, "kill_group", kill_group)
    ended = run_here(passing(1), preload=("deadly", "pytest"))
    assert str(ended.error).startswith("error O506: the launcher died 4 times")
    assert len(killed) == len(set(killed)) == 4
    assert ended.verdict.counts == {"not_run": 2}


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
    """A crew whose launcher may come up once ``go`` is there, and a worker that waits for it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    began: list[crew.Crew] = []

    def begin(module: str = "") -> tuple[crew.Crew, Worker]:
        wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        (tmp_path / "patient.py").write_text(module + "\n" + wait)
        mine = crew.Crew(("patient", "pytest"), {}, tmp_path / "launcher.log", ())
        began.append(mine)
        ours, theirs = socket.socketpair()
        events, log = EventTail(tmp_path / "w0001.jsonl"), tmp_path / "w0001.log"
        worker = Worker("w0001", 0, "GPU-a", False, ours, events, log, since=0.0)
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


def test_a_worker_is_waited_for_from_when_the_launcher_is_up(crew_of, tmp_path) -> None:
    mine, worker = crew_of()
    (tmp_path / "go").touch()
    listen(mine, lambda: mine.launcher.up)
    assert worker.since > 0


def test_a_worker_that_is_killed_before_it_was_forked_has_ended(crew_of, tmp_path) -> None:
    """And the launcher, which has done nothing wrong, goes on."""
    mine, worker = crew_of()
    mine.kill(worker, "device")
    assert not mine.launcher.pending
    assert mine.wait(0.05)[1] == [worker]
    assert worker.status == signal.SIGKILL
    mine.kill(worker, "device")
    mine.forget(worker)
    assert mine.wait(0.05)[1] == []
    (tmp_path / "go").touch()
    assert listen(mine, lambda: mine.launcher.up) == []


def test_a_worker_that_was_lost_with_the_launcher_ends_once(crew_of) -> None:
    mine, worker = crew_of()
    mine.kill(worker, "device")
    assert mine.replace() == [worker]
    mine.forget(worker)
    assert mine.wait(0.05)[1] == []


def test_who_ended_beside_a_launcher_that_died_is_told_too(crew_of) -> None:
    """Once each; only who was at work is the launcher's loss."""
    mine, lost = crew_of()
    ended = dataclasses.replace(lost, name="w0002", killed="deadline", status=signal.SIGKILL)
    mine.workers["w0002"] = ended
    mine.withdrawn = [ended]
    died = mine.launcher
    died.kill()
    until(died.dead)
    assert mine.wait(0.0) == ([], [lost, ended], True)
    assert mine.launcher is not died
    assert [worker.killed for worker in (lost, ended)] == ["launcher", "deadline"]
    assert [worker.status for worker in (lost, ended)] == [signal.SIGKILL, signal.SIGKILL]


def test_what_an_import_has_started_ends_with_the_launcher(crew_of, tmp_path) -> None:
    child = tmp_path / "child"
    mine, _ = crew_of(
        f"import subprocess; open({str(child)!r}, 'w').write(f\"{{subprocess.Popen(['sleep', '600']).pid}} \")"
    )
    until(lambda: child.exists() and child.read_text().endswith(" "))
    mine.launcher.process.kill()
    until(mine.launcher.dead)
    mine.wait(0.0)
    until(lambda: processes.dead(int(child.read_text())), 5)


def test_an_end_waits_for_no_import(crew_of, monkeypatch) -> None:
    mine, _ = crew_of()
    monkeypatch.setattr(LauncherHandle, "reap", lambda *_: None)
    mine.stop()
    assert mine.launcher.process.wait(timeout=10) == -signal.SIGKILL
    monkeypatch.undo()


def test_after_the_end_nobody_is_killed_by_an_id_that_may_be_anothers(crew_of, tmp_path, monkeypatch) -> None:
    stay = "import orchestrator.worker, time\norchestrator.worker.main = lambda *_: time.sleep(600)"
    mine, worker = crew_of(stay)
    (tmp_path / "go").touch()
    listen(mine, lambda: worker.pid)
    assert worker.status is None
    mine.stop()
    killed: list[int] = []
    monkeypatch.setattr(processes, "kill_group", killed.append)
    mine.kill(worker, "device")
    assert not killed


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
