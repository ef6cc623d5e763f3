"""Backends and runners that each break one rule of capture and replay, and are otherwise right."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from kits.backends.flash_attention import FA3Backend
from kits.backends.paging import indptr
from kits.backends.persistent import PersistentBuffers
from kits.backends.triton import TritonBackend
from kits.batches import Batch
from kits.graphs import is_capturing
from kits.layers import Layer


class NoClamp(TritonBackend):
    """The founding bug (faults.md F01): padded rows' prefix is not clamped at zero."""

    def cached_lens(self, batch: Batch) -> torch.Tensor:
        if batch.extend_seq_lens is None or batch.mode == "TARGET_VERIFY":
            return batch.seq_lens
        return batch.seq_lens - batch.extend_seq_lens


class Rebinds(FA3Backend):
    """Replay preparation assigns fresh tensors instead of copying into the captured ones."""

    def prepare_replay(self, batch: Batch) -> None:
        self.tensors = self.values(batch)
        self._begin(batch)


class RebindsBesideCopying(FA3Backend):
    """Copies too, so every value is right: only the address under the name has moved."""

    def prepare_replay(self, batch: Batch) -> None:
        values = self.values(batch)
        self.persistent.fill(values)
        self.tensors = {name: view.clone() for name, view in self.persistent.bind(values).items()}
        self._begin(batch)


class KeepsHostScalar(FA3Backend):
    """The longest KV extent of the capture bounds what a replay may read."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        name = "cache_seqlens_int32"
        longest = max(int(length) for length in batch.seq_lens_cpu)
        whole = self.tensors
        self.tensors = whole | {name: torch.clamp(whole[name], max=longest)}
        try:
            return super().forward(q, k, v, layer, batch)
        finally:
            self.tensors = whole


class DropsConstant(FA3Backend):
    """A constant of the capture is freed after it, while the graph goes on reading its address."""

    def prepare_capture(self, batch: Batch) -> None:
        super().prepare_capture(batch)
        self.one = torch.ones((), dtype=torch.int32, device=self.device)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        whole = self.tensors
        if hasattr(self, "one"):
            self.tensors = whole | {"cache_seqlens_int32": whole["cache_seqlens_int32"] * self.one}
        try:
            return super().forward(q, k, v, layer, batch)
        finally:
            self.tensors = whole

    def prepare_replay(self, batch: Batch) -> None:
        super().prepare_replay(batch)
        if hasattr(self, "one"):
            del self.one


class InGraph(FA3Backend):
    """Runs ``trespass`` in the recorded part."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        self.trespass(q, batch)
        return super().forward(q, k, v, layer, batch)

    def trespass(self, q: torch.Tensor, batch: Batch) -> Any:
        raise NotImplementedError


class CallsItem(InGraph):
    def trespass(self, q: torch.Tensor, batch: Batch) -> Any:
        return batch.seq_lens[0].item()


class CallsTolist(InGraph):
    def trespass(self, q: torch.Tensor, batch: Batch) -> Any:
        return batch.seq_lens.tolist()


class BuildsFromList(InGraph):
    def trespass(self, q: torch.Tensor, batch: Batch) -> Any:
        return torch.tensor([1, 2, 3], device=q.device)


class IndexesByMask(InGraph):
    def trespass(self, q: torch.Tensor, batch: Batch) -> Any:
        return q[batch.positions > 0]


class ReadsHostTensor(InGraph):
    def trespass(self, q: torch.Tensor, batch: Batch) -> Any:
        return batch.seq_lens.copy_(batch.seq_lens_cpu)


class LaunchesTriton(InGraph):
    def trespass(self, q: torch.Tensor, batch: Batch) -> Any:
        from tests.kits.raw_kernel import launch

        launch(q.clone())


