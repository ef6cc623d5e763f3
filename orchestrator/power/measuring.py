"""The measurement: faults, and weaker configurations, over a generated matrix. Imports torch; forks before use."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from orchestrator.power.crew import Done, Job, note_change, run_jobs
from orchestrator.power.planning import Matrix, order, read_matrix, touched
from orchestrator.power.results import FaultFacts, FaultResult, Report

Progress = Callable[[str | None, FaultResult], None]


class Measurement:
    """Everything that the processes of the jobs inherit: the kit, the faults, and the subtests of each profile."""

    def __init__(self, folder: Path, *, workers: int, timeout: float) -> None:
        os.environ["ATTNMATRIX_DEVICE"] = "cpu"  # torch is forked, and the seeded faults live in what CPUs run
        import torch

        from kits import faults
        from kits.faults import trial, weaken

        torch.set_num_threads(1)
        self.workers, self.timeout = workers, timeout
        self.faults, self.trial, self.weaken = faults.load_all(), trial, weaken
        self.planted, self.kinds = faults.planted, faults.KINDS
        self.matrices = {"ci": read_matrix(folder)}
        self.subtests = {"ci": trial.load_subtests(folder)}
        self.red_before = self._warm_up()
        gc.collect()
        gc.freeze()

    def _warm_up(self) -> dict[str, str]:
        """The cheapest subtest of each runner: what they import and cache, no job has to. They must be green."""
        cheapest = {entry["runner"]: entry["id"] for entry in reversed(order(self.matrices["ci"].entries))}
        trials = [self.trial.attempt(self.subtests["ci"][subtest_id]) for subtest_id in cheapest.values()]
        return {trial.id: trial.message for trial in trials if trial.killed}

    def facts(self, fault_id: str) -> FaultFacts:
        fault = self.faults[fault_id]
        return FaultFacts(
            id=fault.id,
            row=fault.row,
            title=fault.title,
            references=fault.references,
            kind=fault.kind,
            kind_name=self.kinds[fault.kind],
            axes=fault.axes,
            control=fault.control,
            module=fault.module,
        )

    def measure(self, ids: Sequence[str], *, everything: bool, progress: Progress) -> Report:
        """Each fault against all it touches; then every subtest that caught one, without a fault."""
        start = time.monotonic()
        results = self._run(ids, None, everything=everything, progress=progress)
        report = Report(
            profile=self.matrices["ci"].profile,
            manifest_sha256=self.matrices["ci"].sha256,
            results=results,
            workers=self.workers,
        )
        report.red = self.red_before | self._red(results, None)
        report.seconds = time.monotonic() - start
        return report

    def compare(self, ids: Sequence[str], name: str, *, progress: Progress) -> tuple[dict[str, str], dict[str, str]]:
        """Status of each fault under a weaker configuration, and the subtests that are red there by themselves."""
        profile = self.weaken.WEAKENINGS[name].profile
        if profile not in self.matrices:
            self._generate(profile)
        results = self._run(ids, name, everything=False, progress=progress)
        return {result.fault.id: result.status for result in results}, self._red(results, name)

    def _generate(self, profile: str) -> None:
        """Another profile of the same spec, as its own generated folder."""
        with tempfile.TemporaryDirectory(prefix="attnmatrix-power-") as name:
            command = [sys.executable, "-m", "generator", "generate", "--profile", profile, "--output", name]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            self.matrices[profile] = read_matrix(Path(name))
            self.subtests[profile] = self.trial.load_subtests(Path(name))

    def _run(
        self, ids: Sequence[str], weakening: str | None, *, everything: bool, progress: Progress
    ) -> list[FaultResult]:
        matrix, keeps = self._plan_for(weakening)
        results = {}
        for fault_id in ids:
            fault = self.faults[fault_id]
            plan = touched(matrix, fault.touches.covers, keeps)
            results[fault_id] = FaultResult(self.facts(fault_id), len(plan))
            if not plan:
                progress(weakening, results[fault_id])
        # Controls run through all they touch, so they begin first.
        jobs = [
            Job(fault_id, weakening, touched(matrix, self.faults[fault_id].touches.covers, keeps), stop=not everything)
            for fault_id in sorted(ids, key=lambda fault_id: not self.faults[fault_id].control)
        ]

        def finished(done: Done) -> None:
            assert done.job.fault is not None
            result = results[done.job.fault]
            result.trials, result.error = done.trials, done.error
            progress(weakening, result)

        run_jobs(jobs, self._attempts, workers=self.workers, timeout=self.timeout, finished=finished)
        return [results[fault_id] for fault_id in ids]

    def _plan_for(self, weakening: str | None) -> tuple[Matrix, Callable[[Any], bool]]:
        if weakening is None:
            return self.matrices["ci"], lambda _entry: True
        found = self.weaken.WEAKENINGS[weakening]
        return self.matrices[found.profile], found.keeps

    def _red(self, results: Sequence[FaultResult], weakening: str | None) -> dict[str, str]:
        """Of the subtests that caught something, those that fail without a fault as well: they prove nothing."""
        killers = list(dict.fromkeys(trial.id for result in results for trial in result.trials if trial.killed))
        share = -(-len(killers) // self.workers) or 1
        jobs = [
            Job(None, weakening, tuple(killers[first : first + share]), stop=False)
            for first in range(0, len(killers), share)
        ]
        done = run_jobs(jobs, self._attempts, workers=self.workers, timeout=self.timeout, finished=lambda _done: None)
        red = {trial.id: trial.message for one in done for trial in one.trials if trial.killed}
        return red | {f"job {number}": one.error for number, one in enumerate(done) if one.error is not None}

    def _attempts(self, job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
        """In the process of a job: plant, then try one subtest after the other."""
        profile = "ci" if job.weakening is None else self.weaken.WEAKENINGS[job.weakening].profile
        with ExitStack() as stack:
            if job.weakening is not None:
                stack.enter_context(self.weaken.weakened(job.weakening))
            if job.fault is not None:
                stack.enter_context(self.planted(job.fault)).on_change = note_change
            for subtest_id in job.ids:
                yield "begin", {"id": subtest_id}
                trial = self.trial.attempt(self.subtests[profile][subtest_id])
                yield "trial", trial.as_dict() | {"killed": trial.killed}
                if job.stop and trial.killed and trial.exercised:
                    return
