"""Kind 1: what a graph runner leaves in rows ``R..B``, and what a backend makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kits.backends.block_tables import BlockTableBackend, FlashMLABackend
from kits.backends.flash_attention import FA3Backend
from kits.backends.flashinfer import FlashInferBackend, SlotLists
from kits.backends.paging import indptr
from kits.backends.persistent import INT32, PersistentBackend, PersistentBuffers
from kits.backends.triton import TritonBackend
from kits.batches import Batch
from kits.faults.live_rows import live_rows, note_live_rows
from kits.faults.registry import Plant, Touches, fault
from kits.padding import PaddedRow
from kits.pools import KVPool
from kits.runners import graph as graph_runner
from kits.runners.graph import GraphRunner

GRAPHS = ("cuda_graph", "cuda_graph_multi_step")


@fault(
    "F01",
    title="the prefix of padded rows is not clamped at zero",
    references=("sgl-project/sglang#26651", "sgl-project/sglang#26658"),
    kind=1,
    axes="DRAFT_EXTEND_V2, prod_fill, metadata of all rows",
    touches=Touches(backends=("triton",), modes=("DRAFT_EXTEND_V2",)),
)
def f01(plant: Plant) -> None:
    """``seq_lens`` is the fill value and ``extend_seq_lens`` is N on padded rows: their difference is negative."""

    def make(original: Any) -> Any:
        def cached_lens(self: TritonBackend, batch: Batch) -> torch.Tensor:
            right = original(self, batch)
            if batch.extend_seq_lens is None or batch.mode == "TARGET_VERIFY":
                return right
            return plant.swap(right, batch.seq_lens - batch.extend_seq_lens)

        return cached_lens

    plant.replace(TritonBackend, "cached_lens", make)


@fault(
    "F02",
    title="seq_lens is padded, the host's seq_lens_sum is not",
    references=("sgl-project/sglang#26880", "sgl-project/sglang#1789"),
    kind=1,
    axes="padded rows, an index list cut at the host's sum",
    touches=Touches(backends=("flashinfer",), runners=GRAPHS, pad_styles=("prod_fill",)),
)
def f02(plant: Plant) -> None:
    """The runner keeps the sum over live rows; the backend cuts its index list by it, as it may."""
    note_live_rows(plant)

    def refresh(original: Any) -> Any:
        def _refresh_host_mirrors(self: GraphRunner, batch: Batch) -> None:
            original(self, batch)
            live = int(batch.seq_lens_cpu[: live_rows(batch)].sum())
            plant.witness(changed=live != batch.seq_lens_sum)
            batch.seq_lens_sum = live

        return _refresh_host_mirrors

    def cut(original: Any) -> Any:
        def _lists(self: FlashInferBackend, batch: Batch, part: str, group: str, extend: Any) -> SlotLists:
            lists: SlotLists = original(self, batch, part, group, extend)
            branches = batch.spec_info.topk if part and batch.spec_info is not None else 1
            missing = (int(batch.seq_lens.sum()) - batch.seq_lens_sum) * branches
            return replace(lists, kv_indices=lists.kv_indices[: len(lists.kv_indices) - missing])

        return _lists

    plant.replace(GraphRunner, "_refresh_host_mirrors", refresh)
    plant.replace(FlashInferBackend, "_lists", cut)


def _keeps_tail(plant: Plant, name: str) -> None:
    """The runner writes the live entries of a buffer only: behind them lies what an earlier replay had there."""

    def make(original: Any) -> Any:
        def _fill_tail(self: GraphRunner, batch: Batch, rows: int, tokens: int) -> None:
            buffer = self.buffers.get(name)
            if buffer is None:
                return original(self, batch, rows, tokens)
            per_token = name.startswith("out_cache_loc")
            start, end = (tokens, batch.batch_size * self.tokens_per_row) if per_token else (rows, batch.batch_size)
            stale = buffer[start:end].clone()
            original(self, batch, rows, tokens)
            plant.swap(buffer[start:end], stale)
            buffer[start:end] = stale

        return _fill_tail

    plant.replace(GraphRunner, "_fill_tail", make)


@fault(
    "F03",
    title="padded rows keep the request index of an earlier, larger replay",
    references=(
        "sgl-project/sglang#26292",
        "sgl-project/sglang#22958",
        "sgl-project/sglang#10892",
        "sgl-project/sglang#24401",
    ),
    kind=1,
    axes="a large replay before a small one, raw reuse of runner buffers",
    touches=Touches(runners=GRAPHS, pad_styles=("prod_fill",)),
)
def f03(plant: Plant) -> None:
    """``req_pool_indices[R:B]`` is not written: it names requests that may be gone."""
    _keeps_tail(plant, "req_pool_indices")


@fault(
    "F04",
    title="of two lists of write slots, padding resets only the full layers'",
    references=("sgl-project/sglang#24743",),
    kind=1,
    axes="two KV groups, a large replay before a small one, KV integrity",
    touches=Touches(methods=("swa",), runners=GRAPHS),
)
def f04(plant: Plant) -> None:
    """Padded tokens write the keys of window layers into slots of an earlier batch."""
    _keeps_tail(plant, "out_cache_loc.window")


@fault(
    "F06",
    title="query offsets behind the last live row are filled with -1",
    references=("vllm-project/vllm#19321", "vllm-project/vllm#16072"),
    kind=1,
    axes="padded rows, a varlen kernel",
    touches=Touches(backends=("triton", "fa3", "fa4"), runners=("cuda_graph",), pad_styles=("prod_fill",)),
)
def f06(plant: Plant) -> None:
    """The array should go on with its last value: it must not decrease."""
    note_live_rows(plant)

    def make(original: Any) -> Any:
        def values(self: Any, batch: Batch) -> dict[str, torch.Tensor]:
            made: dict[str, torch.Tensor] = original(self, batch)
            for name in ("qo_indptr", "cu_seqlens_q"):
                if name in made and live_rows(batch) < batch.batch_size:
                    wrong = made[name].clone()
                    wrong[live_rows(batch) + 1 :] = -1
                    made[name] = plant.swap(made[name], wrong)
            return made

        return values

    plant.replace(TritonBackend, "values", make)
    plant.replace(FA3Backend, "values", make)


@fault(
    "F07",
    title="the null slot -1 wraps to the last slot of the pool",
    references=("vllm-project/vllm#43810", "vllm-project/vllm#43869"),
    kind=1,
    axes="a runner that pads with slot -1, a live request on the last page, KV integrity",
    touches=Touches(
        runners=GRAPHS,
        modes=("DECODE", "DRAFT_EXTEND", "DRAFT_EXTEND_V2"),
        pad_styles=("prod_fill", "null_fill"),
    ),
)
def f07(plant: Plant) -> None:
    """The cache writer indexes with the slots as they are. The runner pads with -1 here, as vLLM's does, which the
    kit's writer takes well."""

    def pad(original: Any) -> Any:
        def scratch_row(style: str, fill: int, tokens_per_row: int) -> PaddedRow:
            return replace(original(style, fill, tokens_per_row), slot=-1)

        return scratch_row

    def scatter(original: Any) -> Any:
        def write(self: KVPool, layer: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            wrapped = plant.swap(torch.where(slots == -1, 0, slots), slots % self.groups[layer.group].num_slots)
            original(self, layer, wrapped, k, v)

        return write

    plant.replace(graph_runner, "scratch_row", pad)
    plant.replace(KVPool, "write", scatter)


@fault(
    "F08",
    title="padded rows of length 0 reach a kernel that fetches block ceil(0 / 64) - 1",
    references=("vllm-project/vllm#35969", "vllm-project/vllm#33664"),
    kind=1,
    axes="zero-length padding, padded rows",
    touches=Touches(backends=("flashmla",), runners=GRAPHS, pad_styles=("prod_fill",)),
)
def f08(plant: Plant) -> None:
    """The runner pads with length 0 and page -1, as vLLM's does, and nobody turns that into length 1 and page 0."""

    def fill(original: Any) -> Any:
        return replace(original, pad_seq_len=0)

    def make(original: Any) -> Any:
        def values(self: FlashMLABackend, batch: Batch) -> dict[str, torch.Tensor]:
            made: dict[str, torch.Tensor] = original(self, batch)
            empty = batch.seq_lens <= 0
            plant.witness(changed=bool(empty.any()))
            for name in made:
                if name.startswith("page_table"):
                    made[name] = torch.where(empty[:, None], -1, made[name])
                elif name.endswith("cache_seqlens_int32"):
                    made[name] = torch.where(empty, 0, made[name])
            return made

        return values

    plant.replace(FlashMLABackend, "capabilities", fill)
    plant.replace(FlashMLABackend, "values", make)


@fault(
    "F09",
    title="the captured block table is not cleared before the live rows are copied",
    references=("InternLM/lmdeploy#4569",),
    kind=1,
    axes="a large replay before a small one, pages that moved in between, KV integrity",
    touches=Touches(backends=("trtllm_mha", "fa3", "fa4", "flashmla", "cutlass_mla"), runners=("cuda_graph",)),
)
def f09(plant: Plant) -> None:
    """Padded rows keep pages of an earlier batch, and write their keys there: write slots come from the table."""
    note_live_rows(plant)

    def make(original: Any) -> Any:
        def prepare_replay(self: PersistentBackend, batch: Batch) -> None:
            live, page_size = live_rows(batch), self.pool.page_size
            tables = [name for name in self.persistent.buffers if name.startswith("page_table.")]
            stale = {name: self.persistent.buffers[name][live : batch.batch_size].clone() for name in tables}
            original(self, batch)
            for name, old in stale.items():
                self.persistent.buffers[name][live : batch.batch_size] = old
                slots = batch.out_cache_loc[name.removeprefix("page_table.")].view(batch.batch_size, -1)[live:]
                # The last of the row's tokens stands at its length, the others before it, as far as the row reaches.
                last = batch.seq_lens[live:, None].long() - 1
                places = torch.clamp(last - torch.arange(slots.shape[1], device=self.device).flip(0), min=0)
                wrong = old.long().gather(1, places // page_size) * page_size + places % page_size
                plant.swap(slots, wrong)
                slots.copy_(wrong)

        return prepare_replay

    plant.replace(FA3Backend, "prepare_replay", make)
    plant.replace(BlockTableBackend, "prepare_replay", make)


@fault(
    "F10",
    title="per-token lengths of a uniform expansion have no lower clamp",
    references=("sgl-project/sglang#31270", "sgl-project/sglang#30378"),
    kind=1,
    axes="rows expanded to tokens, prod_fill, metadata of all rows",
    touches=Touches(backends=("fa3", "fa4"), modes=("DRAFT_EXTEND_V2",)),
)
def f10(plant: Plant) -> None:
    """Every new token becomes a row of its own with length ``seq_len - N + 1 + j``: below zero on padded rows."""

    def allocate(original: Any) -> Any:
        def allocate(self: FA3Backend, buffers: PersistentBuffers) -> None:
            original(self, buffers)
            for name, old in list(buffers.buffers.items()):
                shape = old.shape[1:]
                buffers.allocate(name, self.max_tokens + 1, *shape, dtype=old.dtype)

        return allocate

    def make(original: Any) -> Any:
        def values(self: FA3Backend, batch: Batch) -> dict[str, torch.Tensor]:
            made: dict[str, torch.Tensor] = original(self, batch)
            if batch.mode != "DRAFT_EXTEND_V2":
                return made
            tokens = batch.num_tokens // batch.batch_size
            behind = torch.arange(tokens, dtype=INT32, device=self.device).flip(0)
            lens = (batch.seq_lens[:, None] - behind).flatten()
            made["cache_seqlens_int32"] = plant.swap(torch.clamp(lens, min=1), lens)
            made["cu_seqlens_k"] = indptr(made["cache_seqlens_int32"])
            made["cu_seqlens_q"] = torch.arange(len(lens) + 1, dtype=INT32, device=self.device)
            for group in self.pool.groups:
                made[f"page_table.{group}"] = made[f"page_table.{group}"].repeat_interleave(tokens, dim=0)
            return made

        return values

    plant.replace(FA3Backend, "allocate", allocate)
    plant.replace(FA3Backend, "values", make)
