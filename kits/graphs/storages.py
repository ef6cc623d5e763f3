"""Weak references to tensor storages: how a graph remembers memory that it does not own.

A CUDA graph keeps addresses, not tensors. ``StorageRef`` does the same without a strong reference, and is exact
where a bare address or ``_cdata`` is not:

* While a weak reference is held, torch cannot give the same ``StorageImpl`` (``_cdata``) to another storage, so
  equal ``cdata`` means the same storage, and a storage that was freed and replaced, even at the same address, is
  seen as freed.
* The address is kept beside it, because ``resize_`` moves a living storage to other memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class StorageRef:
    """A storage held weakly. Hashable and comparable, also after the storage has died."""

    __slots__ = ("_alias", "_views", "_weak", "address", "cdata", "nbytes")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak = StorageWeakRef(storage)
        self.cdata: int = storage._cdata
        self.address: int = storage.data_ptr()
        self.nbytes: int = storage.nbytes()
        self._alias: torch.UntypedStorage | None = None
        self._views: dict[tuple, torch.Tensor] = {}

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageRef:
        return cls(tensor.untyped_storage())

    def __hash__(self) -> int:
        return hash(self.cdata)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageRef) and self.cdata == other.cdata

    def __repr__(self) -> str:
        return f"<storage at {self.address:#x}, {self.nbytes} bytes, {self.state()}>"

    def lock(self) -> torch.UntypedStorage | None:
        """The living storage, or None if it was freed or its memory moved since this reference was made."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        return storage if storage is not None and storage.data_ptr() == self.address else None

    def state(self) -> str:
        """``alive``, ``freed`` or ``moved`` (resized, so that the captured address is stale)."""
        if self._weak.expired():
            return "freed"
        return "alive" if self.lock() is not None else "moved"

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` still lies in this storage."""
        return tensor.untyped_storage()._cdata == self.cdata

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same memory and layout that does not keep the memory alive.

        It is what a replay works on: reading it after the storage died is what ``lock`` must rule out first.
        """
        key = layout_key(tensor)
        view = self._views.get(key)
        if view is None:
            if self._alias is None:
                self._alias = unowned(self.address, self.nbytes, tensor.device)
            view = self._views[key] = as_view(self._alias, *key)
        return view


def unowned(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over memory that somebody else owns."""
    if device.type != "cpu":
        return torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    if nbytes == 0:
        return torch.UntypedStorage(0)
    buffer = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def layout_key(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]:
    """What tells a tensor from others in the same storage: the arguments of ``as_view``."""
    return tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())


def as_view(
    storage: torch.UntypedStorage, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


@dataclass(frozen=True)
class Use:
    """The first op of a graph that reads (or writes) an external storage, and through which argument."""

    index: int
    op: str
    argument: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"op #{self.index} {self.op} (argument {self.argument}, {dtype} {shape})"


Uses = dict[StorageRef, Use]
