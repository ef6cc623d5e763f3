"""How rows R..B of a batch padded to the captured size B are filled.

``small_real`` pads with small, consistent requests, as the public suites do. ``prod_fill`` mirrors what SGLang's
graph runners leave there: ``seq_lens`` is the backend's fill value, every padded row claims N new tokens, all indices
are 0. So ``seq_lens - extend_seq_lens`` is negative on padded rows wherever N exceeds the fill value. ``null_fill`` is
vLLM's way: length 0, null slot -1, flat query offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

PAD_STYLES = ("small_real", "prod_fill", "null_fill")


@dataclass(frozen=True)
class PaddedRow:
    """One padded row and the write slot and position its tokens carry."""

    req_pool_index: int
    seq_len: int
    extend_seq_len: int
    slot: int


def scratch_row(style: str, fill: int, tokens_per_row: int) -> PaddedRow:
    """The row that ``prod_fill`` or ``null_fill`` repeats."""
    if style == "prod_fill":
        return PaddedRow(req_pool_index=0, seq_len=fill, extend_seq_len=tokens_per_row, slot=0)
    if style == "null_fill":
        return PaddedRow(req_pool_index=0, seq_len=0, extend_seq_len=0, slot=-1)
    raise ValueError(f"pad style {style!r} has no scratch row; known styles: {', '.join(PAD_STYLES)}")
