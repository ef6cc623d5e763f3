"""dense attention, backend fa4.

Generated from suite.toml by `nox -s generate`; edit suite.toml instead.
"""

from dataclasses import replace
from functools import partial

import pytest

from kits import Case, KnownFailure, Model, Native, Speculation, Subtest, Tolerance, run

ADAPTER = "kits.backends.flash_attention:FA4Backend"
NATIVE = Native(packages=("flash-attn-4>=4.0.0b14",), capability=">=9.0,<11.0")
TOLERANCE = Tolerance(atol=0.02, rtol=0.02)
MODEL = Model(method="dense", q_heads=4, kv_heads=4, head_dim=64, v_head_dim=64, scale=0.2, dtype="bfloat16")
MODEL_SOFTCAP_SINKS = replace(MODEL, softcap=2.0, sinks=True)
MODEL_Q8_KV2_SOFTCAP_SINKS = replace(MODEL, q_heads=8, kv_heads=2, softcap=2.0, sinks=True)
MODEL_KV1_SOFTCAP_SINKS = replace(MODEL, kv_heads=1, softcap=2.0, sinks=True)
MODEL_Q10_KV2_SOFTCAP_SINKS = replace(MODEL, q_heads=10, kv_heads=2, softcap=2.0, sinks=True)
MODEL_Q10_KV2_SINKS = replace(MODEL, q_heads=10, kv_heads=2, sinks=True)
MODEL_Q10_KV2 = replace(MODEL, q_heads=10, kv_heads=2)
MODEL_HIDDEN256 = replace(MODEL, hidden=256)

TINY_P1 = Case(name="tiny_p1", mode="EXTEND", prefix_lens=(2, 4), extend_lens=(3, 1), page_size=1)
ZERO_PAGE = Case(name="zero_page", mode="EXTEND", prefix_lens=(0,), extend_lens=(16,), page_size=16)
ZERO_RAGGED = Case(name="zero_ragged", mode="EXTEND", prefix_lens=(0, 0, 0), extend_lens=(15, 16, 17), page_size=16)
PAGE_PLUS2 = Case(name="page_plus2", mode="EXTEND", prefix_lens=(16,), extend_lens=(2,), page_size=16)
HALF_HALF = Case(name="half_half", mode="EXTEND", prefix_lens=(8,), extend_lens=(8,), page_size=16)
CROSS2 = Case(name="cross2", mode="EXTEND", prefix_lens=(15,), extend_lens=(2,), page_size=16)
RAGGED3 = Case(name="ragged3", mode="MIXED", prefix_lens=(0, 8, 16), extend_lens=(15, 8, 1), page_size=16)
P32_CROSS = Case(name="p32_cross", mode="EXTEND", prefix_lens=(31,), extend_lens=(2,), page_size=32)
DECODE3 = Case(name="decode3", mode="DECODE", prefix_lens=(14, 15, 16), extend_lens=(1, 1, 1), page_size=16)
DECODE1 = Case(name="decode1", mode="DECODE", prefix_lens=(7,), extend_lens=(1,), page_size=16)
GQA_DECODE = Case(name="gqa_decode", mode="DECODE", prefix_lens=(15, 16, 17), extend_lens=(1, 1, 1), page_size=16)
MQA_HALF = Case(name="mqa_half", mode="EXTEND", prefix_lens=(8,), extend_lens=(8,), page_size=16)
GQA_CROSS = Case(name="gqa_cross", mode="EXTEND", prefix_lens=(15,), extend_lens=(2,), page_size=16)
LAY_EXT = Case(name="lay_ext", mode="EXTEND", prefix_lens=(5, 20), extend_lens=(36, 3), page_size=16)
LAY_DEC = Case(name="lay_dec", mode="DECODE", prefix_lens=(20, 33, 140), extend_lens=(1, 1, 1), page_size=128)
DECODE3_FREE = Case(name="decode3_free", mode="DECODE", prefix_lens=(14, 15, 16), extend_lens=(1, 1, 1), page_size=128)
VERIFY_EAGLE_CHAIN = Case(
    name="verify_eagle_chain",
    mode="TARGET_VERIFY",
    prefix_lens=(14, 7),
    extend_lens=(3, 3),
    page_size=128,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
)
VERIFY_GQA_SINKS_EAGLE_TREE = Case(
    name="verify_gqa_sinks_eagle_tree",
    mode="TARGET_VERIFY",
    prefix_lens=(14, 7),
    extend_lens=(3, 3),
    page_size=128,
    speculation=Speculation(kind="eagle", draft_tokens=3, topk=2, steps=3, parents=(-1, 0, 0)),
)
VERIFY_GQA_FROZEN_KV_MTP = Case(
    name="verify_gqa_frozen_kv_mtp",
    mode="TARGET_VERIFY",
    prefix_lens=(14, 7),
    extend_lens=(2, 2),
    page_size=128,
    speculation=Speculation(kind="frozen_kv_mtp", draft_tokens=2, steps=2, parents=(-1, 0)),
)
ACCEPTED_EAGLE_CHAIN = Case(
    name="accepted_eagle_chain",
    mode="DRAFT_EXTEND",
    prefix_lens=(14, 7),
    extend_lens=(3, 1),
    page_size=128,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
)
ACCEPTED_MTP_FROZEN_KV_MTP = Case(
    name="accepted_mtp_frozen_kv_mtp",
    mode="DRAFT_EXTEND",
    prefix_lens=(14, 7),
    extend_lens=(1, 2),
    page_size=128,
    speculation=Speculation(kind="frozen_kv_mtp", draft_tokens=2, steps=2, parents=(-1, 0)),
)
ACCEPTED_V2_GQA_EAGLE_CHAIN = Case(
    name="accepted_v2_gqa_eagle_chain",
    mode="DRAFT_EXTEND_V2",
    prefix_lens=(4, 7),
    extend_lens=(3, 3),
    page_size=16,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
)
ACCEPTED_V2_EAGLE_CHAIN = Case(
    name="accepted_v2_eagle_chain",
    mode="DRAFT_EXTEND_V2",
    prefix_lens=(4, 7),
    extend_lens=(3, 3),
    page_size=16,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
)
DRAFT_STEPS_EAGLE_CHAIN = Case(
    name="draft_steps_eagle_chain",
    mode="DECODE",
    prefix_lens=(14, 7),
    extend_lens=(1, 1),
    page_size=128,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
)
DRAFT_STEPS_GQA_FROZEN_KV_MTP = Case(
    name="draft_steps_gqa_frozen_kv_mtp",
    mode="DECODE",
    prefix_lens=(14, 7),
    extend_lens=(1, 1),
    page_size=128,
    speculation=Speculation(kind="frozen_kv_mtp", draft_tokens=2, steps=2, parents=(-1, 0)),
)

