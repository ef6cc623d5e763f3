"""Metadata that live at fixed addresses while graphs are captured over them."""

from __future__ import annotations

import torch

from kits.backends.paging import scratch


class PersistentBuffers:
    """Named tensors allocated once, garbage at first, of which graphs bind leading slices.

    ``bind`` hands out views and ``fill`` writes through them, so that a refresh can never move an address.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[str, torch.Tensor] = {}

    def allocate(self, name: str, *shape: int, dtype: torch.dtype) -> None:
        self.buffers[name] = scratch(*shape, dtype=dtype, device=self.device)

    def bind(self, name: str, rows: int | None = None) -> torch.Tensor:
        """The first ``rows`` entries of a buffer; all of it by default."""
        buffer = self.buffers[name]
        return buffer if rows is None else buffer[:rows]

    def fill(self, values: dict[str, torch.Tensor]) -> None:
        """Copy each value into the leading corner of the buffer of its name; what lies beyond keeps its garbage."""
        for name, value in values.items():
            corner = self.buffers[name][tuple(slice(0, size) for size in value.shape)]
            corner.copy_(value)
