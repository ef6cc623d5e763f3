"""Kind 5: page tables, slot lists, and the sizes of what holds them."""

from __future__ import annotations

from typing import Any

import torch

from kits.backends import paging
from kits.backends.persistent import PersistentBuffers
from kits.backends.triton import TritonBackend
from kits.faults.registry import Plant, Touches, fault
from kits.kernels import triton_ops
from kits.pools import KVGroup
from kits.scratch import scratch


@fault(
    "F26",
    title="the draft's slot lists have room for one branch a row",
    references=("sgl-project/sglang#27338",),
    kind=5,
    axes="topk > 1, a batch at its largest with rows at their longest",
    touches=Touches(backends=("triton",), methods=("dense",), sweeps=("eagle_draft_cg",)),
)
def f26(plant: Plant) -> None:
    """The buffers of a graph's draft steps are ``rows * max_len`` long, and lie behind one another.

    The writer knows no size: what does not fit runs into the next step's list, and behind the last into whatever
    the allocator put there.
    """

    def allocate(original: Any) -> Any:
        def allocate_narrow(self: TritonBackend, buffers: PersistentBuffers) -> None:
            original(self, buffers)
            size = self.max_rows * self.max_len
            for group in self.pool.groups:
                behind = scratch(size * (self.draft_steps + 1), dtype=torch.int32, device=self.device)
                for step in range(self.draft_steps):
                    name = f"step{step}.kv_indices.{group}"
                    buffers.buffers[name] = behind[step * size : (step + 1) * size]

        return allocate_narrow

    def fill(original: Any) -> Any:
        def fill_past_the_end(self: PersistentBuffers, values: dict[str, torch.Tensor]) -> None:
            for name, value in values.items():
                buffer = self.buffers[name]
                if "kv_indices" in name and name.startswith("step"):
                    plant.witness(changed=len(value) > len(buffer))
                    buffer.as_strided(value.shape, (1,), buffer.storage_offset()).copy_(value)
                else:
                    original(self, {name: value})

        return fill_past_the_end

    plant.replace(TritonBackend, "allocate", allocate)
    plant.replace(PersistentBuffers, "fill", fill)


@fault(
    "F27",
    title="slot times stride is computed in too few bits",
    references=(
        "vllm-project/vllm#47671",
        "vllm-project/vllm#50427",
        "ROCm/aiter#4474",
        "Dao-AILab/flash-attention#772",
    ),
    kind=5,
    axes="high page ids",
    touches=Touches(backends=("triton",), sweeps=("eager", "layouts", "verify", "draft_extend_v2")),
)
def f27(plant: Plant) -> None:
    """The product wraps at 15 bits: the scale of this pool to the pools in which it wraps at 31."""
    bits = 15

    def make(original: Any) -> Any:
        def _launch(
            q: Any, k_new: Any, v_new: Any, k_buffer: Any, v_buffer: Any, qo: Any, kv: Any, kv_indices: Any, *rest: Any
        ) -> None:
            stride = k_buffer.stride(0)
            wrapped = (kv_indices.long() * stride % (1 << bits) // stride).to(kv_indices.dtype)
            plant.swap(kv_indices, wrapped)
            original(q, k_new, v_new, k_buffer, v_buffer, qo, kv, wrapped, *rest)

        return _launch

    plant.replace(triton_ops, "_launch", make)


@fault(
    "F28a",
    title="the page table is the first page and those that follow it",
    references=("sgl-project/sglang KNOWN_FAILURES.md, section C.1",),
    kind=5,
    axes="layouts other than contiguous, more than one page a request",
    touches=Touches(
        backends=("fa3", "fa4", "trtllm_mha", "flashmla", "cutlass_mla"), sweeps=("eager", "layouts", "verify")
    ),
)
def f28a(plant: Plant) -> None:
    def make(original: Any) -> Any:
        def page_rows(group: KVGroup, batch: Any, columns: int) -> torch.Tensor:
            right = original(group, batch, columns)
            ascending = torch.arange(right.shape[1], dtype=right.dtype, device=right.device)
            return plant.swap(right, right[:, :1] + ascending)

        return page_rows

    plant.replace_everywhere(paging.page_rows, make)


@fault(
    "F28b",
    title="new keys are read back as one slice of the pool",
    references=("sgl-project/sglang KNOWN_FAILURES.md, section C.1",),
    kind=5,
    axes="more than one request, or slots that are not consecutive",
    touches=Touches(backends=("triton",), methods=("dense", "swa"), sweeps=("eager", "layouts"), modes=("EXTEND",)),
)
def f28b(plant: Plant) -> None:
    """The slice begins at the first write slot, as if the batch's slots were consecutive."""
    first: list[torch.Tensor] = []

    def forward(original: Any) -> Any:
        def forward_noting_slots(self: TritonBackend, q: Any, k: Any, v: Any, layer: Any, batch: Any) -> Any:
            first[:] = [batch.out_cache_loc[layer.group][:1]]
            return original(self, q, k, v, layer, batch)

        return forward_noting_slots

    def extend(original: Any) -> Any:
        def extend_attention(
            q: Any, k_new: Any, v_new: Any, k_buffer: Any, v_buffer: Any, *rest: Any, **more: Any
        ) -> Any:
            slots = (first[0] + torch.arange(len(k_new), device=k_new.device)) % len(k_buffer)
            k_read = plant.swap(k_new, (k_buffer[slots] * more["k_scale"]).to(k_new.dtype))
            return original(q, k_read, v_new, k_buffer, v_buffer, *rest, **more)

        return extend_attention

    plant.replace(TritonBackend, "forward", forward)
    plant.replace(triton_ops, "extend_attention", extend)


@fault(
    "F29",
    title="the whole pages of a tree draft's prefix, where no row has one",
    references=("sgl-project/sglang#28250",),
    kind=5,
    axes="topk > 1, page size > 1, every row shorter than a page",
    touches=Touches(backends=("triton", "flashinfer"), methods=("dense",), sweeps=("eagle_draft_cg",)),
)
def f29(plant: Plant) -> None:
    """The prefix is copied page by page, for as many pages as the longest row has but at least one.

    Shorter rows are masked by comparing with that longest row: where it has no page, nothing is masked, and each
    branch copies page -1.
    """

    def make(original: Any) -> Any:
        def gather_draft_slots(group: KVGroup, batch: Any, step: int) -> torch.Tensor:
            right: torch.Tensor = original(group, batch, step)
            prefixes = batch.seq_lens.tolist()
            if batch.spec_info.topk == 1 or max(prefixes) // group.page_size > 0:
                return right
            wrong, start = right.clone(), 0
            table = group.req_to_token[batch.req_pool_indices]
            own = step + 1 if batch.save_kv else 0
            for row, prefix in enumerate(prefixes):
                for _ in range(batch.spec_info.topk):
                    page = table[row, -group.page_size :]
                    stop = min(start + group.page_size, len(wrong))
                    wrong[start:stop] = page[: stop - start]
                    start += prefix + own
            return plant.swap(right, wrong)

        return gather_draft_slots

    plant.replace_everywhere(paging.gather_draft_slots, make)
