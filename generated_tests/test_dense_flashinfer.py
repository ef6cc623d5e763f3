"""dense attention, backend flashinfer.

Generated from suite.toml by `nox -s generate`; edit suite.toml instead.
"""

from dataclasses import replace
from functools import partial

import pytest

from kits import Case, Model, Native, Speculation, Subtest, Tolerance, run

ADAPTER = "kits.backends.flashinfer:FlashInferBackend"
NATIVE = Native(packages=("flashinfer-python>=0.6",), capability=">=8.0")
TOLERANCE = Tolerance(atol=0.02, rtol=0.02)
MODEL = Model(method="dense", q_heads=4, kv_heads=4, head_dim=64, v_head_dim=64, scale=0.2, dtype="bfloat16")
MODEL_SOFTCAP_K_SCALE_V_SCALE = replace(MODEL, softcap=2.0, k_scale=0.375, v_scale=2.1)
MODEL_Q8_KV2_SOFTCAP_K_SCALE_V_SCALE = replace(MODEL, q_heads=8, kv_heads=2, softcap=2.0, k_scale=0.375, v_scale=2.1)
MODEL_KV1_SOFTCAP_K_SCALE_V_SCALE = replace(MODEL, kv_heads=1, softcap=2.0, k_scale=0.375, v_scale=2.1)
MODEL_Q10_KV2_SOFTCAP_K_SCALE_V_SCALE = replace(MODEL, q_heads=10, kv_heads=2, softcap=2.0, k_scale=0.375, v_scale=2.1)
MODEL_Q10_KV2 = replace(MODEL, q_heads=10, kv_heads=2)

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
LAY_DEC = Case(name="lay_dec", mode="DECODE", prefix_lens=(20, 33, 140), extend_lens=(1, 1, 1), page_size=16)
DECODE3_FREE = Case(name="decode3_free", mode="DECODE", prefix_lens=(14, 15, 16), extend_lens=(1, 1, 1), page_size=16)
VERIFY_EAGLE_CHAIN = Case(
    name="verify_eagle_chain",
    mode="TARGET_VERIFY",
    prefix_lens=(14, 7),
    extend_lens=(3, 3),
    page_size=16,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
)
VERIFY_GQA_RIDES_EAGLE_TREE = Case(
    name="verify_gqa_rides_eagle_tree",
    mode="TARGET_VERIFY",
    prefix_lens=(14, 7),
    extend_lens=(3, 3),
    page_size=16,
    speculation=Speculation(kind="eagle", draft_tokens=3, topk=2, steps=3, parents=(-1, 0, 0)),
)
VERIFY_GQA_FROZEN_KV_MTP = Case(
    name="verify_gqa_frozen_kv_mtp",
    mode="TARGET_VERIFY",
    prefix_lens=(14, 7),
    extend_lens=(2, 2),
    page_size=16,
    speculation=Speculation(kind="frozen_kv_mtp", draft_tokens=2, steps=2, parents=(-1, 0)),
)
VERIFY_GQA_DFLASH = Case(
    name="verify_gqa_dflash",
    mode="TARGET_VERIFY",
    prefix_lens=(14, 7),
    extend_lens=(16, 16),
    page_size=16,
    speculation=Speculation(
        kind="dflash", draft_tokens=16, parents=(-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)
    ),
)
VERIFY_GQA_NGRAM = Case(
    name="verify_gqa_ngram",
    mode="TARGET_VERIFY",
    prefix_lens=(14, 7),
    extend_lens=(5, 5),
    page_size=16,
    speculation=Speculation(kind="ngram", draft_tokens=5, parents=(-1, 0, 1, 1, 0)),
)
ACCEPTED_EAGLE_CHAIN = Case(
    name="accepted_eagle_chain",
    mode="DRAFT_EXTEND",
    prefix_lens=(14, 7),
    extend_lens=(3, 1),
    page_size=16,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
)
ACCEPTED_MTP_FROZEN_KV_MTP = Case(
    name="accepted_mtp_frozen_kv_mtp",
    mode="DRAFT_EXTEND",
    prefix_lens=(14, 7),
    extend_lens=(1, 2),
    page_size=16,
    speculation=Speculation(kind="frozen_kv_mtp", draft_tokens=2, steps=2, parents=(-1, 0)),
)
DRAFT_STEPS_EAGLE_CHAIN = Case(
    name="draft_steps_eagle_chain",
    mode="DECODE",
    prefix_lens=(14, 7),
    extend_lens=(1, 1),
    page_size=16,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
)
DRAFT_STEPS_EAGLE_TREE = Case(
    name="draft_steps_eagle_tree",
    mode="DECODE",
    prefix_lens=(14, 7),
    extend_lens=(1, 1),
    page_size=16,
    speculation=Speculation(kind="eagle", draft_tokens=3, topk=2, steps=3, parents=(-1, 0, 0)),
)
DRAFT_STEPS_GQA_FROZEN_KV_MTP = Case(
    name="draft_steps_gqa_frozen_kv_mtp",
    mode="DECODE",
    prefix_lens=(14, 7),
    extend_lens=(1, 1),
    page_size=16,
    speculation=Speculation(kind="frozen_kv_mtp", draft_tokens=2, steps=2, parents=(-1, 0)),
)

