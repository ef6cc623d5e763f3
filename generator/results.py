"""Reference runs: what whole runs of a profile gave, on which host, with which versions; one file each.

``add`` makes such a file from the folder of a run, so that nothing in README's table of them is typed by hand.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from generator.loading import dotted
from generator.problems import Problem, SpecError, quote
from generator.tables import Table, code, inline

FOLDER = "results/runs"
ORDER = (
    "passed", "known_failure", "failed", "crashed", "timeout", "unexpected_pass", "flaky", "unavailable",
    "skipped_known", "not_run",
)  # fmt: skip


class Record(BaseModel):
    """A part of a reference run: no unknown keys, no conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Host(Record):
    """Where it ran."""

    system: str
    processor: str
    cores: int = Field(ge=1)


class ReferenceRun(Record):
    """One file."""

    format: Literal[1] = 1
    kind: Literal["reference run"] = "reference run"
    date: str = Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")
    profile: str
    commit: str
    spec_sha256: str
    command: str
    host: Host
    device: str
    devices: int = Field(ge=1)
    workers: int = Field(ge=1)
    versions: dict[str, str]
    outcomes: dict[str, int]
    ran: dict[str, int]
    seconds: float = Field(gt=0)

    @property
    def name(self) -> str:
        """The file it belongs in: one for each day, profile, device and number of devices."""
        count = f"{self.devices}x-" if self.devices > 1 else ""
        slug = re.sub(r"[^a-z0-9]+", "-", f"{self.profile}-{count}{self.device}".lower()).strip("-")
        return f"{self.date}-{slug}.json"

    def text(self) -> str:
        """The file."""
        return json.dumps(self.model_dump(), indent=2) + "\n"


