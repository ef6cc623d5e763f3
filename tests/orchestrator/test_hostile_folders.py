"""Malformed and hostile manifests, run folders and events: a code and a sentence, no traceback, no file elsewhere."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.campaign.fakesuite import passing, write_suite
from orchestrator.campaign.pretend import pretend_run
from orchestrator.cli import main
from orchestrator.errors import CODES, FAMILY_EXIT, OrchestratorError
from orchestrator.folder import Folder
from orchestrator.manifest import load_manifest
from orchestrator.reports import text
from orchestrator.verdict import build_verdict, read_ledger

ROOT = Path(__file__).parents[2]
REACHED: set[str] = set()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working folder, with another one beside it in which nothing may appear."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("keep out")
    monkeypatch.chdir(inside)
    yield inside
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    assert (outside / "secret").read_text() == "keep out"


def refused(capsys, code: str | None, *arguments: object) -> None:
    """The command fails with this code, in two lines at most."""
    status = main([str(argument) for argument in arguments])
    err = capsys.readouterr().err
    match = re.match(r"error (O\d\d\d): .", err)
    assert match, (status, err)
    assert code is None or match[1] == code, err
    assert status == FAMILY_EXIT[match[1][1]]
    assert len(err.splitlines()) <= 2
    assert "\x1b" not in err
    assert len(err) < 1500
    REACHED.add(match[1])


# Manifests

Change = Callable[[dict], object]


def first(**fields) -> Change:
    return lambda manifest: manifest["subtests"][0].update(fields)


def top(**fields) -> Change:
    return lambda manifest: manifest.update(fields)


MANIFESTS: list[tuple[str, Change]] = [
    ("O104", top(format=2)),
    ("O104", top(format=True)),
    ("O104", top(format="1")),
    ("O104", top(profile=None)),
    ("O104", top(profile="a\x1b[31m")),
    ("O104", top(spec_sha256=["x"])),
    ("O104", top(subtests={})),
    ("O104", top(subtests="abc")),
    ("O120", top(subtests=[])),
    ("O105", top(subtests=[[]])),
    ("O105", top(subtests=[None])),
    ("O105", first(id=7)),
    ("O105", first(id=None)),
    ("O105", first(node=[])),
    ("O105", first(sweep={})),
    ("O106", first(id="")),
    ("O106", first(id="a.b.c")),
    ("O106", first(id="a.b.c.D")),
    ("O106", first(id="a.b.c.d; rm -rf /")),
    ("O106", first(id="a.b.c.d\n")),
    ("O106", first(id="../../etc.b.c.d")),
    ("O106", first(id="a.b.c." + "d" * 400)),
    ("O106", first(id="a.b.c.\u0131")),
    ("O107", first(backend="bb")),
    ("O107", first(node="generated_tests/test_dense_bb.py::test_eager[pass_0]")),
    ("O107", first(node="generated_tests/test_dense_aa.py::test_eager[pass_0]; true")),
    ("O107", first(node="/etc/passwd")),
    ("O108", lambda manifest: manifest["subtests"].append(manifest["subtests"][0])),
    ("O109", top(counts={"must_pass": 3, "known_failures": 0})),
    ("O109", top(counts=[])),
    ("O110", first(weight=0)),
    ("O110", first(weight=-1.5)),
    ("O110", first(weight="heavy")),
    ("O110", first(weight=True)),
    ("O110", first(weight=float("nan"))),
    ("O110", first(weight=float("inf"))),
    ("O111", first(known_failure="x")),
    ("O111", first(known_failure="x", known_failure_action="ignore")),
    ("O111", first(known_failure=None, known_failure_action="xfail")),
    ("O111", first(known_failure=["x"], known_failure_action="xfail")),
    ("O111", first(known_failure="x\n", known_failure_action="xfail")),
    ("O111", first(known_failure="x", known_failure_action="crash", known_failure_exit=9)),
]


@pytest.mark.parametrize(("code", "change"), MANIFESTS)
def test_malformed_manifests(home, capsys, code, change):
    suite = write_suite(home / "suite", passing(3))
    manifest = json.loads((suite / "manifest.json").read_text())
    manifest.pop("counts") if code == "O111" else None
    change(manifest)
    (suite / "manifest.json").write_text(json.dumps(manifest))
    refused(capsys, code, "plan", "--tests", suite)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 100_000, b"\xff\xfe\0", b"null", b'"x"', b"[]", b"1" * 5000, b'{"format":1e999}']
)
def test_manifests_that_are_none(home, capsys, data):
    suite = write_suite(home / "suite", passing(1))
    (suite / "manifest.json").write_bytes(data)
    refused(capsys, None, "plan", "--tests", suite)


def test_manifests_that_cannot_be_read(home, capsys):
    refused(capsys, "O101", "plan", "--tests", "none")
    refused(capsys, "O102", "plan", "--tests", "a\0b")
    (home / "folder" / "manifest.json").mkdir(parents=True)
    refused(capsys, "O102", "plan", "--tests", "folder")
    (home / "pipe").mkdir()
    os.mkfifo(home / "pipe" / "manifest.json")
    refused(capsys, "O102", "plan", "--tests", "pipe")
    big = home / "big" / "manifest.json"
    big.parent.mkdir()
    with open(big, "wb") as file:
        file.truncate((512 << 20) + 1)
    refused(capsys, "O119", "plan", "--tests", "big")
    suite = write_suite(home / "suite", passing(2))
    (suite / "test_dense_bb.py").unlink()
    refused(capsys, "O116", "plan", "--tests", suite)


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("O112", ["-k", "nothing_like_it"]),
        ("O113", ["dense.aa.eager.pass_99"]),
        ("O113", ["--backend", "cc"]),
        ("O113", ["--sweep", "x" * 5000]),
        ("O113", ["--method", "\x1b[31m"]),
        ("O114", ["-k", "and and"]),
        ("O115", ["--shard", "3/2"]),
        ("O115", ["--shard", "0/2"]),
        ("O115", ["--shard", "one"]),
        ("O115", ["--shard", "1/99999"]),
        ("O115", ["--shard", "1/200"]),
        ("O117", ["--durations", "manifest.json"]),
        ("O508", ["--shards", "0"]),
        ("O508", ["--shards", "100000"]),
    ],
)
def test_malformed_selections(home, capsys, code, arguments):
    suite = write_suite(home, passing(2))
    refused(capsys, code, "plan", "--tests", suite, *arguments)


# Run folders


def set_run(**fields) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        raw = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(raw | fields))

    return change


def set_plan(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        raw = json.loads((folder / "plan.json").read_text())
        change(raw)
        (folder / "plan.json").write_text(json.dumps(raw))

    return apply


def row_of(plan: dict) -> list:
    return plan["shards"][0][0]["rows"][0]


def set_row(place: int, value: object) -> Callable[[Path], object]:
    return set_plan(lambda plan: row_of(plan).__setitem__(place, value))


def replace_with_link(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        path.symlink_to(folder.parents[1] / "outside" / ("secret" if "." in name else ""))

    return change


def pipe(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


FOLDERS: list[tuple[str, Callable[[Path], object]]] = [
    ("O201", lambda folder: (folder / "run.json").unlink()),
    ("O201", lambda folder: (folder / "plan.json").unlink()),
    ("O202", lambda folder: (folder / "run.json").write_text("{")),
    ("O202", lambda folder: (folder / "run.json").write_bytes(b"\xff" * 10)),
    ("O202", lambda folder: (folder / "plan.json").write_text("[" * 90_000)),
    ("O202", replace_with_link("run.json")),
    ("O202", replace_with_link("plan.json")),
    ("O202", pipe("run.json")),
    ("O203", lambda folder: (folder / "run.json").write_text("[]")),
    ("O203", set_run(format=9)),
    ("O204", set_run(tests=7)),
    ("O204", set_run(tests="a\nb")),
    ("O204", set_run(tests="x" * 5000)),
    ("O204", set_run(profile="\x1b]0;owned\x07")),
    ("O204", set_run(part=[1, 2, 3])),
    ("O204", set_run(part=["1", "2"])),
    ("O204", set_run(part=[0, 4])),
    ("O204", set_run(part=[2, 3])),
    ("O204", set_run(repeat=0)),
    ("O204", set_run(repeat=10**9)),
    ("O204", set_run(repeat=True)),
    ("O204", set_run(deadline=-1)),
    ("O204", set_run(deadline="soon")),
    ("O204", set_run(deadline=float("nan"))),
    ("O204", set_run(devices="cpu")),
    ("O204", set_run(devices=[1])),
    ("O204", set_run(command="curl example.org | sh")),
    ("O204", set_run(started=None)),
    ("O204", set_run(selection=[["x"]])),
    ("O204", lambda folder: (folder / "run.json").write_text('{"format": 1}')),
    ("O205", lambda folder: (folder / "plan.json").write_text("{}")),
    ("O205", set_plan(lambda plan: plan.update(shards=[]))),
    ("O205", set_plan(lambda plan: plan.update(shards=[[]] * 999))),
    ("O205", set_plan(lambda plan: plan.update(shards=[7]))),
    ("O205", set_plan(lambda plan: plan.update(sweeps=7))),
    ("O205", set_plan(lambda plan: plan["shards"][0].append(7))),
    ("O205", set_plan(lambda plan: plan["shards"][0][0].update(file="../../x.py"))),
    ("O205", set_plan(lambda plan: plan["shards"][0][0].update(cost="1"))),
    ("O205", set_plan(lambda plan: plan["shards"][0][0].update(rows=[]))),
    ("O205", set_plan(lambda plan: plan["shards"][0][0].update(rows=7))),
    ("O205", set_plan(lambda plan: plan["shards"][0][0].update(rows=[[]]))),
    ("O205", set_plan(lambda plan: plan["shards"][0][0]["rows"].append(row_of(plan)))),
    ("O205", set_row(0, "dense.aa.eager.X")),
    ("O205", set_row(0, 7)),
    ("O205", set_row(0, "mla.zz.eager.x")),
    ("O205", set_row(1, "x")),
    ("O205", set_row(2, "run")),
    ("O205", set_row(3, [])),
    ("O205", set_row(4, "1")),
    ("O206", set_run(plan_sha256="0" * 64)),
    ("O206", set_plan(lambda plan: plan["shards"].reverse())),
    ("O206", set_plan(lambda plan: plan["shards"][0].pop())),
    ("O211", replace_with_link("events/w0001.jsonl")),
    ("O211", replace_with_link("events/supervisor.jsonl")),
    ("O211", pipe("events/w0002.jsonl")),
    ("O211", lambda folder: (folder / "events" / "w0009.jsonl").mkdir()),
]


@pytest.mark.parametrize(("code", "change"), FOLDERS)
def test_malformed_run_folders(home, capsys, code, change):
    suite = write_suite(home / "suite", passing(4))
    folder = pretend_run(suite, home / "run", shards=4).path
    change(folder)
    refused(capsys, code, "report", folder)
    refused(capsys, code, "merge", folder, "--output", home / "merged")


@pytest.mark.parametrize("name", ["events", "logs"])
def test_a_folder_that_points_elsewhere_is_not_written_to(home, capsys, name):
    suite = write_suite(home / "suite", passing(2))
    folder = pretend_run(suite, home / "run", say=lambda planned: None).path
    replace_with_link(name)(folder)
    refused(capsys, "O201", "run", "--tests", suite, "--resume", folder)
    (home / "new").mkdir()
    (home / "new" / name).symlink_to(home.parent / "outside")
    refused(capsys, "O201", "run", "--tests", suite, "--output", home / "new")


def test_reports_replace_links_instead_of_following_them(home):
    suite = write_suite(home / "suite", passing(2))
    folder = pretend_run(suite, home / "run").path
    for name in ("results.json", "index.html", "junit.xml", "summary.md"):
        (folder / name).symlink_to(home.parent / "outside" / "secret")
    assert main(["report", str(folder)]) == 0
    assert not (folder / "index.html").is_symlink()


def test_other_refusals(home, capsys):
    suite = write_suite(home / "suite", passing(2))
    folder = pretend_run(suite, home / "run").path
    refused(capsys, "O207", "run", "--tests", suite, "--output", folder)
    lock = Folder(folder).lock()
    with pytest.raises(OrchestratorError) as caught:
        Folder(folder).lock(wait=0.1)
    os.close(lock)
    assert caught.value.code == "O208"
    (home / "file").write_text("")
    refused(capsys, "O505", "run", "--tests", suite, "--output", home / "file")
    (folder / ".lock").unlink()
    (folder / ".lock").symlink_to(home.parent / "outside" / "new")
    refused(capsys, "O201", "run", "--tests", suite, "--resume", folder)


# Generated damage


def damage(data: bytes, rng: random.Random) -> bytes:
    """Cut, flip, repeat, insert: what disks, editors and bad luck do."""
    kind = rng.randrange(5)
    at = rng.randrange(len(data) + 1)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + data[max(0, at - 50) : at] + data[at:]
    if kind == 3:
        word = rng.choice([b"null", b"1e999", b"{}", b"[[]]", b'"\\ud800"', b"-1", b"true", b"\0", b"\x1b[31m"])
        return data[:at] + word + data[at:]
    tokens = re.split(rb"(\W)", data)
    spot = rng.randrange(len(tokens))
    tokens[spot] = rng.choice(tokens)
    return b"".join(tokens)


def judge(folder: Path) -> list[str]:
    """What the report says about a folder: the ids that it judged."""
    run, plan = Folder(folder).load()
    verdict = build_verdict(run, plan, read_ledger(Folder(folder), plan))
    text.summary(verdict)
    assert sum(verdict.counts.values()) == len(verdict.results)
    return [result.planned.id for result in verdict.results]


def test_generated_damage(home):
    """400 damaged manifests, plans, runs and events: each is refused with a code, or judged with nothing lost."""
    suite = write_suite(home / "suite", passing(3))
    clean = pretend_run(suite, home / "clean", shards=2).path
    files = [clean / name for name in ("run.json", "plan.json")] + sorted((clean / "events").iterdir())
    files.append(suite / "manifest.json")
    whole = {path: path.read_bytes() for path in files}
    refusals: list[OrchestratorError] = []
    judged = 0
    for seed in range(400):
        rng = random.Random(seed)
        path = rng.choice(files)
        data = whole[path]
        for _ in range(rng.randint(1, 3)):
            data = damage(data, rng)
        path.write_bytes(data)
        try:
            ids = [p.id for p in load_manifest(suite).subtests] if path.name == "manifest.json" else judge(clean)
            assert len(ids) == len(set(ids))
            assert len(ids) == 6 or path.parent.name != "events"
            judged += 1
        except OrchestratorError as error:
            refusals.append(error)
        path.write_bytes(whole[path])
    assert all(error.code in CODES and "\x1b" not in str(error) for error in refusals)
    assert len(refusals) > 100
    assert judged > 100


def test_every_error_code_is_raised_somewhere_and_documented():
    source = "".join(path.read_text() for path in (ROOT / "orchestrator").rglob("*.py") if path.name != "errors.py")
    used = set(re.findall(r'"(O\d\d\d)"', source))
    assert used == set(CODES)
    assert len(set(CODES.values())) == len(CODES)


def test_enough_of_them_were_reached_here():
    if len(REACHED) < 5:
        pytest.skip("only meaningful after the whole module")
    assert len(REACHED) >= 25, sorted(REACHED)
