"""FlashInfer's paged decode and prefill wrappers: the contract of the flashinfer backend (dense, sliding window).

Convention source: ``flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper`` and
``flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper``, version 0.6.12. Both work in two steps: ``plan`` on the host
(it reads lengths there, so it cannot be captured), which leaves buffers and a schedule on the device, and ``run``,
which can be captured and reads those. For a CUDA graph the caller gives the buffers once (``use_cuda_graph=True``),
and plans again before each replay. The latent-attention wrapper is in `kits.kernels.flashinfer_mla`.

Common to both:

* ``paged_kv_cache``: ``(k_cache, v_cache)``, each (pages, page_size, Hkv, D) for ``NHD`` or (pages, Hkv, page_size, D)
  for ``HND``; or one tensor with K and V at ``[:, 0]`` and ``[:, 1]``.
* A request's pages are ``kv_indices[kv_indptr[b] : kv_indptr[b + 1]]``; its length is ``(pages - 1) * page_size +
  last_page_len[b]``, with ``1 <= last_page_len <= page_size``, and 0 where it has no page: zeros, and an LSE of -5e4.
* ``window_left``: keys more than this before the query's position are hidden, -1 for none. A window of W keys with the
  query's own is ``W - 1``. ``logits_soft_cap``: 0 or None for none.
* ``lse`` is (tokens, Hq) float32 in **base 2**; -5e4 stands for minus infinity.
* ``k_scale`` multiplies the scores, ``v_scale`` the output; both are host numbers, fixed by a capture.
* ``run`` computes what ``plan`` was told of heads and dims, and the library does not compare: a ``KernelFault``, on any
  device, for a query or a cache of others.
* A ``KernelFault`` (emulation) names offsets that decrease or leave their buffer, page ids outside the cache, a
  ``last_page_len`` outside its page, masks that end too early, and fewer indices than the offsets announce.
"""

from __future__ import annotations

import itertools

import torch

from kits.kernels import _flashinfer_schedule as schedule
from kits.kernels import _ops
from kits.kernels._flashinfer_paged import native_wrappers, segment_packbits
from kits.kernels._flashinfer_wrapper import Cache, PagedWrapper, unpack_cache

