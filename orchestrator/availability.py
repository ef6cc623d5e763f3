"""Which reasons for an unavailable subtest a run accepts.

A subtest that cannot run here says why: ``architecture``, ``package`` or ``no_device``. No runner can change its card,
but a package that went missing, or a torch that lost its CUDA, is what continuous integration is there to notice.
"""

from __future__ import annotations

import difflib
import platform

from orchestrator.errors import OrchestratorError
from orchestrator.manifest import short
from orchestrator.outcomes import UNAVAILABLE_KINDS

NONE = "none"


def accepted_here(device_kind: str) -> list[str]:
    """What a run accepts where its caller names nothing.

    On a GPU, that the card lacks what a kernel needs. On a CPU emulations need no library; Triton's own source does,
    and pyproject.toml asks for Triton only where it can be installed.
    """
    if device_kind != "cpu":
        return ["architecture"]
    return [] if (platform.system(), platform.machine()) == ("Linux", "x86_64") else ["package"]


def parse_kinds(text: str) -> list[str]:
    """``architecture,package`` as a list; ``none`` as an empty one."""
    words = [word.strip() for word in text.split(",")]
    if words == [NONE]:
        return []
    for word in words:
        if word not in UNAVAILABLE_KINDS:
            near = difflib.get_close_matches(word, [*sorted(UNAVAILABLE_KINDS), NONE], n=1, cutoff=0.4)
            known = f"one or more of {', '.join(sorted(UNAVAILABLE_KINDS))}, or {NONE}"
            hint = f"did you mean {near[0]}?" if near else f"it takes {known}"
            raise OrchestratorError("O508", f"--allow-unavailable: there is no reason {short(word, 80)}", hint)
    return sorted(set(words))
