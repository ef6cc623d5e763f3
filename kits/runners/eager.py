"""Runner mode ``eager``: one forward of the case, no graph, no padding."""

from __future__ import annotations

from kits.runners.common import SubtestRun


def run_eager(run: SubtestRun) -> None:
    """Forward the case's rows and compare them with the reference."""
    case = run.case
    lens = list(zip(case.prefix_lens, case.extend_lens, strict=True))
    max_len = max(prefix + extend for prefix, extend in lens)
    run.open(max_rows=len(lens), max_tokens=sum(case.extend_lens), max_len=max_len, live_rows=len(lens))
    requests = run.world.add_requests(lens)
    with run.notes.phase("eager"):
        outputs = run.forward_eagerly(requests, case.mode, run.subtest.seq_lens, case.speculation)
    run.compare("eager", outputs, requests, case.mode, case.speculation)
    run.finish()
