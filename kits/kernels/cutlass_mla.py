"""CUTLASS MLA decode (SM 10.0): one query per request over latent keys in pages.

Convention source: ``sgl_kernel.cutlass_mla_decode`` and ``sgl_kernel.cutlass_mla_get_workspace_size``.
"""

from __future__ import annotations

import torch

from kits.errors import KernelFault, Unavailable
from kits.kernels import _ops, provenance
from kits.kernels._attend import attend

KERNEL = "cutlass_mla_decode"
LATENT, ROPE = 512, 64
BLOCK = 128  # keys of the kernel's tile; a table row must fill whole tiles


def cutlass_mla_get_workspace_size(
    max_seq_len: int, num_batches: int, sm_count: int = 0, num_kv_splits: int = 1, *, device: torch.device
) -> int:
    """Bytes of the workspace for ``num_batches`` requests of up to ``max_seq_len`` keys; 1 for the emulation.

    ``device`` is ours: the library asks the current CUDA device, which a CPU worker on a GPU host must not touch.
    """
    if max_seq_len <= 0 or num_batches <= 0:
        raise ValueError(f"{KERNEL}: max_seq_len {max_seq_len} and num_batches {num_batches} must be above 0")
    if device.type != "cuda":
        return 1
    try:
        from sgl_kernel import cutlass_mla_get_workspace_size as library
    except ImportError:
        return 1  # the decode itself says that the package is missing
    size: int = library(max_seq_len, num_batches, sm_count, num_kv_splits)
    return size


def cutlass_mla_decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c_and_k_pe_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    workspace: torch.Tensor,
    sm_scale: float,
    num_kv_splits: int = 1,
) -> torch.Tensor:
    """``q_nope`` (B, H <= 128, 512), ``q_pe`` (B, H, 64); ``kv_c_and_k_pe_cache`` (pages, page_size, 576).

    ``seq_lens`` (B,) int32: all keys of a request; ``page_table`` (B, columns) int32, columns a multiple of
    ``128 / page_size``; ``workspace`` uint8. The value of a key is its first 512 numbers. ``num_kv_splits`` stays 1
    under a CUDA graph, as the library advises.

    Returns a fresh (B, H, 512). A request of length 0 is outside the contract and becomes NaN. ``KernelFault``
    (emulation) for a negative length, a table too narrow, page ids outside the cache.
    """
    rows, heads, latent = q_nope.shape
    _, page_size, width = kv_c_and_k_pe_cache.shape
    if (latent, q_pe.shape[2], width) != (LATENT, ROPE, LATENT + ROPE) or q_pe.shape[:2] != (rows, heads):
        raise ValueError(
            f"{KERNEL}: dims must be {LATENT}, {ROPE} and {LATENT + ROPE}: q_nope {tuple(q_nope.shape)}, "
            f"q_pe {tuple(q_pe.shape)}, cache {tuple(kv_c_and_k_pe_cache.shape)}"
        )
    if heads > 128 or not 0 < page_size <= BLOCK or page_size & (page_size - 1):
        raise ValueError(f"{KERNEL}: {heads} heads (at most 128), pages of {page_size} (a power of two up to {BLOCK})")
    if page_table.shape[0] != rows or seq_lens.shape != (rows,) or page_table.shape[1] % (BLOCK // page_size):
        raise ValueError(
            f"{KERNEL}: {rows} requests, seq_lens {tuple(seq_lens.shape)}, page_table {tuple(page_table.shape)} "
            f"(columns in multiples of {BLOCK // page_size})"
        )
    _ops.require_indices(KERNEL, packed=True, seq_lens=seq_lens, page_table=page_table)
    result: torch.Tensor = _op(
        q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, sm_scale, num_kv_splits
    )
    return result


def _emulate(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    workspace: torch.Tensor,
    sm_scale: float,
    num_kv_splits: int,
) -> torch.Tensor:
    provenance.note(provenance.EMULATED)
    pages, page_size, _ = cache.shape
    out = torch.full_like(q_nope, float("nan"))
    for row, length in enumerate(seq_lens.tolist()):
        if length < 0:
            raise KernelFault(KERNEL, "seq_lens", f"row {row}: {length}")
        if length == 0:
            continue
        ids, inside = _ops.page_slice(KERNEL, "page_table", row, page_table[row], page_size, pages, 0, length)
        keys = cache[ids].flatten(0, 1)[inside].unsqueeze(1)
        query = torch.cat([q_nope[row], q_pe[row]], dim=-1).unsqueeze(0)
        out[row] = attend(query, keys, keys[..., :LATENT], scale=sm_scale)[0][0]
    return out


def _native(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    workspace: torch.Tensor,
    sm_scale: float,
    num_kv_splits: int,
) -> torch.Tensor:
    major, minor = torch.cuda.get_device_capability(q_nope.device)
    if major != 10:
        raise Unavailable("architecture", f"CUTLASS MLA needs SM 10.0, this is SM {major}.{minor}")
    try:
        from sgl_kernel import cutlass_mla_decode as library
    except ImportError as error:
        raise Unavailable("package", f"sgl_kernel cannot be imported: {error}") from error
    provenance.note(provenance.NATIVE)
    out: torch.Tensor = library(q_nope, q_pe, cache, seq_lens, page_table, workspace, sm_scale, num_kv_splits)
    return out


def _fake(q_nope: torch.Tensor, *_rest: object) -> torch.Tensor:
    return torch.empty_like(q_nope)


_op = _ops.define(
    "cutlass_mla_decode(Tensor q_nope, Tensor q_pe, Tensor cache, Tensor seq_lens, Tensor page_table, "
    "Tensor(a!) workspace, float sm_scale, int num_kv_splits) -> Tensor",
    cpu=_emulate,
    cuda=_native,
    fake=_fake,
)