PAGE_TABLE_CANNOT_SCATTER = KnownFailure(
    id="page-table-cannot-scatter",
    action="xfail",
    kind="design",
    reason="A page table cannot express slots that are scattered within a page.",
    raises="MismatchError",
    wrong=(0.75, 1.0),
)
FA_DE_V2_PREFIX = KnownFailure(
    id="fa-de-v2-prefix",
    action="xfail",
    kind="bug",
    reason="FlashAttention reads only the prefix of the KV cache when seq_lens is the prefix.",
    raises="MismatchError",
    max_abs=(0.3, 1.6),
    wrong=(0.6, 0.97),
)

eager = partial(Subtest, adapter=ADAPTER, runner="eager", seq_lens="total", tolerance=TOLERANCE, native=NATIVE)

EAGER = [
    eager(id="dense.fa4.eager.tiny_p1", model=MODEL, case=TINY_P1),
    eager(id="dense.fa4.eager.zero_page", model=MODEL, case=ZERO_PAGE),
    eager(id="dense.fa4.eager.zero_ragged", model=MODEL, case=ZERO_RAGGED),
    eager(id="dense.fa4.eager.page_plus2", model=MODEL_SOFTCAP_SINKS, case=PAGE_PLUS2),
    eager(id="dense.fa4.eager.half_half", model=MODEL, case=HALF_HALF),
    eager(id="dense.fa4.eager.cross2", model=MODEL, case=CROSS2),
    eager(id="dense.fa4.eager.ragged3", model=MODEL_SOFTCAP_SINKS, case=RAGGED3),
    eager(id="dense.fa4.eager.p32_cross", model=MODEL, case=P32_CROSS),
    eager(id="dense.fa4.eager.decode3", model=MODEL, case=DECODE3),
    eager(id="dense.fa4.eager.decode1", model=MODEL, case=DECODE1),
    eager(id="dense.fa4.eager.gqa_decode", model=MODEL_Q8_KV2_SOFTCAP_SINKS, case=GQA_DECODE),
    eager(id="dense.fa4.eager.mqa_half", model=MODEL_KV1_SOFTCAP_SINKS, case=MQA_HALF),
    eager(id="dense.fa4.eager.gqa_cross", model=MODEL_Q10_KV2_SOFTCAP_SINKS, case=GQA_CROSS),
]


