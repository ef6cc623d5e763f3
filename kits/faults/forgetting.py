"""What several faults share: writes that do not happen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from kits.faults.registry import Plant


@contextmanager
def forgotten(plant: Plant, buffers: Iterable[torch.Tensor]) -> Iterator[None]:
    """What the block writes to ``buffers`` is lost, as if these lines were missing in it."""
    kept = [(buffer, buffer.clone()) for buffer in buffers]
    yield
    for buffer, old in kept:
        plant.swap(buffer, old)
        buffer.copy_(old)
