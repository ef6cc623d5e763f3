"""Kind 4: what the host decided at the capture and a replay cannot decide anew."""

from __future__ import annotations

from typing import Any

from kits.backends.block_tables import TRTLLMBackend
from kits.backends.flashinfer import FlashInferBackend
from kits.faults.forgetting import forgotten
from kits.faults.registry import Plant, Touches, fault
from kits.kernels import trtllm
from kits.kernels.flashinfer import BatchDecodeWithPagedKVCacheWrapper


@fault(
    "F23",
    title="the kernel's loop bound is the longest row of the capture",
    references=("Dao-AILab/flash-attention#1164", "facebookresearch/xformers#968", "vllm-project/vllm#9285"),
    kind=4,
    axes="a replay with longer rows than the capture",
    touches=Touches(backends=("trtllm_mha",)),
)
def f23(plant: Plant) -> None:
    """``max_seq_len`` is taken from the lengths at hand, a host integer that the capture keeps."""
    longest = [0]

    def begin(original: Any) -> Any:
        def _begin(self: TRTLLMBackend, batch: Any) -> None:
            original(self, batch)
            lens = [value for name, value in self.tensors.items() if name.endswith("cache_seqlens_int32")]
            longest[0] = max(int(value.max()) for value in lens)

        return _begin

    def decode(original: Any) -> Any:
        def trtllm_batch_decode_with_kv_cache(
            query: Any, kv_cache: Any, workspace: Any, tables: Any, lens: Any, max_seq_len: int, **options: Any
        ) -> Any:
            plant.witness(changed=longest[0] < max_seq_len)
            return original(query, kv_cache, workspace, tables, lens, longest[0], **options)

        return trtllm_batch_decode_with_kv_cache

    plant.replace(TRTLLMBackend, "_begin", begin)
    plant.replace(trtllm, "trtllm_batch_decode_with_kv_cache", decode)


@fault(
    "F24",
    title="of two wrappers only the labelled one is planned again before a replay",
    references=(
        "NVIDIA/TensorRT-LLM#18769",
        "alibaba/rtp-llm#378",
        "alibaba/rtp-llm#1084",
        "alibaba/rtp-llm#1254",
    ),
    kind=4,
    axes="window and full layers in one model, lengths that differ from the capture's",
    touches=Touches(backends=("flashinfer",), methods=("swa",), runners=("cuda_graph",)),
)
def f24(plant: Plant) -> None:
    """The page lists of the second wrapper are fresh, its schedule is the capture's."""

    def make(original: Any) -> Any:
        def prepare_replay(self: FlashInferBackend, batch: Any) -> None:
            labelled = next(iter(self.pool.groups))
            others = [
                wrapper
                for name, wrapper in self.captured[batch.batch_size].items()
                if name.rpartition(".")[2] != labelled
            ]
            with forgotten(plant, [wrapper.int_workspace for wrapper in others]):
                original(self, batch)

        return prepare_replay

    plant.replace(FlashInferBackend, "prepare_replay", make)


@fault(
    "F25",
    title="the grid is padded to a bound, the schedule is filled for real work only",
    references=("flashinfer-ai/flashinfer#4794", "sgl-project/sglang#31387"),
    kind=4,
    axes="a schedule shorter than its grid, a workspace full of garbage",
    touches=Touches(
        backends=("flashinfer",),
        methods=("dense", "swa"),
        sweeps=("decode_cg", "eagle_draft_cg", "frozen_kv_mtp_draft_cg"),
    ),
)
def f25(plant: Plant) -> None:
    """A plan for a graph announces tiles up to a multiple of the grid; nothing says which of them are real."""
    grid = 8

    def make(original: Any) -> Any:
        def plan(self: BatchDecodeWithPagedKVCacheWrapper, *arguments: Any, **options: Any) -> None:
            original(self, *arguments, **options)
            if self.use_cuda_graph:
                real = int(self.int_workspace[0])
                padded = -(-real // grid) * grid
                plant.witness(changed=padded != real)
                self.int_workspace[0] = padded

        return plan

    plant.replace(BatchDecodeWithPagedKVCacheWrapper, "plan", make)
