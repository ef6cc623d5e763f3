"""Spares: public bugs beside the counted ones, in what backends and runners prepare."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kits.backends.flashinfer import FlashInferBackend
from kits.backends.persistent import PersistentBackend
from kits.faults.forgetting import forgotten
from kits.faults.registry import Plant, Touches, fault
from kits.kernels import flashmla
from kits.kernels._flashinfer_wrapper import PagedWrapper
from kits.kernels.flashinfer import BatchDecodeWithPagedKVCacheWrapper
from kits.pools import KVPool
from kits.runners.graph import GraphRunner
from kits.runners.split_op import SplitRunner
from kits.scratch import scratch


@fault(
    "S01",
    title="the cache writer's loop is bounded by the rows of K, not by the write slots",
    references=("vllm-project/vllm#13922",),
    kind=1,
    axes="token-padded K beside slots of the live tokens",
    touches=Touches(backends=("fa3", "fa4", "flashinfer"), sweeps=("split_op",)),
)
def s01(plant: Plant) -> None:
    """Slots are cut to the live tokens; the writer reads on into what an earlier batch left behind them."""

    def load(original: Any) -> Any:
        def _load(self: SplitRunner, size: int, requests: Any) -> Any:
            before = {name: value.clone() for name, value in self.buffers.items() if name.startswith("out_cache_loc")}
            raw, static = original(self, size, requests)
            for name, old in before.items():
                self.buffers[name][raw.num_tokens :] = old[raw.num_tokens :]
            cut = {name: slots[: raw.num_tokens] for name, slots in static.out_cache_loc.items()}
            return raw, dataclasses.replace(static, out_cache_loc=cut)

        return _load

    def write(original: Any) -> Any:
        def write_rows_of_k(self: KVPool, layer: Any, slots: torch.Tensor, k: Any, v: Any) -> None:
            plant.witness(changed=len(k) != len(slots))
            original(self, layer, slots.as_strided((len(k),), (1,), slots.storage_offset()), k, v)

        return write_rows_of_k

    plant.replace(SplitRunner, "_load", load)
    plant.replace(KVPool, "write", write)


@fault(
    "S02",
    title="arrays with an entry a request are filled for the live rows only",
    references=("xLLM-AI/xllm#1939",),
    kind=1,
    axes="padded rows, an earlier replay of more rows",
    touches=Touches(backends=("fa3", "fa4", "trtllm_mha", "flashmla", "cutlass_mla"), sweeps=("decode_cg",)),
)
def s02(plant: Plant) -> None:
    """Behind them the graph reads whatever the allocator put there."""

    def make(original: Any) -> Any:
        def prepare(self: Any, size: int, requests: Any) -> Any:
            captured, behind = original(self, size, requests), slice(len(requests), size)
            for name, buffer in self.backend.persistent.buffers.items():
                if "cu_" not in name:
                    foreign = scratch(*buffer[behind].shape, dtype=buffer.dtype, device=buffer.device)
                    buffer[behind] = plant.swap(buffer[behind], foreign)
            return captured

        return prepare

    plant.replace(GraphRunner, "prepare", make)


@fault(
    "S03",
    title="query offsets behind the live rows are those of an earlier batch",
    references=("vllm-project/vllm-ascend#5711",),
    kind=1,
    axes="ragged rows, padding, an earlier replay of other counts",
    touches=Touches(backends=("fa3", "fa4"), sweeps=("draft_extend_cg",)),
)
def s03(plant: Plant) -> None:
    """The difference of two neighbours, a number of queries, can be negative there."""

    def make(original: Any) -> Any:
        def prepare(self: Any, size: int, requests: Any) -> Any:
            offsets = self.backend.persistent.buffers["cu_seqlens_q"]
            with forgotten(plant, [offsets[len(requests) + 1 : size + 1]]):
                return original(self, size, requests)

        return prepare

    plant.replace(GraphRunner, "prepare", make)


@fault(
    "S04",
    title="a length is that of a rank's share, and negative for the shortest rows",
    references=("vllm-project/vllm-ascend#12841",),
    kind=1,
    axes="padded rows shorter than what is subtracted",
    touches=Touches(backends=("fa3", "fa4"), sweeps=("draft_extend_cg",)),
)
def s04(plant: Plant) -> None:
    """The share is what the row has without its queries, and these again: right unless the row has fewer keys."""

    def make(original: Any) -> Any:
        def prepare_replay(self: PersistentBackend, batch: Any) -> None:
            original(self, batch)
            lens = self.persistent.buffers["cache_seqlens_int32"][: batch.batch_size]
            share = torch.where(lens < batch.extend_seq_lens, lens - batch.extend_seq_lens, lens)
            lens.copy_(plant.swap(lens, share))

        return prepare_replay

    plant.replace(PersistentBackend, "prepare_replay", make)


@fault(
    "S05",
    title="a plan checks the page list and does not copy it",
    references=("flashinfer-ai/flashinfer#2185",),
    kind=3,
    axes="a replay of other requests than the capture's",
    touches=Touches(backends=("flashinfer",), methods=("dense", "swa"), runners=("cuda_graph",)),
)
def s05(plant: Plant) -> None:
    def make(original: Any) -> Any:
        def _set(self: Any, name: str, value: torch.Tensor) -> None:
            if name == "kv_indices" and self.use_cuda_graph:
                plant.swap(value, self.kv_indices[: len(value)])
            else:
                original(self, name, value)

        return _set

    plant.replace(PagedWrapper, "_set", make)


@fault(
    "S06",
    title="a replay launches as many tiles as the capture had",
    references=("flashinfer-ai/flashinfer#411",),
    kind=4,
    axes="a replay with more work than the capture",
    touches=Touches(backends=("flashinfer",), methods=("dense", "swa"), sweeps=("decode_cg",)),
)
def s06(plant: Plant) -> None:
    def make(original: Any) -> Any:
        def plan(self: Any, *arguments: Any, **options: Any) -> None:
            original(self, *arguments, **options)
            if self.use_cuda_graph:
                tiles = int(self.int_workspace[0])
                self.captured_grid = getattr(self, "captured_grid", tiles)
                plant.witness(changed=tiles > self.captured_grid)
                self.int_workspace[0] = min(tiles, self.captured_grid)

        return plan

    plant.replace(BatchDecodeWithPagedKVCacheWrapper, "plan", make)


@fault(
    "S07",
    title="a window in whole blocks: the partial one before them is dropped",
    references=("vllm-project/vllm-gaudi#1395",),
    kind=6,
    axes="sliding window, decode, window not a multiple of the page",
    touches=Touches(backends=("flashinfer",), methods=("swa",), modes=("DECODE",), sweeps=("eager", "layouts")),
)
def s07(plant: Plant) -> None:
    """Visible are ``window // page`` blocks and the one being filled."""

    def make(original: Any) -> Any:
        def _lists(self: Any, batch: Any, part: str, group_name: str, extend_lens: Any) -> Any:
            right = original(self, batch, part, group_name, extend_lens)
            if group_name != "window" or batch.mode != "DECODE" or part:
                return right
            page, window = self.geometry.page_size, self.geometry.model.window
            blocks = window // page * page + (batch.seq_lens - 1) % page + 1
            lens = plant.swap(right.kv_lens, torch.minimum(right.kv_lens, blocks))
            ends = right.kv_indptr[1:].tolist()
            kept = [right.kv_indices[end - length : end] for end, length in zip(ends, lens.tolist(), strict=True)]
            starts = torch.cat([torch.zeros_like(lens[:1]), lens.cumsum(0)]).to(torch.int32)
            return dataclasses.replace(right, kv_lens=lens, kv_indptr=starts, kv_indices=torch.cat(kept))

        return _lists

    plant.replace(FlashInferBackend, "_lists", make)