class LeavesModeActive(FA3Backend):
    """Enters a dispatch mode and never leaves it."""

    def prepare(self, batch: Batch) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        class Forgotten(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return func(*args, **(kwargs or {}))

        super().prepare(batch)
        if not hasattr(self, "forgotten"):
            self.forgotten = Forgotten()
            self.forgotten.__enter__()


class WritesForeignSlot(FA3Backend):
    """Also stores the first token into the last slot of the pool, which another request owns."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch)
        self.pool.groups[layer.group].k[layer.index][-1].copy_(k[0])
        return out


class WritesForeignSlotOnce(WritesForeignSlot):
    """Only in the first warm-up, as a kernel that tunes itself might."""

    tuned = True

    def prepare_capture(self, batch: Batch) -> None:
        super().prepare_capture(batch)
        self.tuned = hasattr(self, "began")
        self.began = True

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        if self.tuned:
            return FA3Backend.forward(self, q, k, v, layer, batch)
        self.tuned = True
        return super().forward(q, k, v, layer, batch)


class WritesForeignSlotWhenReplayed(WritesForeignSlot):
    """Only in what is captured."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        if is_capturing():
            return super().forward(q, k, v, layer, batch)
        return FA3Backend.forward(self, q, k, v, layer, batch)


class LooksAtNeighbours(FA3Backend):
    """A trace of all rows' lengths is in each row: below the tolerance."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch)
        trace = self.field("cache_seqlens_int32").sum() % 97
        return (out.float() * (1 + trace * 2e-4)).to(out.dtype)


class LoadsTail(FA3Backend):
    """Reads one slot past each row with weight zero: harmless in a pool of zeros, and only there."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch)
        group = self.pool.groups[layer.group]
        ends = group.req_to_token[batch.req_pool_indices].gather(1, batch.seq_lens.long()[:, None] - 1).long()
        tails = group.v[layer.index][torch.clamp(ends[:, 0] + 1, max=group.num_slots - 1)]
        return out + 0 * tails.repeat_interleave(len(out) // len(tails), dim=0).mean(dim=1, keepdim=True)


class BoundsByOwn(FA3Backend):
    """Reads at most 40 keys of a row: enough for every replay but the grown one."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        whole = self.tensors
        self.tensors = whole | {"cache_seqlens_int32": torch.clamp(whole["cache_seqlens_int32"], max=34)}
        try:
            return super().forward(q, k, v, layer, batch)
        finally:
            self.tensors = whole


class KeepsFirstTree(FA3Backend):
    """Refreshes the pages of a tree before a replay, and not how many of its keys each token sees."""

    def prepare_replay(self, batch: Batch) -> None:
        lens = self.persistent.buffers["tree.cache_seqlens_int32"]
        before = lens.clone()
        super().prepare_replay(batch)
        lens.copy_(before)


class OneTreeForAll(FA3Backend):
    """Takes every row's tree for the first row's."""

    def prepare(self, batch: Batch) -> None:
        super().prepare(batch)
        if "tree.cache_seqlens_int32" in self.tensors:
            lens = self.tensors["tree.cache_seqlens_int32"].view(batch.batch_size, -1)
            lens[1:] = lens[:1]


class ScalesOfFirstLayer(TritonBackend):
    """Reads every layer's cache by the scales of the first."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        self.pool.write(layer, batch.out_cache_loc[layer.group], k, v)
        batch.save_kv, first = False, self.geometry.layers[0]
        try:
            scales = {"k_scale": first.k_scale, "v_scale": first.v_scale}
            return super().forward(q, k, v, replace(layer, **scales), batch)
        finally:
            batch.save_kv = True


class RoundsByTurns(FA3Backend):
    """Every second replay ends in other low bits, as a sum does whose parts come as they get done."""

    def open(self, *arguments: Any, **options: Any) -> None:
        super().open(*arguments, **options)
        self.turn = torch.zeros(1, device=self.device)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch)
        self.turn.copy_(1 - self.turn)
        return (out.float() * (1 + self.turn * 5e-3)).to(out.dtype)


class OffsetsOfAccepted(TritonBackend):
    """Lays queries out by how many tokens of a row were accepted, where all drafted ones lie."""

    def values(self, batch: Batch) -> dict[str, torch.Tensor]:
        values = super().values(batch)
        if batch.spec_info is not None and batch.spec_info.extend_seq_lens is not None and "qo_indptr" in values:
            values["qo_indptr"] = indptr(batch.spec_info.extend_seq_lens)
        return values


class ReturnsFloat32(FA3Backend):
    """Hands on the accumulator's dtype, which the copy into the caller's buffer rounds."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        return super().forward(q, k, v, layer, batch).float()


class ScalesQueryInPlace(InGraph):
    """Folds the scale into the caller's q, as if it were its own."""

    def trespass(self, q: torch.Tensor, batch: Batch) -> Any:
        return q.mul_(1 + 4e-3)


class RoundsWhatItStores(TritonBackend):
    """K and V pass through a format of fewer bits on their way into the cache; no output moves beyond tolerance."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        k, v = (values.bfloat16().to(values.dtype) for values in (k, v))
        return super().forward(q, k, v, layer, batch)


class NamesItsOwnWay(FA3Backend):
    """Nobody knows its metadata by these names, so nobody looks at them."""

    def metadata(self) -> dict[str, Any]:
        return {f"my_{name}": value for name, value in super().metadata().items()}


class ShowsNegativeLengths(FA3Backend):
    """Of each draft step."""

    def metadata(self) -> dict[str, Any]:
        return {
            name: value - 1000 if name.endswith(".cache_seqlens_int32") else value
            for name, value in super().metadata().items()
        }


class ChoosesByCapturedLength(FA3Backend):
    """The kernel without a window is captured where no row of the capture is longer than the window."""

    def values(self, batch: Batch) -> dict[str, torch.Tensor]:
        self.longest = int(batch.seq_lens.max())
        return super().values(batch)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        if layer.window is not None and self.longest <= layer.window:
            layer = replace(layer, window=None)
        return super().forward(q, k, v, layer, batch)


class LeavesNoHeadroom(FA3Backend):
    """The page table has no column for the last new token of the longest row, where that begins a page."""

    def allocate(self, buffers: PersistentBuffers) -> None:
        self.max_len -= 1
        super().allocate(buffers)


class StepsPaddedRowsBack(FA3Backend):
    """Every draft step takes a key off padded rows, which have none to spare."""

    def values(self, batch: Batch) -> dict[str, torch.Tensor]:
        values = super().values(batch)
        for name in values:
            if name.startswith("step") and name.endswith("cache_seqlens_int32"):
                values[name] = values[name].masked_fill(batch.req_pool_indices == 0, -1)
        return values


class SkipsEqualLengths(FA3Backend):
    """A replay of the same lengths as the one before keeps its metadata, whoever the requests are."""

    def prepare_replay(self, batch: Batch) -> None:
        key = batch.seq_lens.tolist()
        if getattr(self, "key", None) == key:
            self.tensors = self.captured[batch.batch_size]
            self._begin(batch)
            return
        self.key = key
        super().prepare_replay(batch)


class ExpandsPagesAtReplay(TritonBackend):
    """Replay writes each row's pages out as slots, as if the tokens of a page lay in order; nothing else does."""

    def prepare_replay(self, batch: Batch) -> None:
        super().prepare_replay(batch)
        page, indptr = self.pool.page_size, self.tensors["kv_indptr.full"].tolist()
        for start, stop in itertools.pairwise(indptr[: batch.batch_size + 1]):
            slots = self.tensors["kv_indices.full"][start:stop]
            slots.copy_(slots // page * page + torch.arange(stop - start, device=slots.device) % page)
