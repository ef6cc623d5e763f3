"""What can go wrong in the orchestrator itself: one code per mistake, one exit code per kind of mistake.

``CODES`` is the table that ``python -m orchestrator errors`` prints. A code is never reused for another meaning.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

FAMILY_EXIT = {"1": 10, "2": 11, "3": 12, "4": 13, "5": 14}
"""Exit code by the first digit of an error code: plan, run folder, merge, devices, processes and recording."""

CODES = {
    "O101": "the manifest does not exist",
    "O102": "the manifest cannot be read",
    "O103": "the manifest is not JSON",
    "O104": "the manifest has another shape or format than this version reads",
    "O105": "a subtest of the manifest lacks a field, or a field has the wrong type",
    "O106": "a subtest id uses characters outside [a-z0-9_.] or has too few parts",
    "O107": "a subtest's pytest node does not belong to its id",
    "O108": "two subtests share one id or one node",
    "O109": "the manifest's counts differ from its subtests",
    "O110": "a weight is not a positive finite number",
    "O111": "a known failure is declared by halves, or with an action this version does not know",
    "O112": "no subtest matches the selection",
    "O113": "a name in the selection does not exist",
    "O114": "a -k expression cannot be read",
    "O115": "--shard or --shards is out of range",
    "O116": "a module that the manifest names is missing",
    "O117": "the durations file is unusable",
    "O118": "a shard plan is no partition of its subtests",
    "O119": "the manifest is larger than 512 MiB",
    "O120": "the manifest holds no subtests",
    "O201": "the folder is no run folder",
    "O202": "run.json or plan.json is not readable JSON",
    "O203": "run.json has another format than this version reads",
    "O204": "run.json lacks a field, or a field has the wrong type",
    "O205": "plan.json lacks a field, or a field has the wrong type",
    "O206": "plan.json is not the plan that run.json names",
    "O207": "the output folder already holds a run",
    "O208": "another process works on this run folder",
    "O209": "the suite or the kind of device is another than when the run began, so that it cannot be resumed",
    "O210": "an events file cannot be read",
    "O211": "the events file of a run is a link or no plain file",
    "O212": "a report cannot be written",
    "O301": "nothing to merge",
    "O302": "the runs come from different specs",
    "O303": "the runs come from different commits",
    "O304": "the runs come from different plans",
    "O305": "the same shard is there twice",
    "O307": "the runs were cut into different numbers of shards",
    "O308": "the runs overlap",
    "O309": "the runs used different profiles or selections",
    "O401": "nvidia-smi failed",
    "O402": "a requested device does not exist",
    "O403": "every device is leased by somebody else",
    "O404": "a lease folder is unusable",
    "O405": "CUDA was asked for, and no device is there",
    "O406": "nvidia-smi printed something unreadable",
    "O407": "it is left open which device is meant, or no worker can have it",
    "O501": "an event cannot be written (disk full?)",
    "O502": "the launcher process does not start",
    "O503": "no worker is left: they die before they run anything",
    "O504": "too many workers had to be replaced",
    "O505": "the output folder cannot be made",
    "O506": "the launcher process died again and again",
    "O508": "an option has a value out of range, or does not go with --resume",
    "O509": "a package that the orchestrator or the subtests need is not installed",
}


class OrchestratorError(Exception):
    """A mistake with a code from ``CODES``, a message, and where there is one, what to do next."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        assert code in CODES, code
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint

    @property
    def exit_code(self) -> int:
        return FAMILY_EXIT[self.code[1]]

    def __str__(self) -> str:
        return f"error {self.code}: {self.message}" + (f"\n  {self.hint}" if self.hint else "")
