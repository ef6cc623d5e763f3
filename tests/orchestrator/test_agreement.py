"""The table of agreement, from the folders of two runs that never were."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agreement import cli, page, verdicts
from orchestrator.agreement.verdicts import Limit, Pair, Seen
from orchestrator.campaign.fakesuite import write_suite

IDS = [f"dense.{backend}.eager.case_{number}" for backend in ("aa", "bb") for number in range(3)]


def row(id: str, outcome: str = "passed", **more: Any) -> dict[str, Any]:
    fields = {"id": id, "outcome": outcome, "check": None, "message": "", "ran": ["native"], "unavailable_kind": None}
    return fields | more


class Host:
    """A suite and the two folders; ``compare`` runs the command over them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.suite = write_suite(home / "suite", IDS)
        self.rows = {side: {id: row(id, ran=["emulated"]) for id in IDS} for side in cli.SIDES}
        self.rows["cuda"] = {id: row(id) for id in IDS}
        self.kinds = {"recorder": "cpu", "cuda": "NVIDIA H200"}
        self.limits = ""
        self.sha256 = hashlib.sha256((self.suite / "manifest.json").read_bytes()).hexdigest()

    def compare(self) -> int:
        (self.home / "limits.toml").write_text(self.limits)
        arguments = ["--tests", str(self.suite), "--output", str(self.home / "out"), "--no-faults"]
        arguments += ["--limits", str(self.home / "limits.toml")]
        for side in self.rows:
            arguments += [f"--{side}", str(self.leave(side, self.home / side))]
        return cli.main(arguments)

    def leave(self, side: str, folder: Path) -> Path:
        """The folder of a run on one side."""
        (folder / "events").mkdir(parents=True, exist_ok=True)
        run = {"device_kind": self.kinds[side], "manifest_sha256": self.sha256}
        (folder / "results.json").write_text(json.dumps({"run": run, "subtests": list(self.rows[side].values())}))
        ready = {"event": "ready", "environment": {"versions": {"torch": f"2.11 of {side}"}}}
        (folder / "events" / "w0001.jsonl").write_text(f"x\n{json.dumps(ready)}\n")
        return folder

    @property
    def table(self) -> dict[str, Any]:
        return json.loads((self.home / "out" / "agreement.json").read_text())

    @property
    def page(self) -> str:
        return (self.home / "out" / "agreement.md").read_text()

    def status(self, id: str) -> str:
        return next(entry["status"] for entry in self.table["subtests"] if entry["id"] == id)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_two_runs_that_agree(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    for rows in host.rows.values():
        rows[IDS[1]] |= {"outcome": "known_failure", "check": "compare", "message": "a bit"}
        rows[IDS[2]] |= {"outcome": "failed", "check": "pointer_guard", "message": "rebound"}
    assert host.compare() == 0
    assert "agree on 6 of 6 subtests" in capsys.readouterr().out
    assert [entry["status"] for entry in host.table["subtests"]] == ["agree"] * 6
    assert f"| `{IDS[2]}` | failed: pointer_guard | failed: pointer_guard | agree |" in host.page
    assert "## Disagreements" not in host.page


@pytest.mark.parametrize(
    ("recorder", "cuda", "says"),
    [
        ({}, {"outcome": "failed", "check": "compare", "message": "off by 1"}, "failed: compare on CUDA"),
        ({"outcome": "failed", "check": "kv_integrity"}, {}, "failed: kv_integrity on the recorder, passed on CUDA"),
        ({"outcome": "failed", "check": "compare"}, {"outcome": "failed", "check": "capture"}, "failed: capture"),
        ({"outcome": "known_failure"}, {"outcome": "unexpected_pass"}, "unexpected_pass on CUDA"),
        ({}, {"outcome": "not_run", "ran": []}, "no verdict of cuda"),
        ({"outcome": "not_run"}, {"outcome": "not_run"}, "no verdict of recorder"),
        ({}, {"ran": []}, "ran nothing"),
        ({}, {"ran": ["emulated", "native"]}, "ran emulated and native"),
        ({}, {"outcome": "unavailable", "unavailable_kind": None}, "unavailable on CUDA"),
        ({"outcome": "unavailable", "unavailable_kind": "package"}, {}, "unavailable: package on the recorder"),
    ],
)
def test_every_difference_is_a_disagreement(
    host: Host, recorder: dict[str, Any], cuda: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    host.rows["recorder"][IDS[3]] |= recorder
    host.rows["cuda"][IDS[3]] |= cuda
    assert host.compare() == 1
    assert host.status(IDS[3]) == "disagree"
    assert says in host.page
    assert f"DISAGREE {IDS[3]}" in capsys.readouterr().out


@pytest.mark.parametrize("side", ["recorder", "cuda"])
def test_a_missing_id_is_a_disagreement(host: Host, side: str) -> None:
    del host.rows[side][IDS[0]]
    assert host.compare() == 1
    assert f"no verdict of {side}" in host.page


def test_what_is_not_native_here_is_typed_and_not_counted(host: Host) -> None:
    for id in IDS[3:]:
        host.rows["cuda"][id] |= {
            "outcome": "unavailable", "unavailable_kind": "architecture", "message": "no kernel for SM 9.0", "ran": [],
        }  # fmt: skip
    assert host.compare() == 0
    assert "agree on 3 of 3 subtests" in host.page
    assert "| dense.bb | 3 | architecture: no kernel for SM 9.0 |" in host.page
    del host.rows["recorder"][IDS[4]]
    assert host.compare() == 1


def test_nothing_native_is_no_agreement(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    for id in IDS:
        host.rows["cuda"][id] |= {"outcome": "unavailable", "unavailable_kind": "package", "message": "gone", "ran": []}
    assert host.compare() == 1
    assert "NOTHING COMPARED" in capsys.readouterr().out
    pairs = [Pair(IDS[0], Seen("passed"), Seen("passed"))]
    elsewhere = Pair("-", None, None, "F01", "not native here")
    assert verdicts.Table(pairs).exit_code == 0
    assert verdicts.Table(pairs, [elsewhere]).exit_code == 1


def test_an_illegal_access_is_one_thing_on_both_sides() -> None:
    fault = Seen("failed", "kernel_fault", "page 99 is outside")
    for there in (Seen("crashed"), Seen("failed", "AcceleratorError", poisoned=True), Seen("failed", "IndexError")):
        assert verdicts.judge(Pair("dense.aa.eager.x", fault, there, "F01"), []).status == "agree"


def test_a_stated_limit_is_shown_and_must_be_needed(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.rows["cuda"][IDS[0]] |= {"outcome": "failed", "check": "compare"}
    host.limits = '[[limit]]\nid = "dense.aa.*"\nrecorder = "passed"\ncuda = "failed: compare"\ncause = "it rounds"\n'
    assert host.compare() == 0
    assert "1 differ by a stated limit" in capsys.readouterr().out
    assert "it rounds" in host.page
    limit = Limit(cause="it rounds", id="dense.aa.*", cuda="failed: compare")
    assert verdicts.unused([limit], [Pair(IDS[0], Seen("passed"), Seen("passed"))]) == [limit]
    race = Limit(cause="either order", id="dense.aa.*", sometimes=True)
    assert verdicts.unused([race], [Pair(IDS[0], Seen("passed"), Seen("passed"))]) == []
    assert not Limit(cause="other", id="dense.aa.*", fault="F01").holds(Pair(IDS[0], Seen("passed"), Seen("failed")))


def test_the_page_says_where_each_side_ran_and_which_suite(host: Host) -> None:
    """In the words of the runs: the host that compares may have other versions than both."""
    assert host.compare() == 0
    assert host.table["versions"] == {side: {"torch": f"2.11 of {side}"} for side in cli.SIDES}
    assert (host.table["spec_sha256"], host.table["manifest_sha256"]) == ("fake", host.sha256)
    assert "- CUDA: NVIDIA H200, torch 2.11 of cuda\n- recorder: CPU, torch 2.11 of recorder\n" in host.page
    assert f"manifest `{host.sha256[:12]}`" in host.page


def test_runs_of_another_suite_or_side_are_refused(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    host.kinds["cuda"] = "cpu"
    assert host.compare() == 11
    assert "ran on the other side" in capsys.readouterr().err
    host.kinds["cuda"], host.sha256 = "NVIDIA H200", "0" * 64
    assert host.compare() == 11
    assert "ran another manifest" in capsys.readouterr().err
    (host.home / "cuda" / "results.json").write_text("{")
    assert cli.main(["--tests", str(host.suite), "--recorder", str(host.home / "cuda"), "--no-faults"]) == 11


def trial(id: str, outcome: str = "failed", check: str | None = "compare", exercised: bool = True) -> dict[str, Any]:
    killed = outcome not in ("passed", "known_failure")
    return {
        "id": id, "outcome": outcome, "check": check, "message": "m", "seconds": 1.0, "exercised": exercised,
        "killed": killed,
    }  # fmt: skip


def fault(*trials: dict[str, Any], emulation: bool = False, error: str | None = None) -> dict[str, Any]:
    return {"title": "t", "control": False, "emulation": emulation, "error": error, "trials": list(trials)}


def test_two_hosts_share_the_work(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorder runs here, CUDA there with what the recorder left, and the two are compared anywhere."""
    calls = []

    def run_side(tests: Path, output: Path, device: str, workers: int) -> Path:
        side = next(side for side, name in cli.SIDES.items() if name == device)
        return host.leave(side, output)

    def try_faults(arguments: Any, output: Path, side: str, ids: list[str], faults: Any, workers: int) -> Any:
        calls.append((side, faults))
        before = [trial(IDS[number], "passed", None, exercised=number == 1) for number in range(2)]
        trials = [*before, trial(IDS[2])] if faults is None else [trial(id) for id in faults["F01"]]
        (output / f"faults-{side}.json").write_text(json.dumps({"F01": fault(*trials)}))

    monkeypatch.setattr(cli, "run_side", run_side)
    monkeypatch.setattr(cli, "try_faults", try_faults)
    common, here, there = ["--tests", str(host.suite)], host.home / "here", host.home / "there"
    assert cli.main([*common, "--only", "recorder", "--output", str(here)]) == 0
    assert cli.main([*common, "--only", "cuda", "--output", str(there)]) == 14, "it needs the recorder's trials"
    faults = ["--recorder-faults", str(here / "faults-recorder.json")]
    assert cli.main([*common, "--only", "cuda", "--output", str(host.home / "gpu"), *faults]) == 0
    assert calls == [("recorder", None), ("cuda", {"F01": [IDS[1], IDS[2]]})]
    folders = ["--recorder", str(here / "recorder"), "--cuda", str(host.home / "gpu" / "cuda")]
    faults += ["--cuda-faults", str(host.home / "gpu" / "faults-cuda.json")]
    assert cli.main([*common, *folders, *faults, "--output", str(host.home / "out")]) == 1
    assert [(entry["id"], entry["status"]) for entry in host.table["faults"]] == [
        (IDS[1], "disagree"),
        (IDS[2], "agree"),
    ]
    assert host.table["versions"]["cuda"] == {"torch": "2.11 of cuda"}, "those of this host would be another host's"
    assert "1 of 2 trials" in capsys.readouterr().out


def test_faults_are_compared_trial_by_trial() -> None:
    passed = trial(IDS[0], "passed", None)
    recorder = {
        "F01": fault(passed, trial(IDS[1])),
        "F02": fault(trial(IDS[1]), emulation=True),
        "F03": fault(trial(IDS[1])),
        "F04": fault(),
        "F05": fault(trial(IDS[1]), error="the kit changed"),
        "F06": fault(trial(IDS[1]), emulation=True),
        "F07": fault(trial(IDS[1])),
        "F08": fault(trial(IDS[1])),
        "F09": fault(trial(IDS[1]), emulation=True),
    }
    quiet = trial(IDS[1], "passed", None, exercised=False)
    cuda = {
        "F01": fault(passed, trial(IDS[1])),
        "F02": fault(quiet, emulation=True),
        "F03": fault(quiet),
        "F06": fault(trial(IDS[1], check="capture"), emulation=True),
        "F07": fault(),
        "F08": fault(trial(IDS[1], "unavailable", None, exercised=False)),
        "F09": fault(trial(IDS[1], "passed", None), emulation=True),
    }
    pairs = cli.compare_faults(recorder, cuda, [])
    assert [(pair.fault, pair.status) for pair in pairs] == [
        ("F01", "agree"),
        ("F01", "agree"),
        ("F02", "emulation_only"),
        ("F03", "disagree"),
        ("F04", "not native here"),
        ("F05", "disagree"),
        ("F05", "disagree"),
        ("F06", "disagree"),
        ("F07", "disagree"),
        ("F08", "not native here"),
        ("F09", "emulation_only"),
    ]
    table = verdicts.Table([Pair(IDS[0], Seen("passed"), Seen("passed"))], pairs)
    assert table.exit_code == 1
    text = page.render(table)
    assert f"| F03 | `{IDS[1]}` | failed: compare | passed | disagree |" in text
    assert f"| F02 | `{IDS[1]}` | failed: compare | passed | emulation_only: no native counterpart |" in text
    assert "2 of 7 trials" in text
