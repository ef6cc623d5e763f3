"""Kind 9: speculative decoding, where rows have several tokens and a graph several steps."""

from __future__ import annotations

from typing import Any

import torch

from kits.backends import paging
from kits.backends.flash_attention import FA3Backend
from kits.backends.persistent import PersistentBackend
from kits.backends.triton import TritonBackend
from kits.faults.forgetting import forgotten
from kits.faults.registry import Plant, Touches, fault
from kits.pools import KVGroup


@fault(
    "F44",
    title="query offsets count the draft's steps, tokens lie as many a row as were drafted",
    references=("sgl-project/sglang#27545",),
    kind=9,
    axes="DRAFT_EXTEND_V2 under a graph, topk > 1, two rows or more",
    touches=Touches(backends=("triton",), modes=("DRAFT_EXTEND_V2",), runners=("cuda_graph",)),
)
def f44(plant: Plant) -> None:
    """The stride is steps + 1, which is the number of draft tokens of a chain only."""

    def make(original: Any) -> Any:
        def hook(self: TritonBackend, batch: Any) -> None:
            original(self, batch)
            if batch.mode == "DRAFT_EXTEND_V2":
                offsets = self.persistent.buffers["qo_indptr"][: batch.batch_size + 1]
                stride = batch.spec_info.steps + 1
                wrong = torch.arange(len(offsets), dtype=offsets.dtype, device=offsets.device) * stride
                offsets.copy_(plant.swap(offsets, wrong))

        return hook

    plant.replace(TritonBackend, "prepare_capture", make)
    plant.replace(TritonBackend, "prepare_replay", make)


@fault(
    "F45",
    title="capture and replay disagree on whether rows are uniform or ragged",
    references=("sgl-project/sglang#21987", "sgl-project/sglang#21984", "sgl-project/sglang#19807"),
    kind=9,
    axes="DRAFT_EXTEND, ragged accepted counts, two rows or more",
    touches=Touches(backends=("fa3", "fa4"), modes=("DRAFT_EXTEND",), runners=("cuda_graph",)),
)
def f45(plant: Plant) -> None:
    """Tokens of a replay lie as they were accepted; its query offsets are those of full rows.

    The report has it the other way round: offsets as accepted, tokens in full rows.
    """

    def make(original: Any) -> Any:
        def prepare_replay(self: FA3Backend, batch: Any) -> None:
            original(self, batch)
            if batch.mode == "DRAFT_EXTEND":
                offsets = self.persistent.buffers["cu_seqlens_q"][: batch.batch_size + 1]
                each = torch.arange(len(offsets), dtype=offsets.dtype, device=offsets.device)
                offsets.copy_(plant.swap(offsets, each * batch.spec_info.draft_tokens))

        return prepare_replay

    plant.replace(FA3Backend, "prepare_replay", make)


@fault(
    "F46",
    title="draft slots lie by branch and are read by step",
    references=("sgl-project/sglang#7239", "sgl-project/sglang#7213"),
    kind=9,
    axes="draft decode, topk > 1, two steps or more",
    touches=Touches(backends=("triton", "flashinfer"), methods=("dense",), sweeps=("eagle_draft_cg",)),
)
def f46(plant: Plant) -> None:
    """``(rows, topk, steps)`` is viewed as ``(steps, rows * topk)`` and transposed."""

    def make(original: Any) -> Any:
        def gather_draft_slots(group: KVGroup, batch: Any, step: int) -> torch.Tensor:
            right: torch.Tensor = original(group, batch, step)
            topk, steps = batch.spec_info.topk, batch.spec_info.steps
            if topk == 1:
                return right
            table = group.req_to_token[batch.req_pool_indices]
            prefixes = batch.seq_lens.tolist()
            drafted = torch.cat([table[row, prefix : prefix + topk * steps] for row, prefix in enumerate(prefixes)])
            by_branch = drafted.view(steps, len(prefixes) * topk).t()
            own, pieces = step + 1 if batch.save_kv else 0, []
            for row, prefix in enumerate(prefixes):
                for branch in range(topk):
                    pieces += [table[row, :prefix], by_branch[row * topk + branch, :own]]
            return plant.swap(right, torch.cat(pieces))

        return gather_draft_slots

    plant.replace_everywhere(paging.gather_draft_slots, make)


@fault(
    "F47",
    title="before a replay only the first draft step's metadata are built",
    references=("vllm-project/vllm#38311", "vllm-project/vllm#41162"),
    kind=9,
    axes="several draft steps in one graph, two replays of other lengths",
    touches=Touches(runners=("cuda_graph_multi_step",), backends=("triton", "fa3", "fa4", "trtllm_mha", "flashmla")),
)
def f47(plant: Plant) -> None:
    def make(original: Any) -> Any:
        def prepare_replay(self: PersistentBackend, batch: Any) -> None:
            later = [name for name in self.persistent.buffers if name.startswith("step") and name[:6] != "step0."]
            with forgotten(plant, [self.persistent.buffers[name] for name in later]):
                original(self, batch)

        return prepare_replay

    plant.replace(PersistentBackend, "prepare_replay", make)