eager = partial(Subtest, adapter=ADAPTER, runner="eager", seq_lens="total", tolerance=TOLERANCE, native=NATIVE)

EAGER = [
    eager(id="dense.flashinfer.eager.tiny_p1", model=MODEL, case=TINY_P1),
    eager(id="dense.flashinfer.eager.zero_page", model=MODEL, case=ZERO_PAGE),
    eager(id="dense.flashinfer.eager.zero_ragged", model=MODEL, case=ZERO_RAGGED),
    eager(id="dense.flashinfer.eager.page_plus2", model=MODEL_SOFTCAP_K_SCALE_V_SCALE, case=PAGE_PLUS2),
    eager(id="dense.flashinfer.eager.half_half", model=MODEL, case=HALF_HALF),
    eager(id="dense.flashinfer.eager.cross2", model=MODEL, case=CROSS2),
    eager(id="dense.flashinfer.eager.ragged3", model=MODEL_SOFTCAP_K_SCALE_V_SCALE, case=RAGGED3),
    eager(id="dense.flashinfer.eager.p32_cross", model=MODEL, case=P32_CROSS),
    eager(id="dense.flashinfer.eager.decode3", model=MODEL, case=DECODE3),
    eager(id="dense.flashinfer.eager.decode1", model=MODEL, case=DECODE1),
    eager(id="dense.flashinfer.eager.gqa_decode", model=MODEL_Q8_KV2_SOFTCAP_K_SCALE_V_SCALE, case=GQA_DECODE),
    eager(id="dense.flashinfer.eager.mqa_half", model=MODEL_KV1_SOFTCAP_K_SCALE_V_SCALE, case=MQA_HALF),
    eager(id="dense.flashinfer.eager.gqa_cross", model=MODEL_Q10_KV2_SOFTCAP_K_SCALE_V_SCALE, case=GQA_CROSS),
]


@pytest.mark.parametrize("subtest", EAGER, ids=str)
def test_eager(subtest: Subtest) -> None:
    run(subtest)


layouts = partial(
    Subtest, adapter=ADAPTER, model=MODEL, runner="eager", seq_lens="total", tolerance=TOLERANCE, native=NATIVE
)

LAYOUTS = [
    layouts(id="dense.flashinfer.layouts.lay_ext.interleaved_pages", case=LAY_EXT, layout="interleaved_pages"),
    layouts(id="dense.flashinfer.layouts.lay_ext.non_monotonic_extend", case=LAY_EXT, layout="non_monotonic_extend"),
    layouts(id="dense.flashinfer.layouts.lay_dec.interleaved_pages", case=LAY_DEC, layout="interleaved_pages"),
]


@pytest.mark.parametrize("subtest", LAYOUTS, ids=str)
def test_layouts(subtest: Subtest) -> None:
    run(subtest)


decode_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
    runner="cuda_graph",
    seq_lens="total",
    tolerance=TOLERANCE,
    native=NATIVE,
)

DECODE_CG = [
    decode_cg(id="dense.flashinfer.decode_cg.decode3_free.small_real.x1", case=DECODE3_FREE, pad_style="small_real"),
    decode_cg(
        id="dense.flashinfer.decode_cg.decode3_free.small_real.x2",
        case=DECODE3_FREE,
        pad_style="small_real",
        multiplier=2,
    ),
    decode_cg(
        id="dense.flashinfer.decode_cg.decode3_free.small_real.x4",
        case=DECODE3_FREE,
        pad_style="small_real",
        multiplier=4,
    ),
    decode_cg(id="dense.flashinfer.decode_cg.decode3_free.prod_fill.x1", case=DECODE3_FREE, pad_style="prod_fill"),
    decode_cg(
        id="dense.flashinfer.decode_cg.decode3_free.prod_fill.x2",
        case=DECODE3_FREE,
        pad_style="prod_fill",
        multiplier=2,
    ),
    decode_cg(
        id="dense.flashinfer.decode_cg.decode3_free.prod_fill.x4",
        case=DECODE3_FREE,
        pad_style="prod_fill",
        multiplier=4,
    ),
]


