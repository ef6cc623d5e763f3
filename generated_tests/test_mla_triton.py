"""mla attention, backend triton.

Generated from suite.toml by `nox -s generate`; edit suite.toml instead.
"""

from dataclasses import replace
from functools import partial

import pytest

from kits import Case, Model, Speculation, Subtest, Tolerance, run

ADAPTER = "kits.backends.triton:TritonBackend"
TOLERANCE = Tolerance(atol=0.002, rtol=0.002)
MODEL = Model(method="mla", q_heads=4, kv_heads=1, head_dim=576, v_head_dim=512, scale=0.06, dtype="float16")
MODEL_SOFTCAP_SINKS = replace(MODEL, softcap=2.0, sinks=True)
MODEL_Q16 = replace(MODEL, q_heads=16)
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
H16_DECODE = Case(name="h16_decode", mode="DECODE", prefix_lens=(14, 15, 16), extend_lens=(1, 1, 1), page_size=16)
LONG_PREFIX = Case(name="long_prefix", mode="EXTEND", prefix_lens=(47,), extend_lens=(3,), page_size=16)
RAGGED_ABSORB = Case(name="ragged_absorb", mode="EXTEND", prefix_lens=(3, 17, 9), extend_lens=(2, 1, 4), page_size=16)
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
ACCEPTED_V2_CAPPED_EAGLE_CHAIN = Case(
    name="accepted_v2_capped_eagle_chain",
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
    page_size=16,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
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
    eager(id="mla.triton.eager.tiny_p1", model=MODEL, case=TINY_P1),
    eager(id="mla.triton.eager.zero_page", model=MODEL, case=ZERO_PAGE),
    eager(id="mla.triton.eager.zero_ragged", model=MODEL, case=ZERO_RAGGED),
    eager(id="mla.triton.eager.page_plus2", model=MODEL_SOFTCAP_SINKS, case=PAGE_PLUS2),
    eager(id="mla.triton.eager.half_half", model=MODEL, case=HALF_HALF),
    eager(id="mla.triton.eager.cross2", model=MODEL, case=CROSS2),
    eager(id="mla.triton.eager.ragged3", model=MODEL_SOFTCAP_SINKS, case=RAGGED3),
    eager(id="mla.triton.eager.p32_cross", model=MODEL, case=P32_CROSS),
    eager(id="mla.triton.eager.decode3", model=MODEL, case=DECODE3),
    eager(id="mla.triton.eager.decode1", model=MODEL, case=DECODE1),
    eager(id="mla.triton.eager.h16_decode", model=MODEL_Q16, case=H16_DECODE),
    eager(id="mla.triton.eager.long_prefix", model=MODEL, case=LONG_PREFIX),
    eager(id="mla.triton.eager.ragged_absorb", model=MODEL, case=RAGGED_ABSORB),
]


@pytest.mark.parametrize("subtest", EAGER, ids=str)
def test_eager(subtest: Subtest) -> None:
    run(subtest)


layouts = partial(
    Subtest, adapter=ADAPTER, model=MODEL, runner="eager", seq_lens="total", tolerance=TOLERANCE, requires=("triton",)
)

LAYOUTS = [
    layouts(id="mla.triton.layouts.lay_ext.interleaved_pages", case=LAY_EXT, layout="interleaved_pages"),
    layouts(id="mla.triton.layouts.lay_ext.non_monotonic_extend", case=LAY_EXT, layout="non_monotonic_extend"),
    layouts(id="mla.triton.layouts.lay_dec.interleaved_pages", case=LAY_DEC, layout="interleaved_pages"),
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
    requires=("triton",),
)

DECODE_CG = [
    decode_cg(id="mla.triton.decode_cg.decode3_free.small_real.x1", case=DECODE3_FREE, pad_style="small_real"),
    decode_cg(
        id="mla.triton.decode_cg.decode3_free.small_real.x2", case=DECODE3_FREE, pad_style="small_real", multiplier=2
    ),
    decode_cg(
        id="mla.triton.decode_cg.decode3_free.small_real.x4", case=DECODE3_FREE, pad_style="small_real", multiplier=4
    ),
    decode_cg(id="mla.triton.decode_cg.decode3_free.prod_fill.x1", case=DECODE3_FREE, pad_style="prod_fill"),
    decode_cg(
        id="mla.triton.decode_cg.decode3_free.prod_fill.x2", case=DECODE3_FREE, pad_style="prod_fill", multiplier=2
    ),
    decode_cg(
        id="mla.triton.decode_cg.decode3_free.prod_fill.x4", case=DECODE3_FREE, pad_style="prod_fill", multiplier=4
    ),
]


@pytest.mark.parametrize("subtest", DECODE_CG, ids=str)
def test_decode_cg(subtest: Subtest) -> None:
    run(subtest)


split_op = partial(Subtest, adapter=ADAPTER, seq_lens="total", tolerance=TOLERANCE, requires=("triton",))

SPLIT_OP = [
    split_op(id="mla.triton.split_op.ragged3.pcg", model=MODEL_SOFTCAP_SINKS, case=RAGGED3, runner="pcg"),
    split_op(id="mla.triton.split_op.ragged3.bcg", model=MODEL_SOFTCAP_SINKS, case=RAGGED3, runner="bcg"),
    split_op(id="mla.triton.split_op.cross2.pcg", model=MODEL, case=CROSS2, runner="pcg"),
    split_op(id="mla.triton.split_op.cross2.bcg", model=MODEL, case=CROSS2, runner="bcg"),
]


