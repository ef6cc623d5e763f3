"""A Triton kernel that writes where no memory is."""

# mypy: ignore-errors

from __future__ import annotations

import torch

from kits.kernels._triton import tl, triton
from kits.needs import chosen_device


@triton.jit
def store_far_away(pointer, distance):
    tl.store(pointer + distance, 1)


def write_outside() -> None:
    """Launch it, and do not wait for it: whoever uses the device next is told."""
    target = torch.zeros(1, dtype=torch.int64, device=chosen_device())
    store_far_away[(1,)](target, 1 << 42)