@pytest.mark.parametrize("subtest", DECODE_CG, ids=str)
def test_decode_cg(subtest: Subtest) -> None:
    run(subtest)


split_op = partial(Subtest, adapter=ADAPTER, seq_lens="total", tolerance=TOLERANCE, native=NATIVE)

SPLIT_OP = [
    split_op(
        id="dense.flashinfer.split_op.ragged3.pcg", model=MODEL_SOFTCAP_K_SCALE_V_SCALE, case=RAGGED3, runner="pcg"
    ),
    split_op(
        id="dense.flashinfer.split_op.ragged3.bcg", model=MODEL_SOFTCAP_K_SCALE_V_SCALE, case=RAGGED3, runner="bcg"
    ),
    split_op(
        id="dense.flashinfer.split_op.gqa_cross.pcg",
        model=MODEL_Q10_KV2_SOFTCAP_K_SCALE_V_SCALE,
        case=GQA_CROSS,
        runner="pcg",
    ),
    split_op(
        id="dense.flashinfer.split_op.gqa_cross.bcg",
        model=MODEL_Q10_KV2_SOFTCAP_K_SCALE_V_SCALE,
        case=GQA_CROSS,
        runner="bcg",
    ),
]


@pytest.mark.parametrize("subtest", SPLIT_OP, ids=str)
def test_split_op(subtest: Subtest) -> None:
    run(subtest)


verify = partial(Subtest, adapter=ADAPTER, runner="eager", seq_lens="prefix", tolerance=TOLERANCE, native=NATIVE)

VERIFY = [
    verify(id="dense.flashinfer.verify.eagle_chain", model=MODEL_SOFTCAP_K_SCALE_V_SCALE, case=VERIFY_EAGLE_CHAIN),
    verify(
        id="dense.flashinfer.verify.eagle_tree",
        model=MODEL_Q10_KV2_SOFTCAP_K_SCALE_V_SCALE,
        case=VERIFY_GQA_RIDES_EAGLE_TREE,
    ),
    verify(id="dense.flashinfer.verify.frozen_kv_mtp", model=MODEL_Q10_KV2, case=VERIFY_GQA_FROZEN_KV_MTP),
    verify(id="dense.flashinfer.verify.dflash", model=MODEL_Q10_KV2, case=VERIFY_GQA_DFLASH),
    verify(id="dense.flashinfer.verify.ngram", model=MODEL_Q10_KV2, case=VERIFY_GQA_NGRAM),
]


@pytest.mark.parametrize("subtest", VERIFY, ids=str)
def test_verify(subtest: Subtest) -> None:
    run(subtest)


verify_cg = partial(
    Subtest, adapter=ADAPTER, runner="cuda_graph", seq_lens="prefix", tolerance=TOLERANCE, native=NATIVE
)