@pytest.mark.parametrize("subtest", EAGER, ids=str)
def test_eager(subtest: Subtest) -> None:
    run(subtest)


layouts = partial(
    Subtest, adapter=ADAPTER, model=MODEL, runner="eager", seq_lens="total", tolerance=TOLERANCE, native=NATIVE
)

LAYOUTS = [
    layouts(id="dense.fa4.layouts.lay_ext.interleaved_pages", case=LAY_EXT, layout="interleaved_pages"),
    layouts(
        id="dense.fa4.layouts.lay_ext.non_monotonic_extend",
        case=LAY_EXT,
        layout="non_monotonic_extend",
        known_failure=PAGE_TABLE_CANNOT_SCATTER,
    ),
    layouts(id="dense.fa4.layouts.lay_dec.interleaved_pages", case=LAY_DEC, layout="interleaved_pages"),
]


@pytest.mark.parametrize("subtest", LAYOUTS, ids=str)
def test_layouts(subtest: Subtest) -> None:
    run(subtest)


decode_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_SINKS,
    runner="cuda_graph",
    seq_lens="total",
    tolerance=TOLERANCE,
    native=NATIVE,
)

DECODE_CG = [
    decode_cg(id="dense.fa4.decode_cg.decode3_free.small_real.x1", case=DECODE3_FREE, pad_style="small_real"),
    decode_cg(
        id="dense.fa4.decode_cg.decode3_free.small_real.x2", case=DECODE3_FREE, pad_style="small_real", multiplier=2
    ),
    decode_cg(
        id="dense.fa4.decode_cg.decode3_free.small_real.x4", case=DECODE3_FREE, pad_style="small_real", multiplier=4
    ),
    decode_cg(id="dense.fa4.decode_cg.decode3_free.prod_fill.x1", case=DECODE3_FREE, pad_style="prod_fill"),
    decode_cg(
        id="dense.fa4.decode_cg.decode3_free.prod_fill.x2", case=DECODE3_FREE, pad_style="prod_fill", multiplier=2
    ),
    decode_cg(
        id="dense.fa4.decode_cg.decode3_free.prod_fill.x4", case=DECODE3_FREE, pad_style="prod_fill", multiplier=4
    ),
]


@pytest.mark.parametrize("subtest", DECODE_CG, ids=str)
def test_decode_cg(subtest: Subtest) -> None:
    run(subtest)


split_op = partial(Subtest, adapter=ADAPTER, seq_lens="total", tolerance=TOLERANCE, native=NATIVE)

SPLIT_OP = [
    split_op(id="dense.fa4.split_op.ragged3.pcg", model=MODEL_SOFTCAP_SINKS, case=RAGGED3, runner="pcg"),
    split_op(id="dense.fa4.split_op.ragged3.bcg", model=MODEL_SOFTCAP_SINKS, case=RAGGED3, runner="bcg"),
    split_op(id="dense.fa4.split_op.gqa_cross.pcg", model=MODEL_Q10_KV2_SOFTCAP_SINKS, case=GQA_CROSS, runner="pcg"),
    split_op(id="dense.fa4.split_op.gqa_cross.bcg", model=MODEL_Q10_KV2_SOFTCAP_SINKS, case=GQA_CROSS, runner="bcg"),
]


@pytest.mark.parametrize("subtest", SPLIT_OP, ids=str)
def test_split_op(subtest: Subtest) -> None:
    run(subtest)


verify = partial(Subtest, adapter=ADAPTER, runner="eager", seq_lens="prefix", tolerance=TOLERANCE, native=NATIVE)

