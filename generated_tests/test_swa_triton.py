"""swa attention, backend triton.

Generated from suite.toml by `nox -s generate`; edit suite.toml instead.
"""

from dataclasses import replace
from functools import partial

import pytest

from kits import Case, Model, Speculation, Subtest, Tolerance, run

ADAPTER = "kits.backends.triton:TritonBackend"
TOLERANCE = Tolerance(atol=0.002, rtol=0.002)
MODEL = Model(
    method="swa",
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    scale=0.2,
    dtype="float16",
    layers=("window", "full"),
    window=8,
)
MODEL_SOFTCAP_SINKS_K_SCALE_V_SCALE = replace(MODEL, softcap=2.0, sinks=True, k_scale=0.375, v_scale=2.1)
MODEL_Q10_SOFTCAP_SINKS_K_SCALE_V_SCALE = replace(
    MODEL, q_heads=10, softcap=2.0, sinks=True, k_scale=0.375, v_scale=2.1
)

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
LAY_EXT = Case(name="lay_ext", mode="EXTEND", prefix_lens=(5, 20), extend_lens=(36, 3), page_size=16)
LAY_DEC = Case(name="lay_dec", mode="DECODE", prefix_lens=(20, 33, 140), extend_lens=(1, 1, 1), page_size=16)
DECODE3_FREE = Case(name="decode3_free", mode="DECODE", prefix_lens=(14, 15, 16), extend_lens=(1, 1, 1), page_size=16)
GQA_CROSS = Case(name="gqa_cross", mode="EXTEND", prefix_lens=(15,), extend_lens=(2,), page_size=16)
VERIFY_EAGLE_CHAIN = Case(
    name="verify_eagle_chain",
    mode="TARGET_VERIFY",
    prefix_lens=(14, 7),
    extend_lens=(3, 3),
    page_size=16,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
)
VERIFY_EAGLE_TREE = Case(
    name="verify_eagle_tree",
    mode="TARGET_VERIFY",
    prefix_lens=(14, 7),
    extend_lens=(3, 3),
    page_size=16,
    speculation=Speculation(kind="eagle", draft_tokens=3, topk=2, steps=3, parents=(-1, 0, 0)),
)
ACCEPTED_V2_CAPPED_EAGLE_TREE = Case(
    name="accepted_v2_capped_eagle_tree",
    mode="DRAFT_EXTEND_V2",
    prefix_lens=(4, 7),
    extend_lens=(3, 3),
    page_size=16,
    speculation=Speculation(kind="eagle", draft_tokens=3, topk=2, steps=3, parents=(-1, 0, 0)),
)

eager = partial(Subtest, adapter=ADAPTER, runner="eager", seq_lens="total", tolerance=TOLERANCE, requires=("triton",))

EAGER = [
    eager(id="swa.triton.eager.tiny_p1", model=MODEL, case=TINY_P1),
    eager(id="swa.triton.eager.zero_page", model=MODEL, case=ZERO_PAGE),
    eager(id="swa.triton.eager.zero_ragged", model=MODEL, case=ZERO_RAGGED),
    eager(id="swa.triton.eager.page_plus2", model=MODEL_SOFTCAP_SINKS_K_SCALE_V_SCALE, case=PAGE_PLUS2),
    eager(id="swa.triton.eager.half_half", model=MODEL, case=HALF_HALF),
    eager(id="swa.triton.eager.cross2", model=MODEL, case=CROSS2),
    eager(id="swa.triton.eager.ragged3", model=MODEL_SOFTCAP_SINKS_K_SCALE_V_SCALE, case=RAGGED3),
    eager(id="swa.triton.eager.p32_cross", model=MODEL, case=P32_CROSS),
    eager(id="swa.triton.eager.decode3", model=MODEL, case=DECODE3),
    eager(id="swa.triton.eager.decode1", model=MODEL, case=DECODE1),
]


@pytest.mark.parametrize("subtest", EAGER, ids=str)
def test_eager(subtest: Subtest) -> None:
    run(subtest)


layouts = partial(
    Subtest, adapter=ADAPTER, model=MODEL, runner="eager", seq_lens="total", tolerance=TOLERANCE, requires=("triton",)
)

LAYOUTS = [
    layouts(id="swa.triton.layouts.lay_ext.interleaved_pages", case=LAY_EXT, layout="interleaved_pages"),
    layouts(id="swa.triton.layouts.lay_ext.non_monotonic_extend", case=LAY_EXT, layout="non_monotonic_extend"),
    layouts(id="swa.triton.layouts.lay_dec.interleaved_pages", case=LAY_DEC, layout="interleaved_pages"),
]


@pytest.mark.parametrize("subtest", LAYOUTS, ids=str)
def test_layouts(subtest: Subtest) -> None:
    run(subtest)


decode_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_SINKS_K_SCALE_V_SCALE,
    runner="cuda_graph",
    seq_lens="total",
    layout="non_monotonic_extend",
    tolerance=TOLERANCE,
    requires=("triton",),
)

DECODE_CG = [
    decode_cg(
        id="swa.triton.decode_cg.decode3_free.non_monotonic_extend.small_real.x1",
        case=DECODE3_FREE,
        pad_style="small_real",
    ),
    decode_cg(
        id="swa.triton.decode_cg.decode3_free.non_monotonic_extend.small_real.x2",
        case=DECODE3_FREE,
        pad_style="small_real",
        multiplier=2,
    ),
    decode_cg(
        id="swa.triton.decode_cg.decode3_free.non_monotonic_extend.small_real.x4",
        case=DECODE3_FREE,
        pad_style="small_real",
        multiplier=4,
    ),
    decode_cg(
        id="swa.triton.decode_cg.decode3_free.non_monotonic_extend.prod_fill.x1",
        case=DECODE3_FREE,
        pad_style="prod_fill",
    ),
    decode_cg(
        id="swa.triton.decode_cg.decode3_free.non_monotonic_extend.prod_fill.x2",
        case=DECODE3_FREE,
        pad_style="prod_fill",
        multiplier=2,
    ),
    decode_cg(
        id="swa.triton.decode_cg.decode3_free.non_monotonic_extend.prod_fill.x4",
        case=DECODE3_FREE,
        pad_style="prod_fill",
        multiplier=4,
    ),
]


