"""Subtests under seeded faults on one side. Run in a process of its own, since a device is chosen at import.

``python -m orchestrator.agreement.trials PLAN OUTPUT`` with ``ATTNMATRIX_DEVICE`` set. ``PLAN`` is JSON, ``{"tests",
"workers", "timeout", "ids", "faults"}``: ``ids`` are the subtests to choose from. Where ``faults`` maps a fault to ids,
exactly these are tried; where it is null, every fault is tried on what it touches until one subtest catches it. Of
what a control touches, ``ENOUGH`` are tried.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.power.crew import Done, Job, run_jobs
from orchestrator.power.planning import read_matrix, touched

OURS = ("kits.kernels.triton_ops.", "kits.kernels._triton_attention.", "kits.kernels.merge.")
"""Kernels that run from the same source on both sides."""
ENOUGH = 12
"""Trials of one fault to compare: the one that caught it, and those before it."""


def main(plan_path: str, output: str) -> int:
    plan = json.loads(Path(plan_path).read_text(encoding="utf-8"))
    import torch

    from kits import faults
    from kits.faults import trial

    torch.set_num_threads(1)
    known = faults.load_all()
    folder = Path(plan["tests"])
    subtests, matrix, ids = trial.load_subtests(folder), read_matrix(folder), set(plan["ids"])
    wanted = plan["faults"] or {
        name: touched(matrix, fault.touches.covers, lambda entry: entry["id"] in ids)[
            : ENOUGH if fault.control else None
        ]
        for name, fault in known.items()
    }
    gc.collect()
    gc.freeze()

    def attempts(job: Job) -> Iterator[tuple[str, dict[str, Any]]]:
        with faults.planted(str(job.fault)):
            for id in job.ids:
                yield "begin", {"id": id}
                found = trial.attempt(subtests[id])
                poisoned = settle(torch)
                told = found.as_dict() | {"killed": found.killed or poisoned}
                yield "trial", told | ({"outcome": "crashed", "check": "cuda"} if poisoned else {})
                if poisoned or (job.stop and found.killed):
                    return

    out = {
        name: {
            "title": fault.title,
            "control": fault.control,
            "emulation": in_emulation(fault),
            "error": "not tried",
            "trials": [],
        }
        for name, fault in known.items()
        if name in wanted
    }

    def finished(done: Done) -> None:
        """Write all anew: a call that is cut short has told what it did."""
        name, last = str(done.job.fault), done.trials[-1] if done.trials else None
        print(f"{name:5} {done.error or (last and f'{last.outcome} {last.id}')}", flush=True)
        out[name] |= {"error": done.error, "trials": [vars(trial) for trial in done.trials]}
        Path(output).write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")

    for name in [name for name, chosen in wanted.items() if not chosen]:
        out[name]["error"] = None  # it touches nothing that is native here
    jobs = [Job(name, None, tuple(chosen), stop=plan["faults"] is None) for name, chosen in wanted.items()]
    run_jobs(jobs, attempts, workers=plan["workers"], timeout=plan["timeout"], finished=finished)
    Path(output).write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    return 0


def settle(torch: Any) -> bool:
    """Wait for the device, so that a fault is blamed on the subtest it happened in; whether its context is lost."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def in_emulation(fault: Any) -> bool:
    """Whether all that a fault changes lies in what stands for a library on a CPU: a GPU runs the library's own."""
    from kits.faults.registry import Plant

    plant = Plant(fault)
    try:
        fault.apply(plant)
        return all(place.startswith("kits.kernels.") and not place.startswith(OURS) for place in plant.places)
    finally:
        plant.undo()


if __name__ == "__main__":
    if not os.environ.get("ATTNMATRIX_DEVICE"):
        raise SystemExit("ATTNMATRIX_DEVICE must say which side this is")
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # Triton's bindings would list what they leaked