VERIFY = [
    verify(id="dense.fa4.verify.eagle_chain", model=MODEL_SOFTCAP_SINKS, case=VERIFY_EAGLE_CHAIN),
    verify(id="dense.fa4.verify.eagle_tree", model=MODEL_Q10_KV2_SINKS, case=VERIFY_GQA_SINKS_EAGLE_TREE),
    verify(id="dense.fa4.verify.frozen_kv_mtp", model=MODEL_Q10_KV2, case=VERIFY_GQA_FROZEN_KV_MTP),
]


@pytest.mark.parametrize("subtest", VERIFY, ids=str)
def test_verify(subtest: Subtest) -> None:
    run(subtest)


verify_cg = partial(
    Subtest, adapter=ADAPTER, runner="cuda_graph", seq_lens="prefix", tolerance=TOLERANCE, native=NATIVE
)

VERIFY_CG = [
    verify_cg(
        id="dense.fa4.verify_cg.eagle_chain.small_real.x1",
        model=MODEL_SOFTCAP_SINKS,
        case=VERIFY_EAGLE_CHAIN,
        pad_style="small_real",
    ),
    verify_cg(
        id="dense.fa4.verify_cg.eagle_chain.small_real.x2",
        model=MODEL_SOFTCAP_SINKS,
        case=VERIFY_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=2,
    ),
    verify_cg(
        id="dense.fa4.verify_cg.eagle_chain.small_real.x4",
        model=MODEL_SOFTCAP_SINKS,
        case=VERIFY_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=4,
    ),
    verify_cg(
        id="dense.fa4.verify_cg.eagle_chain.prod_fill.x1",
        model=MODEL_SOFTCAP_SINKS,
        case=VERIFY_EAGLE_CHAIN,
        pad_style="prod_fill",
    ),
    verify_cg(
        id="dense.fa4.verify_cg.eagle_chain.prod_fill.x2",
        model=MODEL_SOFTCAP_SINKS,
        case=VERIFY_EAGLE_CHAIN,
        pad_style="prod_fill",
        multiplier=2,
    ),
    verify_cg(
        id="dense.fa4.verify_cg.eagle_chain.prod_fill.x4",
        model=MODEL_SOFTCAP_SINKS,
        case=VERIFY_EAGLE_CHAIN,
        pad_style="prod_fill",
        multiplier=4,
    ),
    verify_cg(
        id="dense.fa4.verify_cg.eagle_tree.small_real.x1",
        model=MODEL_Q10_KV2_SINKS,
        case=VERIFY_GQA_SINKS_EAGLE_TREE,
        pad_style="small_real",
    ),
    verify_cg(
        id="dense.fa4.verify_cg.eagle_tree.small_real.x2",
        model=MODEL_Q10_KV2_SINKS,
        case=VERIFY_GQA_SINKS_EAGLE_TREE,
        pad_style="small_real",
        multiplier=2,
    ),
    verify_cg(
        id="dense.fa4.verify_cg.eagle_tree.small_real.x4",
        model=MODEL_Q10_KV2_SINKS,
        case=VERIFY_GQA_SINKS_EAGLE_TREE,
        pad_style="small_real",
        multiplier=4,
    ),
    verify_cg(
        id="dense.fa4.verify_cg.eagle_tree.prod_fill.x1",
        model=MODEL_Q10_KV2_SINKS,
        case=VERIFY_GQA_SINKS_EAGLE_TREE,
        pad_style="prod_fill",
    ),
    verify_cg(
        id="dense.fa4.verify_cg.eagle_tree.prod_fill.x2",
        model=MODEL_Q10_KV2_SINKS,
        case=VERIFY_GQA_SINKS_EAGLE_TREE,
        pad_style="prod_fill",
        multiplier=2,
    ),
    verify_cg(
        id="dense.fa4.verify_cg.eagle_tree.prod_fill.x4",
        model=MODEL_Q10_KV2_SINKS,
        case=VERIFY_GQA_SINKS_EAGLE_TREE,
        pad_style="prod_fill",
        multiplier=4,
    ),
    verify_cg(
        id="dense.fa4.verify_cg.frozen_kv_mtp.small_real.x1",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_FROZEN_KV_MTP,
        pad_style="small_real",
    ),
    verify_cg(
        id="dense.fa4.verify_cg.frozen_kv_mtp.small_real.x2",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_FROZEN_KV_MTP,
        pad_style="small_real",
        multiplier=2,
    ),
    verify_cg(
        id="dense.fa4.verify_cg.frozen_kv_mtp.small_real.x4",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_FROZEN_KV_MTP,
        pad_style="small_real",
        multiplier=4,
    ),
    verify_cg(
        id="dense.fa4.verify_cg.frozen_kv_mtp.prod_fill.x1",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_FROZEN_KV_MTP,
        pad_style="prod_fill",
    ),
    verify_cg(
        id="dense.fa4.verify_cg.frozen_kv_mtp.prod_fill.x2",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_FROZEN_KV_MTP,
        pad_style="prod_fill",
        multiplier=2,
    ),
    verify_cg(
        id="dense.fa4.verify_cg.frozen_kv_mtp.prod_fill.x4",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_FROZEN_KV_MTP,
        pad_style="prod_fill",
        multiplier=4,
    ),
]


