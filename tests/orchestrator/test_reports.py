"""Files that are written from a verdict: complete, bounded, and safe with text of foreign make."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from orchestrator import outcomes
from orchestrator.campaign.fakesuite import passing, write_suite
from orchestrator.campaign.pretend import everything_passes, pretend_run
from orchestrator.cli import main
from orchestrator.folder import Folder
from orchestrator.ledger import Attempt
from orchestrator.progress import Progress, clock, lane_words
from orchestrator.reports import github, markdown, text
from orchestrator.running import command_of
from orchestrator.verdict import Verdict, build_verdict, read_ledger

NASTY = "a|b `c` ``` </script><script>alert(1)</script> ]]> & %0A::error::x \x00\x1b[31m \ud800 \u2028 <!--"


def outcome_of(planned) -> dict[str, object]:
    """Every outcome that a worker may claim, by the case's number."""
    number = int(planned.id.rsplit("_", 1)[1])
    if planned.known_failure:
        return {"outcome": "known_failure", "message": "wrong as declared", "seconds": 0.2}
    if number == 1:
        facts = {"margin": 9.0, "max_abs": 0.3, "failure": {"check": "compare", "row": 2}}
        return {"outcome": "failed", "message": NASTY, "longrepr": NASTY * 20, "seconds": 0.1, "attnmatrix": facts}
    if number == 2:
        return {"outcome": "unavailable", "message": "no flash_attn", "attnmatrix": {"unavailable_kind": "package"}}
    return dict(everything_passes(planned))


@pytest.fixture
def folder(tmp_path):
    ids = passing(6, ("aa", "bb", "cc")) + passing(4, ("aa", "bb"), "decode_cg")
    suite = write_suite(tmp_path / "suite", ids, known={"dense.aa.eager.pass_5": ("xfail", None)})
    folder = pretend_run(suite, tmp_path / "run", say=outcome_of)
    allow(folder, "package")
    return folder


def allow(folder: Folder, *kinds: str) -> None:
    """Let the run say that subtests may be unavailable for these reasons."""
    raw = json.loads((folder.path / "run.json").read_text())
    (folder.path / "run.json").write_text(json.dumps(raw | {"allow_unavailable": kinds}))


def verdict_of(folder: Folder) -> Verdict:
    run, plan = folder.load()
    return build_verdict(run, plan, read_ledger(folder, plan))


def write(folder: Folder) -> dict[str, str]:
    assert main(["report", str(folder.path)]) == 0
    names = ("index.html", "junit.xml", "summary.md", "results.json")
    return {name: (folder.path / name).read_text(encoding="utf-8") for name in names}


def test_junit_has_one_case_for_every_planned_subtest(folder):
    root = ET.fromstring(write(folder)["junit.xml"])
    cases = root.findall(".//testcase")
    assert sorted(f"{case.get('classname')}.{case.get('name')}" for case in cases) == sorted(
        planned.id for planned in folder.load()[1].subtests
    )
    failed = [case for case in cases if case.find("failure") is not None]
    assert len(failed) == 5
    assert "rerun: " in (failed[0].find("failure").text or "")
    assert len(root.findall(".//skipped")) == 5 + 1
    assert root.get("tests") == str(len(cases))


def test_what_may_not_be_unavailable_is_an_error_in_every_report(folder):
    allow(folder)
    written = write(folder)
    errors = ET.fromstring(written["junit.xml"]).findall(".//error")
    assert [error.get("type") for error in errors] == ["unavailable"] * 5
    assert written["summary.md"].count("<b>unavailable</b>") == 5
    assert any(line.startswith("::error") and "title=unavailable" in line for line in github.lines(verdict_of(folder)))


def test_markdown_puts_failures_first_and_stays_small(folder):
    summary = write(folder)["summary.md"]
    assert summary.startswith("## Attention matrix: not as expected")
    assert summary.index("<details>") < summary.index("| dense aa |")
    fences = re.findall(r"^(`{3,})text$", summary, re.M)
    assert "````" in fences, "a message with a fence of its own is fenced longer"
    assert "<script>" not in re.sub(r"(?s)(`{3,})text\n.*?\n\1", "", summary)


def test_markdown_of_a_catastrophe_stays_below_a_mebibyte(tmp_path):
    ids = [f"dense.b{b}.s{s}.case_1{n}" for b in range(30) for s in range(10) for n in range(10)]
    suite = write_suite(tmp_path / "suite", ids)
    bad = {"outcome": "failed", "message": "x" * 4000, "attnmatrix": {"ran": ["native"]}}
    verdict = verdict_of(pretend_run(suite, tmp_path / "run", say=lambda planned: bad))
    text_ = markdown.render(verdict)
    assert len(text_.encode()) < 1 << 20
    assert "more failures are left out here" in text_
    assert len(list(github.lines(verdict))) <= 14
    assert len(text.summary(verdict)) < 1 << 20


