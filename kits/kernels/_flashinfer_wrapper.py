"""What FlashInfer's paged wrappers share: the buffers that ``run`` reads, and the launch."""

from __future__ import annotations

import itertools
import math
from typing import TypeAlias

import torch

from kits.errors import KernelFault
from kits.kernels import _flashinfer_schedule as schedule
from kits.kernels import _ops
from kits.kernels._flashinfer_paged import kv_length, run_paged

Cache: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
handles = itertools.count(1)


class Planned:
    """Holds ``run`` to the heads and dims of ``plan``, before and after a capture.

    The library takes a query of other heads without a word, and computes the part of it that the plan covers.
    """

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.plan: tuple[int, ...] | None = None
        self.ran: tuple[int, ...] | None = None

    def planned(self, *heads: int) -> None:
        self.plan = heads
        self._agree()

    def runs(self, *heads: int) -> None:
        self.ran = heads
        self._agree()

    def _agree(self) -> None:
        if self.plan is not None and self.ran is not None and self.plan != self.ran:
            raise KernelFault(self.kernel, "plan", f"is for heads and dims {self.plan}; run has {self.ran}")


class PagedWrapper:
    """Base of the decode and the prefill wrapper."""

    kernel: str

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, use_cuda_graph: bool) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"{self.kernel}: kv_layout must be NHD or HND, not {kv_layout!r}")
        self.device = float_workspace_buffer.device
        self.float_workspace = float_workspace_buffer
        self.kv_layout = kv_layout
        self.use_cuda_graph = use_cuda_graph
        self.int_workspace = (
            torch.empty(0, dtype=torch.int32) if self.device.type == "cuda" else schedule.new_workspace(self.device)
        )
        self.qo_indptr: torch.Tensor | None = None
        self.kv_indptr: torch.Tensor | None = None
        self.kv_indices: torch.Tensor | None = None
        self.last_page_len: torch.Tensor | None = None
        self.custom_mask: torch.Tensor | None = None
        self.mask_indptr: torch.Tensor | None = None
        self.handle = next(handles)
        self._heads = Planned(self.kernel)

    def _require_buffers(self, **buffers: torch.Tensor | None) -> None:
        for name, buffer in buffers.items():
            if not isinstance(buffer, torch.Tensor):
                raise ValueError(f"{self.kernel}: {name} should be a torch.Tensor in cudagraph mode")

    def _group_size(self, num_qo_heads: int, num_kv_heads: int) -> int:
        """Query heads per KV head."""
        if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
            raise ValueError(f"{self.kernel}: {num_qo_heads} query heads cannot share {num_kv_heads} KV heads")
        return num_qo_heads // num_kv_heads

    def _adopt(self, buffers: dict[str, torch.Tensor | None]) -> None:
        """Name the buffers that the library's wrapper reads, by our attributes."""
        for name, buffer in buffers.items():
            setattr(self, name, buffer)

    def _set(self, name: str, value: torch.Tensor) -> None:
        """Copy into the fixed buffer of a graph, or bind a tensor of its own."""
        if self.use_cuda_graph:
            buffer = getattr(self, name)
            buffer[: len(value)].copy_(value)
        else:
            setattr(self, name, value.to(self.device))

    def _lengths(
        self, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int
    ) -> list[int]:
        """Key counts on the host, for the schedule; what they announce must be there."""
        rows = len(last_page_len)
        starts = _ops.offsets(self.kernel, "plan(indptr)", kv_indptr, rows)
        if starts[rows] > len(kv_indices):
            raise KernelFault(
                self.kernel, "plan(indices)", f"has {len(kv_indices)} entries; the offsets announce {starts[rows]}"
            )
        fills: list[int] = last_page_len.tolist()
        return [
            kv_length(self.kernel, row, starts[row + 1] - starts[row], fills[row], page_size) for row in range(rows)
        ]

    def _set_pages(
        self,
        rows: int,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
    ) -> None:
        if self.use_cuda_graph:
            assert self.last_page_len is not None
            assert self.kv_indices is not None
            if rows != len(self.last_page_len):
                raise ValueError(
                    f"{self.kernel}: the batch size is fixed in cudagraph mode: {rows} rows are planned, "
                    f"the buffers were made for {len(self.last_page_len)}"
                )
            if len(kv_indices) > len(self.kv_indices):
                raise ValueError(f"{self.kernel}: {len(kv_indices)} indices do not fit into {len(self.kv_indices)}")
        self._set("kv_indptr", kv_indptr)
        self._set("kv_indices", kv_indices)
        self._set("last_page_len", last_page_len)

    def _set_options(
        self,
        page_size: int,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype | None,
        causal: bool,
    ) -> None:
        self._page_size = page_size
        self._window_left = window_left
        self._soft_cap = logits_soft_cap or 0.0
        self._sm_scale = sm_scale
        self._q_dtype, self._kv_dtype = q_data_type, kv_data_type or q_data_type
        self._causal = causal

    def _run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        k_scale: float | None,
        v_scale: float | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        k_cache, v_cache = unpack_cache(paged_kv_cache)
        if q.dtype != self._q_dtype or k_cache.dtype != self._kv_dtype:
            raise ValueError(
                f"{self.kernel}: planned for q {self._q_dtype} and cache {self._kv_dtype}, "
                f"run with {q.dtype} and {k_cache.dtype}"
            )
        if self.kv_layout == "HND":
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        if k_cache.shape[1] != self._page_size:
            raise ValueError(f"{self.kernel}: planned for pages of {self._page_size}, not {k_cache.shape[1]}")
        self._heads.runs(q.shape[1], k_cache.shape[2], q.shape[2])
        scale = 1.0 / math.sqrt(q.shape[-1]) if self._sm_scale is None else self._sm_scale
        run_paged(
            q,
            k_cache,
            v_cache,
            self.qo_indptr,
            self.kv_indptr,
            self.kv_indices,
            self.last_page_len,
            self.custom_mask,
            self.mask_indptr,
            self.int_workspace,
            out,
            lse,
            scale * (1.0 if k_scale is None else k_scale),
            1.0 if v_scale is None else v_scale,
            self._causal,
            self._window_left,
            self._soft_cap,
            self.handle,
            self.kernel,
        )


def unpack_cache(paged_kv_cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(paged_kv_cache, torch.Tensor):
        return paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    return paged_kv_cache
