"""Reference runs: from the folder of a run to results/runs/, and from there to README."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from spec_tools import SMALL, generator, project_at, repository, with_one_line

from generator.outputs import build, drift, write
from generator.problems import Problem
from generator.results import FOLDER, ReferenceRun, reference_runs
from generator.tables import RUNS_BEGIN, RUNS_END

RUN: dict[str, Any] = {
    "tests": "generated_tests", "profile": "ci", "spec_sha256": "5" * 64, "commit": "c" * 40, "selection": [],
    "part": None, "repeat": 1, "fresh": False, "device_kind": "cpu", "devices": ["cpu"], "workers": 2,
    "started": 1795967349.9, "fault": "", "merged": 0, "command": "nox -s gpu_matrix --",
    "argv": ["run", "--tests", "generated_tests"],
}  # fmt: skip
HERE: dict[str, Any] = {
    "system": "Linux x86_64", "processor": "Some | CPU", "cores": 2,
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
}  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with the small spec, everything generated, and a place for reference runs in README."""
    folder = repository(tmp_path / "repo", SMALL.read_text(encoding="utf-8")).parent
    readme = folder / "README.md"
    if RUNS_BEGIN not in readme.read_text():
        readme.write_text(f"{readme.read_text()}\n{RUNS_BEGIN}\n{RUNS_END}\n")
    assert generator("generate", cwd=folder).returncode == 0
    return folder