@pytest.mark.parametrize("subtest", DECODE_CG, ids=str)
def test_decode_cg(subtest: Subtest) -> None:
    run(subtest)


split_op = partial(Subtest, adapter=ADAPTER, seq_lens="total", tolerance=TOLERANCE, requires=("triton",))

SPLIT_OP = [
    split_op(
        id="swa.triton.split_op.ragged3.pcg", model=MODEL_SOFTCAP_SINKS_K_SCALE_V_SCALE, case=RAGGED3, runner="pcg"
    ),
    split_op(
        id="swa.triton.split_op.ragged3.bcg", model=MODEL_SOFTCAP_SINKS_K_SCALE_V_SCALE, case=RAGGED3, runner="bcg"
    ),
    split_op(
        id="swa.triton.split_op.gqa_cross.pcg",
        model=MODEL_Q10_SOFTCAP_SINKS_K_SCALE_V_SCALE,
        case=GQA_CROSS,
        runner="pcg",
    ),
    split_op(
        id="swa.triton.split_op.gqa_cross.bcg",
        model=MODEL_Q10_SOFTCAP_SINKS_K_SCALE_V_SCALE,
        case=GQA_CROSS,
        runner="bcg",
    ),
]


@pytest.mark.parametrize("subtest", SPLIT_OP, ids=str)
def test_split_op(subtest: Subtest) -> None:
    run(subtest)


verify = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_SINKS_K_SCALE_V_SCALE,
    runner="eager",
    seq_lens="prefix",
    tolerance=TOLERANCE,
    requires=("triton",),
)

VERIFY = [
    verify(id="swa.triton.verify.eagle_chain", case=VERIFY_EAGLE_CHAIN),
    verify(id="swa.triton.verify.eagle_tree", case=VERIFY_EAGLE_TREE),
]


@pytest.mark.parametrize("subtest", VERIFY, ids=str)
def test_verify(subtest: Subtest) -> None:
    run(subtest)


verify_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_SINKS_K_SCALE_V_SCALE,
    runner="cuda_graph",
    seq_lens="prefix",
    tolerance=TOLERANCE,
    requires=("triton",),
)

VERIFY_CG = [
    verify_cg(id="swa.triton.verify_cg.eagle_chain.small_real.x1", case=VERIFY_EAGLE_CHAIN, pad_style="small_real"),
    verify_cg(
        id="swa.triton.verify_cg.eagle_chain.small_real.x2",
        case=VERIFY_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=2,
    ),
    verify_cg(
        id="swa.triton.verify_cg.eagle_chain.small_real.x4",
        case=VERIFY_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=4,
    ),
    verify_cg(id="swa.triton.verify_cg.eagle_chain.prod_fill.x1", case=VERIFY_EAGLE_CHAIN, pad_style="prod_fill"),
    verify_cg(
        id="swa.triton.verify_cg.eagle_chain.prod_fill.x2", case=VERIFY_EAGLE_CHAIN, pad_style="prod_fill", multiplier=2
    ),
    verify_cg(
        id="swa.triton.verify_cg.eagle_chain.prod_fill.x4", case=VERIFY_EAGLE_CHAIN, pad_style="prod_fill", multiplier=4
    ),
    verify_cg(id="swa.triton.verify_cg.eagle_tree.small_real.x1", case=VERIFY_EAGLE_TREE, pad_style="small_real"),
    verify_cg(
        id="swa.triton.verify_cg.eagle_tree.small_real.x2", case=VERIFY_EAGLE_TREE, pad_style="small_real", multiplier=2
    ),
    verify_cg(
        id="swa.triton.verify_cg.eagle_tree.small_real.x4", case=VERIFY_EAGLE_TREE, pad_style="small_real", multiplier=4
    ),
    verify_cg(id="swa.triton.verify_cg.eagle_tree.prod_fill.x1", case=VERIFY_EAGLE_TREE, pad_style="prod_fill"),
    verify_cg(
        id="swa.triton.verify_cg.eagle_tree.prod_fill.x2", case=VERIFY_EAGLE_TREE, pad_style="prod_fill", multiplier=2
    ),
    verify_cg(
        id="swa.triton.verify_cg.eagle_tree.prod_fill.x4", case=VERIFY_EAGLE_TREE, pad_style="prod_fill", multiplier=4
    ),
]


@pytest.mark.parametrize("subtest", VERIFY_CG, ids=str)
def test_verify_cg(subtest: Subtest) -> None:
    run(subtest)


eagle_draft_extend_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_SINKS_K_SCALE_V_SCALE,
    runner="cuda_graph",
    seq_lens="total",
    tolerance=TOLERANCE,
    requires=("triton",),
)

EAGLE_DRAFT_EXTEND_CG = [
    eagle_draft_extend_cg(id="swa.triton.eagle_draft_extend_cg.eagle_tree", case=ACCEPTED_V2_CAPPED_EAGLE_TREE),
]


@pytest.mark.parametrize("subtest", EAGLE_DRAFT_EXTEND_CG, ids=str)
def test_eagle_draft_extend_cg(subtest: Subtest) -> None:
    run(subtest)