VERIFY_CG = [
    verify_cg(
        id="dense.flashinfer.verify_cg.eagle_chain.small_real.x1",
        model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
        case=VERIFY_EAGLE_CHAIN,
        pad_style="small_real",
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.eagle_chain.small_real.x2",
        model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
        case=VERIFY_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=2,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.eagle_chain.small_real.x4",
        model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
        case=VERIFY_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=4,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.eagle_chain.prod_fill.x1",
        model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
        case=VERIFY_EAGLE_CHAIN,
        pad_style="prod_fill",
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.eagle_chain.prod_fill.x2",
        model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
        case=VERIFY_EAGLE_CHAIN,
        pad_style="prod_fill",
        multiplier=2,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.eagle_chain.prod_fill.x4",
        model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
        case=VERIFY_EAGLE_CHAIN,
        pad_style="prod_fill",
        multiplier=4,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.eagle_tree.small_real.x1",
        model=MODEL_Q10_KV2_SOFTCAP_K_SCALE_V_SCALE,
        case=VERIFY_GQA_RIDES_EAGLE_TREE,
        pad_style="small_real",
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.eagle_tree.small_real.x2",
        model=MODEL_Q10_KV2_SOFTCAP_K_SCALE_V_SCALE,
        case=VERIFY_GQA_RIDES_EAGLE_TREE,
        pad_style="small_real",
        multiplier=2,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.eagle_tree.small_real.x4",
        model=MODEL_Q10_KV2_SOFTCAP_K_SCALE_V_SCALE,
        case=VERIFY_GQA_RIDES_EAGLE_TREE,
        pad_style="small_real",
        multiplier=4,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.eagle_tree.prod_fill.x1",
        model=MODEL_Q10_KV2_SOFTCAP_K_SCALE_V_SCALE,
        case=VERIFY_GQA_RIDES_EAGLE_TREE,
        pad_style="prod_fill",
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.eagle_tree.prod_fill.x2",
        model=MODEL_Q10_KV2_SOFTCAP_K_SCALE_V_SCALE,
        case=VERIFY_GQA_RIDES_EAGLE_TREE,
        pad_style="prod_fill",
        multiplier=2,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.eagle_tree.prod_fill.x4",
        model=MODEL_Q10_KV2_SOFTCAP_K_SCALE_V_SCALE,
        case=VERIFY_GQA_RIDES_EAGLE_TREE,
        pad_style="prod_fill",
        multiplier=4,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.frozen_kv_mtp.small_real.x1",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_FROZEN_KV_MTP,
        pad_style="small_real",
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.frozen_kv_mtp.small_real.x2",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_FROZEN_KV_MTP,
        pad_style="small_real",
        multiplier=2,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.frozen_kv_mtp.small_real.x4",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_FROZEN_KV_MTP,
        pad_style="small_real",
        multiplier=4,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.frozen_kv_mtp.prod_fill.x1",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_FROZEN_KV_MTP,
        pad_style="prod_fill",
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.frozen_kv_mtp.prod_fill.x2",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_FROZEN_KV_MTP,
        pad_style="prod_fill",
        multiplier=2,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.frozen_kv_mtp.prod_fill.x4",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_FROZEN_KV_MTP,
        pad_style="prod_fill",
        multiplier=4,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.dflash.small_real.x1",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_DFLASH,
        pad_style="small_real",
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.dflash.small_real.x2",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_DFLASH,
        pad_style="small_real",
        multiplier=2,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.dflash.small_real.x4",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_DFLASH,
        pad_style="small_real",
        multiplier=4,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.dflash.prod_fill.x1",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_DFLASH,
        pad_style="prod_fill",
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.dflash.prod_fill.x2",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_DFLASH,
        pad_style="prod_fill",
        multiplier=2,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.dflash.prod_fill.x4",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_DFLASH,
        pad_style="prod_fill",
        multiplier=4,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.ngram.small_real.x1",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_NGRAM,
        pad_style="small_real",
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.ngram.small_real.x2",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_NGRAM,
        pad_style="small_real",
        multiplier=2,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.ngram.small_real.x4",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_NGRAM,
        pad_style="small_real",
        multiplier=4,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.ngram.prod_fill.x1",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_NGRAM,
        pad_style="prod_fill",
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.ngram.prod_fill.x2",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_NGRAM,
        pad_style="prod_fill",
        multiplier=2,
    ),
    verify_cg(
        id="dense.flashinfer.verify_cg.ngram.prod_fill.x4",
        model=MODEL_Q10_KV2,
        case=VERIFY_GQA_NGRAM,
        pad_style="prod_fill",
        multiplier=4,
    ),
]


@pytest.mark.parametrize("subtest", VERIFY_CG, ids=str)
def test_verify_cg(subtest: Subtest) -> None:
    run(subtest)


draft_extend = partial(Subtest, adapter=ADAPTER, runner="eager", seq_lens="total", tolerance=TOLERANCE, native=NATIVE)

DRAFT_EXTEND = [
    draft_extend(
        id="dense.flashinfer.draft_extend.eagle_chain", model=MODEL_SOFTCAP_K_SCALE_V_SCALE, case=ACCEPTED_EAGLE_CHAIN
    ),
    draft_extend(
        id="dense.flashinfer.draft_extend.frozen_kv_mtp", model=MODEL_Q10_KV2, case=ACCEPTED_MTP_FROZEN_KV_MTP
    ),
]


@pytest.mark.parametrize("subtest", DRAFT_EXTEND, ids=str)
def test_draft_extend(subtest: Subtest) -> None:
    run(subtest)


draft_extend_cg = partial(
    Subtest, adapter=ADAPTER, runner="cuda_graph", seq_lens="total", tolerance=TOLERANCE, native=NATIVE
)

