"""Controls: changes that no output can show, and that no check may report."""

from __future__ import annotations

from typing import Any

import torch

from kits.backends.flashinfer import FlashInferBackend
from kits.backends.triton import TritonBackend
from kits.batches import Batch
from kits.faults.registry import Plant, Touches, fault
from kits.kernels import _flashinfer_schedule as schedule


@fault(
    "C06",
    title="a verify gathers one key more than its window needs",
    references=("sglang mutation journal M6",),
    kind=6,
    axes="none: the mask hides the key, and its rows are laid out by where the gathered keys begin",
    touches=Touches(backends=("triton",), methods=("swa",), modes=("TARGET_VERIFY",)),
    control=True,
)
def c06(plant: Plant) -> None:
    """The index list of window layers reaches ``window`` keys back, where ``window - 1`` are visible."""

    def make(original: Any) -> Any:
        def _window_lens(self: TritonBackend, cached: torch.Tensor, batch: Batch) -> torch.Tensor:
            right: torch.Tensor = original(self, cached, batch)
            if batch.mode != "TARGET_VERIFY":
                return right
            return plant.swap(right, torch.clamp(cached, max=self.geometry.model.window))

        return _window_lens

    plant.replace(TritonBackend, "_window_lens", make)


@fault(
    "C12",
    title="a latent verify leaves prefix lengths in an argument that its kernel does not read",
    references=("sglang mutation journal M12",),
    kind=2,
    axes="none: the schedule holds the lengths",
    touches=Touches(backends=("flashinfer",), methods=("mla",), modes=("TARGET_VERIFY",)),
    control=True,
)
def c12(plant: Plant) -> None:
    """``kv_len_arr`` holds the prefix on the device after the plan, which has read the right lengths on the host."""

    def make(original: Any) -> Any:
        def _plan_all(self: FlashInferBackend, batch: Batch, wrappers: dict[str, Any], extend: Any) -> None:
            original(self, batch, wrappers, extend)
            if batch.mode == "TARGET_VERIFY":
                for wrapper in wrappers.values():
                    lens = wrapper.kv_len_arr
                    plant.swap(lens, batch.seq_lens)
                    lens.copy_(batch.seq_lens)

        return _plan_all

    plant.replace(FlashInferBackend, "_plan_all", make)


@fault(
    "C23",
    title="the number of splits differs between capture and replay",
    references=("sglang mutation journal M23", "sgl-project/sglang#26019", "sgl-project/sglang#26134"),
    kind=10,
    axes="none: any split gives the same sum up to rounding",
    touches=Touches(backends=("flashinfer",), runners=("cuda_graph", "cuda_graph_multi_step")),
    control=True,
)
def c23(plant: Plant) -> None:
    """A replay's plan cuts the keys of a request into tiles of twice the length."""
    replaying = [False]

    def replay(original: Any) -> Any:
        def prepare_replay(self: FlashInferBackend, batch: Batch) -> None:
            replaying[0] = True
            try:
                original(self, batch)
            finally:
                replaying[0] = False

        return prepare_replay

    def tile(original: Any) -> Any:
        def key_tile(page_size: int) -> int:
            right: int = original(page_size)
            plant.witness(changed=replaying[0])
            return 2 * right if replaying[0] else right

        return key_tile

    plant.replace(FlashInferBackend, "prepare_replay", replay)
    plant.replace(schedule, "key_tile", tile)
