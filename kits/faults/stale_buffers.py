"""Kind 3: memory that a graph keeps reading after the backend wrote to, or bound, another."""

from __future__ import annotations

from typing import Any

import torch

from kits.backends.block_tables import BlockTableBackend, FlashMLABackend, TRTLLMBackend
from kits.backends.flash_attention import FA3Backend, is_tree
from kits.backends.flashinfer import FlashInferBackend
from kits.backends.paging import is_draft_decode
from kits.backends.persistent import PersistentBackend, PersistentBuffers
from kits.batches import Batch
from kits.faults.forgetting import forgotten
from kits.faults.registry import Plant, Touches, fault
from kits.kernels.flashinfer import BatchPrefillWithPagedKVCacheWrapper

GRAPHS = ("cuda_graph", "cuda_graph_multi_step")


@fault(
    "F15",
    title="the capture of a draft decode leaves its lengths at zero",
    references=("sgl-project/sglang#26521",),
    kind=3,
    axes="multi-step draft decode, outputs of the warm-up",
    touches=Touches(backends=("trtllm_mha",), runners=("cuda_graph_multi_step",)),
)
def f15(plant: Plant) -> None:
    """The zero-filled buffer is bound, the capture's lengths are never copied into it. A replay does copy."""

    def make(original: Any) -> Any:
        def prepare_capture(self: TRTLLMBackend, batch: Batch) -> None:
            original(self, batch)
            if is_draft_decode(batch):
                for name, lens in self.tensors.items():
                    if name.endswith("cache_seqlens_int32"):
                        plant.swap(lens, torch.zeros_like(lens))
                        lens.zero_()

        return prepare_capture

    plant.replace(TRTLLMBackend, "prepare_capture", make)


@fault(
    "F16",
    title="lengths are copied through the view of the size captured last",
    references=("sgl-project/sglang#26655",),
    kind=3,
    axes="two captured sizes, replayed in turn",
    touches=Touches(backends=("trtllm_mha",), runners=GRAPHS),
)
def f16(plant: Plant) -> None:
    """One metadata object serves all sizes; a copy fills as many rows as the last capture had."""

    def make(original: Any) -> Any:
        def prepare_replay(self: TRTLLMBackend, batch: Batch) -> None:
            last = list(self.captured.values())[-1]
            unreached = [
                self.persistent.buffers[name][len(view) : batch.batch_size]
                for name, view in last.items()
                if name.endswith("cache_seqlens_int32")
            ]
            with forgotten(plant, unreached):
                original(self, batch)

        return prepare_replay

    plant.replace(TRTLLMBackend, "prepare_replay", make)


@fault(
    "F17a",
    title="a replay binds fresh metadata instead of copying into the captured",
    references=("sgl-project/sglang#26019",),
    kind=3,
    axes="replay data that differ from the capture's",
    touches=Touches(backends=("fa3", "fa4", "trtllm_mha", "triton"), runners=GRAPHS),
)
def f17a(plant: Plant) -> None:
    """Every call of the unified init makes tensors and assigns them; the graph keeps the addresses of its capture."""

    def make(original: Any) -> Any:
        def prepare_replay(self: PersistentBackend, batch: Batch) -> None:
            captured = self.captured[batch.batch_size]
            with forgotten(plant, list(self.persistent.buffers.values())):
                original(self, batch)
                fresh = {name: view.clone() for name, view in captured.items()}
            self.tensors = fresh

        return prepare_replay

    plant.replace(PersistentBackend, "prepare_replay", make)


@fault(
    "F17b",
    title="a replay does not fill the page table that the capture bound",
    references=("sgl-project/sglang#26019",),
    kind=3,
    axes="replay data that differ from the capture's",
    touches=Touches(backends=("fa3", "fa4", "trtllm_mha"), runners=GRAPHS),
)
def f17b(plant: Plant) -> None:
    """The page table is bound once and never refilled."""

    def make(original: Any) -> Any:
        def prepare_replay(self: PersistentBackend, batch: Batch) -> None:
            tables = [self.persistent.buffers[name] for name in self.persistent.buffers if "page_table." in name]
            with forgotten(plant, tables):
                original(self, batch)

        return prepare_replay

    plant.replace(FA3Backend, "prepare_replay", make)
    plant.replace(BlockTableBackend, "prepare_replay", make)


