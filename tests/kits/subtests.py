"""Subtests for tests of the kit, made by hand: small, with every default stated once."""

from __future__ import annotations

from typing import Any

from kits import Case, Model, Speculation, Subtest, Tolerance

TOLERANCES = {
    "float16": Tolerance(atol=4e-3, rtol=4e-3),
    "bfloat16": Tolerance(atol=2e-2, rtol=2e-2),
}
CHAIN = Speculation(kind="eagle", draft_tokens=3, topk=1, steps=3, parents=(-1, 0, 1))
TREE = Speculation(kind="eagle", draft_tokens=3, topk=2, steps=3, parents=(-1, 0, 0))


def make(
    adapter: str,
    *,
    mode: str = "DECODE",
    prefix: tuple[int, ...] = (14, 15, 16),
    extend: tuple[int, ...] | None = None,
    runner: str = "cuda_graph",
    page_size: int = 16,
    dtype: str = "bfloat16",
    seq_lens: str = "total",
    speculation: Speculation | None = None,
    pad_style: str | None = None,
    multiplier: int = 1,
    layout: str = "shuffled_pages",
    known_failure: Any = None,
    **model: Any,
) -> Subtest:
    """A dense subtest unless ``model`` says otherwise; its id is made of what was asked for."""
    if extend is None:
        extend = (speculation.draft_tokens if speculation else 1,) * len(prefix)
    shape: dict[str, Any] = {
        "method": "dense",
        "q_heads": 4,
        "kv_heads": 4,
        "head_dim": 64,
        "v_head_dim": 64,
        "scale": 0.2,
        "dtype": dtype,
    }
    return Subtest(
        id=f"dense.test.{runner}.{mode.lower()}.{pad_style}.x{multiplier}",
        adapter=adapter,
        model=Model(**(shape | model)),
        case=Case(
            name="case",
            mode=mode,
            prefix_lens=prefix,
            extend_lens=extend,
            page_size=page_size,
            speculation=speculation,
        ),
        runner=runner,
        seq_lens=seq_lens,
        tolerance=TOLERANCES[dtype],
        layout=layout,
        pad_style=pad_style,
        multiplier=multiplier,
        known_failure=known_failure,
    )