@pytest.fixture(autouse=True)
def _repo(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()


def run_folder(folder: Path, run: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The folder of a run, as far as a reference run needs it."""
    results = {
        "run": RUN | (run or {}),
        "counts": {"passed": 17, "known_failure": 8},
        "ran": {"emulated": 25},
        "cost": {"wall": 12.345, "busy": 20.0},
        "subtests": [],
        **changes,
    }
    (folder / "events").mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results))
    ready = json.dumps({"event": "ready", "pid": 1, "environment": HERE})
    (folder / "events/w0001.jsonl").write_text(f"\n{ready}\n\n")
    (folder / "events/supervisor.jsonl").write_text("\n")
    return folder


def test_a_run_becomes_a_file_and_a_row(small: Path, tmp_path: Path) -> None:
    run = generator("results", "add", run_folder(tmp_path / "run"), cwd=small)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["wrote results/runs/2026-11-29-ci-cpu.json", "changed README.md"]
    kept = json.loads((small / FOLDER / "2026-11-29-ci-cpu.json").read_text())
    assert kept["outcomes"] == {"passed": 17, "known_failure": 8}
    assert (kept["seconds"], kept["workers"], kept["command"]) == (12.3, 2, "nox -s gpu_matrix")
    assert kept["versions"]["torch"] == "2.13.0"
    row = next(line for line in (small / "README.md").read_text().splitlines() if line.startswith("| 2026-11-29"))
    for part in (
        "17 passed, 8 known failures",
        "25 emulated",
        "12.3 on 2 workers",
        "torch 2.13.0",
        "Some \\| CPU, 2 cores",
    ):
        assert part in row
    assert generator("check", cwd=small).returncode == 0


def test_a_row_by_hand_is_drift(small: Path, tmp_path: Path) -> None:
    generator("results", "add", run_folder(tmp_path / "run"), cwd=small)
    readme = small / "README.md"
    readme.write_text(readme.read_text().replace("12.3 on", "2.3 on"))
    assert "error[E-drift]" in generator("check", cwd=small).stderr
    generator("generate", "--only", "readme", cwd=small)
    (small / FOLDER / "2026-11-29-ci-cpu.json").unlink()
    assert "error[E-drift]" in generator("check", cwd=small).stderr


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        ([], "nox -s gpu_matrix"),
        (["--profile", "ci", "--output", "here", "--durations", "there"], "nox -s gpu_matrix -- --profile ci"),
        (["--workers", "14", "--confirm=2"], "nox -s gpu_matrix -- --workers 14 --confirm=2"),
        (["--deadline", "600", "-k", ""], "nox -s gpu_matrix -- --deadline 600 -k ''"),
    ],
)
def test_the_command_repeats_the_run(argv: list[str], command: str, small: Path, tmp_path: Path) -> None:
    """With every option that was typed, but for files of that host."""
    run = {"argv": ["run", "--tests", "generated_tests", *argv]}
    assert generator("results", "add", run_folder(tmp_path / "run", run), cwd=small).returncode == 0
    (kept,), problems = reference_runs(small)
    assert (kept.command, problems) == (command, [])


@pytest.mark.parametrize(
    ("command", "tests", "says"),
    [
        ("nox --no-venv -s gpu_matrix --", "generated_tests", "nox --no-venv -s gpu_matrix -- --wait 5"),
        ("nox -s gpu_matrix --", ".attnmatrix/nightly", "nox -s gpu_matrix -- --profile nightly --wait 5"),
        ("python -m orchestrator run", "a b", "python -m orchestrator run --tests 'a b' --wait 5"),
    ],
)
def test_the_command_begins_as_it_was_started(command: str, tests: str, says: str, small: Path, tmp_path: Path) -> None:
    run = {"command": command, "tests": tests, "profile": "nightly", "argv": ["run", "--tests", tests, "--wait", "5"]}
    assert generator("results", "add", run_folder(tmp_path / "run", run), cwd=small).returncode == 0
    (kept,), _ = reference_runs(small)
    assert kept.command == says


def test_a_changed_tree_shows(small: Path, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", {"commit": f"{'c' * 40}-dirty"})
    assert generator("results", "add", folder, cwd=small).returncode == 0
    assert "| `cccccccccc-dirty` |" in (small / "README.md").read_text()


@pytest.mark.parametrize(
    ("run", "changes", "message"),
    [
        ({"selection": ["--sweep", "eager"]}, {}, "a part of the matrix only"),
        ({"part": [1, 2]}, {}, "a part of the matrix only"),
        ({"fault": "F01"}, {}, 'a planted fault, "F01"'),
        ({"commit": "unknown"}, {}, "set ATTNMATRIX_COMMIT"),
        ({"merged": 2}, {}, "merged from several"),
        ({}, {"cost": None}, "merged from several"),
        ({}, {"counts": {"passed": 3, "not_run": 2}}, "2 subtests were not run"),
        ({"started": "yesterday"}, {}, "no folder of a finished run"),
        ({}, {"ran": ["emulated"]}, "no folder of a finished run"),
        ({}, {"counts": []}, "no folder of a finished run"),
    ],
)
def test_what_is_no_reference_is_refused(
    run: dict[str, Any], changes: dict[str, Any], message: str, small: Path, tmp_path: Path
) -> None:
    done = generator("results", "add", run_folder(tmp_path / "run", run, **changes), cwd=small)
    assert done.returncode == 1
    assert "error[E-run-folder]" in done.stderr
    assert message in done.stderr
    assert not list((small / FOLDER).glob("*.json"))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run": {}}', "\0"])
def test_a_folder_of_something_else(text: str, small: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/results.json").write_text(text)
    for folder in (tmp_path / "other", tmp_path / "nowhere"):
        done = generator("results", "add", folder, cwd=small)
        assert done.returncode == 1
        assert "error[E-run-folder]" in done.stderr


def test_a_run_that_recorded_no_environment(small: Path, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "events/w0001.jsonl").write_text('\n{"event":"ready","pid":1}\n')
    assert "error[E-run-folder]" in generator("results", "add", folder, cwd=small).stderr


def problems_of(folder: Path) -> list[Problem]:
    return list(drift(build(project_at(folder / "suite.toml"), "ci")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "date: Field required"),
        ("[]", "an object"),
        ("{", "Invalid JSON"),
        ('{"x": 1}', "x: Extra inputs"),
    ],
)
def test_a_file_that_is_no_reference_run(text: str, message: str, small: Path) -> None:
    (small / FOLDER).mkdir(parents=True)
    (small / FOLDER / "mine.json").write_text(text)
    found = problems_of(small)
    assert {(problem.code, problem.path) for problem in found} == {("E-results", "results/runs/mine.json")}
    assert any(message in problem.message for problem in found)
    done, problems = write(build(project_at(small / "suite.toml"), "ci"))
    assert not done
    assert problems


def test_runs_without_a_place_in_readme(small: Path, tmp_path: Path) -> None:
    readme = small / "README.md"
    readme.write_text(readme.read_text().replace(RUNS_BEGIN, "").replace(RUNS_END, ""))
    assert problems_of(small) == []
    done = generator("results", "add", run_folder(tmp_path / "run"), cwd=small)
    assert "error[E-markers]" in done.stderr
    assert [problem.code for problem in problems_of(small)] == ["E-markers"]


def test_hostile_text_stays_in_its_cell(small: Path, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", {"device_kind": "<b>GPU</b> | `x`\n\n# owned", "commit": "`|`"})
    assert generator("results", "add", folder, cwd=small).returncode == 0
    rows = [line for line in (small / "README.md").read_text().splitlines() if "owned" in line]
    assert len(rows) == 1
    assert "<b>" not in rows[0].replace("\\<b\\>", "")
    (kept,), _ = reference_runs(small)
    assert isinstance(kept, ReferenceRun)
    assert kept.name == "2026-11-29-ci-b-gpu-b-x-owned.json"


def test_a_run_of_an_earlier_suite_is_marked(small: Path, tmp_path: Path) -> None:
    now = json.loads((small / "generated_tests/manifest.json").read_text())["spec_sha256"]
    generator("results", "add", run_folder(tmp_path / "new", {"spec_sha256": now}), cwd=small)
    assert "| ci |" in next(line for line in (small / "README.md").read_text().splitlines() if "| cpu |" in line)
    spec = small / "suite.toml"
    spec.write_text(with_one_line(spec.read_text()))
    assert generator("generate", "--pin", cwd=small).returncode == 0
    row = next(line for line in (small / "README.md").read_text().splitlines() if "| cpu |" in line)
    assert "| ci, an earlier suite |" in row


@pytest.mark.parametrize("measured", [{"manifest_sha256": "0" * 64}, {}, []])
def test_a_measurement_of_another_matrix_is_remarked_upon(measured: object, small: Path) -> None:
    power = small / "results" / "power.json"
    power.parent.mkdir(exist_ok=True)
    right = hashlib.sha256((small / "generated_tests/manifest.json").read_bytes()).hexdigest()
    remark = "note: results/power.json was measured on another matrix; `nox -s power` renews it"
    for content, said in (({"manifest_sha256": right}, False), (measured, True)):
        power.write_text(json.dumps(content))
        done = generator("check", cwd=small)
        assert done.returncode == 0
        assert (remark in done.stdout) is said


def test_a_run_replaces_another_only_if_told_to(small: Path, tmp_path: Path) -> None:
    generator("results", "add", run_folder(tmp_path / "first"), cwd=small)
    (kept,) = (small / "results/runs").iterdir()
    before = kept.read_bytes()
    second = run_folder(tmp_path / "second", cost={"wall": 99.0, "busy": 1.0})
    done = generator("results", "add", second, cwd=small)
    assert done.returncode == 1
    assert "add --replace to put this one in its place" in done.stderr
    assert kept.read_bytes() == before
    assert generator("results", "add", "--replace", second, cwd=small).returncode == 0
    assert kept.read_bytes() != before


def test_runs_on_one_and_on_two_devices_are_kept_apart(small: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        run = {"device_kind": "NVIDIA H200", "devices": [f"GPU-{index}" for index in range(number)]}
        assert generator("results", "add", run_folder(tmp_path / str(number), run), cwd=small).returncode == 0
    names = {path.name for path in (small / "results/runs").iterdir()}
    assert names == {"2026-11-29-ci-nvidia-h200.json", "2026-11-29-ci-2x-nvidia-h200.json"}


def test_newest_first(small: Path, tmp_path: Path) -> None:
    for number, start in enumerate((1795967349.9, 1796967349.9, 1794967349.9)):
        generator("results", "add", run_folder(tmp_path / f"run{number}", {"started": start}), cwd=small)
    dates = [line.split("|")[1].strip() for line in (small / "README.md").read_text().splitlines() if "| cpu |" in line]
    assert dates == sorted(dates, reverse=True)
    assert len(dates) == 3
