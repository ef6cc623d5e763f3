"""The private memory of a recorded graph, and the poison in it.

What an op of a capture returns gets memory of its own, filled with poison: NaN for floats, large garbage for
integers, True for bool. It is poisoned again before every replay, and a tensor that was dropped during capture is
poisoned at that point of the replay, where a caching allocator might hand its memory to somebody else.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import torch

from kits.graphs.storages import as_view, layout_key

_ALIGN = 64  # as torch's own CPU allocator, since results of some matrix kernels depend on alignment
_CHUNK = 1 << 15

_NAN_BYTE = 0xFF  # every float format reads this as NaN, but for the "fnuz" ones
_POISON_BYTES = {torch.bool: 0x01, torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}
_SIGNED = 0x5B
_UNSIGNED = 0xDB


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
    def __init__(self, size: int) -> None:
        self.buffer = bytearray(size + _ALIGN)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self.offset = -start % _ALIGN
        self.address = start + self.offset
        self.size = size
        self.used = 0


@dataclass(slots=True)
class Block:
    """Private memory of one storage. ``storage`` is the graph's own handle on it, apart from the caller's."""

    address: int
    nbytes: int
    byte: int
    storage: torch.UntypedStorage
    views: dict[tuple, torch.Tensor]
    home: list
    """The list of recorded steps during which it was allocated; that it was dropped is noted there."""

    def poison(self) -> None:
        ctypes.memset(self.address, self.byte, self.nbytes)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The graph's own tensor with the memory and layout of ``tensor``."""
        key = layout_key(tensor)
        view = self.views.get(key)
        if view is None:
            view = self.views[key] = as_view(self.storage, *key)
        return view


class Arena:
    """Allocates blocks, knows which living storages are its own, and notes when the caller drops one.

    A caller's tensor lies in a storage that owns a ``memoryview`` of the block. When the last tensor of that storage
    dies, so does the view, and its weak reference calls back at once. The graph works through other storages over the
    same memory, so it never prolongs the caller's. A dropped block is appended to its ``home``, the list of recorded
    steps, until the arena is closed.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, list[_Chunk]] = {}
        self._leases: dict[int, tuple[Block, weakref.ref]] = {}
        self.closed = False

    def find(self, cdata: int) -> Block | None:
        lease = self._leases.get(cdata)
        return lease[0] if lease else None

    def new(
        self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], home: list
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The caller's tensor, and the graph's own over the same memory."""
        nbytes = max(_extent(shape, stride) * dtype.itemsize, 1)
        byte = poison_byte(dtype)
        chunk, offset = self._take(nbytes, byte)
        memory = memoryview(chunk.buffer)[chunk.offset + offset : chunk.offset + offset + nbytes]
        storage = torch.frombuffer(memoryview(memory), dtype=torch.uint8).untyped_storage()
        block = Block(chunk.address + offset, nbytes, byte, storage, {}, home)
        block.poison()
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        cdata = tensor.untyped_storage()._cdata
        tensor = as_view(tensor.untyped_storage(), dtype, shape, stride, 0)
        arena = weakref.ref(self)  # no cycle, or a dropped graph would wait for the garbage collector
        self._leases[cdata] = block, weakref.ref(memory, lambda _: _drop(arena(), cdata))
        return tensor, block.view(tensor)

    def poison(self) -> None:
        """Poison all private memory."""
        for byte, chunks in self._chunks.items():
            for chunk in chunks:
                ctypes.memset(chunk.address, byte, chunk.used)

    def _take(self, nbytes: int, byte: int) -> tuple[_Chunk, int]:
        chunks = self._chunks.setdefault(byte, [])
        if not chunks or chunks[-1].used + nbytes > chunks[-1].size:
            chunks.append(_Chunk(max(_CHUNK << min(len(chunks), 8), nbytes)))
        chunk = chunks[-1]
        offset = chunk.used
        chunk.used = min(-(-(offset + nbytes) // _ALIGN) * _ALIGN, chunk.size)
        return chunk, offset

    def drop(self, cdata: int) -> None:
        block, _ = self._leases.pop(cdata)
        if not self.closed:
            block.home.append(block)


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
