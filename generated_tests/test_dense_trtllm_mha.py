"""dense attention, backend trtllm_mha.

Generated from suite.toml by `nox -s generate`; edit suite.toml instead.
"""

from dataclasses import replace
from functools import partial

import pytest

from kits import Case, Model, Native, Speculation, Subtest, Tolerance, run

ADAPTER = "kits.backends.block_tables:TRTLLMBackend"
NATIVE = Native(packages=("flashinfer-python>=0.6",), capability=">=9.0")
TOLERANCE = Tolerance(atol=0.02, rtol=0.02)
MODEL = Model(method="dense", q_heads=4, kv_heads=4, head_dim=64, v_head_dim=64, scale=0.2, dtype="bfloat16")
MODEL_Q8_KV2_SINKS = replace(MODEL, q_heads=8, kv_heads=2, sinks=True)
MODEL_SINKS = replace(MODEL, sinks=True)

DECODE3 = Case(name="decode3", mode="DECODE", prefix_lens=(14, 15, 16), extend_lens=(1, 1, 1), page_size=16)
DECODE1 = Case(name="decode1", mode="DECODE", prefix_lens=(7,), extend_lens=(1,), page_size=16)
GQA_DECODE = Case(name="gqa_decode", mode="DECODE", prefix_lens=(15, 16, 17), extend_lens=(1, 1, 1), page_size=16)
DECODE_P32 = Case(name="decode_p32", mode="DECODE", prefix_lens=(31, 32, 33), extend_lens=(1, 1, 1), page_size=32)
LAY_DEC = Case(name="lay_dec", mode="DECODE", prefix_lens=(20, 33, 140), extend_lens=(1, 1, 1), page_size=16)
DECODE3_FREE = Case(name="decode3_free", mode="DECODE", prefix_lens=(14, 15, 16), extend_lens=(1, 1, 1), page_size=16)
DRAFT_STEPS_EAGLE_CHAIN = Case(
    name="draft_steps_eagle_chain",
    mode="DECODE",
    prefix_lens=(14, 7),
    extend_lens=(1, 1),
    page_size=16,
    speculation=Speculation(kind="eagle", draft_tokens=3, steps=2, parents=(-1, 0, 1)),
)

eager = partial(Subtest, adapter=ADAPTER, runner="eager", seq_lens="total", tolerance=TOLERANCE, native=NATIVE)

EAGER = [
    eager(id="dense.trtllm_mha.eager.decode3", model=MODEL, case=DECODE3),
    eager(id="dense.trtllm_mha.eager.decode1", model=MODEL, case=DECODE1),
    eager(id="dense.trtllm_mha.eager.gqa_decode", model=MODEL_Q8_KV2_SINKS, case=GQA_DECODE),
    eager(id="dense.trtllm_mha.eager.decode_p32", model=MODEL, case=DECODE_P32),
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
    layouts(id="dense.trtllm_mha.layouts.lay_dec.interleaved_pages", case=LAY_DEC),
]


@pytest.mark.parametrize("subtest", LAYOUTS, ids=str)
def test_layouts(subtest: Subtest) -> None:
    run(subtest)


decode_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SINKS,
    runner="cuda_graph",
    seq_lens="total",
    tolerance=TOLERANCE,
    native=NATIVE,
)

DECODE_CG = [
    decode_cg(id="dense.trtllm_mha.decode_cg.decode3_free.small_real.x1", case=DECODE3_FREE, pad_style="small_real"),
    decode_cg(
        id="dense.trtllm_mha.decode_cg.decode3_free.small_real.x2",
        case=DECODE3_FREE,
        pad_style="small_real",
        multiplier=2,
    ),
    decode_cg(
        id="dense.trtllm_mha.decode_cg.decode3_free.small_real.x4",
        case=DECODE3_FREE,
        pad_style="small_real",
        multiplier=4,
    ),
    decode_cg(id="dense.trtllm_mha.decode_cg.decode3_free.prod_fill.x1", case=DECODE3_FREE, pad_style="prod_fill"),
    decode_cg(
        id="dense.trtllm_mha.decode_cg.decode3_free.prod_fill.x2",
        case=DECODE3_FREE,
        pad_style="prod_fill",
        multiplier=2,
    ),
    decode_cg(
        id="dense.trtllm_mha.decode_cg.decode3_free.prod_fill.x4",
        case=DECODE3_FREE,
        pad_style="prod_fill",
        multiplier=4,
    ),
]


@pytest.mark.parametrize("subtest", DECODE_CG, ids=str)
def test_decode_cg(subtest: Subtest) -> None:
    run(subtest)


eagle_draft_cg = partial(
    Subtest,
    adapter=ADAPTER,
    model=MODEL_SINKS,
    runner="cuda_graph_multi_step",
    seq_lens="prefix",
    tolerance=TOLERANCE,
    native=NATIVE,
)

EAGLE_DRAFT_CG = [
    eagle_draft_cg(id="dense.trtllm_mha.eagle_draft_cg.eagle_chain", case=DRAFT_STEPS_EAGLE_CHAIN),
]


@pytest.mark.parametrize("subtest", EAGLE_DRAFT_CG, ids=str)
def test_eagle_draft_cg(subtest: Subtest) -> None:
    run(subtest)
