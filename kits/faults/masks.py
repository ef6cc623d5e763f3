"""Kind 6: which keys a query sees."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from kits.backends.paging import gather_slots
from kits.backends.triton import TritonBackend
from kits.faults.registry import Plant, Touches, fault
from kits.kernels import _flashinfer_schedule as schedule
from kits.kernels import flash_attn, flashinfer
from kits.kernels.flashinfer import BatchPrefillWithPagedKVCacheWrapper


@fault(
    "F30",
    title="the causal limit counts from the first key, not from the prefix",
    references=("gittensor-ai-lab/sparkinfer#3", "gittensor-ai-lab/sparkinfer#4", "onnx/onnx#8068"),
    kind=6,
    axes="more than one query on a prefix",
    touches=Touches(backends=("fa3", "fa4"), sweeps=("eager", "layouts", "verify", "draft_extend", "draft_extend_v2")),
)
def f30(plant: Plant) -> None:
    """Top-left instead of bottom-right, in the kernel for several queries: query ``i`` sees keys up to ``i``."""

    def make(original: Any) -> Any:
        def causal_window(tokens: int, position: int, first_key: int, keys: int, *, right: int, **rest: Any) -> Any:
            visible = original(tokens, position, first_key, keys, right=right, **rest)
            if right != 0 or tokens == 1:
                return visible
            device = rest["device"]
            key = torch.arange(first_key, first_key + keys, device=device)
            limit = key[None, :] <= torch.arange(tokens, device=device)[:, None]
            whole = torch.ones(tokens, keys, dtype=torch.bool, device=device) if visible is None else visible
            return plant.swap(whole, whole & limit)

        return causal_window

    plant.replace(flash_attn, "causal_window", make)


@fault(
    "F31",
    title="decode clips to one key less than the window has",
    references=("lightseekorg/tokenspeed#578", "sgl-project/sglang#32087", "sgl-project/sglang MUTATION_FIXES.md, M5"),
    kind=6,
    axes="decode of rows longer than the window",
    touches=Touches(backends=("triton",), methods=("swa",), modes=("DECODE",)),
)
def f31(plant: Plant) -> None:
    """The window is taken as excluding the query's own key, in decode only."""

    def make(original: Any) -> Any:
        def _window_lens(self: Any, cached: torch.Tensor, batch: Any) -> torch.Tensor:
            right = original(self, cached, batch)
            if batch.mode != "DECODE":
                return right
            return plant.swap(right, torch.clamp(cached, max=self.geometry.model.window - 1))

        return _window_lens

    plant.replace(TritonBackend, "_window_lens", make)


@fault(
    "F32",
    title="the window skips whole tiles and masks no single key",
    references=("sgl-project/sglang#31501",),
    kind=6,
    axes="extend of rows longer than the window, window not a multiple of the tile",
    touches=Touches(backends=("flashinfer",), methods=("swa",), sweeps=("eager", "layouts", "split_op")),
)
def f32(plant: Plant) -> None:
    """``plan`` builds a kernel without a left mask; the window only takes tiles out of the schedule."""

    def make(original: Any) -> Any:
        def plan(self: Any, qo_indptr: Any, kv_indptr: Any, *rest: Any, window_left: int = -1, **options: Any) -> None:
            original(self, qo_indptr, kv_indptr, *rest, window_left=-1, **options)
            if window_left < 0:
                return
            q_lens, kv_lens = (
                [stop - start for start, stop in itertools.pairwise(offsets.tolist())]
                for offsets in (qo_indptr, kv_indptr)
            )
            plant.witness(changed=max(kv_lens) > window_left + 1)
            keys, tiles = schedule.read(self.kernel, self.int_workspace, 3)
            kept: list[tuple[int, ...]] = [
                (row, query_tile, key_tile)
                for row, query_tile, key_tile in tiles
                if (key_tile + 1) * keys > kv_lens[row] - q_lens[row] + query_tile * schedule.QUERY_TILE - window_left
            ]
            schedule.write(self.int_workspace, keys, kept)

        return plan

    plant.replace(BatchPrefillWithPagedKVCacheWrapper, "plan", make)


@fault(
    "F33",
    title="verify clips the prefix to the window, but neither its start nor its mask",
    references=("sgl-project/sglang#39160", "sgl-project/sglang#22679"),
    kind=6,
    axes="sliding window, verify, a row longer than the window",
    touches=Touches(backends=("triton",), methods=("swa",), modes=("TARGET_VERIFY",)),
)
def f33(plant: Plant) -> None:
    """Slots are gathered from position 0, and the mask keeps the rows of the whole prefix."""

    def make(original: Any) -> Any:
        def values(self: TritonBackend, batch: Any) -> dict[str, torch.Tensor]:
            right: dict[str, torch.Tensor] = original(self, batch)
            if batch.mode != "TARGET_VERIFY" or "window" not in self.pool.groups:
                return right
            visible = right["kv_indptr.window"].diff().tolist()
            slots = gather_slots(self.pool.groups["window"], batch, [0] * len(visible), visible)
            return right | {
                "kv_indices.window": plant.swap(right["kv_indices.window"], slots),
                "custom_mask.window": plant.swap(right["custom_mask.window"], right["custom_mask.full"]),
            }

        return values

    plant.replace(TritonBackend, "values", make)


@fault(
    "F34",
    title="the packed mask's offsets are not rounded up to whole bytes",
    references=("flashinfer-ai/flashinfer#2201",),
    kind=6,
    axes="verify of two rows or more, a number of mask bits that is no multiple of 8",
    touches=Touches(backends=("flashinfer",), methods=("dense",), sweeps=("verify", "verify_cg")),
)
def f34(plant: Plant) -> None:
    """Each request's mask begins at a byte of its own, but its offset is the number of bits before it over 8."""

    def make(original: Any) -> Any:
        def segment_packbits(mask: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            packed, starts = original(mask, sizes)
            bits = list(itertools.accumulate(sizes, initial=0))
            wrong = torch.tensor([count // 8 for count in bits], dtype=starts.dtype, device=starts.device)
            plant.swap(starts[:-1], wrong[:-1])
            return packed, wrong

        return segment_packbits

    plant.replace(flashinfer, "segment_packbits", make)
