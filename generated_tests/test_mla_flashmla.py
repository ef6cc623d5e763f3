"""mla attention, backend flashmla.

Generated from suite.toml by `nox -s generate`; edit suite.toml instead.
"""

from functools import partial

import pytest

from kits import Case, Model, Native, Speculation, Subtest, Tolerance, run

ADAPTER = "kits.backends.block_tables:FlashMLABackend"
NATIVE = Native(capability=">=9.0,<11.0")
TOLERANCE = Tolerance(atol=0.02, rtol=0.02)
MODEL = Model(method="mla", q_heads=16, kv_heads=1, head_dim=576, v_head_dim=512, scale=0.06, dtype="bfloat16")

DECODE3_P64 = Case(name="decode3_p64", mode="DECODE", prefix_lens=(62, 63, 64), extend_lens=(1, 1, 1), page_size=64)
DECODE1_P64 = Case(name="decode1_p64", mode="DECODE", prefix_lens=(7,), extend_lens=(1,), page_size=64)
DECODE_P64_TWO_PAGES = Case(
    name="decode_p64_two_pages", mode="DECODE", prefix_lens=(100, 14), extend_lens=(1, 1), page_size=64
)
DECODE_LONG_P64 = Case(
    name="decode_long_p64", mode="DECODE", prefix_lens=(130, 3, 191), extend_lens=(1, 1, 1), page_size=64
)
LAY_DEC = Case(name="lay_dec", mode="DECODE", prefix_lens=(20, 33, 140), extend_lens=(1, 1, 1), page_size=64)
DECODE3_FREE = Case(name="decode3_free", mode="DECODE", prefix_lens=(14, 15, 16), extend_lens=(1, 1, 1), page_size=64)
VERIFY_EAGLE_CHAIN = Case(
    name="verify_eagle_chain",
    mode="TARGET_VERIFY",
    prefix_lens=(14, 7),
    extend_lens=(3, 3),
    page_size=64,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
)
DRAFT_STEPS_EAGLE_CHAIN = Case(
    name="draft_steps_eagle_chain",
    mode="DECODE",
    prefix_lens=(14, 7),
    extend_lens=(1, 1),
    page_size=64,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
)

eager = partial(
    Subtest, adapter=ADAPTER, model=MODEL, runner="eager", seq_lens="total", tolerance=TOLERANCE, native=NATIVE
)

EAGER = [
    eager(id="mla.flashmla.eager.decode3_p64", case=DECODE3_P64),
    eager(id="mla.flashmla.eager.decode1_p64", case=DECODE1_P64),
    eager(id="mla.flashmla.eager.decode_p64_two_pages", case=DECODE_P64_TWO_PAGES),
    eager(id="mla.flashmla.eager.decode_long_p64", case=DECODE_LONG_P64),
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
    layouts(id="mla.flashmla.layouts.lay_dec.interleaved_pages", case=LAY_DEC),
]


@pytest.mark.parametrize("subtest", LAYOUTS, ids=str)
def test_layouts(subtest: Subtest) -> None:
    run(subtest)


decode_cg = partial(
    Subtest, adapter=ADAPTER, model=MODEL, runner="cuda_graph", seq_lens="total", tolerance=TOLERANCE, native=NATIVE
)

DECODE_CG = [
    decode_cg(id="mla.flashmla.decode_cg.decode3_free.small_real.x1", case=DECODE3_FREE, pad_style="small_real"),
    decode_cg(
        id="mla.flashmla.decode_cg.decode3_free.small_real.x2", case=DECODE3_FREE, pad_style="small_real", multiplier=2
    ),
    decode_cg(
        id="mla.flashmla.decode_cg.decode3_free.small_real.x4", case=DECODE3_FREE, pad_style="small_real", multiplier=4
    ),
    decode_cg(id="mla.flashmla.decode_cg.decode3_free.prod_fill.x1", case=DECODE3_FREE, pad_style="prod_fill"),
    decode_cg(
        id="mla.flashmla.decode_cg.decode3_free.prod_fill.x2", case=DECODE3_FREE, pad_style="prod_fill", multiplier=2
    ),
    decode_cg(
        id="mla.flashmla.decode_cg.decode3_free.prod_fill.x4", case=DECODE3_FREE, pad_style="prod_fill", multiplier=4
    ),
]


@pytest.mark.parametrize("subtest", DECODE_CG, ids=str)
def test_decode_cg(subtest: Subtest) -> None:
    run(subtest)


verify = partial(
    Subtest, adapter=ADAPTER, model=MODEL, runner="eager", seq_lens="prefix", tolerance=TOLERANCE, native=NATIVE
)

VERIFY = [
    verify(id="mla.flashmla.verify.eagle_chain", case=VERIFY_EAGLE_CHAIN),
]


@pytest.mark.parametrize("subtest", VERIFY, ids=str)
def test_verify(subtest: Subtest) -> None:
    run(subtest)


verify_cg = partial(
    Subtest, adapter=ADAPTER, model=MODEL, runner="cuda_graph", seq_lens="prefix", tolerance=TOLERANCE, native=NATIVE
)

VERIFY_CG = [
    verify_cg(id="mla.flashmla.verify_cg.eagle_chain.small_real.x1", case=VERIFY_EAGLE_CHAIN, pad_style="small_real"),
    verify_cg(
        id="mla.flashmla.verify_cg.eagle_chain.small_real.x2",
        case=VERIFY_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=2,
    ),
    verify_cg(
        id="mla.flashmla.verify_cg.eagle_chain.small_real.x4",
        case=VERIFY_EAGLE_CHAIN,
        pad_style="small_real",
        multiplier=4,
    ),
    verify_cg(id="mla.flashmla.verify_cg.eagle_chain.prod_fill.x1", case=VERIFY_EAGLE_CHAIN, pad_style="prod_fill"),
    verify_cg(
        id="mla.flashmla.verify_cg.eagle_chain.prod_fill.x2",
        case=VERIFY_EAGLE_CHAIN,
        pad_style="prod_fill",
        multiplier=2,
    ),
    verify_cg(
        id="mla.flashmla.verify_cg.eagle_chain.prod_fill.x4",
        case=VERIFY_EAGLE_CHAIN,
        pad_style="prod_fill",
        multiplier=4,
    ),
]


@pytest.mark.parametrize("subtest", VERIFY_CG, ids=str)
def test_verify_cg(subtest: Subtest) -> None:
    run(subtest)


eagle_draft_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL,
    runner="cuda_graph_multi_step",
    seq_lens="prefix",
    tolerance=TOLERANCE,
    native=NATIVE,
)

EAGLE_DRAFT_CG = [
    eagle_draft_cg(id="mla.flashmla.eagle_draft_cg.eagle_chain", case=DRAFT_STEPS_EAGLE_CHAIN),
]


@pytest.mark.parametrize("subtest", EAGLE_DRAFT_CG, ids=str)
def test_eagle_draft_cg(subtest: Subtest) -> None:
    run(subtest)
