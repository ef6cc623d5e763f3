"""What came out: records of trials, and one result per fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

CAUGHT, MISSED, NOT_EXERCISED = "caught", "missed", "not exercised"
CLEAN, REPORTED = "not reported", "reported"
BROKEN = "broken"

GOOD = frozenset({CAUGHT, CLEAN})


@dataclass(frozen=True)
class TrialRecord:
    """What is kept of one subtest against one fault; ``outcome`` is a worker's, or ``crashed`` or ``timeout``."""

    id: str
    outcome: str
    check: str | None
    message: str
    seconds: float
    exercised: bool
    killed: bool

    @property
    def sweep(self) -> str:
        return self.id.split(".")[2]

    @property
    def witnessed(self) -> bool:
        """A kill that the fault can be blamed for, also where the process ended: it changed a value in that subtest."""
        return self.killed and self.exercised


@dataclass(frozen=True)
class FaultFacts:
    """What a registered fault says about itself."""

    id: str
    row: str
    title: str
    references: tuple[str, ...]
    kind: int
    kind_name: str
    axes: str
    control: bool
    module: str

    @property
    def counted(self) -> bool:
        """Whether it stands in the denominator: a row of the catalogue, no control and no spare."""
        return not self.control and self.id.startswith("F")


@dataclass
class FaultResult:
    """All trials of one fault, in the order in which they ran; ``touched`` subtests could have been tried."""

    fault: FaultFacts
    touched: int
    trials: list[TrialRecord] = field(default_factory=list)
    error: str | None = None

    @property
    def kills(self) -> list[TrialRecord]:
        return [trial for trial in self.trials if trial.witnessed]

    @property
    def exercised(self) -> int:
        return sum(trial.exercised for trial in self.trials)

    @property
    def seconds(self) -> float:
        """CPU time up to and with the first kill, or of all trials."""
        total = 0.0
        for trial in self.trials:
            total += trial.seconds
            if trial.witnessed:
                break
        return total

    @property
    def status(self) -> str:
        """A kill that changed no value is no catch: something other than the fault is wrong."""
        if self.error is not None or any(trial.killed and not trial.witnessed for trial in self.trials):
            return BROKEN
        if self.fault.control:
            return REPORTED if self.kills else CLEAN if self.exercised else NOT_EXERCISED
        return CAUGHT if self.kills else MISSED if self.exercised else NOT_EXERCISED

    @property
    def why_broken(self) -> str:
        if self.error is not None:
            return self.error
        stray = next(trial for trial in self.trials if trial.killed and not trial.witnessed)
        return f"{stray.id} failed ({stray.check}: {stray.message}), but the fault changed no value in it"


@dataclass(frozen=True)
class Row:
    """All mutants of one row of the catalogue: caught if every one is."""

    id: str
    results: tuple[FaultResult, ...]

    @property
    def caught(self) -> bool:
        return all(result.status == CAUGHT for result in self.results)


def rows(results: Sequence[FaultResult]) -> list[Row]:
    """Rows of the catalogue in the order of their ids."""
    grouped: dict[str, list[FaultResult]] = {}
    for result in results:
        grouped.setdefault(result.fault.row, []).append(result)
    return [Row(name, tuple(members)) for name, members in sorted(grouped.items())]


@dataclass
class Report:
    """A whole measurement."""

    profile: str
    manifest_sha256: str
    results: list[FaultResult]
    red: dict[str, str] = field(default_factory=dict)
    """Subtests that were to be green without a fault and were not, with what they said."""
    weaker: dict[str, dict[str, str]] = field(default_factory=dict)
    """Status of each fault by the name of a weaker configuration."""
    seconds: float = 0.0
    workers: int = 0

    @property
    def counted(self) -> list[Row]:
        return rows([result for result in self.results if result.fault.counted])

    @property
    def spares(self) -> list[FaultResult]:
        return [r for r in self.results if not r.fault.counted and not r.fault.control]

    @property
    def controls(self) -> list[FaultResult]:
        return [result for result in self.results if result.fault.control]

    @property
    def healthy(self) -> bool:
        """Whether the measurement itself can be trusted, whatever it found."""
        statuses = [result.status for result in self.results]
        for weaker in self.weaker.values():
            statuses += weaker.values()
        return not self.red and BROKEN not in statuses

    def as_dict(self) -> dict[str, Any]:
        counted = self.counted
        return {
            "format": 1,
            "profile": self.profile,
            "manifest_sha256": self.manifest_sha256,
            "workers": self.workers,
            "seconds": round(self.seconds, 1),
            "counted": len(counted),
            "caught": sum(row.caught for row in counted),
            "spares": len(self.spares),
            "spares_caught": sum(result.status == CAUGHT for result in self.spares),
            "controls": len(self.controls),
            "controls_reported": sum(result.status == REPORTED for result in self.controls),
            "red": self.red,
            "faults": [_fault_dict(result) for result in self.results],
            "weaker": self.weaker,
        }


def _fault_dict(result: FaultResult) -> dict[str, Any]:
    return {
        **asdict(result.fault),
        "status": result.status,
        "touched": result.touched,
        "tried": len(result.trials),
        "exercised": result.exercised,
        "seconds": round(result.seconds, 2),
        "kills": [_trial_dict(trial) for trial in result.kills],
        "error": result.why_broken if result.status == BROKEN else None,
    }


def _trial_dict(trial: TrialRecord) -> dict[str, Any]:
    return {
        "id": trial.id,
        "sweep": trial.sweep,
        "outcome": trial.outcome,
        "check": trial.check,
        "message": trial.message,
        "seconds": round(trial.seconds, 2),
    }


def record_from(raw: Mapping[str, Any]) -> TrialRecord:
    return TrialRecord(
        id=str(raw["id"]),
        outcome=str(raw["outcome"]),
        check=raw["check"],
        message=str(raw["message"]),
        seconds=float(raw["seconds"]),
        exercised=bool(raw["exercised"]),
        killed=bool(raw["killed"]),
    )