@pytest.mark.parametrize("subtest", VERIFY_CG, ids=str)
def test_verify_cg(subtest: Subtest) -> None:
    run(subtest)


draft_extend = partial(Subtest, adapter=ADAPTER, runner="eager", seq_lens="total", tolerance=TOLERANCE, native=NATIVE)

DRAFT_EXTEND = [
    draft_extend(id="dense.fa4.draft_extend.eagle_chain", model=MODEL_SOFTCAP_SINKS, case=ACCEPTED_EAGLE_CHAIN),
    draft_extend(id="dense.fa4.draft_extend.frozen_kv_mtp", model=MODEL_Q10_KV2, case=ACCEPTED_MTP_FROZEN_KV_MTP),
]


@pytest.mark.parametrize("subtest", DRAFT_EXTEND, ids=str)
def test_draft_extend(subtest: Subtest) -> None:
    run(subtest)


draft_extend_cg = partial(
    Subtest, adapter=ADAPTER, runner="cuda_graph", seq_lens="total", tolerance=TOLERANCE, native=NATIVE
)

DRAFT_EXTEND_CG = [
    draft_extend_cg(
        id="dense.fa4.draft_extend_cg.eagle_chain.small_real.x1",
        model=MODEL_SOFTCAP_SINKS,
        case=ACCEPTED_EAGLE_CHAIN,
        pad_style="small_real",
    ),
    draft_extend_cg(
        id="dense.fa4.draft_extend_cg.eagle_chain.small_real.x2",
        model=MODEL_SOFTCAP_SINKS,
        case=ACCEPTED_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=2,
    ),
    draft_extend_cg(
        id="dense.fa4.draft_extend_cg.eagle_chain.small_real.x4",
        model=MODEL_SOFTCAP_SINKS,
        case=ACCEPTED_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=4,
    ),
    draft_extend_cg(
        id="dense.fa4.draft_extend_cg.eagle_chain.prod_fill.x1",
        model=MODEL_SOFTCAP_SINKS,
        case=ACCEPTED_EAGLE_CHAIN,
        pad_style="prod_fill",
    ),
    draft_extend_cg(
        id="dense.fa4.draft_extend_cg.eagle_chain.prod_fill.x2",
        model=MODEL_SOFTCAP_SINKS,
        case=ACCEPTED_EAGLE_CHAIN,
        pad_style="prod_fill",
        multiplier=2,
    ),
    draft_extend_cg(
        id="dense.fa4.draft_extend_cg.eagle_chain.prod_fill.x4",
        model=MODEL_SOFTCAP_SINKS,
        case=ACCEPTED_EAGLE_CHAIN,
        pad_style="prod_fill",
        multiplier=4,
    ),
    draft_extend_cg(
        id="dense.fa4.draft_extend_cg.frozen_kv_mtp.small_real.x1",
        model=MODEL_Q10_KV2,
        case=ACCEPTED_MTP_FROZEN_KV_MTP,
        pad_style="small_real",
    ),
    draft_extend_cg(
        id="dense.fa4.draft_extend_cg.frozen_kv_mtp.small_real.x2",
        model=MODEL_Q10_KV2,
        case=ACCEPTED_MTP_FROZEN_KV_MTP,
        pad_style="small_real",
        multiplier=2,
    ),
    draft_extend_cg(
        id="dense.fa4.draft_extend_cg.frozen_kv_mtp.small_real.x4",
        model=MODEL_Q10_KV2,
        case=ACCEPTED_MTP_FROZEN_KV_MTP,
        pad_style="small_real",
        multiplier=4,
    ),
    draft_extend_cg(
        id="dense.fa4.draft_extend_cg.frozen_kv_mtp.prod_fill.x1",
        model=MODEL_Q10_KV2,
        case=ACCEPTED_MTP_FROZEN_KV_MTP,
        pad_style="prod_fill",
    ),
    draft_extend_cg(
        id="dense.fa4.draft_extend_cg.frozen_kv_mtp.prod_fill.x2",
        model=MODEL_Q10_KV2,
        case=ACCEPTED_MTP_FROZEN_KV_MTP,
        pad_style="prod_fill",
        multiplier=2,
    ),
    draft_extend_cg(
        id="dense.fa4.draft_extend_cg.frozen_kv_mtp.prod_fill.x4",
        model=MODEL_Q10_KV2,
        case=ACCEPTED_MTP_FROZEN_KV_MTP,
        pad_style="prod_fill",
        multiplier=4,
    ),
]


