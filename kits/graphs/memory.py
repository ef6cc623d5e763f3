"""The private memory of a recorded graph, and the poison in it.

What an op of a capture returns gets memory of its own, filled with poison: NaN for floats, large garbage for
integers, True for bool. It is poisoned again before every replay, and a tensor that was dropped during capture is
poisoned at that point of the replay, where a caching allocator might hand its memory to somebody else.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from kits.graphs.storages import as_view, layout_key

_ALIGN = 64  # as torch's own CPU allocator, since results of some matrix kernels depend on alignment
_CHUNK = 1 << 15

_NAN_BYTE = 0xFF  # every float format reads this as NaN, but for the "fnuz" ones
_POISON_BYTES = {torch.bool: 0x01, torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}
_SIGNED = 0x5B
_UNSIGNED = 0xDB


@functools.cache
def poison_byte(dtype: torch.dtype) -> int:
    """The byte that poison repeats: NaN for floats, a large number for integers, True for bool."""
    if dtype in _POISON_BYTES:
        return _POISON_BYTES[dtype]
    if dtype.is_floating_point or dtype.is_complex:
        return _NAN_BYTE
    return _SIGNED if dtype.is_signed else _UNSIGNED


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill the whole storage of a CPU tensor with poison."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        ctypes.memset(storage.data_ptr(), poison_byte(tensor.dtype), storage.nbytes())
    return tensor


class _Chunk:
    """Memory for blocks of one poison byte, full of it from the start."""

    def __init__(self, size: int, byte: int) -> None:
        buffer = bytearray([byte]) * (size + _ALIGN)
        start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self.address = start + -start % _ALIGN
        self.memory = memoryview(buffer)[self.address - start :]
        self.size = size
        self.used = 0


class Lane:
    """The recorded steps of one stream of a capture, in order; a dropped block is a step too."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.joined: Lane | None = None

    def join(self, other: Lane) -> None:
        """Let the steps of ``other`` come before what follows here."""
        self.steps += other.steps
        other.steps, other.joined = [], self

    def drop(self, block: Block) -> None:
        lane = self
        while lane.joined is not None:
            lane = lane.joined
        lane.steps.append(block)


@dataclass(slots=True, eq=False)
class Block:
    """Private memory of one storage. ``tensor`` is the graph's own handle on it, apart from the caller's."""

    address: int
    nbytes: int
    byte: int
    tensor: torch.Tensor
    home: Lane
    """The lane in which it was allocated; that it was dropped is noted there."""
    views: dict[tuple, torch.Tensor] = field(default_factory=dict)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The graph's own tensor with the memory and layout of ``tensor``."""
        key = layout_key(tensor)
        view = self.views.get(key)
        if view is None:
            view = self.views[key] = as_view(self.tensor.untyped_storage(), *key)
        return view


class Arena:
    """Allocates blocks, knows which living storages are its own, and notes when the caller drops one.

    A caller's tensor lies in a storage that owns a ``memoryview`` of the block. When the last tensor of that storage
    dies, so does the view, and its weak reference calls back at once. The graph works through other storages over the
    same memory, so it never prolongs the caller's. A dropped block is noted in its lane, until the arena is closed.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, list[_Chunk]] = {}
        self._leases: dict[int, tuple[Block, weakref.ref]] = {}
        self._weak = weakref.ref(self)  # no cycle, or a dropped graph would wait for the garbage collector
        self.closed = False

    def find(self, cdata: int) -> Block | None:
        lease = self._leases.get(cdata)
        return lease[0] if lease else None

    def new(
        self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], home: Lane
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The caller's tensor, and the graph's own over the same memory."""
        nbytes = max(_extent(shape, stride), 1) * dtype.itemsize
        byte = poison_byte(dtype)
        chunk, offset = self._take(nbytes, byte)
        lease = chunk.memory[offset : offset + nbytes]
        mine = torch.frombuffer(chunk.memory[offset : offset + nbytes], dtype=dtype).as_strided_(shape, stride)
        tensor = torch.frombuffer(lease, dtype=dtype).as_strided_(shape, stride)
        block = Block(chunk.address + offset, nbytes, byte, mine, home)
        arena, cdata = self._weak, tensor.untyped_storage()._cdata
        self._leases[cdata] = block, weakref.ref(lease, lambda _: _drop(arena(), cdata))
        return tensor, mine

    def poison(self) -> None:
        """Poison all private memory."""
        for byte, chunks in self._chunks.items():
            for chunk in chunks:
                ctypes.memset(chunk.address, byte, chunk.used)

    def _take(self, nbytes: int, byte: int) -> tuple[_Chunk, int]:
        chunks = self._chunks.setdefault(byte, [])
        if not chunks or chunks[-1].used + nbytes > chunks[-1].size:
            chunks.append(_Chunk(max(_CHUNK << min(len(chunks), 8), nbytes), byte))
        chunk = chunks[-1]
        offset = chunk.used
        chunk.used = min(-(-(offset + nbytes) // _ALIGN) * _ALIGN, chunk.size)
        return chunk, offset

    def drop(self, cdata: int) -> None:
        block, _ = self._leases.pop(cdata)
        if not self.closed:
            block.home.drop(block)


def _drop(arena: Arena | None, cdata: int) -> None:
    if arena is not None:
        arena.drop(cdata)


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements a storage needs to hold a tensor of this layout."""
    extent = 1
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            return 0
        extent += (size - 1) * step
    return extent
