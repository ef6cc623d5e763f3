"""Kind 2: how many keys a row has, and where its new ones are counted."""

from __future__ import annotations

from typing import Any

import torch

from kits.backends.block_tables import FlashMLABackend
from kits.backends.flash_attention import FA3Backend
from kits.backends.triton import TritonBackend
from kits.batches import Batch
from kits.faults.registry import Plant, Touches, fault
from kits.kernels import triton_ops
from kits.kernels._triton_attention import attention_kernel


@fault(
    "F05",
    title="a tile loads the values of slot 0 and masks only the probabilities",
    references=("sgl-project/sglang#32477", "sgl-project/sglang#35351"),
    kind=1,
    axes="NaN in the reserved slot, a ragged last tile",
    touches=Touches(backends=("triton",), methods=("dense", "swa"), modes=("DECODE",)),
)
def f05(plant: Plant) -> None:
    """Lanes behind the last key name slot 0, where padded rows write what they like: ``0 * NaN`` enters the sum."""
    from kits.faults.sources import edited_kernel

    original = attention_kernel
    loads_all = edited_kernel(
        original,
        (
            "v_mask = keep if BLOCK_V == V_DIM else keep & (v_dims < V_DIM)",
            "v_mask = (keep if EXTEND else keep | (n >= 0)[:, :, None]) & (v_dims < V_DIM)",
        ),
    )

    def make(launch: Any) -> Any:
        def _launch(*arguments: Any) -> None:
            k_new, out = arguments[1], arguments[8]
            if k_new is not None:
                return launch(*arguments)
            right = out.clone()
            launch(*arguments[:8], right, *arguments[9:])
            triton_ops.attention_kernel = loads_all
            try:
                launch(*arguments)
            finally:
                triton_ops.attention_kernel = original
            plant.swap(right, out)

        return _launch

    plant.replace(triton_ops, "_launch", make)


@fault(
    "F11",
    title="the KV extent is the prefix: new tokens are cached but not read",
    references=("sgl-project/sglang#26512",),
    kind=2,
    axes="DRAFT_EXTEND_V2",
    touches=Touches(backends=("fa3", "fa4"), modes=("DRAFT_EXTEND_V2",)),
)
def f11(plant: Plant) -> None:
    """``cache_seqlens`` is set to the prefix lengths."""
    _shifts_kv_lens(plant, -1)


@fault(
    "F12",
    title="extend lengths are added to lengths that count them already",
    references=("sgl-project/sglang#26628",),
    kind=2,
    axes="DRAFT_EXTEND_V2, poison behind the end, shuffled pages",
    touches=Touches(backends=("fa3", "fa4"), modes=("DRAFT_EXTEND_V2",)),
)
def f12(plant: Plant) -> None:
    """``cache_seqlens`` is ``seq_lens + extend_lens`` although ``seq_lens`` is the total."""
    _shifts_kv_lens(plant, 1)


def _shifts_kv_lens(plant: Plant, sign: int) -> None:
    def make(original: Any) -> Any:
        def kv_lens(self: FA3Backend, batch: Batch) -> torch.Tensor:
            right: torch.Tensor = original(self, batch)
            if batch.mode != "DRAFT_EXTEND_V2" or batch.extend_seq_lens is None:
                return right
            return plant.swap(right, right + sign * batch.extend_seq_lens)

        return kv_lens

    plant.replace(FA3Backend, "kv_lens", make)


@fault(
    "F13",
    title="the cached range covers new tokens that the kernel gets as arguments too",
    references=("sgl-project/sglang#26651", "sgl-project/sglang#27738"),
    kind=2,
    axes="DRAFT_EXTEND_V2, short prefixes",
    touches=Touches(backends=("triton",), modes=("DRAFT_EXTEND_V2",)),
)
def f13(plant: Plant) -> None:
    """``kv_indices`` is built from ``seq_lens`` instead of the prefix: new tokens are attended to twice."""

    def make(original: Any) -> Any:
        def cached_lens(self: TritonBackend, batch: Batch) -> torch.Tensor:
            right: torch.Tensor = original(self, batch)
            return plant.swap(right, batch.seq_lens) if batch.mode == "DRAFT_EXTEND_V2" else right

        return cached_lens

    plant.replace(TritonBackend, "cached_lens", make)


def _counts_pages(plant: Plant, extra: int, *, after_draft: bool) -> None:
    """A verify's table holds ``ceil((seq_len + extra) / page)`` pages of each row, and -1 behind them.

    ``after_draft``: the draft is counted before ``extra``.
    """

    def make(original: Any) -> Any:
        def values(self: FlashMLABackend, batch: Batch) -> dict[str, torch.Tensor]:
            made: dict[str, torch.Tensor] = original(self, batch)
            if batch.mode != "TARGET_VERIFY" or batch.spec_info is None:
                return made
            page_size = self.geometry.page_size
            columns = torch.arange(self.columns, device=self.device)
            for name in [name for name in made if name.startswith("page_table.")]:
                draft = batch.spec_info.draft_tokens
                right, wrong = (
                    torch.where(columns * page_size < (batch.seq_lens + more)[:, None], made[name], -1)
                    for more in (draft, draft + extra if after_draft else extra)
                )
                made[name] = plant.swap(right, wrong)
            return made

        return values

    plant.replace(FlashMLABackend, "values", make)


@fault(
    "F14",
    title="the page count of a verify leaves the draft out",
    references=("sglang mutation journal M14", "sglang mutation journal M15"),
    kind=2,
    axes="TARGET_VERIFY whose draft crosses a page",
    touches=Touches(backends=("flashmla",), modes=("TARGET_VERIFY",)),
)
def f14(plant: Plant) -> None:
    """``ceil(seq_len / page)``: the page that the draft crosses into is missing, and the kernel reads its entry."""
    _counts_pages(plant, 0, after_draft=False)


@fault(
    "C14",
    title="the page count of a verify is one token too generous",
    references=("sglang mutation journal M16",),
    kind=2,
    axes="none: no kernel reads an entry behind the length",
    touches=Touches(backends=("flashmla",), modes=("TARGET_VERIFY",)),
    control=True,
)
def c14(plant: Plant) -> None:
    """``ceil((seq_len + N + 1) / page)``: the surplus entry is never read by a kernel that goes by the length."""
    _counts_pages(plant, 1, after_draft=True)
