"""What FlashInfer's ``plan`` leaves on the device for ``run``: a list of tiles, in the wrapper's int workspace.

The library splits every request's queries and keys into tiles on the host, copies the list into a workspace on the
device, and its kernel computes exactly the listed tiles: a replay after which nobody planned again misses the keys
and queries that no tile covers. The emulation keeps that property with smaller tiles (16 queries, 16 keys), so that
short requests show it; how a request is split changes no result beyond rounding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kits.errors import KernelFault

QUERY_TILE = 16
KEY_TILE = 16
_ENTRIES = 1 << 16
_GARBAGE = 0x5A5A5A5A
_HEADER = 2  # number of tiles, keys of a tile


def new_workspace(device: torch.device) -> torch.Tensor:
    """An int32 workspace of uninitialised memory: garbage, never zeros."""
    return torch.full((_ENTRIES,), _GARBAGE, dtype=torch.int32, device=device)


def key_tile(page_size: int) -> int:
    """Keys of a tile: whole pages, at least one."""
    return max(KEY_TILE // page_size, 1) * page_size


def tiles(q_lens: list[int], kv_lens: list[int], keys: int) -> Iterator[tuple[int, int, int]]:
    """All (request, query tile, key tile). A request without keys has one tile, which writes zeros."""
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for query_tile in range(-(-q_len // QUERY_TILE)):
            for kv_tile in range(max(-(-kv_len // keys), 1)):
                yield request, query_tile, kv_tile


def write(workspace: torch.Tensor, keys: int, entries: list[tuple[int, ...]]) -> None:
    """Copy a schedule to the device. Entries beyond it keep what an earlier plan left."""
    flat = [len(entries), keys, *(value for entry in entries for value in entry)]
    if len(flat) > workspace.numel():
        raise ValueError(f"the schedule needs {len(flat)} entries; the int workspace has {workspace.numel()}")
    workspace[: len(flat)].copy_(torch.tensor(flat, dtype=torch.int32))


def read(kernel: str, workspace: torch.Tensor, width: int) -> tuple[int, list[list[int]]]:
    """(keys of a tile, entries of ``width`` values each), as the kernel finds them."""
    count, keys = workspace[:_HEADER].tolist()
    stop = _HEADER + count * width
    if count < 0 or stop > workspace.numel():
        raise KernelFault(kernel, "int_workspace", f"holds no schedule (count {count}): plan was not called")
    flat: list[int] = workspace[_HEADER:stop].tolist()
    return keys, [flat[start : start + width] for start in range(0, len(flat), width)]