@fault(
    "S09",
    title="metadata of a piecewise graph are built with the padded number of tokens",
    references=("vllm-project/vllm#36626",),
    kind=1,
    axes="token-padded extend",
    touches=Touches(backends=("fa3", "fa4", "triton", "flashinfer"), sweeps=("split_op",)),
)
def s09(plant: Plant) -> None:
    """The padding becomes new tokens of the last row."""

    def make(original: Any) -> Any:
        def prepare(self: SplitRunner, size: int, requests: Any) -> Any:
            captured = original(self, size, requests)
            lens = captured.batch.extend_seq_lens.clone()
            lens[-1] += size - captured.batch.num_tokens
            plant.swap(captured.batch.extend_seq_lens, lens)
            padded = dataclasses.replace(
                captured.batch, num_tokens=size, extend_seq_lens=lens, extend_seq_lens_cpu=lens.tolist()
            )
            self.backend.prepare(padded)
            return captured

        return prepare

    plant.replace(SplitRunner, "prepare", make)


@fault(
    "S12",
    title="the schedule is built in the block size of another dtype",
    references=("vllm-project/vllm#38719",),
    kind=8,
    axes="a row that is split between two parts of the schedule",
    touches=Touches(backends=("flashmla",)),
)
def s12(plant: Plant) -> None:
    """A part's first key is given in blocks half as large as the kernel's."""

    def make(original: Any) -> Any:
        def get_mla_metadata(*arguments: Any) -> Any:
            parts, splits = original(*arguments)
            wrong = parts.clone()
            wrong[:, 1] //= 2
            return plant.swap(parts, wrong), splits

        return get_mla_metadata

    plant.replace(flashmla, "get_mla_metadata", make)


@fault(
    "S14",
    title="the next batch is staged before the replay has read the slot mapping",
    references=("sgl-project/sglang#31270",),
    kind=10,
    axes="a graph that reads the mapping while it runs",
    touches=Touches(backends=("fa3", "fa4", "trtllm_mha"), sweeps=("decode_cg",)),
)
def s14(plant: Plant) -> None:
    """What is staged are the write slots of a batch that has none yet: the reserved slot."""

    def make(original: Any) -> Any:
        def run(self: GraphRunner, captured: Any, requests: Any) -> Any:
            for slots in captured.batch.out_cache_loc.values():
                slots.copy_(plant.swap(slots, torch.zeros_like(slots)))
            return original(self, captured, requests)

        return run

    plant.replace(GraphRunner, "run", make)
