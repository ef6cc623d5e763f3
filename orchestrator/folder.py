"""The folder of one run: what was planned and how (``run.json``, ``plan.json``), events, logs, reports."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import math
import os
import re
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import OrchestratorError
from orchestrator.files import NOFOLLOW, read_plain, write_whole
from orchestrator.manifest import ACTIONS, ID, MAX_BYTES, Planned, printable, short
from orchestrator.outcomes import UNAVAILABLE_KINDS
from orchestrator.planning import Block, Plan, digest

FORMAT = 1
JOURNAL = "supervisor.jsonl"
COMMAND = re.compile(r"python -m orchestrator run|nox (--no-venv )?-s [a-z_]+ --")
FIELDS = ("id", "known_failure", "action", "required_exit", "weight")


@dataclass(kw_only=True)
class Run:
    """``run.json``: everything that must agree before two folders may be joined or a run continued."""

    tests: str
    profile: str
    spec_sha256: str
    manifest_sha256: str
    plan_sha256: str
    commit: str
    selection: list[str]
    part: list[int] | None = None
    """``[i, n]`` for ``--shard i/n``: only shard ``i`` (from 1) of the plan belongs to this folder."""
    repeat: int = 1
    confirm: int = 0
    fresh: bool = False
    deadline: float = 120.0
    device_kind: str = "cpu"
    devices: list[str] = field(default_factory=list)
    workers: int = 1
    started: float = 0.0
    fault: str = ""
    allow_unavailable: list[str] = field(default_factory=list)
    """Reasons for which a subtest may be unavailable without making the exit code differ from 0."""
    command: str = "python -m orchestrator run"
    """What the user types before ids and options; under nox, the session."""
    argv: list[str] = field(default_factory=list)
    """The orchestrator's own arguments: ``run``, options and ids."""
    merged: int = 0
    """Number of folders this one was merged from; 0 for a run."""

    @property
    def short_commit(self) -> str:
        sha, dirty, _ = self.commit.partition("-dirty")
        return sha[:12] + dirty


