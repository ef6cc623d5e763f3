"""Persistent buffers as freshly allocated device memory is: full of garbage, and with neighbours that matter.

Every buffer lies between two guard zones. A kernel that runs past its end changes them, which ``spoiled`` shows. The
buffers are remembered weakly: whoever drops one still leaves a graph with a dangling address, as on a GPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from kits.graphs.storages import StorageRef, as_view, unowned

GUARD = 16
"""Elements of a guard zone on either side of a buffer."""

_INT_GARBAGE = 0x2AAAAAAA


@dataclass(frozen=True, slots=True)
class _Buffer:
    """``zones`` are the bytes of both guard zones, and do not keep the buffer alive."""

    storage: StorageRef
    dtype: torch.dtype
    shape: tuple[int, ...]
    zones: tuple[torch.Tensor, torch.Tensor]

    @property
    def intact(self) -> torch.Tensor:
        """What each zone holds as long as nobody wrote to it."""
        return _garbage_bytes(self.dtype, self.zones[0].device)


_buffers: list[_Buffer] = []


def scratch(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous buffer of garbage between guard zones: NaN in floats, a huge id in integers, 1 in bytes."""
    size = math.prod(shape)
    whole = torch.full((size + 2 * GUARD,), _garbage(dtype), dtype=dtype, device=device)
    storage = StorageRef.of(whole)
    alias, length = unowned(storage.address, storage.nbytes, whole.device), GUARD * dtype.itemsize
    front, back = (as_view(alias, torch.uint8, (length,), (1,), start) for start in (0, storage.nbytes - length))
    _buffers.append(_Buffer(storage, dtype, shape, (front, back)))
    return whole[GUARD : GUARD + size].view(shape)


def _garbage(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("nan")
    return _INT_GARBAGE if dtype in (torch.int32, torch.int64) else 1


@functools.cache
def _garbage_bytes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((GUARD,), _garbage(dtype), dtype=dtype, device=device).view(torch.uint8)


def forget_buffers() -> None:
    """Begin anew: buffers of an earlier subtest are nobody's concern."""
    _buffers.clear()


def intact() -> torch.Tensor:
    """Whether nobody wrote to a guard zone of a living buffer: a bool on the device, found in one comparison."""
    living = _living()
    if not living:
        return torch.tensor(True)
    zones = torch.cat([zone for buffer in living for zone in buffer.zones])
    return (zones == torch.cat([buffer.intact for buffer in living for _ in buffer.zones])).all()


def spoiled() -> list[str]:
    """The living buffers whose guard zones somebody wrote to, described by dtype and shape."""
    return [
        f"{str(buffer.dtype).removeprefix('torch.')} buffer of shape {buffer.shape}"
        for buffer in _living()
        if not all(torch.equal(zone, buffer.intact) for zone in buffer.zones)
    ]


def _living() -> list[_Buffer]:
    return [buffer for buffer in _buffers if buffer.storage.lock() is not None]


_PADDING_NAN = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}


def fill_with_padding_nan(values: torch.Tensor) -> None:
    """NaN in other bits than those of the pool's poison: written where nobody owns the slot, it still is a change."""
    integers, pattern = _PADDING_NAN[values.element_size()]
    values.view(integers).fill_(pattern)