def add(run_folder: Path, root: Path, *, replace: bool = False) -> Path:
    """Write the reference run of a run folder below ``root``, in the place of one only if told to; returns the file."""
    run = reference_run(run_folder)
    path = root / FOLDER / run.name
    if path.exists() and not replace:
        message = "holds another run of that day, profile and device"
        raise SpecError(
            [Problem("E-output", (), message, "add --replace to put this one in its place", path=str(path))]
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(run.text(), encoding="utf-8")
    except OSError as error:
        raise SpecError([Problem("E-output", (), f"cannot write: {error.strerror}", path=str(path))]) from None
    return path


def reference_run(folder: Path) -> ReferenceRun:
    """What a run folder says. A run of a part, of a planted fault, or without an end is no reference."""
    results = read_json(folder / "results.json")
    try:
        run, cost = results["run"], results["cost"]
        here = environment_of(folder)
        obstacle = why_not(run, results["counts"], cost)
        if obstacle:
            raise SpecError([Problem("E-run-folder", (), obstacle, path=str(folder))])
        return ReferenceRun(
            date=datetime.datetime.fromtimestamp(run["started"], datetime.UTC).date().isoformat(),
            profile=run["profile"],
            commit=run["commit"],
            spec_sha256=run["spec_sha256"],
            command=command_of(run),
            host=Host(system=here["system"], processor=here["processor"], cores=here["cores"]),
            device=run["device_kind"],
            devices=len(run["devices"]),
            workers=run["workers"],
            versions=here["versions"],
            outcomes={name: results["counts"][name] for name in ORDER if results["counts"].get(name)},
            ran=results["ran"],
            seconds=round(cost["wall"], 1),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        message = f"this is no folder of a finished run: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise SpecError([Problem("E-run-folder", (), message, path=str(folder))]) from None


def why_not(run: Mapping[str, Any], counts: Mapping[str, int], cost: object) -> str | None:
    """Why a run cannot be a reference, or None."""
    chosen = [word for word in run["selection"] if word not in ("--profile", run["profile"])]
    if chosen or run["part"] is not None:
        return "the run had a part of the matrix only"
    if run["fault"]:
        return f"the run had a planted fault, {quote(run['fault'])}"
    if run["commit"] == "unknown":
        return "the run names no commit: set ATTNMATRIX_COMMIT on a host that has no git"
    if run["merged"] or cost is None:
        return "the run was merged from several: its parts have no common time"
    if counts.get("not_run"):
        return f"{counts['not_run']} subtests were not run"
    return None


def command_of(run: Mapping[str, Any]) -> str:
    """The command that repeats a run: what was typed, but for files of that host: the folder, which already holds a
    run, and recorded durations.

    Under nox, the session adds ``--tests``, and takes ``--profile`` away where it generated that profile first.
    """
    shown = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    shown.add_argument("--tests")
    shown.add_argument("--output")
    shown.add_argument("--durations")
    known, rest = shown.parse_known_args(run["argv"][1:])
    words = run["command"].split()
    if words[0] != "nox":
        return shlex.join([*words, *(["--tests", known.tests] if known.tests else []), *rest])
    if known.tests == f".attnmatrix/{run['profile']}":
        rest = ["--profile", run["profile"], *rest]
    return shlex.join([*words, *rest] if rest else words[:-1])


def environment_of(folder: Path) -> dict[str, Any]:
    """What the first worker of a run said about where it is."""
    for path in sorted((folder / "events").glob("w*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if '"ready"' in line:
                    event = json.loads(line)
                    found: dict[str, Any] = event["environment"]
                    return found
    raise ValueError("no worker said where it runs")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a run folder."""
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = "name the folder of a finished run, such as .attnmatrix/runs/20260101-120000-1"
        raise SpecError([Problem("E-run-folder", (), f"cannot be read: {reason}", hint, path=str(path))]) from None
    return data


def reference_runs(root: Path) -> tuple[list[ReferenceRun], list[Problem]]:
    """The runs that were kept, newest first, and the files among them that are none."""
    runs: list[ReferenceRun] = []
    problems: list[Problem] = []
    for path in sorted((root / FOLDER).glob("*.json")):
        shown = f"{FOLDER}/{path.name}"
        try:
            runs.append(ReferenceRun.model_validate_json(path.read_bytes()))
        except ValidationError as error:
            problems += [Problem("E-results", (), said, path=shown) for said in complaints(error)]
        except OSError as error:
            problems.append(Problem("E-results", (), f"cannot be read: {error.strerror}", path=shown))
    runs.sort(key=lambda run: (run.date, run.profile, run.device, run.seconds), reverse=True)
    return runs, problems


def complaints(error: ValidationError) -> Iterator[str]:
    """What is wrong with a file, one line for each place."""
    for detail in error.errors(include_url=False):
        where = dotted(detail["loc"])
        yield f"{where}: {detail['msg']}" if where else detail["msg"]


def runs_text(runs: list[ReferenceRun], spec_sha256: str) -> str:
    """The table of reference runs; those of another spec than the one at hand are marked."""
    if not runs:
        return "None yet.\n"
    header = ["date", "device", "host", "profile", "outcomes", "ran", "seconds", "versions", "commit", "command"]
    return (
        Table(header, [run_row(run, run.spec_sha256 == spec_sha256) for run in runs], words=len(header)).text() + "\n"
    )


def run_row(run: ReferenceRun, current: bool) -> list[str]:
    """One row of the table."""
    device = run.device if run.devices == 1 else f"{run.devices} x {run.device}"
    host = f"{run.host.processor}, {run.host.cores} cores, {run.host.system}"
    counts = {name: run.outcomes[name] for name in sorted(run.outcomes, key=place)}
    return [
        run.date,
        inline(device),
        inline(host),
        inline(run.profile if current else f"{run.profile}, an earlier suite"),
        inline(", ".join(f"{count} {words(name, count)}" for name, count in counts.items())),
        inline(", ".join(f"{count} {kind}" for kind, count in run.ran.items())),
        f"{run.seconds:g} on {run.workers} worker{'s' * (run.workers != 1)}",
        inline(", ".join(f"{name} {version}" for name, version in run.versions.items())),
        f"`{code(short_commit(run.commit))}`",
        f"`{code(run.command)}`",
    ]


def short_commit(commit: str) -> str:
    """The beginning of a commit, and whether files had changed since."""
    sha, dirty, _ = commit.partition("-dirty")
    return sha[:10] + dirty


def words(outcome: str, count: int) -> str:
    """``passed``, ``known failures``."""
    text = outcome.replace("_", " ")
    if outcome == "known_failure" and count != 1:
        return f"{text}s"
    return f"{text}es" if outcome == "unexpected_pass" and count != 1 else text


def place(outcome: str) -> int:
    """Where an outcome stands among the others; one that is unknown comes last."""
    return ORDER.index(outcome) if outcome in ORDER else len(ORDER)
