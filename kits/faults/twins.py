"""F19 and its control: the wrong one of two equal buffers is refreshed."""

from __future__ import annotations

import bisect
from typing import Any

import torch

from kits.backends.flashinfer import FlashInferBackend
from kits.batches import Batch
from kits.errors import Unavailable
from kits.faults.forgetting import forgotten
from kits.faults.registry import Plant, Touches, fault
from kits.kernels import _flashinfer_schedule as schedule
from kits.kernels import _ops, flashinfer_mla

TOUCHES = Touches(backends=("flashinfer",), methods=("mla",), runners=("cuda_graph",), modes=("DECODE",))


def _refreshes_the_twin(plant: Plant) -> None:
    """A replay rebuilds ``kv_indptr`` in the buffer of eager batches, and names that as its metadata; the captured
    wrapper holds another, which keeps the offsets of an earlier plan."""

    def replay(original: Any) -> Any:
        def prepare_replay(self: FlashInferBackend, batch: Batch) -> None:
            wrappers = self.captured[batch.batch_size].values()
            with forgotten(plant, [wrapper.kv_indptr for wrapper in wrappers]):
                original(self, batch)

        return prepare_replay

    def names(original: Any) -> Any:
        def metadata(self: FlashInferBackend) -> dict[str, Any]:
            return original(self) | {"kv_indptr": self.lists["full"].kv_indptr}

        return metadata

    plant.replace(FlashInferBackend, "prepare_replay", replay)
    plant.replace(FlashInferBackend, "metadata", names)


def _reads_offsets(*arguments: Any) -> None:
    """The emulation, with the page offsets of each request taken from ``kv_indptr`` instead of the schedule."""
    *stock, kv_indptr, qo_indptr = arguments
    emulate: Any = flashinfer_mla._emulate
    workspace = stock[5].clone()
    keys, entries = schedule.read(flashinfer_mla.KERNEL, workspace, flashinfer_mla._WIDTH)
    starts = qo_indptr.tolist()
    for entry in entries:
        entry[4] = int(kv_indptr[bisect.bisect_right(starts, entry[0]) - 1])
    schedule.write(workspace, keys, [tuple(entry) for entry in entries])
    emulate(*stock[:5], workspace, *stock[6:])


def _no_such_kernel(*_arguments: Any) -> None:
    raise Unavailable("package", "the kernel that reads these offsets is in no library; its emulation runs on a CPU")


_replacement_kernel = _ops.define(
    "fault_mla_reading_offsets(Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor kv_indices, "
    "Tensor int_workspace, Tensor(a!) out, Tensor(b!)? lse, float sm_scale, bool causal, bool base_e, int handle, "
    "Tensor kv_indptr, Tensor qo_indptr) -> ()",
    cpu=_reads_offsets,
    cuda=_no_such_kernel,
    fake=_ops.fake_none,
)


@fault(
    "F19",
    title="a replay refreshes the twin of the offsets that the captured kernel reads",
    references=("sgl-project/sglang#37975",),
    kind=3,
    axes="a kernel that reads kv_indptr, decode replay",
    touches=TOUCHES,
)
def f19(plant: Plant) -> None:
    """With a replacement kernel that reads the captured wrapper's ``kv_indptr``."""
    _refreshes_the_twin(plant)
    running: list[Any] = []

    def run(original: Any) -> Any:
        def run(self: Any, *arguments: Any, **options: Any) -> torch.Tensor:
            running[:] = [self]
            result: torch.Tensor = original(self, *arguments, **options)
            return result

        return run

    def launch(_original: Any) -> Any:
        def _op(*arguments: Any) -> None:
            _replacement_kernel(*arguments, running[0].kv_indptr, running[0].qo_indptr)

        return _op

    plant.replace(flashinfer_mla.BatchMLAPagedAttentionWrapper, "run", run)
    plant.replace(flashinfer_mla, "_op", launch)


@fault(
    "C19",
    title="a replay refreshes the twin of offsets that the stock kernel does not read",
    references=("sgl-project/sglang#37975",),
    kind=3,
    axes="none: the stock kernel takes all offsets from its schedule",
    touches=TOUCHES,
    control=True,
)
def c19(plant: Plant) -> None:
    """With the stock kernel."""
    _refreshes_the_twin(plant)
