"""Persistent buffers as freshly allocated device memory is: full of garbage, and with neighbours that matter.

Every buffer lies between two guard zones. A kernel that runs past its end changes them, which ``spoiled`` shows. The
buffers are remembered weakly: whoever drops one still leaves a graph with a dangling address, as on a GPU.
"""

from __future__ import annotations

import math

import torch

from kits.graphs.storages import StorageRef

GUARD = 16
"""Elements of a guard zone on either side of a buffer."""

_INT_GARBAGE = 0x2AAAAAAA
_buffers: list[tuple[StorageRef, torch.dtype, tuple[int, ...]]] = []


def scratch(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous buffer of garbage between guard zones: NaN in floats, a huge id in integers, 1 in bytes."""
    size = math.prod(shape)
    whole = torch.full((size + 2 * GUARD,), _garbage(dtype), dtype=dtype, device=device)
    _buffers.append((StorageRef.of(whole), dtype, shape))
    return whole[GUARD : GUARD + size].view(shape)


def _garbage(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("nan")
    return _INT_GARBAGE if dtype in (torch.int32, torch.int64) else 1


def forget_buffers() -> None:
    """Begin anew: buffers of an earlier subtest are nobody's concern."""
    _buffers.clear()


def spoiled() -> list[str]:
    """The living buffers whose guard zones somebody wrote to, described by dtype and shape."""
    found = []
    for reference, dtype, shape in _buffers:
        storage = reference.lock()
        if storage is None:
            continue
        whole = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (math.prod(shape) + 2 * GUARD,))
        zones = torch.cat([whole[:GUARD], whole[-GUARD:]])
        intact = torch.isnan(zones) if dtype.is_floating_point else zones == _garbage(dtype)
        if not bool(intact.all()):
            found.append(f"{str(dtype).removeprefix('torch.')} buffer of shape {shape}")
    return found