class Folder:
    """Paths inside one run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = path / "events"
        self.logs = path / "logs"
        self.journal = self.events / JOURNAL

    def create(self) -> None:
        """Make an empty run folder; one that already holds a run is left alone."""
        if (self.path / "run.json").exists():
            raise OrchestratorError(
                "O207",
                f"{self.path} already holds a run",
                f"continue it with --resume {self.path}, or choose another folder",
            )
        try:
            self.events.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise OrchestratorError("O505", f"cannot make {self.path}: {error.strerror}") from None
        self.reopen()

    def reopen(self) -> None:
        """Before writing into a folder that is already there: its parts must be what ``create`` made."""
        for path in (self.events, self.logs):
            if path.is_symlink() or not path.is_dir():
                raise OrchestratorError("O201", f"{self.path} is no run folder: {path} is no folder")

    def lock(self, wait: float = 10.0) -> int:
        """Hold the folder. Workers inherit the lock, so it is free only when the last process of a run is gone."""
        try:
            fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | NOFOLLOW, 0o644)
        except OSError as error:
            raise OrchestratorError("O201", f"{self.path} is no run folder: {error.strerror}") from None
        until = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(fd)
                    raise OrchestratorError("O208", f"another process works on {self.path}") from None
                time.sleep(0.05)

    def event_files(self) -> list[Path]:
        """The workers' events files, in the order of their numbers."""
        return sorted(path for path in self.events.glob("*.jsonl") if not path.name.endswith(JOURNAL))

    def journals(self) -> list[Path]:
        """The supervisor's journal; after a merge, one of each part."""
        return sorted(self.events.glob(f"*{JOURNAL}"))

    def save(self, run: Run, plan: Plan) -> None:
        shards = [
            [
                {
                    "file": block.file,
                    "cost": round(block.cost, 4),
                    "rows": [[p.id, p.known_failure, p.action, p.required_exit, p.weight] for p in block.subtests],
                }
                for block in blocks
            ]
            for blocks in plan.shards
        ]
        head = {"format": FORMAT, "fields": FIELDS, "sweeps": plan.sweeps, "backends": plan.backends}
        self.write_json("plan.json", {**head, "shards": shards})
        self.write_json("run.json", {"format": FORMAT, **asdict(run)})

    def write_json(self, name: str, value: object) -> None:
        self.write_text(name, json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n")

    def write_text(self, name: str, text: str, then: str = "") -> None:
        """Whole or not at all. ``then``: what to do about it once it can be written."""
        try:
            write_whole(self.path / name, text)
        except OSError as error:
            first = "free space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see to that"
            hint = f"{first}, then {then}" if then else ""
            raise OrchestratorError("O212", f"cannot write {self.path / name}: {error.strerror}", hint) from None

    def load(self, like: tuple[bytes, Plan] | None = None) -> tuple[Run, Plan]:
        """Read and check what ``save`` wrote. ``like`` is another folder's plan file with the plan read from it."""
        run = parse_run(decode(self.read("run.json"), self.path / "run.json"), self.path / "run.json")
        data = self.read("plan.json")
        if like is not None and like[0] == data:
            plan = like[1]
        else:
            plan = parse_plan(decode(data, self.path / "plan.json"), self.path / "plan.json")
            plan.sha256 = digest(plan)
        if plan.sha256 != run.plan_sha256:
            raise OrchestratorError("O206", f"{self.path / 'plan.json'} is not the plan that run.json names")
        if run.part and run.part[1] != len(plan.shards):
            raise OrchestratorError(
                "O204", f"{self.path}: shard {run.part[0]}/{run.part[1]} of {len(plan.shards)} shards"
            )
        return run, plan

    def read(self, name: str) -> bytes:
        path = self.path / name
        try:
            return read_plain(path, MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            raise OrchestratorError("O201", f"{self.path} is no run folder: it has no {name}") from None
        except OSError as error:
            raise OrchestratorError("O202", f"{path} cannot be read: {error.strerror}") from None


def decode(data: bytes, path: Path) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise OrchestratorError("O202", f"{path} is not JSON: {error}") from None


@contextlib.contextmanager
def bulk() -> Generator[None]:
    """Collect no garbage meanwhile: among a million small live objects, looking for it costs more than reading them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def parse_run(raw: object, path: Path) -> Run:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise OrchestratorError("O203", f"{path} is no run of format {FORMAT}")
    values: dict[str, Any] = {}
    for name, kind in Run.__annotations__.items():
        if name not in raw:
            raise OrchestratorError("O204", f"{path} lacks `{name}`")
        if not fits(raw[name], kind):
            raise OrchestratorError("O204", f"{path}: `{name}` is {short(raw[name])}, not {kind}")
        values[name] = raw[name]
    run = Run(**values)
    if run.part is not None and not (len(run.part) == 2 and 1 <= run.part[0] <= run.part[1]):
        raise OrchestratorError("O204", f"{path}: `part` is {short(run.part)}")
    if not UNAVAILABLE_KINDS.issuperset(run.allow_unavailable):
        raise OrchestratorError("O204", f"{path}: `allow_unavailable` is {short(run.allow_unavailable)}")
    if not COMMAND.fullmatch(run.command):
        raise OrchestratorError("O204", f"{path}: `command` is {short(run.command)}")
    if not 1 <= run.repeat <= 100_000 or not math.isfinite(run.deadline) or run.deadline <= 0:
        raise OrchestratorError("O204", f"{path}: `repeat` or `deadline` is out of range")
    return run


def fits(value: object, kind: str) -> bool:
    """Whether a decoded value has the annotated type of a ``Run`` field."""
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind.startswith("list["):
        inner = "str" if "str" in kind else "int"
        return (value is None and "None" in kind) or (isinstance(value, list) and all(fits(v, inner) for v in value))
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    return printable(value) if kind == "str" else isinstance(value, bool)


def parse_plan(raw: object, path: Path) -> Plan:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or not isinstance(raw.get("shards"), list):
        raise OrchestratorError("O205", f"{path} is no plan of format {FORMAT}")
    if not 1 <= len(raw["shards"]) <= 256:
        raise OrchestratorError("O205", f"{path}: {len(raw['shards'])} shards")
    shards: list[list[Block]] = []
    seen: set[str] = set()
    for number, blocks in enumerate(raw["shards"]):
        shards.append([parse_block(block, number, path) for block in items_of(blocks, path)])
        for block in shards[-1]:
            for planned in block.subtests:
                if planned.id in seen:
                    raise OrchestratorError("O205", f"{path} plans {planned.id} twice")
                seen.add(planned.id)
    orders = [raw.get(name, []) for name in ("sweeps", "backends")]
    if not all(fits(order, "list[str]") for order in orders):
        raise OrchestratorError("O205", f"{path}: `sweeps` and `backends` must be lists of strings")
    return Plan(shards, "", *orders)


def items_of(value: object, path: Path) -> list[Any]:
    if not isinstance(value, list):
        raise OrchestratorError("O205", f"{path}: expected a list, found {short(value)}")
    return value


def known_fits(known: object, action: object, required: object) -> bool:
    return printable(known) and action in ACTIONS and (required is None or printable(required))


def parse_block(raw: object, shard: int, path: Path) -> Block:
    if not isinstance(raw, Mapping) or not fits(raw.get("cost"), "float") or not isinstance(raw.get("file"), str):
        raise OrchestratorError("O205", f"{path}: shard {shard + 1} holds {short(raw)}")
    rows = []
    file = raw["file"]
    for row in items_of(raw.get("rows"), path):
        if not isinstance(row, list) or len(row) != len(FIELDS) or not isinstance(row[0], str):
            raise OrchestratorError("O205", f"{path}: a row is {short(row)}")
        id, known, action, required, weight = row
        plain = known is None and action is None and required is None
        fine = type(weight) in (int, float) and (plain or known_fits(known, action, required))
        if not fine or not ID.fullmatch(id):
            raise OrchestratorError("O205", f"{path}: a row is {short(row)}")
        method, backend, sweep, rest = id.split(".", 3)
        if file != f"test_{method}_{backend}.py":
            raise OrchestratorError("O205", f"{path}: {id} lies in the block of {short(file)}")
        rows.append(Planned(id, file, f"test_{sweep}[{rest}]", method, backend, sweep, weight, known, action, required))
    if not rows:
        raise OrchestratorError("O205", f"{path}: an empty block in shard {shard + 1}")
    return Block(shard, raw["file"], rows, float(raw["cost"]))