@pytest.mark.parametrize("subtest", SPLIT_OP, ids=str)
def test_split_op(subtest: Subtest) -> None:
    run(subtest)


verify = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_SINKS,
    runner="eager",
    seq_lens="prefix",
    tolerance=TOLERANCE,
    requires=("triton",),
)

VERIFY = [
    verify(id="mla.triton.verify.eagle_chain", case=VERIFY_EAGLE_CHAIN),
]


@pytest.mark.parametrize("subtest", VERIFY, ids=str)
def test_verify(subtest: Subtest) -> None:
    run(subtest)


verify_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_SINKS,
    runner="cuda_graph",
    seq_lens="prefix",
    tolerance=TOLERANCE,
    requires=("triton",),
)

VERIFY_CG = [
    verify_cg(id="mla.triton.verify_cg.eagle_chain.small_real.x1", case=VERIFY_EAGLE_CHAIN, pad_style="small_real"),
    verify_cg(
        id="mla.triton.verify_cg.eagle_chain.small_real.x2",
        case=VERIFY_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=2,
    ),
    verify_cg(
        id="mla.triton.verify_cg.eagle_chain.small_real.x4",
        case=VERIFY_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=4,
    ),
    verify_cg(id="mla.triton.verify_cg.eagle_chain.prod_fill.x1", case=VERIFY_EAGLE_CHAIN, pad_style="prod_fill"),
    verify_cg(
        id="mla.triton.verify_cg.eagle_chain.prod_fill.x2", case=VERIFY_EAGLE_CHAIN, pad_style="prod_fill", multiplier=2
    ),
    verify_cg(
        id="mla.triton.verify_cg.eagle_chain.prod_fill.x4", case=VERIFY_EAGLE_CHAIN, pad_style="prod_fill", multiplier=4
    ),
]


@pytest.mark.parametrize("subtest", VERIFY_CG, ids=str)
def test_verify_cg(subtest: Subtest) -> None:
    run(subtest)


draft_extend_v2 = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_SINKS,
    runner="eager",
    seq_lens="total",
    tolerance=TOLERANCE,
    requires=("triton",),
)

DRAFT_EXTEND_V2 = [
    draft_extend_v2(id="mla.triton.draft_extend_v2.eagle_chain.total", case=ACCEPTED_V2_CAPPED_EAGLE_CHAIN),
]


@pytest.mark.parametrize("subtest", DRAFT_EXTEND_V2, ids=str)
def test_draft_extend_v2(subtest: Subtest) -> None:
    run(subtest)


draft_extend_v2_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_HIDDEN256,
    runner="cuda_graph",
    seq_lens="total",
    tolerance=TOLERANCE,
    requires=("triton",),
)

DRAFT_EXTEND_V2_CG = [
    draft_extend_v2_cg(
        id="mla.triton.draft_extend_v2_cg.eagle_chain.total.small_real.x1",
        case=ACCEPTED_V2_EAGLE_CHAIN,
        pad_style="small_real",
    ),
    draft_extend_v2_cg(
        id="mla.triton.draft_extend_v2_cg.eagle_chain.total.small_real.x2",
        case=ACCEPTED_V2_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=2,
    ),
    draft_extend_v2_cg(
        id="mla.triton.draft_extend_v2_cg.eagle_chain.total.small_real.x4",
        case=ACCEPTED_V2_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=4,
    ),
    draft_extend_v2_cg(
        id="mla.triton.draft_extend_v2_cg.eagle_chain.total.prod_fill.x1",
        case=ACCEPTED_V2_EAGLE_CHAIN,
        pad_style="prod_fill",
    ),
    draft_extend_v2_cg(
        id="mla.triton.draft_extend_v2_cg.eagle_chain.total.prod_fill.x2",
        case=ACCEPTED_V2_EAGLE_CHAIN,
        pad_style="prod_fill",
        multiplier=2,
    ),
    draft_extend_v2_cg(
        id="mla.triton.draft_extend_v2_cg.eagle_chain.total.prod_fill.x4",
        case=ACCEPTED_V2_EAGLE_CHAIN,
        pad_style="prod_fill",
        multiplier=4,
    ),
]


@pytest.mark.parametrize("subtest", DRAFT_EXTEND_V2_CG, ids=str)
def test_draft_extend_v2_cg(subtest: Subtest) -> None:
    run(subtest)


eagle_draft_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_SINKS,
    runner="cuda_graph_multi_step",
    seq_lens="prefix",
    tolerance=TOLERANCE,
    requires=("triton",),
)

EAGLE_DRAFT_CG = [
    eagle_draft_cg(id="mla.triton.eagle_draft_cg.eagle_chain", case=DRAFT_STEPS_EAGLE_CHAIN),
]


@pytest.mark.parametrize("subtest", EAGLE_DRAFT_CG, ids=str)
def test_eagle_draft_cg(subtest: Subtest) -> None:
    run(subtest)


eagle_draft_extend_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_SINKS,
    runner="cuda_graph",
    seq_lens="total",
    tolerance=TOLERANCE,
    requires=("triton",),
)

EAGLE_DRAFT_EXTEND_CG = [
    eagle_draft_extend_cg(id="mla.triton.eagle_draft_extend_cg.eagle_tree", case=ACCEPTED_V2_CAPPED_EAGLE_TREE),
]


@pytest.mark.parametrize("subtest", EAGLE_DRAFT_EXTEND_CG, ids=str)
def test_eagle_draft_extend_cg(subtest: Subtest) -> None:
    run(subtest)