@fault(
    "F18",
    title="under one dtype the schedule is assigned, not copied into the persistent buffers",
    references=("vllm-project/vllm#35175", "vllm-project/vllm#33638", "vllm-project/vllm#36611"),
    kind=3,
    axes="repeated replays with growing lengths, the dtype of that path",
    touches=Touches(backends=("flashmla",), runners=GRAPHS),
)
def f18(plant: Plant) -> None:
    """The path's dtype is bfloat16 here, the one the kit has; the buffers are there, and nobody writes them."""
    schedule = ("tile_scheduler_metadata", "num_splits")

    def make(original: Any) -> Any:
        def prepare_replay(self: FlashMLABackend, batch: Batch) -> None:
            if self.geometry.dtype != torch.bfloat16:
                return original(self, batch)
            names = [name for name in self.captured[batch.batch_size] if name.endswith(schedule)]
            with forgotten(plant, [self.persistent.buffers[name] for name in names]):
                original(self, batch)
                fresh = {name: self.tensors[name].clone() for name in names}
            self.tensors = self.tensors | fresh

        return prepare_replay

    plant.replace(FlashMLABackend, "prepare_replay", make)


@fault(
    "F20",
    title="the metadata of the largest size are handed out without a cut to the live one",
    references=("sgl-project/sglang#28768",),
    kind=3,
    axes="DRAFT_EXTEND_V2, fewer rows than the largest captured size, garbage in unused rows",
    touches=Touches(backends=("fa3", "fa4"), modes=("DRAFT_EXTEND_V2",), runners=GRAPHS),
)
def f20(plant: Plant) -> None:
    """The kernel takes its batch size from ``cu_seqlens_q``, and goes through rows that nobody wrote."""

    def make(original: Any) -> Any:
        def bind(self: PersistentBuffers, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            right: dict[str, torch.Tensor] = original(self, values)
            plant.witness(changed=any(len(view) < len(self.buffers[name]) for name, view in right.items()))
            return {name: self.buffers[name] for name in right}

        return bind

    plant.replace(PersistentBuffers, "bind", make)


@fault(
    "F21",
    title="metadata derived in the graph are kept from the warm-up",
    references=("sgl-project/sglang#38994",),
    kind=3,
    axes="warm-up and capture on the same object, replay data that differ",
    touches=Touches(backends=("fa3", "fa4"), modes=("TARGET_VERIFY",)),
)
def f21(plant: Plant) -> None:
    """Lengths are derived in the graph, unless the batch has some already: then the capture records no kernel."""
    name = "cache_seqlens_int32"

    def make(original: Any) -> Any:
        def forward(self: FA3Backend, q: Any, k: Any, v: Any, layer: Any, batch: Any) -> torch.Tensor:
            if batch.mode != "TARGET_VERIFY" or is_tree(batch):
                return original(self, q, k, v, layer, batch)
            derived = batch.seq_lens + batch.spec_info.draft_tokens
            if not hasattr(batch, "derived_lens"):
                batch.derived_lens = derived
            whole = self.tensors
            self.tensors = whole | {name: plant.swap(derived, batch.derived_lens)}
            try:
                return original(self, q, k, v, layer, batch)
            finally:
                self.tensors = whole

        return forward

    plant.replace(FA3Backend, "forward", make)


@fault(
    "F22",
    title="a wrapper that planned with a mask keeps it for a causal plan",
    references=("flashinfer-ai/flashinfer#1028", "flashinfer-ai/flashinfer#2690", "flashinfer-ai/flashinfer#860"),
    kind=3,
    axes="a verify with a mask, then an extend, on one instance",
    touches=Touches(backends=("flashinfer",), methods=("dense",), modes=("TARGET_VERIFY",)),
)
def f22(plant: Plant) -> None:
    """The branch is chosen by whether a mask buffer is set, and nothing clears it. Modes share a wrapper here, as they
    do in engines; that alone is harmless."""

    def one_wrapper(original: Any) -> Any:
        def prepare(self: FlashInferBackend, batch: Batch) -> None:
            if batch.mode != "DECODE":
                for name in self._names(batch):
                    shared = next((w for (mode, n), w in self.eager.items() if n == name and mode != "DECODE"), None)
                    if shared is not None:
                        self.eager[batch.mode, name] = shared
            original(self, batch)

        return prepare

    def keep(original: Any) -> Any:
        def _set_mask(self: BatchPrefillWithPagedKVCacheWrapper, mask: Any, q_lens: Any, lengths: Any) -> None:
            if mask is None and not self.use_cuda_graph:
                plant.witness(changed=self.custom_mask is not None)
                return
            original(self, mask, q_lens, lengths)

        return _set_mask

    plant.replace(FlashInferBackend, "prepare", one_wrapper)
    plant.replace(BatchPrefillWithPagedKVCacheWrapper, "_set_mask", keep)
