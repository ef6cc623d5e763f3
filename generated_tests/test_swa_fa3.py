"""swa attention, backend fa3.

Generated from suite.toml by `nox -s generate`; edit suite.toml instead.
"""

from dataclasses import replace
from functools import partial

import pytest

from kits import Case, KnownFailure, Model, Native, Speculation, Subtest, Tolerance, run

ADAPTER = "kits.backends.flash_attention:FA3Backend"
NATIVE = Native(packages=("sglang-kernel>=0.4",), capability="==9.0")
TOLERANCE = Tolerance(atol=0.02, rtol=0.02)
MODEL = Model(
    method="swa",
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    scale=0.2,
    dtype="bfloat16",
    layers=("window", "full"),
    window=8,
)
MODEL_SOFTCAP_SINKS = replace(MODEL, softcap=2.0, sinks=True)
MODEL_Q10_SOFTCAP_SINKS = replace(MODEL, q_heads=10, softcap=2.0, sinks=True)

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
ACCEPTED_EAGLE_CHAIN = Case(
    name="accepted_eagle_chain",
    mode="DRAFT_EXTEND",
    prefix_lens=(14, 7),
    extend_lens=(3, 1),
    page_size=16,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
)

PAGE_TABLE_CANNOT_SCATTER = KnownFailure(
    id="page-table-cannot-scatter",
    action="xfail",
    kind="design",
    reason="A page table cannot express slots that are scattered within a page.",
    raises="MismatchError",
    wrong=(0.75, 1.0),
)

eager = partial(Subtest, adapter=ADAPTER, runner="eager", seq_lens="total", tolerance=TOLERANCE, native=NATIVE)

EAGER = [
    eager(id="swa.fa3.eager.tiny_p1", model=MODEL, case=TINY_P1),
    eager(id="swa.fa3.eager.zero_page", model=MODEL, case=ZERO_PAGE),
    eager(id="swa.fa3.eager.zero_ragged", model=MODEL, case=ZERO_RAGGED),
    eager(id="swa.fa3.eager.page_plus2", model=MODEL_SOFTCAP_SINKS, case=PAGE_PLUS2),
    eager(id="swa.fa3.eager.half_half", model=MODEL, case=HALF_HALF),
    eager(id="swa.fa3.eager.cross2", model=MODEL, case=CROSS2),
    eager(id="swa.fa3.eager.ragged3", model=MODEL_SOFTCAP_SINKS, case=RAGGED3),
    eager(id="swa.fa3.eager.p32_cross", model=MODEL, case=P32_CROSS),
    eager(id="swa.fa3.eager.decode3", model=MODEL, case=DECODE3),
    eager(id="swa.fa3.eager.decode1", model=MODEL, case=DECODE1),
]


@pytest.mark.parametrize("subtest", EAGER, ids=str)
def test_eager(subtest: Subtest) -> None:
    run(subtest)


layouts = partial(
    Subtest, adapter=ADAPTER, model=MODEL, runner="eager", seq_lens="total", tolerance=TOLERANCE, native=NATIVE
)

LAYOUTS = [
    layouts(id="swa.fa3.layouts.lay_ext.interleaved_pages", case=LAY_EXT, layout="interleaved_pages"),
    layouts(
        id="swa.fa3.layouts.lay_ext.non_monotonic_extend",
        case=LAY_EXT,
        layout="non_monotonic_extend",
        known_failure=PAGE_TABLE_CANNOT_SCATTER,
    ),
    layouts(id="swa.fa3.layouts.lay_dec.interleaved_pages", case=LAY_DEC, layout="interleaved_pages"),
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
    decode_cg(id="swa.fa3.decode_cg.decode3_free.small_real.x1", case=DECODE3_FREE, pad_style="small_real"),
    decode_cg(
        id="swa.fa3.decode_cg.decode3_free.small_real.x2", case=DECODE3_FREE, pad_style="small_real", multiplier=2
    ),
    decode_cg(
        id="swa.fa3.decode_cg.decode3_free.small_real.x4", case=DECODE3_FREE, pad_style="small_real", multiplier=4
    ),
    decode_cg(id="swa.fa3.decode_cg.decode3_free.prod_fill.x1", case=DECODE3_FREE, pad_style="prod_fill"),
    decode_cg(id="swa.fa3.decode_cg.decode3_free.prod_fill.x2", case=DECODE3_FREE, pad_style="prod_fill", multiplier=2),
    decode_cg(id="swa.fa3.decode_cg.decode3_free.prod_fill.x4", case=DECODE3_FREE, pad_style="prod_fill", multiplier=4),
]


@pytest.mark.parametrize("subtest", DECODE_CG, ids=str)
def test_decode_cg(subtest: Subtest) -> None:
    run(subtest)


split_op = partial(Subtest, adapter=ADAPTER, seq_lens="total", tolerance=TOLERANCE, native=NATIVE)

SPLIT_OP = [
    split_op(id="swa.fa3.split_op.ragged3.pcg", model=MODEL_SOFTCAP_SINKS, case=RAGGED3, runner="pcg"),
    split_op(id="swa.fa3.split_op.ragged3.bcg", model=MODEL_SOFTCAP_SINKS, case=RAGGED3, runner="bcg"),
    split_op(id="swa.fa3.split_op.gqa_cross.pcg", model=MODEL_Q10_SOFTCAP_SINKS, case=GQA_CROSS, runner="pcg"),
    split_op(id="swa.fa3.split_op.gqa_cross.bcg", model=MODEL_Q10_SOFTCAP_SINKS, case=GQA_CROSS, runner="bcg"),
]


@pytest.mark.parametrize("subtest", SPLIT_OP, ids=str)
def test_split_op(subtest: Subtest) -> None:
    run(subtest)


eagle_draft_extend_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SOFTCAP_SINKS,
    runner="cuda_graph",
    seq_lens="total",
    tolerance=TOLERANCE,
    native=NATIVE,
)

EAGLE_DRAFT_EXTEND_CG = [
    eagle_draft_extend_cg(id="swa.fa3.eagle_draft_extend_cg.eagle_chain", case=ACCEPTED_EAGLE_CHAIN),
]


@pytest.mark.parametrize("subtest", EAGLE_DRAFT_EXTEND_CG, ids=str)
def test_eagle_draft_extend_cg(subtest: Subtest) -> None:
    run(subtest)
