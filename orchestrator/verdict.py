"""One outcome for every planned id, from whatever the events say. What the events do not say was not run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator import outcomes
from orchestrator.events import read_events
from orchestrator.folder import Folder, Run, bulk
from orchestrator.ledger import Attempt, Cost, Ledger
from orchestrator.manifest import Planned
from orchestrator.planning import Plan

PART = re.compile(r"s(\d{3})-")


@dataclass(slots=True)
class Result:
    """The verdict on one planned subtest; ``attempts`` in the order of their numbers."""

    planned: Planned
    shard: int
    outcome: str
    attempts: list[Attempt]

    @property
    def shown(self) -> Attempt | None:
        """The attempt that explains the outcome: the gravest one."""
        return min(self.attempts, key=lambda attempt: outcomes.ORDER.index(attempt.outcome), default=None)

    @property
    def seconds(self) -> float:
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def margin(self) -> float | None:
        return max((attempt.margin for attempt in self.attempts if attempt.margin is not None), default=None)

    @property
    def lacking(self) -> set[str]:
        """Why it was unavailable, in any of its attempts."""
        return {attempt.kind or "" for attempt in self.attempts if attempt.outcome == outcomes.UNAVAILABLE}

    @property
    def tally(self) -> Counter[str]:
        """How often each outcome was seen, over all attempts."""
        return Counter(attempt.outcome for attempt in self.attempts)

    @property
    def message(self) -> str:
        shown = self.shown
        return shown.message if shown else ""


@dataclass(slots=True)
class Verdict:
    """A whole run, or several merged ones."""

    run: Run
    plan: Plan
    results: list[Result]
    notes: list[str] = field(default_factory=list)
    noted: int = 0
    remarks: list[str] = field(default_factory=list)
    interrupted: bool = False
    cost: Cost | None = None

    @property
    def counts(self) -> Counter[str]:
        return Counter(result.outcome for result in self.results)

    @property
    def exit_code(self) -> int:
        bad = {result.outcome for result in self.failures}
        code = next((code for outcome, code in outcomes.EXIT_CODES.items() if outcome in bad), 0)
        return code or (outcomes.EXIT_NOTHING if self.proves_nothing else 0)

    @property
    def failures(self) -> list[Result]:
        """Everything that makes the exit code differ from 0, gravest first."""
        bad = [result for result in self.results if not self.accepts(result)]
        return sorted(bad, key=lambda result: (outcomes.ORDER.index(result.outcome), result.planned.id))

    def accepts(self, result: Result) -> bool:
        """Whether a result is as expected, or unavailable for a reason that the run allows."""
        if result.outcome == outcomes.UNAVAILABLE:
            return result.lacking <= set(self.run.allow_unavailable)
        return result.outcome in outcomes.EXPECTED

    @property
    def proves_nothing(self) -> bool:
        """Whether no subtest that must pass did; of known failures alone, whether none of them was seen to fail."""
        must_pass = any(result.planned.known_failure is None for result in self.results)
        return not self.counts[outcomes.PASSED if must_pass else outcomes.KNOWN_FAILURE]

    @property
    def nothing_tested(self) -> bool:
        """Whether that is what the run ended in: where something failed, or was not run, that is what to say."""
        return self.exit_code == outcomes.EXIT_NOTHING

    @property
    def ran(self) -> Counter[str]:
        """How many subtests ran ``native``, ``interpreted``, ``emulated``, or a mixture, which is named as such."""
        out: Counter[str] = Counter()
        for result in self.results:
            kinds = sorted({kind for attempt in result.attempts for kind in attempt.ran})
            if kinds:
                out[" + ".join(kinds)] += 1
        return out

    @property
    def columns(self) -> list[str]:
        """Sweeps in the spec's order."""
        mine = {result.planned.sweep for result in self.results}
        return [*(sweep for sweep in self.plan.sweeps if sweep in mine), *sorted(mine - set(self.plan.sweeps))]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Pairs of method and backend in the spec's order."""
        order = {name: number for number, name in enumerate(self.plan.backends)}
        mine = {(result.planned.method, result.planned.backend) for result in self.results}
        return sorted(mine, key=lambda pair: (order.get(".".join(pair), len(order)), pair))

    def thinnest(self, number: int = 10) -> list[Result]:
        """Passed subtests that came closest to their tolerance."""
        passed = [r for r in self.results if r.outcome == outcomes.PASSED and r.margin is not None]
        return sorted(passed, key=lambda result: (-(result.margin or 0.0), result.planned.id))[:number]


