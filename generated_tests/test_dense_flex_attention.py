"""dense attention, backend flex_attention.

Generated from suite.toml by `nox -s generate`; edit suite.toml instead.
"""

from dataclasses import replace
from functools import partial

import pytest

from kits import Case, Model, Subtest, Tolerance, run

ADAPTER = "kits.backends.flex_attention:FlexAttentionBackend"
TOLERANCE = Tolerance(atol=0.02, rtol=0.02)
MODEL = Model(method="dense", q_heads=4, kv_heads=4, head_dim=64, v_head_dim=64, scale=0.2, dtype="bfloat16")
MODEL_SOFTCAP = replace(MODEL, softcap=2.0)
MODEL_Q8_KV2_SOFTCAP = replace(MODEL, q_heads=8, kv_heads=2, softcap=2.0)
MODEL_KV1_SOFTCAP = replace(MODEL, kv_heads=1, softcap=2.0)
MODEL_Q10_KV2_SOFTCAP = replace(MODEL, q_heads=10, kv_heads=2, softcap=2.0)

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

eager = partial(Subtest, adapter=ADAPTER, runner="eager", seq_lens="total", tolerance=TOLERANCE)

EAGER = [
    eager(id="dense.flex_attention.eager.tiny_p1", model=MODEL, case=TINY_P1),
    eager(id="dense.flex_attention.eager.zero_page", model=MODEL, case=ZERO_PAGE),
    eager(id="dense.flex_attention.eager.zero_ragged", model=MODEL, case=ZERO_RAGGED),
    eager(id="dense.flex_attention.eager.page_plus2", model=MODEL_SOFTCAP, case=PAGE_PLUS2),
    eager(id="dense.flex_attention.eager.half_half", model=MODEL, case=HALF_HALF),
    eager(id="dense.flex_attention.eager.cross2", model=MODEL, case=CROSS2),
    eager(id="dense.flex_attention.eager.ragged3", model=MODEL_SOFTCAP, case=RAGGED3),
    eager(id="dense.flex_attention.eager.p32_cross", model=MODEL, case=P32_CROSS),
    eager(id="dense.flex_attention.eager.decode3", model=MODEL, case=DECODE3),
    eager(id="dense.flex_attention.eager.decode1", model=MODEL, case=DECODE1),
    eager(id="dense.flex_attention.eager.gqa_decode", model=MODEL_Q8_KV2_SOFTCAP, case=GQA_DECODE),
    eager(id="dense.flex_attention.eager.mqa_half", model=MODEL_KV1_SOFTCAP, case=MQA_HALF),
    eager(id="dense.flex_attention.eager.gqa_cross", model=MODEL_Q10_KV2_SOFTCAP, case=GQA_CROSS),
]


@pytest.mark.parametrize("subtest", EAGER, ids=str)
def test_eager(subtest: Subtest) -> None:
    run(subtest)


layouts = partial(Subtest, adapter=ADAPTER, model=MODEL, runner="eager", seq_lens="total", tolerance=TOLERANCE)

LAYOUTS = [
    layouts(id="dense.flex_attention.layouts.lay_ext.interleaved_pages", case=LAY_EXT, layout="interleaved_pages"),
    layouts(
        id="dense.flex_attention.layouts.lay_ext.non_monotonic_extend", case=LAY_EXT, layout="non_monotonic_extend"
    ),
    layouts(id="dense.flex_attention.layouts.lay_dec.interleaved_pages", case=LAY_DEC, layout="interleaved_pages"),
]


@pytest.mark.parametrize("subtest", LAYOUTS, ids=str)
def test_layouts(subtest: Subtest) -> None:
    run(subtest)


split_op = partial(Subtest, adapter=ADAPTER, seq_lens="total", tolerance=TOLERANCE)

SPLIT_OP = [
    split_op(id="dense.flex_attention.split_op.ragged3.pcg", model=MODEL_SOFTCAP, case=RAGGED3, runner="pcg"),
    split_op(id="dense.flex_attention.split_op.ragged3.bcg", model=MODEL_SOFTCAP, case=RAGGED3, runner="bcg"),
    split_op(
        id="dense.flex_attention.split_op.gqa_cross.pcg", model=MODEL_Q10_KV2_SOFTCAP, case=GQA_CROSS, runner="pcg"
    ),
    split_op(
        id="dense.flex_attention.split_op.gqa_cross.bcg", model=MODEL_Q10_KV2_SOFTCAP, case=GQA_CROSS, runner="bcg"
    ),
]


@pytest.mark.parametrize("subtest", SPLIT_OP, ids=str)
def test_split_op(subtest: Subtest) -> None:
    run(subtest)
