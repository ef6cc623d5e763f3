"""The bench over a suite that does nothing: every second has its place."""

from __future__ import annotations

import json

import pytest

from orchestrator.bench import __main__ as command
from orchestrator.bench import measuring
from orchestrator.bench.measuring import Setting
from orchestrator.campaign.fakesuite import passing
from orchestrator.devices import Device
from orchestrator.errors import OrchestratorError


def test_settings_take_turns():
    a, b, c = Setting("cuda", 1, 2), Setting("cuda", 2, 4), Setting("cpu", 0, 4)
    assert command.turns([a, b, c], 2) == [(c, 0), (b, 0), (a, 1), (b, 1), (c, 1), (c, 2), (b, 2), (a, 2)]


def test_settings_of_a_host(monkeypatch):
    monkeypatch.setattr(measuring, "allowed", lambda env: [Device(n, f"GPU-{n}", "H200") for n in range(2)])
    parse = command.build_parser().parse_args
    assert command.settings(parse(["--workers", "4,8", "--no-cpu"])) == [
        Setting("cuda", gpus, workers) for gpus in (1, 2) for workers in (4, 8)
    ]
    assert command.settings(parse(["--gpus", "2", "--workers", "1", "--cpu-workers", "3"])) == [
        Setting("cuda", 2, 1),
        Setting("cpu", 0, 3),
    ]
    with pytest.raises(OrchestratorError, match="--gpus 3: only 2 GPUs may be used here"):
        command.settings(parse(["--gpus", "1,3"]))
    monkeypatch.setattr(measuring, "allowed", lambda env: [])
    assert command.settings(parse(["--cpu-workers", "1"])) == [Setting("cpu", 0, 1)]
    with pytest.raises(OrchestratorError, match="nothing to measure"):
        command.settings(parse(["--no-cpu"]))
    with pytest.raises(OrchestratorError, match="--gpus 1: only 0 GPUs"):
        command.settings(parse(["--gpus", "1"]))


def test_a_small_suite_is_measured(bench, tmp_path, monkeypatch, capsys):
    suite = bench([*passing(3), "dense.aa.eager.slow_1"])
    for name, value in suite.env.items():
        monkeypatch.setenv(name, value)
    output = tmp_path / "out"
    arguments = ["--tests", str(suite.suite), "--output", str(output), "--repetitions", "1", "--cpu-workers", "1,2"]
    assert command.main(arguments) == 0
    runs = json.loads((output / "bench.json").read_text())["runs"]
    assert [(run["setting"]["workers"], run["number"]) for run in runs] == [(2, 0), (1, 1), (2, 1)]
    for run in runs:
        assert run["subtests"] == 7
        assert run["said"] == "7 passed"
        assert run["wall"] == pytest.approx(run["start"] + run["work"] + run["end"], abs=0.01)
        assert run["phases"]["other"] > 0
    page = (output / "bench.md").read_text()
    assert "| CPU, 1 workers | 1 |" in page
    assert "CPU, 2 workers:" in page.split("First runs")[1]
    assert "CPU, 1 workers: run 1 of 1" in capsys.readouterr().out


def test_a_failing_suite_is_said(bench, tmp_path, monkeypatch):
    suite = bench(["dense.aa.eager.fail_1", "dense.aa.eager.pass_1"])
    for name, value in suite.env.items():
        monkeypatch.setenv(name, value)
    arguments = ["--tests", str(suite.suite), "--output", str(tmp_path / "out"), "--repetitions", "1"]
    assert command.main([*arguments, "--cpu-workers", "1"]) == 1
    assert "exit code 1, 1 failed, 1 passed" in (tmp_path / "out" / "bench.md").read_text()
