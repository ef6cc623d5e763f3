"""Faults F01 to F22 and the controls, each on a subtest that exercises it."""

from __future__ import annotations

import pytest

from kits.faults import load_all, planted
from kits.faults.trial import attempt
from tests.kits.generated import planned

DECODE = "decode_cg.decode3_free.prod_fill.x2"
V2 = "draft_extend_v2_fa_cg.eagle_chain.total.prod_fill"
VALUES = ("compare", "neighbour_independence")
"""A replay's wrong value shows in either, depending on the row that the neighbour check keeps."""

CAUGHT = {
    "F01": ("dense.triton.draft_extend_v2_cg.eagle_chain.total.prod_fill.x2", ("metadata_invariants",)),
    "F02": (f"dense.flashinfer.{DECODE}", ("kernel_fault", "metadata_invariants")),
    "F03": (f"dense.flashinfer.{DECODE}", ("metadata_invariants",)),
    "F04": (
        "swa.flashinfer.decode_cg.decode3_free.non_monotonic_extend.prod_fill.x2",
        ("metadata_invariants", "kv_integrity"),
    ),
    "F05": ("dense.triton.eager.decode3", ("compare",)),
    "F06": (f"dense.fa3.{DECODE}", ("metadata_invariants",)),
    "F07": (f"dense.flashinfer.{DECODE}", ("kv_integrity", "metadata_invariants")),
    "F08": (f"mla.flashmla.{DECODE}", ("kernel_fault",)),
    "F09": (f"dense.fa3.{DECODE}", ("kv_integrity", "metadata_invariants")),
    "F10": (f"dense.fa3.{V2}.x4", ("metadata_invariants",)),
    "F11": ("dense.fa3.draft_extend_v2.eagle_chain.total", ("compare",)),
    "F12": ("dense.fa3.draft_extend_v2.eagle_chain.total", ("compare", "metadata_invariants")),
    "F13": ("dense.triton.draft_extend_v2.eagle_chain.total", ("compare",)),
    "F14": ("mla.flashmla.verify_cg.eagle_chain.prod_fill.x2", ("metadata_invariants", "kernel_fault")),
    "F15": ("dense.trtllm_mha.eagle_draft_cg.eagle_chain", ("compare",)),
    "F16": (f"dense.trtllm_mha.{DECODE}", VALUES),
    "F17a": (f"dense.fa3.{DECODE}", ("pointer_guard",)),
    "F17b": (f"dense.fa3.{DECODE}", ("metadata_invariants",)),
    "F18": (f"mla.flashmla.{DECODE}", ("pointer_guard",)),
    "F19": (f"mla.flashinfer.{DECODE}", (*VALUES, "kernel_fault")),
    "F20": (f"dense.fa3.{V2}.x2", ("kernel_fault",)),
    "F21": ("dense.fa3.verify_cg.eagle_chain.prod_fill.x2", VALUES),
    "F22": ("dense.flashinfer.verify_cg.eagle_chain.prod_fill.x2", ("compare", "kernel_fault")),
}
QUIET = {
    "C06": "swa.triton.verify_cg.eagle_chain.prod_fill.x1",
    "C12": "mla.flashinfer.verify_cg.eagle_chain.prod_fill.x1",
    "C14": "mla.flashmla.verify_cg.eagle_chain.prod_fill.x4",
    "C19": f"mla.flashinfer.{DECODE}",
    "C23": f"dense.flashinfer.{DECODE}",
}


@pytest.mark.parametrize("fault_id", CAUGHT)
def test_exercised_and_caught(fault_id: str) -> None:
    subtest_id, checks = CAUGHT[fault_id]
    with planted(fault_id):
        found = attempt(planned()[subtest_id])
    assert found.exercised, f"{fault_id} changed no value in {subtest_id}"
    assert found.killed, f"{subtest_id} stays {found.outcome} under {fault_id}"
    assert found.check in checks, found.message


@pytest.mark.parametrize("fault_id", QUIET)
def test_exercised_and_not_reported(fault_id: str) -> None:
    with planted(fault_id):
        found = attempt(planned()[QUIET[fault_id]])
    assert found.exercised, f"{fault_id} changed no value in {QUIET[fault_id]}"
    assert found.outcome == "passed", found.message


@pytest.mark.parametrize("subtest_id", sorted({*QUIET.values(), *(subtest_id for subtest_id, _ in CAUGHT.values())}))
def test_green_without_a_fault(subtest_id: str) -> None:
    found = attempt(planned()[subtest_id])
    assert found.outcome == "passed", found.message


def test_every_early_row_and_every_control_is_here() -> None:
    faults = load_all()
    assert {faults[fault_id].row for fault_id in CAUGHT} == {f"F{number:02}" for number in range(1, 23)}
    assert set(QUIET) == {fault_id for fault_id, fault in faults.items() if fault.control}
