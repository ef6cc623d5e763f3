"""A Triton kernel launched without a custom op around it."""

from __future__ import annotations

import torch

from kits.kernels._triton import triton

tl = triton.language


@triton.jit
def store_one(pointer):  # type: ignore[no-untyped-def]
    tl.store(pointer, 1.0)


def launch(q: torch.Tensor) -> None:
    store_one[(1,)](q)
