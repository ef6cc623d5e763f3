"""Spares: public bugs beside the counted ones, inside kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kits.faults.registry import Plant, Touches, active, fault
from kits.kernels import _flashinfer_paged, _ops, flash_attn, trtllm
from kits.kernels import _flashinfer_schedule as schedule


@fault(
    "S08",
    title="the LSE of a part without keys is plus infinity",
    references=("vllm-project/vllm#15492", "vllm-project/vllm#28181"),
    kind=8,
    axes="a result in two parts, one of them empty",
    touches=Touches(backends=("fa3", "fa4"), methods=("dense",), sweeps=("verify", "verify_cg")),
)
def s08(plant: Plant) -> None:
    plant.replace(flash_attn, "_op", lambda _original: _other_flash_attn("empty_lse", _infinite_lse))


def _infinite_lse(*arguments: Any) -> Any:
    out, lse = flash_attn._emulate(*arguments)
    return out, _swap(lse, lse.masked_fill(lse == float("-inf"), float("inf")))


@fault(
    "S10",
    title="the combination of splits strides by the longest row's queries",
    references=("Dao-AILab/flash-attention#2550",),
    kind=8,
    axes="ragged queries over rows long enough to be split",
    touches=Touches(backends=("fa3", "fa4"), methods=("dense",), sweeps=("eager", "draft_extend", "layouts")),
)
def s10(plant: Plant) -> None:
    plant.replace(flash_attn, "_op", lambda _original: _other_flash_attn("strided_output", _strided_output))


def _strided_output(q: Any, k: Any, v: Any, table: Any, lens: Any, offsets: Any, queries: int, *rest: Any) -> Any:
    out, lse = flash_attn._emulate(q, k, v, table, lens, offsets, queries, *rest)
    wrong, starts = out.clone(), offsets.tolist()
    for row, length in enumerate(lens.tolist()):
        if length > SPLIT_KEYS:
            here = out[starts[row] : starts[row + 1]]
            there = wrong[row * queries : row * queries + len(here)]
            there.copy_(here[: len(there)])
    return _swap(out, wrong), lse


SPLIT_KEYS = 16
"""Rows with more keys are split."""


@fault(
    "S11",
    title="values of the last page's unused slots are loaded, and weighted with zero",
    references=("vllm-project/vllm#936", "vllm-project/vllm#53856", "ROCm/aiter#5401"),
    kind=6,
    axes="rows that do not fill their last page, whose rest holds no numbers",
    touches=Touches(backends=("trtllm_mha",), sweeps=("eager", "layouts", "decode_cg")),
)
def s11(plant: Plant) -> None:
    plant.replace(trtllm, "_op", lambda _original: _unmasked_tail_op())


@functools.cache
def _unmasked_tail_op() -> Any:
    arguments = str(trtllm._op._schema).split("(", 1)[1]
    return _ops.define(
        f"fault_trtllm_unmasked_tail({arguments}", cpu=_unmasked_tail, cuda=trtllm._native, fake=_ops.fake_none
    )


def _unmasked_tail(q: Any, k: Any, v: Any, space: Any, tables: Any, lens: Any, *rest: Any) -> None:
    out = rest[4]
    trtllm._emulate(q, k, v, space, tables, lens, *rest)
    right, page_size = out.clone(), v.shape[1]
    for row, length in enumerate(lens[: len(q)].tolist()):
        tail = v[int(tables[row, (length - 1) // page_size]), (length - 1) % page_size + 1 :]
        out[row] += 0.0 * tail.sum()
    _swap(right, out)


@fault(
    "S13",
    title="tiles below the diagonal skip the tree's mask",
    references=("PaddlePaddle/FastDeploy#3514",),
    kind=6,
    axes="a tree of more tokens than a tile has",
    touches=Touches(backends=("flashinfer",), methods=("dense",), modes=("TARGET_VERIFY",)),
)
def s13(plant: Plant) -> None:
    """Tiles of 4, the scale of these trees to real ones."""
    tile = 4

    def make(original: Any) -> Any:
        def unpack_mask(kernel: str, row: int, packed: Any, start: int, queries: int, keys: int) -> torch.Tensor:
            right = original(kernel, row, packed, start, queries, keys)
            first_position = keys - queries + torch.arange(queries) // tile * tile
            last_key = torch.arange(keys) // tile * tile + tile - 1
            return plant.swap(right, right | (last_key[None, :] < first_position[:, None]))

        return unpack_mask

    plant.replace(_flashinfer_paged, "unpack_mask", make)


@fault(
    "S15",
    title="the mask is read for a whole tile of queries",
    references=("flashinfer-ai/flashinfer#1008",),
    kind=6,
    axes="a mask that ends with its buffer",
    touches=Touches(backends=("flashinfer",), methods=("dense",), modes=("TARGET_VERIFY",)),
)
def s15(plant: Plant) -> None:
    def make(original: Any) -> Any:
        def unpack_mask(kernel: str, row: int, packed: Any, start: int, queries: int, keys: int) -> torch.Tensor:
            tile = -(-queries // schedule.QUERY_TILE) * schedule.QUERY_TILE
            plant.witness(changed=tile != queries)
            bits: torch.Tensor = original(kernel, row, packed, start, tile, keys)
            return bits[:queries]

        return unpack_mask

    plant.replace(_flashinfer_paged, "unpack_mask", make)


@functools.cache
def _other_flash_attn(name: str, emulation: Any) -> Any:
    arguments = str(flash_attn._op._schema).split("(", 1)[1]
    return _ops.define(
        f"fault_flash_attn_{name}({arguments}", cpu=emulation, cuda=flash_attn._native, fake=flash_attn._fake
    )


def _swap(right: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
    """``Plant.swap`` for an operator, which outlives the plant that had it defined."""
    plant = active()
    return wrong if plant is None else plant.swap(right, wrong)
