"""mla attention, backend cutlass_mla.

Generated from suite.toml by `nox -s generate`; edit suite.toml instead.
"""

from functools import partial

import pytest

from kits import Case, Model, Native, Subtest, Tolerance, run

ADAPTER = "kits.backends.block_tables:CutlassMLABackend"
NATIVE = Native(packages=("sglang-kernel>=0.4",), capability=">=10.0,<11.0")
TOLERANCE = Tolerance(atol=0.02, rtol=0.02)
MODEL = Model(method="mla", q_heads=16, kv_heads=1, head_dim=576, v_head_dim=512, scale=0.06, dtype="bfloat16")

DECODE3_P128 = Case(
    name="decode3_p128", mode="DECODE", prefix_lens=(126, 127, 128), extend_lens=(1, 1, 1), page_size=128
)
DECODE1_P128 = Case(name="decode1_p128", mode="DECODE", prefix_lens=(7,), extend_lens=(1,), page_size=128)
DECODE_P128_TWO_PAGES = Case(
    name="decode_p128_two_pages", mode="DECODE", prefix_lens=(200, 14), extend_lens=(1, 1), page_size=128
)
DECODE_LONG_P128 = Case(
    name="decode_long_p128", mode="DECODE", prefix_lens=(260, 3, 383), extend_lens=(1, 1, 1), page_size=128
)
LAY_DEC = Case(name="lay_dec", mode="DECODE", prefix_lens=(20, 33, 140), extend_lens=(1, 1, 1), page_size=128)
DECODE3_FREE = Case(name="decode3_free", mode="DECODE", prefix_lens=(14, 15, 16), extend_lens=(1, 1, 1), page_size=128)

eager = partial(
    Subtest, adapter=ADAPTER, model=MODEL, runner="eager", seq_lens="total", tolerance=TOLERANCE, native=NATIVE
)

EAGER = [
    eager(id="mla.cutlass_mla.eager.decode3_p128", case=DECODE3_P128),
    eager(id="mla.cutlass_mla.eager.decode1_p128", case=DECODE1_P128),
    eager(id="mla.cutlass_mla.eager.decode_p128_two_pages", case=DECODE_P128_TWO_PAGES),
    eager(id="mla.cutlass_mla.eager.decode_long_p128", case=DECODE_LONG_P128),
]


@pytest.mark.parametrize("subtest", EAGER, ids=str)
def test_eager(subtest: Subtest) -> None:
    run(subtest)


layouts = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL,
    runner="eager",
    seq_lens="total",
    layout="interleaved_pages",
    tolerance=TOLERANCE,
    native=NATIVE,
)

LAYOUTS = [
    layouts(id="mla.cutlass_mla.layouts.lay_dec.interleaved_pages", case=LAY_DEC),
]


@pytest.mark.parametrize("subtest", LAYOUTS, ids=str)
def test_layouts(subtest: Subtest) -> None:
    run(subtest)


decode_cg = partial(
    Subtest, adapter=ADAPTER, model=MODEL, runner="cuda_graph", seq_lens="total", tolerance=TOLERANCE, native=NATIVE
)

DECODE_CG = [
    decode_cg(id="mla.cutlass_mla.decode_cg.decode3_free.small_real.x1", case=DECODE3_FREE, pad_style="small_real"),
    decode_cg(
        id="mla.cutlass_mla.decode_cg.decode3_free.small_real.x2",
        case=DECODE3_FREE,
        pad_style="small_real",
        multiplier=2,
    ),
    decode_cg(
        id="mla.cutlass_mla.decode_cg.decode3_free.small_real.x4",
        case=DECODE3_FREE,
        pad_style="small_real",
        multiplier=4,
    ),
    decode_cg(id="mla.cutlass_mla.decode_cg.decode3_free.prod_fill.x1", case=DECODE3_FREE, pad_style="prod_fill"),
    decode_cg(
        id="mla.cutlass_mla.decode_cg.decode3_free.prod_fill.x2", case=DECODE3_FREE, pad_style="prod_fill", multiplier=2
    ),
    decode_cg(
        id="mla.cutlass_mla.decode_cg.decode3_free.prod_fill.x4", case=DECODE3_FREE, pad_style="prod_fill", multiplier=4
    ),
]


@pytest.mark.parametrize("subtest", DECODE_CG, ids=str)
def test_decode_cg(subtest: Subtest) -> None:
    run(subtest)
