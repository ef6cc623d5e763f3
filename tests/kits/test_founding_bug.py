"""The bug that this exists for, through the real generated subtests: no clamp at zero on padded rows."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.kits.generated import attempt, planned

SWEEP = "dense.triton.draft_extend_v2_cg.eagle_chain.total.{}.x{}"
BREAKER = "tests.kits.breakers:NoClamp"


@pytest.mark.parametrize("multiplier", [1, 2, 4])
def test_polite_padding_stays_green(multiplier: int) -> None:
    subtest = dataclasses.replace(planned()[SWEEP.format("small_real", multiplier)], adapter=BREAKER)
    assert attempt(subtest).outcome == "passed"


@pytest.mark.parametrize("multiplier", [1, 2, 4])
def test_production_padding_names_field_size_and_value(multiplier: int) -> None:
    subtest = dataclasses.replace(planned()[SWEEP.format("prod_fill", multiplier)], adapter=BREAKER)
    verdict = attempt(subtest)
    assert (verdict.outcome, verdict.check) == ("failed", "metadata_invariants")
    message = str(verdict.failure["message"]) if verdict.failure else ""
    assert re.search(r"kv_indptr \(B=\d+\): decreases by 2 behind row \d+: \[0, ", message)
