"""The measurement itself: no kill is invented, none is lost, and a process that dies is a kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kits.faults import load_all
from orchestrator import processes
from orchestrator.power import cli, crew, page
from orchestrator.power.crew import Done, Job, run_jobs
from orchestrator.power.planning import order
from orchestrator.power.results import (
    BROKEN,
    CAUGHT,
    CLEAN,
    MISSED,
    NOT_EXERCISED,
    REPORTED,
    FaultFacts,
    FaultResult,
    Report,
    TrialRecord,
)

FACTS = FaultFacts(
    id="F01", row="F01", title="a bug", references=("owner/repo#1",), kind=1, kind_name="padded rows", axes="all",
    control=False, module="kits.faults.some",
)  # fmt: skip
CONTROL = replace(FACTS, id="C06", row="C06", control=True)
SPARE = replace(FACTS, id="S01", row="S01")


def trial(number: int = 0, outcome: str = "passed", *, exercised: bool = True) -> TrialRecord:
    killed = outcome not in ("passed", "known_failure")
    check = "compare" if killed else None
    return TrialRecord(f"dense.fa3.decode_cg.s{number}", outcome, check, "", 1.0, exercised, killed)


def result(*trials: TrialRecord, facts: FaultFacts = FACTS) -> FaultResult:
    return FaultResult(facts, touched=len(trials), trials=list(trials))


@pytest.mark.parametrize(
    ("trials", "facts", "status"),
    [
        ((trial(), trial(outcome="failed")), FACTS, CAUGHT),
        ((trial(), trial(outcome="unexpected_pass")), FACTS, CAUGHT),
        ((trial(), trial()), FACTS, MISSED),
        ((trial(exercised=False),), FACTS, NOT_EXERCISED),
        ((), FACTS, NOT_EXERCISED),
        ((trial(outcome="failed", exercised=False),), FACTS, BROKEN),
        ((trial(outcome="crashed"),), FACTS, CAUGHT),
        ((trial(outcome="crashed", exercised=False),), FACTS, BROKEN),
        ((trial(outcome="timeout", exercised=False),), FACTS, BROKEN),
        ((trial(), trial(exercised=False)), CONTROL, CLEAN),
        ((trial(outcome="failed"),), CONTROL, REPORTED),
        ((trial(exercised=False),), CONTROL, NOT_EXERCISED),
        ((trial(outcome="failed", exercised=False),), CONTROL, BROKEN),
    ],
)
def test_status(trials: tuple[TrialRecord, ...], facts: FaultFacts, status: str) -> None:
    assert result(*trials, facts=facts).status == status


def test_a_row_is_caught_if_all_its_mutants_are() -> None:
    caught, missed = result(trial(outcome="failed")), result(trial())
    missed.fault = replace(FACTS, id="F01b")
    report = Report("ci", "0", [caught, missed])
    assert [(row.id, row.caught) for row in report.counted] == [("F01", False)]


def entry(id: str, **fields: Any) -> dict[str, Any]:
    defaults = {
        "weight": 1.0,
        "sweep": "eager",
        "backend": "fa3",
        "method": "dense",
        "pad_style": None,
        "multiplier": 1,
    }
    return {"id": id, **defaults, **fields}


def test_order_is_cheap_first_and_takes_turns() -> None:
    entries = [
        entry("slow", weight=15.0, sweep="decode_cg"),
        entry("a1"),
        entry("a2"),
        entry("b1", sweep="verify"),
        entry("polite", weight=5.0, sweep="verify_cg", pad_style="small_real"),
        entry("rough", weight=5.0, sweep="verify_cg", pad_style="prod_fill"),
    ]
    assert [found["id"] for found in order(entries)] == ["a1", "b1", "a2", "rough", "polite", "slow"]


def attempts(job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    """What jobs below do, by the names of their subtests."""
    for subtest_id in job.ids:
        yield "begin", {"id": subtest_id}
        if "changes" in subtest_id:
            crew.note_change()
        if subtest_id.endswith("shot"):
            os.kill(os.getpid(), signal.SIGKILL)
        if subtest_id.endswith("dies"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if subtest_id.endswith("hangs"):
            time.sleep(60)
        if subtest_id.endswith("raises"):
            raise RuntimeError("cannot be planted")
        if subtest_id.endswith("vanishes"):
            yield "trial", vars(trial())
            os._exit(3)
        killed = subtest_id.endswith("kills")
        told = vars(trial(outcome="failed" if killed else "passed")) | {"id": subtest_id}
        yield "trial", told
        if killed and job.stop:
            return


def run(*ids: str, stop: bool = True) -> Done:
    seen: list[Done] = []
    timeout = 3.0 if any(id.endswith("hangs") for id in ids) else 30.0
    (done,) = run_jobs([Job("F01", None, ids, stop)], attempts, workers=2, timeout=timeout, finished=seen.append)
    assert seen == [done]
    return done


def test_the_first_kill_ends_a_job() -> None:
    assert [found.outcome for found in run("1", "2kills", "3").trials] == ["passed", "failed"]
    assert [found.outcome for found in run("1", "2kills", "3", stop=False).trials] == ["passed", "failed", "passed"]


@pytest.mark.parametrize(("end", "outcome"), [("dies", "crashed"), ("hangs", "timeout"), ("shot", "crashed")])
def test_a_process_that_ends_inside_a_subtest_is_a_kill(end: str, outcome: str) -> None:
    """The fault's if it changed a value in that subtest; not if it did so in an earlier one only."""
    done = run("1changes", f"2changes_and_{end}", "3")
    assert [found.outcome for found in done.trials] == ["passed", outcome]
    assert done.trials[1].witnessed
    assert done.error is None
    done = run("1changes", f"2{end}", "3")
    assert done.trials[1].killed
    assert not done.trials[1].witnessed
    assert FaultResult(FACTS, 3, done.trials).status == BROKEN


