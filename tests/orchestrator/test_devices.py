"""Devices and leases, with a stand-in for nvidia-smi."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import devices
from orchestrator.campaign.fakesuite import passing, write_suite
from orchestrator.cli import main
from orchestrator.devices import Device, allowed, choose_lanes, narrow
from orchestrator.durations import save_durations
from orchestrator.errors import OrchestratorError

GPUS = [Device(n, f"GPU-{n}{n}{n}{n}-abc", "NVIDIA H200") for n in range(4)]
LISTING = "".join(f"{gpu.index}, {gpu.uuid}, [N/A], {gpu.name}\n" for gpu in GPUS)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Install a program ``nvidia-smi`` that prints this text."""

    def install(text: str = LISTING, code: int = 0) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "listing").write_text(text)
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat {folder}/listing\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return folder

    for name in list(os.environ):
        if name.startswith(("ATTNMATRIX_", "CUDA_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ATTNMATRIX_LEASES", str(tmp_path / "leases"))
    return install


def uuids(env: dict[str, str]) -> list[str]:
    return [device.uuid for device in allowed(env)]


def test_all_devices_are_allowed_unless_the_caller_narrows_them(smi):
    smi()
    assert uuids({}) == [gpu.uuid for gpu in GPUS]
    assert uuids({"CUDA_VISIBLE_DEVICES": "2,0"}) == [GPUS[2].uuid, GPUS[0].uuid]
    assert uuids({"CUDA_VISIBLE_DEVICES": "GPU-1111"}) == [GPUS[1].uuid]
    assert uuids({"CUDA_VISIBLE_DEVICES": "1,-1,2"}) == [GPUS[1].uuid]
    assert uuids({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert uuids({"CUDA_VISIBLE_DEVICES": "-1,MIG-a1"}) == []
    assert uuids({"CUDA_VISIBLE_DEVICES": "MIG-a1,MIG-b2"}) == ["MIG-a1", "MIG-b2"]
    assert uuids({"ATTNMATRIX_DEVICES": "3"}) == [GPUS[3].uuid]
    assert uuids({"ATTNMATRIX_DEVICES": "cpu"}) == []
    assert uuids({"ATTNMATRIX_DEVICE": "cpu"}) == []
    assert uuids({"CUDA_VISIBLE_DEVICES": "0,1", "ATTNMATRIX_DEVICES": "1"}) == [GPUS[1].uuid]


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"CUDA_VISIBLE_DEVICES": "7"}, "O402"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-9"}, "O402"),
        ({"CUDA_VISIBLE_DEVICES": "GPU"}, "O402"),
        ({"CUDA_VISIBLE_DEVICES": "0", "ATTNMATRIX_DEVICES": "1"}, "O402"),
        ({"CUDA_VISIBLE_DEVICES": "", "ATTNMATRIX_DEVICE": "cuda"}, "O405"),
        ({"ATTNMATRIX_DEVICE": "cpuu"}, "O402"),
        ({"ATTNMATRIX_DEVICE": "cuda:0", "ATTNMATRIX_DEVICES": "cpu"}, "O402"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(smi, env, code):
    smi()
    with pytest.raises(OrchestratorError) as caught:
        allowed(env)
    assert caught.value.code == code


def test_an_index_may_mean_two_devices_on_a_host_with_several_models(smi):
    """CUDA counts the fastest first, nvidia-smi as they are plugged in."""
    smi("0, GPU-old-0, [N/A], Tesla T4\n1, GPU-new-1, [N/A], NVIDIA H200\n")
    for visible in ("0", "GPU-old,1"):
        with pytest.raises(OrchestratorError) as caught:
            allowed({"CUDA_VISIBLE_DEVICES": visible})
        assert caught.value.code == "O407"
        assert "GPU-new-1 (NVIDIA H200)" in caught.value.hint
    assert uuids({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == ["GPU-old-0"]
    assert uuids({"CUDA_VISIBLE_DEVICES": "GPU-new"}) == ["GPU-new-1"]
    assert uuids({"ATTNMATRIX_DEVICES": "1"}) == ["GPU-new-1"], "this one is ours, and counts as nvidia-smi does"


def test_devices_that_are_split_by_mig_are_named_by_slice(smi):
    smi("0, GPU-split-0, Enabled, NVIDIA H200\n1, GPU-whole-1, Disabled, NVIDIA H200\n")
    for env in ({}, {"CUDA_VISIBLE_DEVICES": "GPU-split-0"}, {"CUDA_VISIBLE_DEVICES": "GPU-whole-1,MIG-a1"}):
        with pytest.raises(OrchestratorError) as caught:
            allowed(env)
        assert caught.value.code == "O407"
        assert "slices" in caught.value.hint
    assert uuids({"CUDA_VISIBLE_DEVICES": "1"}) == ["GPU-whole-1"]
    assert uuids({"ATTNMATRIX_DEVICES": "1"}) == ["GPU-whole-1"]
    assert uuids({"CUDA_VISIBLE_DEVICES": "MIG-a1,MIG-b2,MIG-a1"}) == ["MIG-a1", "MIG-b2"]


def test_a_driver_that_does_not_answer_is_no_host_without_a_gpu(smi):
    smi("NVIDIA-SMI has failed because it couldn't communicate with the driver", 9)
    with pytest.raises(OrchestratorError) as caught:
        allowed({})
    assert caught.value.code == "O401"
    smi("<html>hello</html>\n")
    with pytest.raises(OrchestratorError) as caught:
        allowed({})
    assert caught.value.code == "O406"


def test_without_a_driver_the_lanes_are_cpu_cores(smi, monkeypatch):
    monkeypatch.setattr(devices, "QUERY", ("no-such-program",))
    monkeypatch.setattr(devices, "CONTROL", Path("/no/such/device"))
    monkeypatch.setattr(devices, "cpu_count", lambda: 16)
    with choose_lanes(None) as lanes:
        assert lanes.devices == ["cpu"] * 4
        assert "No GPU here: 4 workers run them on the CPU" in lanes.sentence
    monkeypatch.setattr(devices, "CONTROL", Path("/dev/null"))
    with pytest.raises(OrchestratorError) as caught, choose_lanes(None):
        pass
    assert caught.value.code == "O401", "a driver without nvidia-smi is no host without a GPU"


def test_lanes_alternate_between_devices(smi, monkeypatch):
    smi()
    monkeypatch.setattr(devices, "cpu_count", lambda: 16)
    with choose_lanes(None) as lanes:
        assert lanes.devices == [gpu.uuid for gpu in GPUS] * 3
        assert lanes.kind == "NVIDIA H200"
    with choose_lanes(None, env={"CUDA_VISIBLE_DEVICES": "1", **os.environ}) as lanes:
        assert lanes.devices == [GPUS[1].uuid] * 12, "as many as a device takes, three for four cores"
    with choose_lanes(None, 2) as lanes:
        assert lanes.devices == [gpu.uuid for gpu in GPUS] * 2
    with choose_lanes(2) as lanes:
        assert len(set(lanes.devices)) == 2


def test_two_runs_never_share_a_device(smi):
    smi()
    hold = "import time; from orchestrator.devices import choose_lanes\nwith choose_lanes(2) as lanes:\n"
    hold += "    print(*lanes.devices, flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    theirs = other.stdout.readline().split()
    with choose_lanes(None) as lanes:
        assert len(theirs) == 2
        assert not set(theirs) & set(lanes.devices)
        assert set(theirs) | set(lanes.devices) == {gpu.uuid for gpu in GPUS}
        with pytest.raises(OrchestratorError) as caught, choose_lanes(None, wait=0.1):
            pass
        assert caught.value.code == "O403"
    other.kill()
    other.wait()
    with choose_lanes(None, wait=5) as lanes:
        assert len(set(lanes.devices)) == 4, "a lease ends with its process, also when it is killed"


def test_an_unusable_lease_folder(smi, tmp_path):
    smi()
    (tmp_path / "file").write_text("")
    with pytest.raises(OrchestratorError) as caught, choose_lanes(1, env={"ATTNMATRIX_LEASES": str(tmp_path / "file")}):
        pass
    assert caught.value.code == "O404"


def test_narrowing_keeps_the_order_and_drops_repetition():
    assert narrow(GPUS, "2, GPU-0000,2", "x") == [GPUS[2], GPUS[0]]


def test_the_plan_that_is_printed_is_the_one_that_would_run(smi, tmp_path, monkeypatch, capsys):
    """For the GPUs of this host and their recorded times, though another run holds them all."""
    smi()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "cpu_count", lambda: 16)
    ids = passing(20, ("aa", "bb"))
    suite = write_suite(tmp_path / "suite", ids)
    durations = tmp_path / "durations.json"
    save_durations(durations, "NVIDIA H200", dict.fromkeys(ids, 2.0))
    save_durations(durations, "cpu", dict.fromkeys(ids, 50.0))
    with choose_lanes(None):
        assert main(["plan", "--tests", str(suite), "--durations", str(durations)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[1] for line in lines] == [f"{n}/12" for n in range(1, 13)]
        assert sum(float(line.split()[-2]) for line in lines) == 2.0 * len(ids)
        assert main(["plan", "--tests", str(suite), "--workers-per-device", "3"]) == 0
        assert "shard 12/12" in capsys.readouterr().out
    monkeypatch.setenv("ATTNMATRIX_DEVICE", "cpu")
    assert main(["plan", "--tests", str(suite)]) == 0
    assert "shard 4/4" in capsys.readouterr().out


def test_workers_see_one_device_each(smi, bench):
    """CUDA_VISIBLE_DEVICES is the UUID, set before anything can touch CUDA."""
    smi()
    suite = bench([f"dense.{b}.eager.meet_{n}" for b in "xy" for n in range(3)], env={"ATTNMATRIX_DEVICE": ""})
    done = suite.run("--workers", "2")
    assert done.code == 0, done.out
    assert "2 workers on 2 GPUs (NVIDIA H200)" in done.out
    used = {line.split()[1] for path in suite.marks.glob("*.ran") for line in path.read_text().splitlines()}
    assert used == {GPUS[0].uuid, GPUS[1].uuid}
    assert done.results["run"]["device_kind"] == "NVIDIA H200"


def test_a_device_on_which_three_unrelated_subtests_break_is_set_aside(smi, bench):
    """The three run again on the other device, and count as flaky: never silently green."""
    smi("0, GPU-bad-1, Disabled, NVIDIA H200\n1, GPU-good-2, Disabled, NVIDIA H200\n")
    ids = [f"m{m}.b{n}.eager.badgpu" for n in range(6) for m in range(4)]
    suite = bench(ids, env={"ATTNMATRIX_DEVICE": ""})
    done = suite.run("--workers", "2")
    assert "device GPU-bad-1 set aside: 3 unrelated subtests broke on it" in done.out
    counts = done.results["counts"]
    assert counts["flaky"] == 3
    assert counts["flaky"] + counts["passed"] + counts.get("crashed", 0) == len(ids)
    assert done.code != 0
    flaky = next(row for row in done.results["subtests"] if row["outcome"] == "flaky")
    assert flaky["attempts"] == {"crashed": 1, "passed": 1}
    assert flaky["devices"] == ["GPU-bad-1", "GPU-good-2"]


def test_a_single_device_is_never_set_aside(smi, bench):
    smi("0, GPU-bad-1, Disabled, NVIDIA H200\n")
    suite = bench([f"dense.b{n}.eager.badgpu" for n in range(4)], env={"ATTNMATRIX_DEVICE": ""})
    assert suite.run("--workers", "1").results["counts"] == {"crashed": 4}
