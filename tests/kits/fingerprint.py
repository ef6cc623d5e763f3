"""What makes a subtest different from every other: the inputs of its kernels and its replay plan, and no name.

Two subtests with one fingerprint are one subtest counted twice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from typing import Any

from kits.runners.plan import plan_of
from kits.subtest import Subtest


def kernel_inputs(subtest: Subtest) -> dict[str, Any]:
    """Every value that reaches a kernel or decides what is replayed; the seed, which the id decides, is held fixed."""
    case, speculation = subtest.case, subtest.case.speculation
    inputs: dict[str, Any] = {
        "adapter": subtest.adapter,
        "model": dataclasses.asdict(subtest.model),
        "mode": case.mode,
        "runner": subtest.runner,
        "page_size": case.page_size,
        "layout": subtest.layout,
        "lens": [case.prefix_lens, case.extend_lens],
        "seq_lens": subtest.seq_lens,
    }
    if speculation is not None and case.mode == "TARGET_VERIFY":
        inputs["tree"] = speculation.parents
    if subtest.runner == "cuda_graph_multi_step" and speculation is not None:
        inputs["draft"] = [speculation.topk, speculation.steps, speculation.caches_drafts]
    if subtest.runner != "eager":
        plan = plan_of(subtest, random.Random(0))
        inputs["plan"] = dataclasses.asdict(plan)
        if any(step.size > len(step.lens) for step in plan.steps):
            inputs["pad_style"] = subtest.pad_style
    return inputs


def fingerprint(subtest: Subtest) -> str:
    """Hash of ``kernel_inputs``."""
    return hashlib.sha256(json.dumps(kernel_inputs(subtest), sort_keys=True).encode()).hexdigest()
