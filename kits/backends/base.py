"""The backend protocol: what the suite asks of an attention backend, and what a backend says about itself.

The split follows what engines do. ``prepare*`` is host-side work outside the graph (SGLang:
``init_forward_metadata`` and ``init_forward_metadata_out_graph``; vLLM: ``build`` and
``build_for_cudagraph_capture``); ``forward`` is what gets recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kits.batches import Batch
from kits.errors import ResultError
from kits.layers import Layer
from kits.pools import KVPool
from kits.subtest import Model, Speculation


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do. The suite checks a cell against it before it runs, and never guesses."""

    forward_modes: frozenset[str]
    """Forward modes that ``prepare`` accepts."""
    graph: str = "always"
    """Which batches may be captured: ``always``, ``uniform_query``, ``single_token``; ``split`` runs eagerly between
    graphs only (pcg, bcg); ``never`` has no graph at all."""
    methods: frozenset[str] = frozenset({"dense"})
    page_sizes: frozenset[int] | None = None
    """Page sizes the kernels take; None for any."""
    dtypes: frozenset[str] = frozenset({"float16", "bfloat16"})
    topk: int = 1
    """Largest topk of a verify tree or a draft."""
    window: bool = False
    sinks: bool = False
    softcap: bool = False
    kv_scales: bool = False
    pad_seq_len: int = 1
    """What the runner writes to ``seq_lens`` of padded rows (SGLang's ``get_cuda_graph_seq_len_fill_value``)."""
    batch_invariant: bool = False
    """A row's bits do not depend on the other rows."""
    reads_tail: str | None = None
    """Why the kernel loads the unwritten tail of a row's last page (with a reference); None where it does not."""
    fills_at_capture: frozenset[str] = frozenset()
    """Forward modes in which ``prepare_capture`` plans on fill values instead of the batch's own; what warm-ups put out
    is compared in all others."""


@dataclass(frozen=True, eq=False)
class Geometry:
    """Everything about model, pool and engine limits that a backend may size its buffers by."""

    model: Model
    layers: tuple[Layer, ...]
    pool: KVPool
    page_size: int
    device: torch.device
    dtype: torch.dtype
    speculation: Speculation | None


class Backend(ABC):
    """One implementation of an attention method.

    One instance serves a whole subtest: eager batches and captured ones, in any order. ``prepare_replay`` must write
    in place into what ``prepare_capture`` bound: the captured graph keeps those addresses.
    """

    capabilities: Capabilities
    libraries: ClassVar[tuple[str, ...]] = ()
    """Modules that its kernels import on a GPU and that take seconds: imported before the device is first used."""

    def open(
        self, geometry: Geometry, *, max_rows: int, max_tokens: int, max_len: int, capture_sizes: Sequence[int]
    ) -> None:
        """Allocate persistent buffers. ``max_rows``, ``max_tokens`` and ``max_len`` bound every later batch;
        ``capture_sizes`` are the rows (tokens in pcg and bcg) that will be captured, largest first."""
        self.geometry = geometry
        self.pool = geometry.pool
        self.device = geometry.device
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.max_len = max_len

    @abstractmethod
    def prepare(self, batch: Batch) -> None:
        """Build metadata for an eager forward of ``batch``."""

    def prepare_capture(self, batch: Batch) -> None:
        """Bind metadata for capturing ``batch.batch_size`` rows; called before the warm-ups and before the capture."""
        raise NotImplementedError(f"{type(self).__name__} captures no graph")

    def prepare_replay(self, batch: Batch) -> None:
        """Refresh, in place, what the graph captured at ``batch.batch_size`` reads."""
        raise NotImplementedError(f"{type(self).__name__} captures no graph")

    @abstractmethod
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        """Attention of one layer; writes k and v into the pool unless ``batch.save_kv`` is False.

        Args:
            q: ``(T, q_heads, head_dim)``.
            k: ``(T, kv_heads, head_dim)``.
            v: ``(T, kv_heads, v_head_dim)``.

        Returns:
            ``(T, q_heads, v_head_dim)`` in q's dtype.
        """

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Layer, batch: Batch) -> torch.Tensor:
        """``forward``, held to what it says it returns: a copy into a buffer hides another dtype or a broadcast."""
        out = self.forward(q, k, v, layer, batch)
        if out.dtype != q.dtype or out.dim() != 3 or out.shape[1:] != (layer.q_heads, layer.v_head_dim):
            raise ResultError(
                f"layer {layer.index} returned {out.dtype} of shape {tuple(out.shape)}, not {q.dtype} of shape "
                f"(tokens, {layer.q_heads}, {layer.v_head_dim})"
            )
        return out

    def advance_draft(self, step: int) -> None:
        """Switch to the metadata of draft step ``step`` inside one multi-step graph."""
        raise NotImplementedError(f"{type(self).__name__} drafts no further steps")

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """The current metadata of a captured batch, by their field names in the engines.

        ``kits.invariants`` looks at tensors of these names, and at no others: offsets ``kv_indptr``, ``qo_indptr``,
        ``mask_indptr``, ``window_kv_indptr``, ``window_mask_indptr``, ``cu_seqlens_q``, ``cu_seqlens_k``,
        ``encoder_cu_seqlens_k``; lengths ``cache_seqlens_int32``, ``kv_lens``, ``local_seqused_k``,
        ``encoder_lens_int32``, ``max_seq_len_k``; slots and pages ``kv_indices``, ``window_kv_indices``,
        ``page_table``, ``window_page_table``. A prefix names a part: ``step1.kv_indptr``.
        """

    def close(self) -> None:  # noqa: B027  (most backends have nothing to release)
        """Release what ``open`` allocated."""