def test_github_annotations_are_bounded_and_cannot_issue_commands(folder, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    write(folder)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::")]
    assert [line.split(" ")[0] for line in lines] == ["::error"] * 5 + ["::warning", "::notice"]
    assert "%250A::error::x" in lines[0]
    assert (tmp_path / "step.md").read_text(encoding="utf-8").startswith("## Attention matrix")


def test_results_name_every_subtest_once(folder):
    results = json.loads(write(folder)["results.json"])
    ids = [row["id"] for row in results["subtests"]]
    assert ids == sorted(set(ids))
    assert results["counts"] == {"failed": 5, "unavailable": 5, "known_failure": 1, "passed": 15}
    assert results["exit_code"] == 1
    assert results["cost"]["own"] == 0.04


def test_the_page_can_run_nothing_but_its_own_script(folder):
    page = write(folder)["index.html"]
    assert page.count("<script") == 2
    assert "alert(1)</script>" not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    assert "default-src 'none'" in policy[1].replace("&#39;", "'")
    assert "unsafe" not in policy[1]
    assert not re.search(r'(?:src|href)="', page), "nothing is loaded"
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_each_failure_prints_one_command_that_runs_it(folder, capsys):
    write(folder)
    out = capsys.readouterr().out
    commands = [line.strip() for line in out.splitlines() if line.strip().startswith("rerun: ")]
    assert len(commands) == len(set(commands)) == 5
    assert "/suite/test_dense_aa.py::test_eager[pass_1]'" in "".join(commands)
    assert "\x1b" not in out
    assert "\x00" not in out


def test_commands_name_the_planted_fault_and_quote_the_folder(folder):
    verdict = verdict_of(folder)
    verdict.run.fault, verdict.run.tests = "F01; rm -rf /", "my tests"
    failed = verdict.failures[0]
    assert text.reproduce(verdict, failed).startswith("ATTNMATRIX_FAULT='F01; rm -rf /' ATTNMATRIX_DEVICE=cpu python")
    failed.outcome = outcomes.CRASHED
    assert "--tests 'my tests' dense." in text.reproduce(verdict, failed)


def test_commands_of_a_run_under_nox_go_through_nox(folder, monkeypatch):
    """The interpreter that the user has outside of nox may lack torch."""
    verdict = verdict_of(folder)
    nox = {"NOX_CURRENT_SESSION": "gpu_matrix"}
    verdict.run.command, verdict.run.tests = command_of(nox), "generated_tests"
    assert text.reproduce(verdict, verdict.failures[0]) == "nox -s gpu_matrix -- dense.aa.decode_cg.pass_1"
    assert command_of(nox | {"ATTNMATRIX_NO_VENV": "1"}) == "nox --no-venv -s gpu_matrix --"
    for session in ("", "tests", "$(reboot)"):
        assert command_of({"NOX_CURRENT_SESSION": session}) == "python -m orchestrator run"


def test_tables_follow_the_order_of_the_spec(folder):
    verdict = verdict_of(folder)
    assert verdict.columns == ["eager", "decode_cg"]
    assert verdict.rows == [("dense", "aa"), ("dense", "bb"), ("dense", "cc")]


@pytest.mark.parametrize(("code", "first"), [(errno.ENOSPC, "free space"), (errno.EACCES, "see to that")])
def test_a_report_that_cannot_be_written_says_how_to_have_it_later(folder, monkeypatch, capsys, code, first):
    def full(path: Path, text: str) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("orchestrator.folder.write_whole", full)
    assert main(["report", str(folder.path)]) == 11
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"error O212: cannot write {folder.path / 'results.json'}: {os.strerror(code)}"
    assert said[1] == f"  {first}, then `python -m orchestrator report {folder.path}`"


# Progress


class Stub:
    """As much of a supervisor as progress looks at."""

    left = 30
    lanes = ("cpu", None)
    workers: dict[int, object] = {}  # noqa: RUF012

    @staticmethod
    def planned(id: str):
        return None


def test_plain_progress_tells_failures_at_once_and_the_rest_now_and_then():
    stream = io.StringIO()
    progress = Progress(stream)
    progress.start(40)
    for number in range(10):
        outcome = "failed" if number == 4 else "passed"
        progress(Stub, Attempt(f"a.b.c.{number}", 0, outcome, "w1", message="row 1 differs\nmore"))
    assert stream.getvalue() == "FAILED a.b.c.4: row 1 differs\n"
    progress.last -= 60
    progress(Stub, None)
    last = stream.getvalue().splitlines()[-1]
    assert last.startswith("10/40 ")
    assert "left" in last
    assert last.endswith("9 passed, 1 failed")
    assert lane_words(Stub, 1, None) == ("set aside", "", "")
    assert clock(125) == "2:05"


def test_a_live_line_that_announces_a_list_has_its_first_item():
    stream = io.StringIO()
    message = "metadata: 2 metadata invariant(s) broken:\n\n  kv_indptr: must not fall\n  page_table: -1 at row 2"
    Progress(stream)(Stub, Attempt("a.b.c.d", 0, "failed", "w1", message=message))
    assert stream.getvalue() == "FAILED a.b.c.d: metadata: 2 metadata invariant(s) broken: kv_indptr: must not fall\n"


def test_progress_survives_a_closed_stream(tmp_path):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    progress = Progress(Gone())
    progress(Stub, Attempt("a.b.c.d", 0, "failed", "w1"))


def test_a_flood_of_failures_is_cut():
    stream = io.StringIO()
    progress = Progress(stream)
    for number in range(200):
        progress(Stub, Attempt(f"a.b.c.{number}", 0, "failed", "w1"))
    assert len(stream.getvalue().splitlines()) == 41


def test_report_of_a_folder_that_is_none(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 11
    assert "error O201" in capsys.readouterr().err
    assert main(["report", str(Path(tmp_path) / "none")]) == 11