def settle(planned: Planned, attempt: Attempt) -> str:
    """The outcome of one attempt in the light of the plan."""
    outcome = attempt.outcome
    if attempt.poisoned:  # whatever else it says of itself, it took the device's context along
        met = outcome == outcomes.KNOWN_FAILURE and planned.action is not None
        if planned.action == "crash" and outcome == outcomes.FAILED:
            met = planned.required_exit in (None, "cuda_error")
        return outcomes.KNOWN_FAILURE if met else outcomes.CRASHED
    if planned.action == "crash" and outcome == outcomes.PASSED:
        return outcomes.UNEXPECTED_PASS
    if planned.action is None and outcome in (outcomes.KNOWN_FAILURE, outcomes.SKIPPED_KNOWN):
        return outcomes.FAILED
    if outcome == outcomes.UNAVAILABLE and attempt.kind not in outcomes.UNAVAILABLE_KINDS:
        return outcomes.FAILED
    return outcome


def conclude(planned: Planned, attempts: list[Attempt], repeat: int) -> str:
    """One outcome from all attempts. Attempts that disagree about success are flaky, never green."""
    seen = {attempt.outcome for attempt in attempts}
    missing = repeat - sum(attempt.attempt < repeat for attempt in attempts)
    if not seen:
        return outcomes.NOT_RUN
    bad = seen & outcomes.BAD
    if missing:
        return outcomes.worst(bad) if bad else outcomes.NOT_RUN
    if len(seen) == 1 or seen <= outcomes.BAD:
        return outcomes.worst(seen)
    return outcomes.FLAKY


@bulk()
def read_ledger(folder: Folder, plan: Plan) -> Ledger:
    """Every event of a run folder. Workers first: what they saw outranks what the supervisor concluded.

    In a merged folder the files of shard ``i`` begin with ``s00i-``, and count for the subtests of that shard only.
    """
    everything = {planned.id: planned for planned in plan.subtests}
    by_shard: list[Mapping[str, Planned]] = [
        {planned.id: planned for block in blocks for planned in block.subtests} for blocks in plan.shards
    ]
    ledger = Ledger(everything)

    def known(path: Path) -> Mapping[str, Planned]:
        match = PART.match(path.name)
        number = int(match[1]) if match else 0
        return by_shard[number - 1] if 1 <= number <= len(by_shard) else everything

    for path in folder.event_files():
        ledger.known, source = known(path), path.stem
        for event in read_events(path):
            ledger.feed(source, event)
    for path in folder.journals():
        ledger.known, source = known(path), path.stem
        for event in read_events(path):
            ledger.judge(source, event)
    ledger.known = everything
    return ledger


@bulk()
def build_verdict(run: Run, plan: Plan, ledger: Ledger) -> Verdict:
    """Join plan and attempts. Of a partial run, only its own shard is judged."""
    results = []
    mine = plan.shards if run.part is None else [plan.shards[run.part[0] - 1]]
    for blocks in mine:
        for block in blocks:
            for planned in block.subtests:
                tries = ledger.attempts.get(planned.id, {})
                attempts = [tries[number] for number in sorted(tries)]
                for attempt in attempts:
                    attempt.outcome = settle(planned, attempt)
                results.append(Result(planned, block.shard, conclude(planned, attempts, run.repeat), attempts))
    return Verdict(run, plan, results, ledger.notes, ledger.noted, ledger.remarks, ledger.interrupted > 0, ledger.cost)
