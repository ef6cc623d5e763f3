"""Faults F23 to F49 and the spares: each is exercised and caught by the subtest named here, by the check named here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kits.faults import load_all, planted
from kits.faults.trial import attempt, load_subtests
from kits.subtest import Subtest

GENERATED = Path(__file__).parents[3] / "generated_tests"
VALUES = ("compare", "neighbour_independence")
"""A replay's wrong value shows in either, depending on the row that the neighbour check keeps."""


CAUGHT = {
    # host scalars
    "F23": ("dense.trtllm_mha.decode_cg.decode3_free.small_real.x1", VALUES),
    "F24": ("swa.flashinfer.decode_cg.decode3_free.non_monotonic_extend.small_real.x1", VALUES),
    "F25": ("dense.flashinfer.decode_cg.decode3_free.small_real.x1", ("kernel_fault",)),
    # page table and layout
    "F26": ("dense.triton.eagle_draft_cg.eagle_tree", ("metadata_invariants",)),
    "F27": ("dense.triton.eager.page_plus2", ("compare",)),
    "F28a": ("dense.fa3.eager.tiny_p1", ("metadata_invariants",)),
    "F28b": ("dense.triton.eager.tiny_p1", ("compare",)),
    "F29": ("dense.flashinfer.eagle_draft_cg.eagle_tree", ("metadata_invariants",)),
    # masks
    "F30": ("dense.fa3.eager.cross2", ("compare",)),
    "F31": ("swa.triton.eager.decode3", ("compare",)),
    "F32": ("swa.flashinfer.eager.zero_page", ("compare",)),
    "F33": ("swa.triton.verify.eagle_chain", ("compare",)),
    "F34": ("dense.flashinfer.verify.eagle_tree", ("compare",)),
    # dispatch
    "F35": ("dense.flashinfer.decode_cg.decode3_free.small_real.x1", ("compare", "replay_count")),
    "F36a": ("swa.fa3.decode_cg.decode3_free.small_real.x1", ("metadata_invariants",)),
    "F36b": ("swa.fa3.decode_cg.decode3_free.small_real.x1", ("metadata_invariants",)),
    "F37": ("dense.fa4.draft_extend_cg.eagle_chain.small_real.x1", ("metadata_invariants",)),
    # scale, dtype and heads
    "F38": ("dense.triton.eager.mqa_half", ("compare",)),
    "F39a": ("dense.triton.eager.gqa_decode", ("compare",)),
    "F39b": ("dense.flashinfer.eager.gqa_decode", ("compare",)),
    "F40a": ("dense.fa3.eager.mqa_half", ("compare",)),
    "F40b": ("dense.fa3.eager.mqa_half", ("compare",)),
    "F41a": ("dense.flashinfer.split_op.gqa_cross.pcg", ("compare",)),
    "F41b": ("dense.flashinfer.eager.gqa_decode", ("compare",)),
    "F42a": ("dense.fa3.eager.gqa_cross", ("compare",)),
    "F42b": ("dense.trtllm_mha.eager.gqa_decode", ("compare",)),
    "F42c": ("dense.flashinfer.eager.gqa_cross", ("compare",)),
    "F43": ("dense.fa3.verify.eagle_tree", ("compare",)),
    # steps and speculation
    "F44": ("swa.triton.eagle_draft_extend_cg.eagle_tree", ("kernel_fault",)),
    "F45": ("swa.fa3.eagle_draft_extend_cg.eagle_chain", (*VALUES, "metadata_invariants")),
    "F46": ("dense.flashinfer.eagle_draft_cg.eagle_tree", ("metadata_invariants",)),
    "F47": ("dense.fa3.eagle_draft_cg.eagle_chain", (*VALUES, "metadata_invariants")),
    # order and determinism
    "F48": ("dense.fa3.decode_cg.decode3_free.small_real.x1", ("metadata_invariants",)),
    "F49": ("dense.fa3.decode_cg.decode3_free.small_real.x1", ("neighbour_independence",)),
    # spares
    "S01": ("dense.flashinfer.split_op.ragged3.pcg", ("IndexError",)),
    "S02": ("dense.trtllm_mha.decode_cg.decode3_free.small_real.x2", ("metadata_invariants",)),
    "S03": ("dense.fa3.draft_extend_cg.eagle_chain.prod_fill.x2", ("metadata_invariants",)),
    "S04": ("dense.fa3.draft_extend_cg.eagle_chain.prod_fill.x1", ("metadata_invariants",)),
    "S05": ("dense.flashinfer.decode_cg.decode3_free.small_real.x1", ("kernel_fault",)),
    "S06": ("dense.flashinfer.decode_cg.decode3_free.small_real.x1", VALUES),
    "S07": ("swa.flashinfer.eager.decode3", ("compare",)),
    "S08": ("dense.fa3.verify_cg.eagle_tree.prod_fill.x2", VALUES),
    "S09": ("dense.flashinfer.split_op.ragged3.pcg", (*VALUES, "metadata_invariants")),
    "S10": ("dense.fa3.eager.zero_ragged", ("compare",)),
    "S11": ("dense.trtllm_mha.eager.decode3", ("compare",)),
    "S12": ("mla.flashmla.layouts.lay_dec.interleaved_pages", ("compare",)),
    "S13": ("dense.flashinfer.verify.ngram", ("compare",)),
    "S14": ("dense.fa3.decode_cg.decode3_free.small_real.x1", ("kv_integrity",)),
    "S15": ("dense.flashinfer.verify.eagle_chain", ("kernel_fault",)),
}
"""Fault: the subtest that catches it, and by which check."""


@pytest.fixture(scope="module")
def subtests() -> dict[str, Subtest]:
    return load_subtests(GENERATED)


@pytest.mark.parametrize("fault_id", CAUGHT)
def test_fault_is_exercised_and_caught(fault_id: str, subtests: dict[str, Subtest]) -> None:
    subtest_id, checks = CAUGHT[fault_id]
    with planted(fault_id):
        trial = attempt(subtests[subtest_id])
    assert trial.exercised, f"{fault_id} changed no value in {subtest_id}"
    assert trial.killed, f"{subtest_id} stays {trial.outcome} under {fault_id}"
    assert trial.check in checks, trial.message


@pytest.mark.parametrize("subtest_id", sorted({subtest_id for subtest_id, _ in CAUGHT.values()}))
def test_the_same_subtests_pass_without_a_fault(subtest_id: str, subtests: dict[str, Subtest]) -> None:
    trial = attempt(subtests[subtest_id])
    assert trial.outcome == "passed", trial.message


def test_every_later_row_of_the_catalogue_is_planted_here() -> None:
    planted_here = {fault.row for fault in load_all().values() if fault.id in CAUGHT}
    assert planted_here >= {f"F{number}" for number in range(23, 50)}
    assert sum(row.startswith("S") for row in planted_here) >= 12
