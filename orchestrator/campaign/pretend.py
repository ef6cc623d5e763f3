"""Makes finished run folders without running anything, for tests of merging and reporting."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from orchestrator.devices import Lanes
from orchestrator.folder import Folder
from orchestrator.manifest import Manifest, Planned
from orchestrator.planning import Plan
from orchestrator.running import Request, describe, prepare

Say = Callable[[Planned], Mapping[str, object] | None]


def everything_passes(planned: Planned) -> Mapping[str, object]:
    rng = random.Random(planned.id)
    margin = round(rng.betavariate(2, 5), 3)
    facts = {"ran": ["emulated"], "margin": margin, "max_abs": margin / 50, "captures": 1, "replays": 4}
    return {"outcome": "passed", "seconds": round(rng.lognormvariate(-2.5, 1), 4), "attnmatrix": facts}


def pretend_run(
    tests: Path, output: Path, part: tuple[int, int] | None = None, say: Say = everything_passes, workers: int = 2,
    shards: int = 4, prepared: tuple[Manifest, Plan] | None = None,
) -> Folder:  # fmt: skip
    """A folder as a run leaves it. ``say`` gives the fields of a subtest's finish, or None for one that did not run."""
    request = Request(tests=tests, part=part, shards=shards)
    manifest, plan = prepared or prepare(request, "cpu")
    run = describe(request, manifest, plan, Lanes(["cpu"] * workers, "cpu", ""))
    folder = Folder(output)
    folder.create()
    folder.save(run, plan)
    lines: list[list[str]] = [['{"event":"ready","device":"cpu","pid":1,"t":0.0}'] for _ in range(workers)]
    blocks = [b for n, shard in enumerate(plan.shards, 1) if part is None or n == part[0] for b in shard]
    for number, block in enumerate(blocks):
        for planned in block.subtests:
            fields = say(planned)
            key = {"id": planned.id, "attempt": 0}
            lines[number % workers].append(json.dumps({"event": "start", **key, "t": 1.0}))
            if fields is not None:
                lines[number % workers].append(json.dumps({"event": "finish", **key, "t": 2.0, **fields}))
    for number, mine in enumerate(lines, 1):
        (folder.events / f"w{number:04d}.jsonl").write_text("\n".join(mine) + "\n")
    folder.journal.write_text('{"event":"ended","wall":10.0,"busy":9.0,"start":0.6}\n')
    return folder