@pytest.mark.parametrize("subtest", DRAFT_EXTEND_CG, ids=str)
def test_draft_extend_cg(subtest: Subtest) -> None:
    run(subtest)


draft_extend_v2 = partial(Subtest, adapter=ADAPTER, runner="eager", tolerance=TOLERANCE, native=NATIVE)

DRAFT_EXTEND_V2 = [
    draft_extend_v2(
        id="dense.fa4.draft_extend_v2.eagle_chain.total",
        model=MODEL_Q10_KV2_SOFTCAP_SINKS,
        case=ACCEPTED_V2_GQA_EAGLE_CHAIN,
        seq_lens="total",
    ),
    draft_extend_v2(
        id="dense.fa4.draft_extend_v2.eagle_chain.prefix",
        model=MODEL_HIDDEN256,
        case=ACCEPTED_V2_EAGLE_CHAIN,
        seq_lens="prefix",
        known_failure=FA_DE_V2_PREFIX,
    ),
]


@pytest.mark.parametrize("subtest", DRAFT_EXTEND_V2, ids=str)
def test_draft_extend_v2(subtest: Subtest) -> None:
    run(subtest)


draft_extend_v2_fa_cg = partial(Subtest, adapter=ADAPTER, runner="cuda_graph", tolerance=TOLERANCE, native=NATIVE)

