"""FlashInfer's latent attention (MLA) over a paged cache: the contract of the flashinfer backend for mla.

Convention source: ``flashinfer.mla.BatchMLAPagedAttentionWrapper``, version 0.6.12, backends fa2 and fa3. ``plan`` and
``run`` as in `kits.kernels.flashinfer`, with one difference that matters for stale metadata: the schedule holds
every length and offset, and ``run`` reads the schedule and ``kv_indices`` only.
"""

from __future__ import annotations

import itertools

import torch

from kits.errors import KernelFault
from kits.kernels import _flashinfer_schedule as schedule
from kits.kernels import _ops, provenance
from kits.kernels._attend import attend, causal_window, merge_parts
from kits.kernels._flashinfer_paged import EMPTY_LSE, LOG2_E, native_wrappers
from kits.kernels._flashinfer_wrapper import Planned, handles

KERNEL = "BatchMLAPagedAttentionWrapper"
_WIDTH = 8  # values of a schedule entry, see `_entries`


class BatchMLAPagedAttentionWrapper:
    """Decode, extend and verify over latent keys: the value of a key is its first part (``ckv``)."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        """Buffers for a CUDA graph of B requests, int32 on the device: (B + 1,), (B + 1,), (max pages,), (B,)."""
        self.device = float_workspace_buffer.device
        self.float_workspace = float_workspace_buffer
        self.use_cuda_graph = use_cuda_graph
        self.qo_indptr, self.kv_indptr = qo_indptr, kv_indptr
        self.kv_indices, self.kv_len_arr = kv_indices, kv_len_arr
        self.handle = next(handles)
        self._heads = Planned(KERNEL)
        if self.device.type == "cuda":
            from kits.kernels import _flashinfer_native

            self._native = native_wrappers[self.handle] = _flashinfer_native.MLA(
                float_workspace_buffer, use_cuda_graph, qo_indptr, kv_indptr, kv_indices, kv_len_arr, backend
            )
        else:
            self.int_workspace = schedule.new_workspace(self.device)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Copy the page lists into the buffers and schedule the work; not inside a capture.

        ``qo_indptr`` (B + 1,) query offsets, ``kv_indptr`` (B + 1,) **page** offsets, ``kv_indices``
        (>= kv_indptr[-1],), ``kv_len_arr`` (B,) keys of each request, all int32. The last query stands at the last
        key; ``causal`` hides later keys. ``sm_scale`` is that of the head dim before absorption (128 + 64).

        ``KernelFault`` (emulation): offsets that decrease, a negative length, more keys than a request has pages for.
        """
        self._heads.planned(num_heads, head_dim_ckv, head_dim_kpe)
        self._page_size, self._causal, self._sm_scale = page_size, causal, sm_scale
        self._dtypes = (q_data_type, kv_data_type)
        if self.device.type == "cuda":
            self._native.plan(
                qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
                causal, sm_scale, q_data_type, kv_data_type,
            )  # fmt: skip
            for name, buffer in self._native.buffers().items():
                setattr(self, name, buffer)
            return
        rows = len(kv_len_arr)
        entries = _entries(qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size)
        for name, value in (
            ("qo_indptr", qo_indptr),
            ("kv_indptr", kv_indptr),
            ("kv_indices", kv_indices),
            ("kv_len_arr", kv_len_arr),
        ):
            if not self.use_cuda_graph:
                setattr(self, name, value.to(self.device))
                continue
            buffer = getattr(self, name)
            if len(value) > len(buffer) or (name == "kv_len_arr" and len(buffer) != rows):
                raise ValueError(f"{KERNEL}: {name} of {len(value)} entries does not fit the buffer of {len(buffer)}")
            buffer[: len(value)].copy_(value)
        schedule.write(self.int_workspace, 0, entries)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        return_lse_base_on_e: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``q_nope`` (T, H, 512), ``q_pe`` (T, H, 64), ``ckv_cache`` (pages, page_size, 512), ``kpe_cache`` (.., 64).

        Returns ``out`` (T, H, 512), uninitialised where no request of the last plan has a query, and ``lse`` (T, H)
        float32 in base 2, or natural with ``return_lse_base_on_e``.
        """
        if (q_nope.dtype, ckv_cache.dtype) != self._dtypes:
            raise ValueError(f"{KERNEL}: planned for {self._dtypes}, run with {(q_nope.dtype, ckv_cache.dtype)}")
        if ckv_cache.shape[1] != self._page_size:
            raise ValueError(f"{KERNEL}: planned for pages of {self._page_size}, not {ckv_cache.shape[1]}")
        self._heads.runs(q_nope.shape[1], q_nope.shape[2], q_pe.shape[2])
        if out is None:
            out = torch.empty_like(q_nope)
        if return_lse and lse is None:
            lse = q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32)
        _op(
            q_nope, q_pe, ckv_cache, kpe_cache, self.kv_indices, self.int_workspace, out, lse if return_lse else None,
            self._sm_scale, self._causal, return_lse_base_on_e, self.handle,
        )  # fmt: skip
        return (out, lse) if return_lse and lse is not None else out


def _entries(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    page_size: int,
) -> list[tuple[int, ...]]:
    """A tile: (first token, tokens, its index in the request, queries, first page, keys, first key, end key)."""
    rows = len(kv_len_arr)
    q_starts = _ops.offsets(KERNEL, "plan(qo_indptr)", qo_indptr, rows)
    kv_starts = _ops.offsets(KERNEL, "plan(kv_indptr)", kv_indptr, rows)
    lengths: list[int] = kv_len_arr.tolist()
    if kv_starts[rows] > len(kv_indices):
        raise KernelFault(KERNEL, "plan(kv_indices)", f"has {len(kv_indices)} entries of {kv_starts[rows]} announced")
    for row, length in enumerate(lengths):
        room = (kv_starts[row + 1] - kv_starts[row]) * page_size
        if not 0 <= length <= room:
            raise KernelFault(KERNEL, "plan(kv_len_arr)", f"row {row}: {length} keys; its pages hold {room}")
    q_lens = [stop - start for start, stop in itertools.pairwise(q_starts)]
    keys = schedule.key_tile(page_size)
    entries: list[tuple[int, ...]] = []
    for row, query_tile, key_tile in schedule.tiles(q_lens, lengths, keys):
        index = query_tile * schedule.QUERY_TILE
        tokens = min(schedule.QUERY_TILE, q_lens[row] - index)
        first = key_tile * keys
        stop = min(first + keys, lengths[row])
        entries.append((q_starts[row] + index, tokens, index, q_lens[row], kv_starts[row], lengths[row], first, stop))
    return entries


def _emulate(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    int_workspace: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sm_scale: float,
    causal: bool,
    base_e: bool,
    handle: int,
) -> None:
    provenance.note(provenance.EMULATED)
    pages, page_size = ckv_cache.shape[:2]
    parts: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for token, tokens, index, q_len, first_page, length, first, last in schedule.read(KERNEL, int_workspace, _WIDTH)[1]:
        if token < 0 or token + tokens > q_nope.shape[0]:
            raise KernelFault(
                KERNEL, "int_workspace", f"a tile covers tokens {token}..{token + tokens - 1} of {q_nope.shape[0]}"
            )
        found = parts.setdefault((token, tokens), [])
        position = length - q_len + index
        if causal:
            last = min(last, position + tokens)
        if last <= first:
            continue
        ids, inside = _ops.page_slice(
            KERNEL, "kv_indices", token, kv_indices[first_page:], page_size, pages, first, last
        )
        latent = ckv_cache[ids].flatten(0, 1)[inside].unsqueeze(1)
        rope = kpe_cache[ids].flatten(0, 1)[inside].unsqueeze(1)
        here = slice(token, token + tokens)
        found.append(
            attend(
                torch.cat([q_nope[here], q_pe[here]], dim=-1),
                torch.cat([latent, rope], dim=-1),
                latent,
                scale=sm_scale,
                visible=causal_window(
                    tokens, position, first, last - first, left=-1, right=0 if causal else -1, device=q_nope.device
                ),
            )
        )
    for (token, tokens), found in parts.items():
        here = slice(token, token + tokens)
        if not found:
            out[here] = 0
            if lse is not None:
                lse[here] = EMPTY_LSE
            continue
        result, result_lse = merge_parts(found)
        out[here] = result
        if lse is not None:
            lse[here] = (result_lse if base_e else result_lse * LOG2_E).clamp(min=EMPTY_LSE)


def _native(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    int_workspace: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sm_scale: float,
    causal: bool,
    base_e: bool,
    handle: int,
) -> None:
    provenance.note(provenance.NATIVE)
    native_wrappers[handle].launch_mla(q_nope, q_pe, ckv_cache, kpe_cache, out, lse, base_e)


_op = _ops.define(
    "flashinfer_mla_paged_attention(Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, "
    "Tensor kv_indices, Tensor int_workspace, Tensor(a!) out, Tensor(b!)? lse, float sm_scale, bool causal, "
    "bool base_e, int handle) -> ()",
    cpu=_emulate,
    cuda=_native,
    fake=_ops.fake_none,
)
