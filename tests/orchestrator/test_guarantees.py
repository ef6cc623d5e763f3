"""Takes the orchestrator's guarantees away one at a time: what they protect against must then show, and loudly."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from orchestrator import crew, processes
from orchestrator.campaign.__main__ import one_run
from orchestrator.campaign.audit import audit
from orchestrator.campaign.fakesuite import passing, write_suite
from orchestrator.campaign.pretend import pretend_run
from orchestrator.campaign.scenarios import SCENARIOS
from orchestrator.cli import main
from orchestrator.ledger import Ledger
from orchestrator.scheduling import Scheduler
from orchestrator.supervisor import Supervisor


@pytest.fixture
def undying(monkeypatch):
    """The first process that the supervisor kills is inside a kernel that hangs: it does not die before the end."""
    kill_group, held = processes.kill_group, []

    def kill(pid, sig=signal.SIGKILL):
        held[:] = held or [pid]
        if pid not in held:
            kill_group(pid, sig)

    monkeypatch.setattr(processes, "kill_group", kill)
    monkeypatch.setattr(crew, "DYING_LIMIT", 0.5)


@pytest.mark.parametrize("devices", [("GPU-a", "GPU-b", "GPU-a", "GPU-b"), ("GPU-a", "GPU-a")])
def test_a_worker_that_does_not_die_takes_no_other_along(run_here, undying, devices, tmp_path):
    """Its subtest is judged, its device set aside where there is another, and the launcher lives on."""
    ids = ["dense.aa.eager.hang", *(f"dense.{b}.eager.slow_{n}" for b in ("aa", "bb", "cc", "dd") for n in range(6))]
    ended = run_here(ids, *devices)
    assert ended.error is None
    assert ended.verdict.counts == {"timeout": 1, "passed": 24}
    text = (tmp_path / "run" / "events" / "supervisor.jsonl").read_text()
    assert re.search(r"(device GPU-[ab]|lane \d) given up: w\d+ \(process \d+\) was killed and does not die", text)
    assert ("device GPU" in text) == ("GPU-b" in devices)
    assert "the launcher died" not in text


def test_a_launcher_that_reports_no_death_is_replaced(run_here, monkeypatch):
    """The worker is dead, so that it is the launcher that does not answer."""
    monkeypatch.setattr(crew, "REPORT_LIMIT", 0.5)
    hear, deaf = crew.Crew.hear_launcher, []

    def half(self, ended):
        lost = hear(self, ended)
        if ended and not deaf:
            deaf.extend(ended)
            for worker in ended:
                worker.status = None
            ended.clear()
        return lost

    monkeypatch.setattr(crew.Crew, "hear_launcher", half)
    ended = run_here(["dense.aa.eager.hang", *passing(2)])
    assert ended.verdict.counts == {"timeout": 1, "passed": 4}
    assert "the launcher died; its workers were replaced" in ended.verdict.remarks


def test_a_process_is_dead_when_all_its_threads_are():
    process = subprocess.Popen(["sleep", "60"])
    assert not processes.dead(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert processes.dead(process.pid), "not reaped yet"
    process.wait()
    assert processes.dead(process.pid)


IDS = ["dense.aa.eager.pass_0", "dense.aa.eager.exit0", "dense.aa.eager.pass_1", "dense.aa.eager.pass_2"]


def test_with_all_guarantees(run_here):
    ended = run_here(IDS)
    assert ended.verdict.counts == {"passed": 3, "crashed": 1}
    assert ended.verdict.exit_code == 3


def test_a_supervisor_that_does_not_requeue_cannot_hide_it(run_here, monkeypatch):
    monkeypatch.setattr(Scheduler, "put_back", lambda self, jobs: None)
    ended = run_here(IDS)
    assert ended.verdict.counts["not_run"] >= 1
    assert sum(ended.verdict.counts.values()) == 4
    assert ended.verdict.exit_code != 0


def test_a_supervisor_that_judges_nobody_cannot_hide_it(run_here, monkeypatch):
    monkeypatch.setattr(Supervisor, "judge", lambda self, worker, job, how: None)
    ended = run_here(IDS)
    assert ended.verdict.counts == {"passed": 3, "not_run": 1}
    assert ended.verdict.exit_code == 7


def test_a_supervisor_that_counts_twice_cannot_hide_it(run_here, monkeypatch):
    """Every job is handed out again after it has finished."""
    after = Supervisor.after
    twice: set[str] = set()

    def again(self, job, attempt):
        after(self, job, attempt)
        if job.planned.id not in twice:
            twice.add(job.planned.id)
            self.scheduler.put_back([job])

    monkeypatch.setattr(Supervisor, "after", again)
    ended = run_here(passing(3))
    assert ended.verdict.counts == {"passed": 6}
    assert ended.verdict.noted >= 6, "each second outcome is noted and counts for nothing"


def test_a_supervisor_that_stops_at_once_leaves_everything_not_run(run_here, monkeypatch):
    monkeypatch.setattr(Supervisor, "loop", lambda self, crew: None)
    ended = run_here(passing(2))
    assert ended.verdict.counts == {"not_run": 4}
    assert ended.verdict.exit_code == 7


def test_without_settling_the_device_the_wrong_subtest_is_blamed(bench):
    """The same suite as in test_supervision, with the synchronisation taken out of the workers."""
    ids = ["dense.aa.eager.poison", "dense.aa.eager.pass_1"]
    suite = bench(ids)
    suite.env["PYTHONPATH"] = str(suite.home)
    code = "from orchestrator.worker_plugin import WorkerPlugin\nWorkerPlugin.settle = lambda self: None\n"
    (suite.home / "no_settling.py").write_text(code)
    done = suite.run("--plugin", "no_settling", "--workers", "1", "--shards", "1")
    assert done.outcomes()[ids[0]] == "passed", "only settling the device finds this"


def test_a_result_that_cannot_be_read_is_made_again(run_here, monkeypatch):
    """The first finish of all but the last is lost on its way to the supervisor: those run a second time."""
    feed, follow, seen = Ledger.feed, Supervisor.follow, set()
    *_, last = ids = passing(3, ("aa",))

    def lost(event) -> bool:
        return isinstance(event, dict) and event["event"] == "finish" and (event["id"], event["t"]) in hidden

    hidden: set[tuple[str, float]] = set()

    def deaf(self, source, event):
        if isinstance(event, dict) and event["event"] == "finish" and event["id"] not in {*seen, last}:
            seen.add(event["id"])
            hidden.add((event["id"], event["t"]))
        return None if lost(event) else feed(self, source, event)

    monkeypatch.setattr(Ledger, "feed", deaf)
    monkeypatch.setattr(Supervisor, "follow", lambda self, w, e: None if lost(e) else follow(self, w, e))
    ended = run_here(ids, start_limit=3.0)
    assert ended.verdict.counts == {"passed": 3}


# The audit of the campaign


@pytest.fixture
def audited(tmp_path):
    """A good run, with the marks that its subtests would have left."""
    ids = passing(3)
    suite = write_suite(tmp_path / "suite", ids)
    folder = pretend_run(suite, tmp_path / "run")
    assert main(["report", str(folder.path)]) == 0
    marks = tmp_path / "marks"
    marks.mkdir()
    for id in ids:
        (marks / f"{id}.ran").touch()
    return folder.path, ids, marks


def test_the_audit_finds_nothing_in_a_good_run(audited):
    folder, ids, marks = audited
    assert audit(folder, ids, marks, 0, 0) == []


def change(folder: Path, edit) -> None:
    path = folder / "results.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda raw: raw["subtests"].pop(), "is lost"),
        (lambda raw: raw["subtests"].append(raw["subtests"][0]), "counted 2 times"),
        (lambda raw: raw["subtests"][0].update(id="dense.zz.eager.pass_0"), "never planned"),
        (lambda raw: raw["subtests"][0].update(outcome="fine"), "ended as fine"),
        (lambda raw: raw["subtests"][0].update(outcome="failed"), "not passed"),
        (lambda raw: raw["subtests"][0].update(outcome="crashed"), "not passed"),
        (lambda raw: raw["counts"].update(passed=7), "do not add up"),
        (lambda raw: raw.update(exit_code=1), "does not fit"),
    ],
)
def test_the_audit_finds_every_kind_of_wrong(audited, edit, words):
    folder, ids, marks = audited
    change(folder, edit)
    assert any(words in wrong for wrong in audit(folder, ids, marks, 0, 0))


def test_the_audit_does_not_believe_a_pass_that_never_ran(audited):
    folder, ids, marks = audited
    (marks / f"{ids[0]}.ran").unlink()
    assert audit(folder, ids, marks, 0, 0) == [f"{ids[0]} is passed and never ran"]


@pytest.mark.parametrize("name", ["supervisor and launcher killed", "results soiled", "several runners"])
def test_a_piece_of_the_campaign(tmp_path, name):
    number = next(n for n, scenario in enumerate(SCENARIOS) if scenario.name == name)
    outcome = one_run(number, 7, tmp_path)
    assert outcome.wrong == [], (tmp_path / f"{number:04d}" / "log.txt").read_text()