DRAFT_EXTEND_CG = [
    draft_extend_cg(
        id="dense.flashinfer.draft_extend_cg.eagle_chain.small_real.x1",
        model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
        case=ACCEPTED_EAGLE_CHAIN,
        pad_style="small_real",
    ),
    draft_extend_cg(
        id="dense.flashinfer.draft_extend_cg.eagle_chain.small_real.x2",
        model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
        case=ACCEPTED_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=2,
    ),
    draft_extend_cg(
        id="dense.flashinfer.draft_extend_cg.eagle_chain.small_real.x4",
        model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
        case=ACCEPTED_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=4,
    ),
    draft_extend_cg(
        id="dense.flashinfer.draft_extend_cg.eagle_chain.prod_fill.x1",
        model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
        case=ACCEPTED_EAGLE_CHAIN,
        pad_style="prod_fill",
    ),
    draft_extend_cg(
        id="dense.flashinfer.draft_extend_cg.eagle_chain.prod_fill.x2",
        model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
        case=ACCEPTED_EAGLE_CHAIN,
        pad_style="prod_fill",
        multiplier=2,
    ),
    draft_extend_cg(
        id="dense.flashinfer.draft_extend_cg.eagle_chain.prod_fill.x4",
        model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
        case=ACCEPTED_EAGLE_CHAIN,
        pad_style="prod_fill",
        multiplier=4,
    ),
    draft_extend_cg(
        id="dense.flashinfer.draft_extend_cg.frozen_kv_mtp.small_real.x1",
        model=MODEL_Q10_KV2,
        case=ACCEPTED_MTP_FROZEN_KV_MTP,
        pad_style="small_real",
    ),
    draft_extend_cg(
        id="dense.flashinfer.draft_extend_cg.frozen_kv_mtp.small_real.x2",
        model=MODEL_Q10_KV2,
        case=ACCEPTED_MTP_FROZEN_KV_MTP,
        pad_style="small_real",
        multiplier=2,
    ),
    draft_extend_cg(
        id="dense.flashinfer.draft_extend_cg.frozen_kv_mtp.small_real.x4",
        model=MODEL_Q10_KV2,
        case=ACCEPTED_MTP_FROZEN_KV_MTP,
        pad_style="small_real",
        multiplier=4,
    ),
    draft_extend_cg(
        id="dense.flashinfer.draft_extend_cg.frozen_kv_mtp.prod_fill.x1",
        model=MODEL_Q10_KV2,
        case=ACCEPTED_MTP_FROZEN_KV_MTP,
        pad_style="prod_fill",
    ),
    draft_extend_cg(
        id="dense.flashinfer.draft_extend_cg.frozen_kv_mtp.prod_fill.x2",
        model=MODEL_Q10_KV2,
        case=ACCEPTED_MTP_FROZEN_KV_MTP,
        pad_style="prod_fill",
        multiplier=2,
    ),
    draft_extend_cg(
        id="dense.flashinfer.draft_extend_cg.frozen_kv_mtp.prod_fill.x4",
        model=MODEL_Q10_KV2,
        case=ACCEPTED_MTP_FROZEN_KV_MTP,
        pad_style="prod_fill",
        multiplier=4,
    ),
]


@pytest.mark.parametrize("subtest", DRAFT_EXTEND_CG, ids=str)
def test_draft_extend_cg(subtest: Subtest) -> None:
    run(subtest)


eagle_draft_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_K_SCALE_V_SCALE,
    runner="cuda_graph_multi_step",
    seq_lens="prefix",
    tolerance=TOLERANCE,
    native=NATIVE,
)

EAGLE_DRAFT_CG = [
    eagle_draft_cg(id="dense.flashinfer.eagle_draft_cg.eagle_chain", case=DRAFT_STEPS_EAGLE_CHAIN),
    eagle_draft_cg(id="dense.flashinfer.eagle_draft_cg.eagle_tree", case=DRAFT_STEPS_EAGLE_TREE),
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
    frozen_kv_mtp_draft_cg(
        id="dense.flashinfer.frozen_kv_mtp_draft_cg.frozen_kv_mtp", case=DRAFT_STEPS_GQA_FROZEN_KV_MTP
    ),
]


@pytest.mark.parametrize("subtest", FROZEN_KV_MTP_DRAFT_CG, ids=str)
def test_frozen_kv_mtp_draft_cg(subtest: Subtest) -> None:
    run(subtest)
