"""Kind 7: who takes a batch, and whom it is handed on to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kits.backends.flash_attention import FA3Backend, FA4Backend
from kits.backends.persistent import PersistentBackend
from kits.faults.forgetting import forgotten
from kits.faults.registry import Plant, Touches, fault
from kits.runners.graph import GraphRunner


@fault(
    "F35",
    title="a batch is taken for a uniform decode by its shape",
    references=("vllm-project/vllm#50532", "vllm-project/vllm#51865"),
    kind=7,
    axes="a prompt chunk of as many tokens as a captured row has",
    touches=Touches(
        backends=("flashinfer", "fa3"), runners=("cuda_graph",), modes=("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND")
    ),
)
def f35(plant: Plant) -> None:
    def make(original: Any) -> Any:
        def takes(self: GraphRunner, mode: str, rows: int, tokens: int) -> bool:
            right = original(self, mode, rows, tokens)
            wrong = tokens == rows * self.tokens_per_row and any(rows <= size for size in self.captured)
            plant.witness(changed=wrong != right)
            return wrong

        return takes

    plant.replace(GraphRunner, "takes", make)


def _forward_to(plant: Plant, reached: Callable[[list[str]], list[str]]) -> None:
    """Of a hybrid model's KV groups, the children of a composite backend, only some hear of a replay."""

    def make(original: Any) -> Any:
        def prepare_replay(self: PersistentBackend, batch: Any) -> None:
            children = list(self.pool.groups)
            left_out = set(children) - set(reached(children))
            names = [name for name in self.captured[batch.batch_size] if name.rpartition(".")[2] in left_out]
            with forgotten(plant, [self.persistent.buffers[name] for name in names]):
                original(self, batch)

        return prepare_replay

    plant.replace(PersistentBackend, "prepare_replay", make)


HYBRID = Touches(backends=("fa3", "triton"), methods=("swa",), runners=("cuda_graph",))


@fault(
    "F36a",
    title="the replay hook reaches only the first child",
    references=(
        "sgl-project/sglang MUTATION_FIXES.md, M19",
        "sgl-project/sglang#26665",
        "sgl-project/sglang#30846",
    ),
    kind=7,
    axes="two KV groups, other requests at the replay than at the capture",
    touches=HYBRID,
)
def f36a(plant: Plant) -> None:
    _forward_to(plant, lambda children: children[:1])


@fault(
    "F36b",
    title="the replay hook skips the first child",
    references=(
        "sgl-project/sglang MUTATION_FIXES.md, M20",
        "sgl-project/sglang#26665",
        "sgl-project/sglang#30846",
    ),
    kind=7,
    axes="two KV groups, other requests at the replay than at the capture",
    touches=HYBRID,
)
def f36b(plant: Plant) -> None:
    _forward_to(plant, lambda children: children[1:])


@fault(
    "F37",
    title="a mode that the subclass forgot falls to the parent's capture, whose index buffer is flat",
    references=("sgl-project/sglang KNOWN_FAILURES.md, section C.3",),
    kind=7,
    axes="a graph of a mode that a subclass does not override",
    touches=Touches(backends=("fa4",), modes=("DRAFT_EXTEND",), runners=("cuda_graph",)),
)
def f37(plant: Plant) -> None:
    """Under a graph, a draft extend writes the pages of all rows behind one another into the 2-D page table."""

    def make(original: Any) -> Any:
        def hook(self: FA3Backend, batch: Any) -> None:
            original(self, batch)
            if batch.mode != "DRAFT_EXTEND":
                return
            page_size = self.geometry.page_size
            for group in self.pool.groups:
                table = self.persistent.buffers[f"page_table.{group}"]
                pages = [-(-length // page_size) for length in batch.seq_lens.tolist()]
                flat = torch.cat([table[row, :count].clone() for row, count in enumerate(pages)])
                strided = table.clone()
                strided.view(-1)[: len(flat)] = flat
                table.copy_(plant.swap(table, strided))

        return hook

    plant.replace(FA4Backend, "prepare_capture", make)
    plant.replace(FA4Backend, "prepare_replay", make)
