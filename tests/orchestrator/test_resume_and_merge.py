"""Several runners, several attempts, and runs that go on later: nothing is lost and nothing counts twice."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import pytest

from orchestrator.campaign.fakesuite import passing, write_suite
from orchestrator.campaign.pretend import everything_passes, pretend_run
from orchestrator.cli import RESUMPTION, build_parser, main
from orchestrator.merging import merge
from orchestrator.running import Request, prepare
from orchestrator.verdict import build_verdict, read_ledger


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def suite(tmp_path):
    return write_suite(tmp_path / "suite", passing(8, ("aa", "bb", "cc")))


def parts_of(suite: Path, home: Path, number: int = 3, **options) -> list[Path]:
    return [pretend_run(suite, home / f"p{n}", (n, number), **options).path for n in range(1, number + 1)]


def merged(*paths: Path, to: str = "merged") -> int:
    return main(["merge", *map(str, paths), "--output", to])


def results(folder: str = "merged") -> dict:
    return json.loads((Path(folder) / "results.json").read_text())


def test_shards_of_several_runners_merge_into_one_verdict(suite, tmp_path, capsys):
    parts = parts_of(suite, tmp_path)
    assert merged(*parts) == 0
    out = capsys.readouterr().out
    assert "3 runs partition the plan: 24 subtests, none missing, none twice" in out
    assert results()["counts"] == {"passed": 24}
    assert {row["shard"] for row in results()["subtests"]} == {1, 2, 3}
    assert main(["report", "merged"]) == 0
    assert {path.name for path in Path("merged").iterdir()} >= {"index.html", "junit.xml", "summary.md", "results.json"}


def test_a_missing_shard_is_said_in_one_line_and_is_not_run(suite, tmp_path, capsys):
    parts = parts_of(suite, tmp_path)
    assert merged(parts[0], parts[2]) == 7
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("missing: "))
    match = re.fullmatch(r"missing: shard 2/3 \((\d+) of 24 subtests\)", line)
    assert match
    assert results()["counts"] == {"not_run": int(match[1]), "passed": 24 - int(match[1])}


def test_what_a_runner_did_not_finish_is_not_run(suite, tmp_path):
    parts = parts_of(
        suite, tmp_path, say=lambda planned: None if planned.id.endswith("_3") else everything_passes(planned)
    )
    assert merged(*parts) == 7
    assert results()["counts"] == {"not_run": 3, "passed": 21}


def test_a_merge_allows_what_every_runner_allowed(suite, tmp_path):
    lacking = {"outcome": "unavailable", "attnmatrix": {"unavailable_kind": "architecture"}}
    parts = parts_of(
        suite, tmp_path, 2, say=lambda planned: lacking if planned.backend == "cc" else everything_passes(planned)
    )
    edit(parts[0], allow_unavailable=["architecture"])
    assert merged(*parts, to="one") == 8
    edit(parts[1], allow_unavailable=["architecture", "package"])
    assert merged(*parts, to="both") == 0
    assert main(["merge", *map(str, parts), "--output", "none", "--allow-unavailable", "none"]) == 8


def edit(path: Path, **changes) -> None:
    raw = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(raw | changes))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"spec_sha256": "other"}, "O302"),
        ({"manifest_sha256": "other"}, "O302"),
        ({"commit": "other"}, "O303"),
        ({"profile": "nightly"}, "O309"),
        ({"selection": ["--backend", "aa"]}, "O309"),
        ({"fault": "F01"}, "O309"),
        ({"part": [1, 3]}, "O305"),
        ({"part": None}, "O308"),
        ({"merged": 2}, "O308"),
        ({"plan_sha256": "x"}, "O206"),
        ({"part": [1, 7]}, "O204"),
    ],
)
def test_runs_that_do_not_belong_together(suite, tmp_path, capsys, changes, code):
    parts = parts_of(suite, tmp_path)
    edit(parts[1], **changes)
    assert merged(*parts) in (11, 12)
    assert f"error {code}" in capsys.readouterr().err


def test_runners_that_cut_differently_cannot_be_merged(suite, tmp_path, capsys):
    parts = parts_of(suite, tmp_path)
    shutil.rmtree(parts[1])
    Path("results").mkdir()
    table = {f"dense.aa.eager.pass_{n}": 50.0 for n in range(8)}
    Path("results/durations.json").write_text(json.dumps({"format": 1, "seconds": {"cpu": table}}))
    pretend_run(suite, parts[1], (2, 3))
    assert merged(*parts) == 12
    assert "error O304" in capsys.readouterr().err
    shutil.rmtree(parts[1])
    pretend_run(suite, parts[1], (2, 4))
    assert merged(*parts) == 12
    assert "error O307" in capsys.readouterr().err


def test_a_part_cannot_speak_for_another_shard(suite, tmp_path):
    """A runner whose file claims results of ids outside its shard: they count for nothing."""
    parts = parts_of(suite, tmp_path, say=lambda planned: None)
    plan = json.loads((parts[0] / "plan.json").read_text())
    foreign = plan["shards"][1][0]["rows"][0][0]
    with open(parts[0] / "events" / "w0001.jsonl", "a") as file:
        for event in ({"event": "start"}, {"event": "finish", "outcome": "passed"}):
            file.write(json.dumps({**event, "id": foreign, "attempt": 0}) + "\n")
    assert merged(*parts) == 7
    assert results()["counts"] == {"not_run": 24}


def test_a_hundred_thousand_results_are_merged_in_ten_seconds(tmp_path):
    ids = [f"m.b{b:02}.s{s:02}.c{n}" for b in range(20) for s in range(10) for n in range(500)]
    suite = write_suite(tmp_path / "big", ids)
    passed = {"outcome": "passed", "seconds": 0.1, "attnmatrix": {"ran": ["native"], "margin": 0.2, "replays": 4}}
    prepared = prepare(Request(tests=suite), "cpu")
    parts = parts_of(suite, tmp_path, 4, say=lambda planned: passed, prepared=prepared)
    began = time.process_time()
    folder, run, plan, _ = merge(parts, tmp_path / "merged")
    verdict = build_verdict(run, plan, read_ledger(folder, plan))
    spent = time.process_time() - began
    assert verdict.counts == {"passed": 100_000}
    began = time.process_time()
    sum(range(3_000_000))
    assert spent < 10 * max(1.0, (time.process_time() - began) / 0.05), spent


# Really run


def test_two_runners_and_a_merge(bench):
    ids = [*passing(4), "dense.bb.eager.fail", "dense.aa.eager.segv"]
    suite = bench(ids)
    runs = [suite.start("--shard", f"{n}/2", "--workers", "1", output=f"p{n}") for n in (1, 2)]
    first, second = (suite.finish(run, f"p{n}") for n, run in enumerate(runs, 1))
    mine, theirs = set(first.outcomes()), set(second.outcomes())
    assert not mine & theirs
    assert mine | theirs == set(ids)
    done = suite.call("merge", str(first.folder), str(second.folder), "--output", str(suite.home / "all"), output="all")
    assert done.code == 1
    assert done.results["counts"] == {"failed": 1, "crashed": 1, "passed": 8}
    assert all(len(suite.ran(id)) == 1 for id in ids)


def test_resume_runs_only_what_is_missing(bench):
    suite = bench([*passing(3), "dense.bb.eager.fail", "dense.bb.eager.segv"])
    first = suite.run()
    events = sorted((first.folder / "events").glob("w*.jsonl"))
    kept = events[0].read_bytes().splitlines(keepends=True)
    lost = [json.loads(line)["id"] for line in kept if b'"finish"' in line][-1:]
    events[0].write_bytes(b"".join(line for line in kept if not (b'"finish"' in line and lost[0].encode() in line)))
    done = suite.run("--resume", str(first.folder))
    assert done.results["counts"] == first.results["counts"]
    assert [id for id in done.outcomes() if len(suite.ran(id)) > 1] == lost
    again = suite.run("--resume", str(first.folder))
    assert again.code == first.code == 1
    assert again.out.startswith("8 subtests in 4 shards, nothing left to run.\n")
    assert "the orchestrator's own" in done.out
    assert "the orchestrator's own" not in again.out
    assert again.results["cost"] == done.results["cost"]
    assert again.results["subtests"] == done.results["subtests"]


@pytest.mark.parametrize("change", ["suite", "tests", "fault", "device"])
def test_resume_refuses_another_suite_or_device(bench, change):
    suite = bench(passing(1, ("aa",)))
    first = suite.run()
    arguments = ["--resume", str(first.folder)]
    if change == "suite":
        write_suite(suite.suite, passing(2, ("aa",)))
    if change == "tests":
        suite.suite = write_suite(suite.home / "other", passing(1, ("aa",)))
    if change == "fault":
        suite.env["ATTNMATRIX_FAULT"] = "F01"
    if change == "device":
        edit(first.folder, device_kind="NVIDIA H200")
    done = suite.run(*arguments)
    assert done.code == 11
    assert "error O209" in done.out


DECIDED = {
    "ids": ["dense.aa.eager.pass_0"], "-k": ["-k", "pass"], "--backend": ["--backend", "aa"],
    "--method": ["--method", "dense"], "--sweep": ["--sweep", "eager"], "--profile": ["--profile", "ci"],
    "--shard": ["--shard", "1/1"], "--shards": ["--shards", "4"], "--output": ["--output", "x"],
    "--deadline": ["--deadline", "9"], "--repeat": ["--repeat", "1"], "--confirm": ["--confirm", "0"],
    "--fresh-process": ["--fresh-process"], "--allow-unavailable": ["--allow-unavailable", "none"],
}  # fmt: skip
"""Given with the value that is usual, too: the run may have begun with another."""


@pytest.mark.parametrize("option", DECIDED)
def test_resume_names_what_the_run_decides_already(suite, tmp_path, capsys, option):
    pretend_run(suite, tmp_path / "run")
    assert main(["run", "--tests", str(suite), "--resume", "run", *DECIDED[option]]) == 14
    assert f"error O508: --resume continues a run, which decides this already: {option}\n" in capsys.readouterr().err


def test_no_option_is_forgotten_by_resume():
    """Each option of ``run`` goes with ``--resume`` or is refused, and one that is new is refused until it is named."""
    plain = vars(build_parser().parse_args(["run"]))
    given = {name for name, value in plain.items() if value not in (None, [], "")}
    assert given <= RESUMPTION, "an option with a default of its own would be refused though nobody gave it"
    refused = {"ids": "ids", "-k": "keyword"}
    assert set(plain) - RESUMPTION == {refused.get(name, name[2:].replace("-", "_")) for name in DECIDED}


def test_a_failure_is_confirmed_in_new_processes_and_may_be_flaky(bench):
    ids = ["dense.aa.eager.fail", "dense.aa.eager.sometimes", "dense.aa.eager.once_segv", "dense.aa.eager.pass"]
    suite = bench(ids)
    done = suite.run("--confirm", "2")
    assert done.outcomes() == {ids[0]: "failed", ids[1]: "flaky", ids[2]: "flaky", ids[3]: "passed"}
    assert done.row(ids[0])["attempts"] == {"failed": 3}
    assert done.row(ids[1])["attempts"] == {"failed": 2, "passed": 1}
    assert "3 attempts: 1 passed, 2 failed" in done.out
    assert done.code == 1
    assert len({line.split()[0] for line in suite.ran(ids[0])}) == 3, "each attempt in its own process"
    assert len(suite.ran(ids[3])) == 1
    shutil.rmtree(suite.marks)
    suite.marks.mkdir()
    assert suite.run("--confirm", "1", "--backend", "aa", "-k", "once", output="flaky").code == 6


def test_repetition_in_fresh_processes_is_evidence(bench):
    """What removing a known failure asks for: it passes every time, in a process of its own."""
    ids = ["dense.aa.eager.xpass", "dense.aa.eager.sometimes"]
    suite = bench(ids, known={ids[0]: ("xfail", None)})
    done = suite.run("--repeat", "3", "--fresh-process", "--workers", "2")
    assert done.row(ids[0])["attempts"] == {"unexpected_pass": 3}
    assert done.row(ids[1])["outcome"] == "flaky"
    assert re.search(r"^[12] of 6 attempts passed, 3 unexpected passes, [12] failed$", done.out, re.M), done.out
    assert len({line.split()[0] for id in ids for line in suite.ran(id)}) == 6


def test_one_subtest_is_repeated_in_one_process(bench):
    """Its own next item: pytest must set it up anew all the same."""
    suite = bench(["dense.aa.eager.pass"])
    done = suite.run("--repeat", "5", "--workers", "1")
    assert done.row("dense.aa.eager.pass")["attempts"] == {"passed": 5}, done.out
    assert len({line.split()[0] for line in suite.ran("dense.aa.eager.pass")}) == 1


def test_repetition_says_how_many_attempts_passed(bench):
    done = bench(["dense.aa.eager.pass"]).run("--repeat", "5")
    assert "\n5 of 5 attempts passed\n" in done.out
    assert '<property name="attempts" value="5 of 5 attempts passed"' in (done.folder / "junit.xml").read_text()