def test_the_group_of_a_dead_process_is_killed_before_its_id_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    kill_group, found = processes.kill_group, []

    def kill(pid: int, sig: int = signal.SIGKILL) -> None:
        found.append(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
        kill_group(pid, sig)

    monkeypatch.setattr(processes, "kill_group", kill)
    run("1")
    run("1dies")
    assert len(found) == 2
    assert None not in found, "ended, and still there to be reaped"


def test_going_on_after_a_process_that_died() -> None:
    assert [found.outcome for found in run("1", "2dies", "3", "4kills", stop=False).trials] == [
        "passed",
        "crashed",
        "passed",
        "failed",
    ]


@pytest.mark.parametrize(
    ("what", "error"), [("2raises", "RuntimeError: cannot be planted"), ("2vanishes", "ended between subtests: exit:3")]
)
def test_a_job_that_breaks_is_no_kill(what: str, error: str) -> None:
    done = run("1", what)
    assert done.error is not None
    assert error in done.error
    assert FaultResult(FACTS, 2, done.trials, done.error).status == BROKEN


def test_many_jobs_end_once_each() -> None:
    jobs = [Job(f"F{number:02}", None, ("1", "2kills", "3")) for number in range(7)]
    seen: list[Done] = []
    done = run_jobs([*jobs, Job("F99", None, ())], attempts, workers=3, timeout=30.0, finished=seen.append)
    assert [one.job for one in done] == jobs
    assert {id(one) for one in seen} == {id(one) for one in done}
    assert all(one.trials[-1].killed for one in done)


def test_exit_code() -> None:
    caught, missed = result(trial(outcome="failed")), result(trial())

    def code(*results: FaultResult, before: dict[str, str] | None = None, **more: Any) -> int:
        report = Report("ci", "0", list(results), **more)
        return cli._exit_code(report, cli._lost(report, before or {}))

    assert code(caught) == 0
    assert code(missed) == cli.EXIT_SHORT
    assert code(caught, result(trial(outcome="failed"), facts=CONTROL)) == cli.EXIT_SHORT
    assert code(caught, weaker={"polite": {"F01": BROKEN}}) == cli.EXIT_BROKEN
    assert code(caught, red={"some": "failed"}) == cli.EXIT_BROKEN


def test_what_was_caught_before_must_be_caught_again() -> None:
    """A spare is in no share that could fall below a bar, and one counted fault of many leaves it above."""
    spare = result(trial(), facts=SPARE)
    many = [result(trial(outcome="failed"), facts=replace(FACTS, id=f"F{n}", row=f"F{n}")) for n in range(10, 50)]
    report = Report("ci", "0", [*many, result(trial()), spare])
    for before, lost in (({}, []), ({"S01": MISSED}, []), ({"S01": CAUGHT}, ["S01"]), ({"F01": CAUGHT}, ["F01"])):
        found = cli._lost(report, before)
        assert [one.fault.id for one in found] == lost
        assert cli._exit_code(report, found) == (cli.EXIT_SHORT if lost else 0)


def test_the_committed_results_say_what_was_caught_before() -> None:
    assert set(cli._committed()) == set(load_all())


def test_page_and_readme(tmp_path: Path) -> None:
    report = Report("ci", "0", [result(trial(outcome="failed")), result(trial(), facts=SPARE)])
    report.results.append(result(trial(), facts=CONTROL))
    report.weaker = {"polite": {"F01": MISSED, "S01": MISSED, "C06": CLEAN}}
    text = page.render(report, {"polite": "less of everything"})
    assert "| F01 | owner/repo#1 | padded rows | a bug | decode_cg | compare | 1.0 |" in text
    assert "| polite: less of everything | 0 | F01 |" in text
    assert "- **S01** (a bug): missed in 1 of 1 subtests" in text
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    page.fill_readme(readme, report)
    said = "1 of 1 catalogued public bugs caught (100 %), 0 of 1 further ones, 0 of 1 harmless changes reported."
    assert readme.read_text() == f"before\n{page.BEGIN}\n{said}\n{page.END}\nafter\n"


def test_all_subtests_that_catch_a_named_fault_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(trial(), *(trial(number, "failed") for number in range(1, 10)))
    cli._tell_all(found)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "F01 is caught by 9 subtests"
    assert " ".join(line.strip() for line in lines) == ", ".join(f"dense.fa3.decode_cg.s{n}" for n in range(1, 10))
    assert all(len(line) <= 120 for line in lines)


def test_earlier_measurements_of_weaker_configurations_stay_only_where_they_fit(tmp_path: Path) -> None:
    report = Report("ci", "one", [result(trial(outcome="failed"))], weaker={"polite": {"F01": MISSED}})
    assert cli._earlier(tmp_path, report) == {}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "power.json").write_text(cli.json.dumps(report.as_dict()))
    assert cli._earlier(tmp_path, report) == {"polite": {"F01": MISSED}}
    assert cli._earlier(tmp_path, replace(report, manifest_sha256="another")) == {}
    assert cli._earlier(tmp_path, replace(report, results=[result(trial(), facts=SPARE)])) == {}


def test_the_committed_page_is_of_these_faults() -> None:
    measured = cli.json.loads((cli.ROOT / "results" / "power.json").read_text(encoding="utf-8"))
    assert {found["id"] for found in measured["faults"]} == set(load_all()), "run `nox -s power`"
    said = (cli.ROOT / "README.md").read_text(encoding="utf-8").split(page.BEGIN)[1].split(page.END)[0].strip()
    assert f"**{said}**" in (cli.ROOT / "POWER.md").read_text(encoding="utf-8")
