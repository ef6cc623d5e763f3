"""A pytest plugin for workers: one subtest launches a kernel that writes far outside of all memory.

    ATTNMATRIX_POISON=ID python -m orchestrator run --plugin orchestrator.campaign.poison

On a GPU that poisons the device's context for good; in Triton's interpreter, on a CPU, it kills the process. Either way
this subtest must end as crashed, and every other as it would have.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

VARIABLE = "ATTNMATRIX_POISON"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    callspec = getattr(item, "callspec", None)
    subtest = callspec.params.get("subtest") if callspec is not None else None
    if subtest is not None and subtest.id == os.environ.get(VARIABLE):
        from orchestrator.campaign.outside import write_outside

        write_outside()
    return (yield)
