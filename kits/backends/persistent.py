"""Metadata that live at fixed addresses while graphs are captured over them: what every graph backend shares."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from kits.backends.base import Backend, Geometry
from kits.backends.paging import is_draft_decode
from kits.batches import Batch
from kits.scratch import scratch

INT32 = torch.int32


class PersistentBuffers:
    """Named tensors allocated once, garbage at first, of which graphs bind leading rows.

    ``bind`` hands out views and ``fill`` writes through them, so that a refresh can never move an address.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[str, torch.Tensor] = {}
        self._whole: set[str] = set()

    def allocate(self, name: str, *shape: int, dtype: torch.dtype = INT32, whole: bool = False) -> None:
        """``whole``: the field's length varies from batch to batch, so a graph binds all of the buffer."""
        self.buffers[name] = scratch(*shape, dtype=dtype, device=self.device)
        if whole:
            self._whole.add(name)

    def bind(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The views that a graph over a batch with these values keeps: as many rows as each value has."""
        return {
            name: self.buffers[name] if name in self._whole else self.buffers[name][: len(value)]
            for name, value in values.items()
        }

    def fill(self, values: dict[str, torch.Tensor]) -> None:
        """Copy each value into the leading corner of the buffer of its name; what lies beyond keeps its garbage."""
        for name, value in values.items():
            corner = self.buffers[name][tuple(slice(0, size) for size in value.shape)]
            corner.copy_(value)


class PersistentBackend(Backend):
    """A backend whose metadata are named tensors: fresh ones for an eager batch, buffers for a captured one.

    Names are ``field.group`` (``kv_indptr.full``) or ``field``; those of a draft step begin with ``stepN.``.
    A subclass says what to allocate and what the values of a batch are; ``self.tensors`` is what ``forward`` reads.
    """

    def open(
        self, geometry: Geometry, *, max_rows: int, max_tokens: int, max_len: int, capture_sizes: Sequence[int]
    ) -> None:
        super().open(geometry, max_rows=max_rows, max_tokens=max_tokens, max_len=max_len, capture_sizes=capture_sizes)
        self.draft_steps = geometry.speculation.steps if geometry.speculation is not None else 0
        self.persistent = PersistentBuffers(self.device)
        self.allocate(self.persistent)
        self.tensors: dict[str, torch.Tensor] = {}
        self.captured: dict[int, dict[str, torch.Tensor]] = {}
        self.step = ""

    @abstractmethod
    def allocate(self, buffers: PersistentBuffers) -> None:
        """Allocate a buffer for each name that ``values`` may give."""

    @abstractmethod
    def values(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Fresh metadata of ``batch``; host-side work outside the graph."""

    def prepare(self, batch: Batch) -> None:
        self.tensors = self.values(batch)
        self._begin(batch)

    def prepare_capture(self, batch: Batch) -> None:
        values = self.values(batch)
        self.captured[batch.batch_size] = self.persistent.bind(values)
        self.persistent.fill(values)
        self.tensors = self.captured[batch.batch_size]
        self._begin(batch)
        # The graph keeps this number: it must cover every replay, not the longest row of the capture.
        self.max_extend_len = 1 if batch.extend_seq_lens is None else batch.num_tokens // batch.batch_size

    def prepare_replay(self, batch: Batch) -> None:
        self.persistent.fill(self.values(batch))
        self.tensors = self.captured[batch.batch_size]
        self._begin(batch)

    def _begin(self, batch: Batch) -> None:
        self.decoding = batch.mode == "DECODE"
        self.max_extend_len = max(batch.extend_seq_lens_cpu or [1])
        self.step = "step0." if is_draft_decode(batch) else ""

    def advance_draft(self, step: int) -> None:
        self.step = f"step{step}."

    def field(self, name: str) -> torch.Tensor:
        """The metadata ``name`` of the current draft step, or of the whole forward."""
        own = self.tensors.get(self.step + name)
        return self.tensors[name] if own is None else own

    def metadata(self) -> dict[str, Any]:
        """Names as the invariants know them: ``kv_indptr``, ``window_kv_indptr``, ``step1.kv_indptr``."""
        return {_engine_name(name): value for name, value in self.tensors.items()}


def _engine_name(name: str) -> str:
    """``step1.kv_indptr.window`` -> ``step1.window_kv_indptr``; the group ``full`` goes unsaid."""
    if name.endswith(".window"):
        part, _, field = name.removesuffix(".window").rpartition(".")
        return f"{part}.window_{field}".lstrip(".")
    return name.removesuffix(".full")