DECODE_GROUPS = (1, 2, 3, 4, 8)
"""Query heads per KV head that the library compiles its decode kernels for (``DISPATCH_GQA_GROUP_SIZE``)."""


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """One query per request, standing at its last key."""

    kernel = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        """``paged_kv_*_buffer`` (B + 1,), (max pages,), (B,) int32 on the device, for a CUDA graph of B requests.

        ``use_tensor_cores`` takes the kernels of the prefill wrapper, which know any number of query heads per KV head;
        the others are compiled for ``DECODE_GROUPS``.
        """
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self.use_tensor_cores = use_tensor_cores
        if use_cuda_graph:
            self._require_buffers(
                paged_kv_indptr_buffer=paged_kv_indptr_buffer,
                paged_kv_indices_buffer=paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
            )
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            if len(paged_kv_indptr_buffer) != len(paged_kv_last_page_len_buffer) + 1:
                raise ValueError(f"{self.kernel}: paged_kv_indptr_buffer must have batch_size + 1 entries")
            self.kv_indptr = paged_kv_indptr_buffer
            self.kv_indices = paged_kv_indices_buffer
            self.last_page_len = paged_kv_last_page_len_buffer
            self.qo_indptr = torch.arange(
                len(paged_kv_indptr_buffer), dtype=torch.int32, device=float_workspace_buffer.device
            )
        if self.device.type == "cuda":
            from kits.kernels import _flashinfer_native

            self._native = native_wrappers[self.handle] = _flashinfer_native.Decode(
                float_workspace_buffer, kv_layout, use_cuda_graph, use_tensor_cores,
                self.kv_indptr, self.kv_indices, self.last_page_len,
            )  # fmt: skip

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        """Copy the page lists into the buffers and schedule the work; not inside a capture.

        ``indptr`` (B + 1,), ``indices`` (>= indptr[-1],), ``last_page_len`` (B,) int32, on host or device.
        """
        rows = len(last_page_len)
        group_size = self._group_size(num_qo_heads, num_kv_heads)
        if not self.use_tensor_cores and group_size not in DECODE_GROUPS:
            raise ValueError(
                f"{self.kernel}: no decode kernel has {group_size} query heads per KV head, only "
                f"{', '.join(map(str, DECODE_GROUPS))}; use_tensor_cores=True takes any"
            )
        self._heads.planned(num_qo_heads, num_kv_heads, head_dim)
        self._set_options(page_size, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type, causal=False)
        if self.device.type == "cuda":
            self._native.plan(
                indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
                window_left=window_left, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type,
                kv_data_type=kv_data_type, sm_scale=sm_scale,
            )  # fmt: skip
            self._adopt(self._native.buffers())
            return
        lengths = self._lengths(indptr, indices, last_page_len, page_size)
        self._set_pages(rows, indptr, indices, last_page_len)
        if not self.use_cuda_graph:
            self.qo_indptr = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        keys = schedule.key_tile(page_size)
        schedule.write(self.int_workspace, keys, list(schedule.tiles([1] * rows, lengths, keys)))

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``q`` (B, Hq, D) with exactly the planned B. Returns ``out`` (B, Hq, Dv), and ``lse`` where asked for."""
        assert self.last_page_len is not None, f"{self.kernel}: plan was not called"
        if q.shape[0] != self.last_page_len.shape[0]:
            raise ValueError(
                f"{self.kernel}: q has {q.shape[0]} rows, the plan {self.last_page_len.shape[0]} (one query each)"
            )
        if out is None:
            out = q.new_empty((*q.shape[:-1], unpack_cache(paged_kv_cache)[1].shape[-1]))
        if return_lse and lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        self._run(q, paged_kv_cache, k_scale, v_scale, out, lse if return_lse else None)
        return (out, lse) if return_lse and lse is not None else out


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Ragged queries over keys that already lie in the cache: extend, verify, draft extend."""

    kernel = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        """Buffers for a CUDA graph of B requests, int32: (B + 1,), (B + 1,), (max pages,), (B,).

        ``custom_mask_buf`` uint8 holds packed bits, ``mask_indptr_buf`` (B + 1,) their first byte per request. As
        in the library, a wrapper that was given them masks by them in **every** run: plan each mode on its own wrapper.
        """
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self.backend = backend
        self._max_rows: int | None = None
        if use_cuda_graph:
            self._require_buffers(
                qo_indptr_buf=qo_indptr_buf,
                paged_kv_indptr_buf=paged_kv_indptr_buf,
                paged_kv_indices_buf=paged_kv_indices_buf,
                paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            )
            self.qo_indptr, self.kv_indptr = qo_indptr_buf, paged_kv_indptr_buf
            self.kv_indices, self.last_page_len = paged_kv_indices_buf, paged_kv_last_page_len_buf
            self.custom_mask, self.mask_indptr = custom_mask_buf, mask_indptr_buf
        if self.device.type == "cuda":
            from kits.kernels import _flashinfer_native

            self._native = native_wrappers[self.handle] = _flashinfer_native.Prefill(
                float_workspace_buffer, kv_layout, use_cuda_graph, self.qo_indptr, self.kv_indptr, self.kv_indices,
                self.last_page_len, self.custom_mask, self.mask_indptr, backend,
            )  # fmt: skip

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        """Copy page lists, query offsets and mask into the buffers and schedule the work; not inside a capture.

        The last of a request's queries stands at its last key (bottom-right); ``causal`` hides later keys.
        ``custom_mask``: bool, all requests' (queries, keys) matrices laid end to end, row-major; it replaces
        ``causal``, and the window cuts further. It is packed here, each request from a byte of its own.
        """
        rows = len(qo_indptr) - 1
        self._group_size(num_qo_heads, num_kv_heads)
        self._heads.planned(num_qo_heads, num_kv_heads, head_dim_qk)
        self._set_options(page_size, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type, causal)
        q_starts = _ops.offsets(self.kernel, "plan(qo_indptr)", qo_indptr, rows)
        self._planned_tokens = q_starts[rows]
        if self.use_cuda_graph:
            self._max_rows = self._planned_tokens if self._max_rows is None else self._max_rows
            if self._planned_tokens > self._max_rows:
                raise ValueError(
                    f"{self.kernel}: {self._planned_tokens} tokens; in cudagraph mode the {self._max_rows} of the "
                    "first plan are the maximum"
                )
        if self.device.type == "cuda":
            self._native.plan(
                qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
                num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo=head_dim_vo, custom_mask=custom_mask,
                causal=causal, sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type, kv_data_type=kv_data_type,
            )  # fmt: skip
            self._adopt(self._native.buffers())
            return
        lengths = self._lengths(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self._set_pages(rows, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._set("qo_indptr", qo_indptr)
        q_lens = [stop - start for start, stop in itertools.pairwise(q_starts)]
        self._set_mask(custom_mask, q_lens, lengths)
        keys = schedule.key_tile(page_size)
        schedule.write(self.int_workspace, keys, list(schedule.tiles(q_lens, lengths, keys)))

    def _set_mask(self, custom_mask: torch.Tensor | None, q_lens: list[int], lengths: list[int]) -> None:
        if custom_mask is None:
            if not self.use_cuda_graph:
                self.custom_mask = self.mask_indptr = None
            return
        if self.use_cuda_graph:
            self._require_buffers(custom_mask_buf=self.custom_mask, mask_indptr_buf=self.mask_indptr)
        sizes = [q_len * length for q_len, length in zip(q_lens, lengths, strict=True)]
        packed, indptr = segment_packbits(custom_mask, sizes)
        self._set("custom_mask", packed)
        self._set("mask_indptr", indptr)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``q`` (T, Hq, D) with exactly the planned ``qo_indptr[-1]`` tokens. Returns ``out`` (T, Hq, Dv).

        A result that is not given is allocated as zeros (``lse``: uninitialised); a replay writes the tokens of the
        last plan only.
        """
        if q.shape[0] != self._planned_tokens:
            raise ValueError(f"{self.kernel}: q has {q.shape[0]} tokens, qo_indptr ends at {self._planned_tokens}")
        if out is None:
            out = q.new_zeros((*q.shape[:-1], unpack_cache(paged_kv_cache)[1].shape[-1]))
        if return_lse and lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        self._run(q, paged_kv_cache, k_scale, v_scale, out, lse if return_lse else None)
        return (out, lse) if return_lse and lse is not None else out
