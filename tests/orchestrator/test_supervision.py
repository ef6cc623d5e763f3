"""Runs of the fake suite: what each misbehaviour becomes, and that the rest still runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from orchestrator.availability import accepted_here
from orchestrator.campaign.acts import RESULTS, until
from orchestrator.campaign.audit import survivors
from orchestrator.campaign.fakesuite import passing

ROOT = Path(__file__).parents[2]
ACTS = [
    "fail", "noisy", "foreign", "memory", "untyped", "skip", "nothing", "xpass", "nodevice", "segv", "kill", "abort",
    "exit0", "exit3", "half", "quit", "hang", "stop", "garbage",
]  # fmt: skip
GATES = [f"gate_{number}" for number in range(5)]
"""Subtests of which all but the first three wait until the test opens the gate."""


def test_every_misbehaviour_has_its_own_outcome(bench):
    """One run with all of them: each is blamed on its own subtest only, and the others run."""
    ids = passing(3) + [f"dense.{('aa', 'bb')[n % 2]}.attack.{act}" for n, act in enumerate(ACTS)]
    ids += ["dense.aa.known.xfail", "dense.bb.known.abort", "dense.bb.known.exit3", "dense.aa.known.pass"]
    known = {
        "dense.aa.known.xfail": ("xfail", None),
        "dense.bb.known.abort": ("crash", "SIGABRT"),
        "dense.bb.known.exit3": ("crash", "SIGSEGV"),
        "dense.aa.known.pass": ("crash", None),
        "dense.bb.attack.xpass": ("xfail", None),
    }
    suite = bench(ids, known=known)
    done = suite.run("--deadline", "2.5", "--workers", "2")
    found = done.outcomes()
    for id in ids[: -len(known) + 1]:
        act = id.split(".")[3].split("_")[0]
        assert found[id] == RESULTS[act], (id, done.out)
    assert found["dense.aa.known.xfail"] == "known_failure"
    assert found["dense.bb.known.abort"] == "known_failure"
    assert found["dense.bb.known.exit3"] == "crashed"
    assert "requires SIGSEGV" in done.row("dense.bb.known.exit3")["message"]
    assert found["dense.aa.known.pass"] == "unexpected_pass"
    assert len(found) == len(ids)
    assert done.code == 1
    # What is told about them
    lines = done.out.splitlines()
    for id, words in (("attack.xpass", "delete the entry fake_bug"), ("known.pass", "it passes now: delete the entry")):
        at = next(n for n, line in enumerate(lines) if re.fullmatch(rf"UNEXPECTED PASS dense\.\w+\.{id}", line))
        block = "\n".join(lines[at + 1 :]).partition("rerun: ")[0]
        assert words in block
        assert block.count("delete the entry") == 1
        assert "unexpected" not in block
    assert "rerun: python -m orchestrator run --tests" in done.out
    assert f"python -m pytest '{suite.suite}/test_dense_aa.py::test_attack[fail]'" in done.out
    assert "15.5 x the tolerance" in done.out
    assert "row 1" in done.out
    assert "\x1b[31m" not in done.out, "control characters of a subtest reach the terminal"
    assert "Running on the CPU as asked: 2 workers (" in done.out
    assert done.out.count("\nshard ") == 4
    assert done.results["foreign_lines"] > 5, "garbage is counted"
    stack = next((done.folder / "events").glob("supervisor.jsonl")).read_text()
    assert "acts.py" in stack, "a hang is reported with its stack"
    # The subtest that crashes on purpose ran alone
    alone = suite.ran("dense.bb.known.abort")[0].split()[0]
    others = {line.split()[0] for id in ids if id != "dense.bb.known.abort" for line in suite.ran(id)}
    assert alone not in others


def test_one_is_said_as_one(bench):
    suite = bench(["dense.aa.eager.pass_1"])
    done = suite.run("--workers", "1")
    assert done.out.startswith("1 subtest in 1 shard. Running on the CPU as asked: 1 worker (")
    assert "\nshard 1/1      1 subtest   " in done.out
    planned = suite.call("plan", "--tests", str(suite.suite)).out
    assert planned.startswith("shard 1/1  1 subtest  1 module  about ")


def test_a_crash_and_a_hang_say_where_they_were_and_where_their_log_is(bench):
    done = bench(["dense.aa.eager.segv", "dense.aa.eager.hang"]).run("--deadline", "2", "--workers", "1")
    lines = done.out.splitlines()
    says = {"segv": "CRASHED", "hang": "TIMED OUT"}
    for act, name in (("segv", "segfault"), ("hang", "hang")):
        found = [line.strip() for line in lines[lines.index(f"{says[act]} dense.aa.eager.{act}") :]]
        assert re.fullmatch(rf"it was in orchestrator/campaign/acts\.py:\d+ \({name}\)", found[2]), found[:4]
        log = Path(found[3].removeprefix("its log: "))
        assert log.parent == done.folder / "logs"
        assert name in log.read_text()
        for report in ("summary.md", "results.json", "junit.xml", "index.html"):
            assert log.name in (done.folder / report).read_text()


def test_a_clean_run_exits_with_zero_and_says_what_ran(bench):
    done = bench(passing(3)).run()
    assert done.code == 0
    assert done.results["counts"] == {"passed": 6}
    assert "ran: 6 emulated" in done.out
    assert "thinnest margins" in done.out


@pytest.mark.parametrize(
    ("act", "code"),
    [("fail", 1), ("segv", 3), ("hang", 4), ("xpass", 5), ("nodevice", 8)],
)
def test_exit_codes(bench, act, code):
    done = bench([f"dense.aa.eager.{act}", "dense.aa.eager.pass_1"]).run("--deadline", "2" if act == "hang" else "60")
    assert done.code == code, done.out
    if act == "nodevice":
        assert "UNAVAILABLE on this host, and so not tested: 1 no_device" in done.out


def test_the_caller_says_what_may_be_unavailable(bench):
    suite = bench(["dense.aa.eager.nopackage", "dense.aa.eager.oldcard", "dense.aa.eager.pass_1"])
    done = suite.run("--allow-unavailable", "architecture")
    assert done.code == done.results["exit_code"] == 8
    assert "UNAVAILABLE dense.aa.eager.nopackage" in done.out
    assert "UNAVAILABLE dense.aa.eager.oldcard" not in done.out
    assert "not allowed: package; where it is meant: --allow-unavailable architecture,package" in done.out
    assert suite.run("--allow-unavailable", "package,architecture", output="both").code == 0
    assert suite.run("--allow-unavailable", "none", output="none").code == 8
    wrong = suite.run("--allow-unavailable", "architectures", output="wrong")
    assert wrong.code == 14
    assert "did you mean architecture?" in wrong.out
    assert "O508" in suite.run("--resume", str(suite.home / "both"), "--allow-unavailable", "none").out


def test_a_run_that_tested_nothing_is_no_success(bench):
    """Whatever may be unavailable: where no subtest passed, nothing is known."""
    suite = bench(["dense.aa.eager.oldcard", "dense.aa.eager.xfail"], known={"dense.aa.eager.xfail": ("xfail", None)})
    done = suite.run("--allow-unavailable", "architecture")
    assert done.code == done.results["exit_code"] == 9
    assert "NOTHING WAS TESTED" in done.out
    assert "NOTHING WAS TESTED" in (done.folder / "summary.md").read_text()
    assert suite.run("dense.aa.eager.xfail", output="known").code == 0, "of a known failure, that it was seen"


def test_a_rerun_that_fails_again_has_tested_something(bench):
    done = bench(["dense.aa.eager.fail", "dense.aa.eager.pass_1"]).run("dense.aa.eager.fail")
    assert done.code == 1
    for text in (done.out, (done.folder / "summary.md").read_text()):
        assert "NOTHING WAS TESTED" not in text


@pytest.mark.parametrize(
    ("kind", "system", "machine", "accepted"),
    [
        ("NVIDIA H200", "Linux", "x86_64", ["architecture"]),
        ("cpu", "Linux", "x86_64", []),
        ("cpu", "Linux", "aarch64", ["package"]),
        ("cpu", "Darwin", "arm64", ["package"]),
    ],
)
def test_what_may_be_unavailable_unless_the_caller_says(monkeypatch, kind, system, machine, accepted):
    """On a CPU only Triton, and only where pyproject.toml does not ask for it."""
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert accepted_here(kind) == accepted
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    triton = next(requirement for requirement in map(Requirement, asked) if requirement.name == "triton")
    if kind == "cpu":
        assert triton.marker.evaluate({"platform_system": system, "platform_machine": machine}) == (accepted == [])


def test_a_module_that_kills_its_workers_is_condemned_alone(bench):
    suite = bench(passing(3, ("aa", "bb", "cc")), prelude={"test_dense_bb.py": "import os\nos._exit(0)"})
    done = suite.run("--workers", "1")
    assert done.results["counts"] == {"passed": 6, "crashed": 3}
    assert "while they collect test_dense_bb.py" in done.row("dense.bb.eager.pass_0")["message"]


def test_a_module_that_cannot_be_imported_fails_with_its_error(bench):
    suite = bench(passing(2), prelude={"test_dense_bb.py": "import no_such_module_here"})
    done = suite.run()
    assert done.results["counts"] == {"passed": 2, "failed": 2}
    assert "no_such_module_here" in done.row("dense.bb.eager.pass_0")["message"]


def test_a_subtest_that_the_module_lacks_fails(bench):
    suite = bench(passing(2, ("aa",)))
    module = suite.suite / "test_dense_aa.py"
    module.write_text(module.read_text().replace("'pass_1'", ""))
    done = suite.run()
    assert done.outcomes()["dense.aa.eager.pass_1"] == "failed"
    assert "generate the tests anew" in done.out


@pytest.mark.parametrize(
    ("act", "outcome", "words"),
    [("poison", "crashed", "illegal memory access"), ("leak", "failed", "left 1 torch dispatch or function mode")],
)
def test_what_would_spoil_later_subtests_is_blamed_on_its_cause(bench, act, outcome, words):
    """The device is synchronised and modes are counted before the report is written; the worker ends after it."""
    ids = [f"dense.aa.eager.{act}", "dense.aa.eager.pass_1", "dense.aa.eager.pass_2"]
    suite = bench(ids)
    done = suite.run("--workers", "1", "--shards", "1")
    assert done.outcomes() == {ids[0]: outcome, ids[1]: "passed", ids[2]: "passed"}
    assert words in done.row(ids[0])["message"]
    assert suite.ran(ids[0])[0].split()[0] != suite.ran(ids[1])[0].split()[0]


def test_exhausted_memory_is_a_failure_and_replaces_the_worker(bench):
    suite = bench(["dense.aa.eager.memory", "dense.aa.eager.pass_1"])
    done = suite.run("--workers", "1", "--shards", "1")
    assert done.outcomes()["dense.aa.eager.memory"] == "failed"
    assert suite.ran("dense.aa.eager.memory")[0] != suite.ran("dense.aa.eager.pass_1")[0]


def test_nothing_is_left_running(bench):
    """Grandchildren too, also those that moved to a session of their own."""
    suite = bench([*passing(2), "dense.aa.eager.orphan", "dense.bb.eager.hang"])
    suite.run("--deadline", "2")
    assert len(list(suite.marks.glob("orphan.*"))) == 2
    assert not survivors(str(suite.marks))


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGKILL])
def test_interrupt_leaves_no_process_and_a_run_that_can_be_finished(bench, sig):
    ids = [f"dense.{backend}.eager.{act}" for backend in ("aa", "bb") for act in GATES]
    suite = bench(ids)
    process = suite.start("--workers", "2")
    until(lambda: len(list(suite.marks.glob("*.ran"))) == 5)
    process.send_signal(sig)
    first = suite.finish(process)
    assert first.code == (130 if sig == signal.SIGINT else -signal.SIGKILL)
    until(lambda: not survivors(str(suite.marks)), 5)
    if sig == signal.SIGINT:
        assert first.results["counts"] == {"passed": 3, "not_run": 7}
        assert f"--resume {suite.home}/run" in first.out
    before = {id: len(suite.ran(id)) for id in ids}
    (suite.marks / "gate").touch()
    done = suite.run("--resume", str(suite.home / "run"))
    assert done.code == 0, done.out
    assert done.results["counts"] == {"passed": 10}
    again = [id for id in ids if before[id] and len(suite.ran(id)) > before[id]]
    assert len(again) == 2, "only what the two workers were inside of runs a second time"


def test_the_launcher_may_die(bench):
    ids = [f"dense.aa.eager.slow_{n}" for n in range(4)]
    suite = bench(["dense.aa.eager.once_killlauncher", *ids])
    done = suite.run("--workers", "2")
    assert done.code == 0, done.out
    assert "the launcher died" in done.out


def test_new_interpreters_work_too(bench):
    done = bench([*passing(1), "dense.aa.eager.segv"]).run("--new-interpreters")
    assert done.results["counts"] == {"passed": 2, "crashed": 1}


def test_workers_that_cannot_start_are_given_up(bench):
    """A plugin that ends every worker: bounded, explained, nothing lost."""
    suite = bench(passing(2))
    suite.env["PYTHONPATH"] = str(suite.home)
    (suite.home / "fatal_plugin.py").write_text("import os\nos._exit(9)\n")
    done = suite.run("--plugin", "fatal_plugin", "--workers", "2")
    assert done.code == 14
    assert "error O503" in done.out
    assert done.results["counts"] == {"not_run": 4}


def test_restarts_are_bounded(bench):
    done = bench([f"dense.aa.eager.kill_{n}" for n in range(6)]).run("--max-restarts", "2", "--workers", "1")
    assert done.code == 14
    assert "error O504" in done.out
    assert sum(done.results["counts"].values()) == 6


def test_a_full_disk_ends_the_run_and_says_so(bench):
    suite = bench(passing(12))
    shell = ["/bin/sh", "-c", 'ulimit -f 8; exec "$@"', "sh", *suite.command(*suite.arguments(output="full"))]
    done = subprocess.run(shell, cwd=ROOT, env=suite.env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 14
    assert "error O501" in done.stderr
    finished = suite.run("--resume", str(suite.home / "full"), output="full")
    assert finished.results["counts"] == {"passed": 24}


def test_a_closed_pipe_does_not_change_the_exit_code(bench):
    suite = bench(["dense.aa.eager.slow_1", "dense.aa.eager.fail_1"])
    process = suite.start()
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 1


def test_a_run_folder_serves_one_process_at_a_time(bench):
    suite = bench([f"dense.aa.eager.{act}" for act in GATES])
    process = suite.start("--workers", "1")
    until(lambda: (suite.home / "run" / "run.json").exists())
    assert "O207" in suite.run().out, "a second run must not mix into the folder"
    (suite.marks / "gate").touch()
    assert suite.finish(process).code == 0


def test_wait_statuses_have_names():
    from orchestrator.processes import say_status

    assert say_status(signal.SIGSEGV) == "SIGSEGV"
    assert say_status(3 << 8) == "exit:3"
    assert os.name == "posix"
