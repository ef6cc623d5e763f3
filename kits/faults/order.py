"""Kind 10: what runs before what, and what a sum depends on."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kits.backends.persistent import PersistentBackend
from kits.faults.registry import Plant, Touches, active, fault
from kits.graphs import stream
from kits.kernels import _ops, flash_attn
from kits.kernels._attend import attend, merge_parts


@fault(
    "F48",
    title="metadata are written on a side stream that no replay waits for",
    references=("vllm-project/vllm#47404", "vllm-project/vllm#47196"),
    kind=10,
    axes="a replay whose metadata differ from those before it",
    touches=Touches(
        backends=("fa3", "fa4", "trtllm_mha", "flashmla", "cutlass_mla"),
        runners=("cuda_graph", "cuda_graph_multi_step"),
    ),
)
def f48(plant: Plant) -> None:
    def make(original: Any) -> Any:
        def prepare_replay(self: Any, batch: Any) -> None:
            self.side_stream = stream(self.device)
            fill = self.persistent.fill

            def fill_aside(values: dict[str, torch.Tensor]) -> None:
                plant.witness(changed=not all(_same(self.persistent.buffers[name], values[name]) for name in values))
                with self.side_stream.work():
                    fill(values)

            self.persistent.fill = fill_aside
            try:
                original(self, batch)
            finally:
                del self.persistent.fill

        return prepare_replay

    plant.replace(PersistentBackend, "prepare_replay", make)


def _same(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    corner = buffer[tuple(slice(0, size) for size in value.shape)]
    return torch.equal(corner, value.to(corner.dtype))


@fault(
    "F49",
    title="a row's number of splits depends on the lengths of the whole batch",
    references=("Dao-AILab/flash-attention#1897", "Dao-AILab/flash-attention#2450", "vllm-project/vllm#53257"),
    kind=10,
    axes="the same row beside other rows, compared bit for bit",
    touches=Touches(backends=("fa3", "fa4"), runners=("cuda_graph",)),
)
def f49(plant: Plant) -> None:
    """The batch's keys are dealt out to a number of processors; parts are kept in the output's dtype."""
    plant.replace(flash_attn, "_op", lambda _original: _split_op())


PROCESSORS = 8


@functools.cache
def _split_op() -> Any:
    arguments = str(flash_attn._op._schema).split("(", 1)[1]
    return _ops.define(
        f"fault_flash_attn_batch_splits({arguments}", cpu=_split_all, cuda=flash_attn._native, fake=flash_attn._fake
    )


def _split_all(q: Any, k: Any, v: Any, table: Any, lens: torch.Tensor, *rest: Any) -> Any:
    """The emulation with `attend` in as many parts as the batch asks for."""
    keys = max(4, int(lens.clamp(min=0).sum()) // PROCESSORS)
    whole = flash_attn.attend
    flash_attn.attend = functools.partial(_attend_in_parts, keys)
    try:
        return flash_attn._emulate(q, k, v, table, lens, *rest)
    finally:
        flash_attn.attend = whole


def _attend_in_parts(
    keys: int, q: Any, k: Any, v: Any, *, visible: Any = None, sinks: Any = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = []
    for start in range(0, len(k), keys):
        part = slice(start, start + keys)
        mask = None if visible is None else visible[:, part]
        out, lse = attend(q, k[part], v[part], visible=mask, sinks=None if start else sinks, **options)
        parts.append((out.to(q.dtype).float(), lse))
    plant = active()
    if plant is not None:
        plant.witness(changed=len(parts) > 1)
    return merge_parts(parts)