DRAFT_EXTEND_V2_FA_CG = [
    draft_extend_v2_fa_cg(
        id="dense.fa4.draft_extend_v2_fa_cg.eagle_chain.total.small_real.x1",
        model=MODEL_Q10_KV2_SOFTCAP_SINKS,
        case=ACCEPTED_V2_GQA_EAGLE_CHAIN,
        seq_lens="total",
        pad_style="small_real",
    ),
    draft_extend_v2_fa_cg(
        id="dense.fa4.draft_extend_v2_fa_cg.eagle_chain.total.small_real.x2",
        model=MODEL_Q10_KV2_SOFTCAP_SINKS,
        case=ACCEPTED_V2_GQA_EAGLE_CHAIN,
        seq_lens="total",
        pad_style="small_real",
        multiplier=2,
    ),
    draft_extend_v2_fa_cg(
        id="dense.fa4.draft_extend_v2_fa_cg.eagle_chain.total.small_real.x4",
        model=MODEL_Q10_KV2_SOFTCAP_SINKS,
        case=ACCEPTED_V2_GQA_EAGLE_CHAIN,
        seq_lens="total",
        pad_style="small_real",
        multiplier=4,
    ),
    draft_extend_v2_fa_cg(
        id="dense.fa4.draft_extend_v2_fa_cg.eagle_chain.total.prod_fill.x1",
        model=MODEL_Q10_KV2_SOFTCAP_SINKS,
        case=ACCEPTED_V2_GQA_EAGLE_CHAIN,
        seq_lens="total",
        pad_style="prod_fill",
    ),
    draft_extend_v2_fa_cg(
        id="dense.fa4.draft_extend_v2_fa_cg.eagle_chain.total.prod_fill.x2",
        model=MODEL_Q10_KV2_SOFTCAP_SINKS,
        case=ACCEPTED_V2_GQA_EAGLE_CHAIN,
        seq_lens="total",
        pad_style="prod_fill",
        multiplier=2,
    ),
    draft_extend_v2_fa_cg(
        id="dense.fa4.draft_extend_v2_fa_cg.eagle_chain.total.prod_fill.x4",
        model=MODEL_Q10_KV2_SOFTCAP_SINKS,
        case=ACCEPTED_V2_GQA_EAGLE_CHAIN,
        seq_lens="total",
        pad_style="prod_fill",
        multiplier=4,
    ),
    draft_extend_v2_fa_cg(
        id="dense.fa4.draft_extend_v2_fa_cg.eagle_chain.prefix.small_real.x1",
        model=MODEL_HIDDEN256,
        case=ACCEPTED_V2_EAGLE_CHAIN,
        seq_lens="prefix",
        pad_style="small_real",
        known_failure=FA_DE_V2_PREFIX,
    ),
    draft_extend_v2_fa_cg(
        id="dense.fa4.draft_extend_v2_fa_cg.eagle_chain.prefix.small_real.x2",
        model=MODEL_HIDDEN256,
        case=ACCEPTED_V2_EAGLE_CHAIN,
        seq_lens="prefix",
        pad_style="small_real",
        multiplier=2,
        known_failure=FA_DE_V2_PREFIX,
    ),
    draft_extend_v2_fa_cg(
        id="dense.fa4.draft_extend_v2_fa_cg.eagle_chain.prefix.small_real.x4",
        model=MODEL_HIDDEN256,
        case=ACCEPTED_V2_EAGLE_CHAIN,
        seq_lens="prefix",
        pad_style="small_real",
        multiplier=4,
        known_failure=FA_DE_V2_PREFIX,
    ),
    draft_extend_v2_fa_cg(
        id="dense.fa4.draft_extend_v2_fa_cg.eagle_chain.prefix.prod_fill.x1",
        model=MODEL_HIDDEN256,
        case=ACCEPTED_V2_EAGLE_CHAIN,
        seq_lens="prefix",
        pad_style="prod_fill",
        known_failure=FA_DE_V2_PREFIX,
    ),
    draft_extend_v2_fa_cg(
        id="dense.fa4.draft_extend_v2_fa_cg.eagle_chain.prefix.prod_fill.x2",
        model=MODEL_HIDDEN256,
        case=ACCEPTED_V2_EAGLE_CHAIN,
        seq_lens="prefix",
        pad_style="prod_fill",
        multiplier=2,
        known_failure=FA_DE_V2_PREFIX,
    ),
    draft_extend_v2_fa_cg(
        id="dense.fa4.draft_extend_v2_fa_cg.eagle_chain.prefix.prod_fill.x4",
        model=MODEL_HIDDEN256,
        case=ACCEPTED_V2_EAGLE_CHAIN,
        seq_lens="prefix",
        pad_style="prod_fill",
        multiplier=4,
        known_failure=FA_DE_V2_PREFIX,
    ),
]


@pytest.mark.parametrize("subtest", DRAFT_EXTEND_V2_FA_CG, ids=str)
def test_draft_extend_v2_fa_cg(subtest: Subtest) -> None:
    run(subtest)


eagle_draft_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_SINKS,
    runner="cuda_graph_multi_step",
    seq_lens="prefix",
    tolerance=TOLERANCE,
    native=NATIVE,
)

EAGLE_DRAFT_CG = [
    eagle_draft_cg(id="dense.fa4.eagle_draft_cg.eagle_chain", case=DRAFT_STEPS_EAGLE_CHAIN),
]


@pytest.mark.parametrize("subtest", EAGLE_DRAFT_CG, ids=str)
def test_eagle_draft_cg(subtest: Subtest) -> None:
    run(subtest)


frozen_kv_mtp_draft_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_Q10_KV2,
    runner="cuda_graph_multi_step",
    seq_lens="prefix",
    tolerance=TOLERANCE,
    native=NATIVE,
)

FROZEN_KV_MTP_DRAFT_CG = [
    frozen_kv_mtp_draft_cg(id="dense.fa4.frozen_kv_mtp_draft_cg.frozen_kv_mtp", case=DRAFT_STEPS_GQA_FROZEN_KV_MTP),
]


@pytest.mark.parametrize("subtest", FROZEN_KV_MTP_DRAFT_CG, ids=str)
def test_frozen_kv_mtp_draft_cg(subtest: Subtest) -> None:
    run(subtest)
