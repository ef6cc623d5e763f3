"""What a generated test states about one subtest: plain data, free of torch, so that collecting costs nothing.

The words are DESIGN's: forward mode, runner mode, speculative kind, pad style, capture multiplier,
cache layout and seq_lens convention.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """A value is wrong when ``|out - ref| > atol + rtol * |ref|``."""

    atol: float
    rtol: float


@dataclass(frozen=True, kw_only=True)
class Model:
    """The attention layers a subtest runs, and the dtype of q, k, v and of the KV cache.

    ``window`` counts the keys a query sees *including its own* (Hugging Face's ``sliding_window``);
    ``layers`` says for each layer whether it is ``"full"`` or ``"window"``.
    For ``mla``, ``head_dim`` is latent + rope (512 + 64), ``v_head_dim`` the latent, and there is one KV head.
    """

    method: str
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    dtype: str
    layers: tuple[str, ...] = ("full",)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    hidden: int | None = None
    """Width of the hidden state. Where set, q, k and v are ``nn.Linear`` projections of one hidden state,
    and results are compared after an output projection back to this width."""


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """A speculative kind: ``eagle``, ``frozen_kv_mtp``, ``dflash`` or ``ngram``.

    ``parents[i]`` is the parent of draft token ``i`` in the verify tree, -1 for the root (draft token 0 is
    the root: the last accepted token).
    """

    kind: str
    draft_tokens: int
    topk: int = 1
    steps: int = 0
    parents: tuple[int, ...] = ()

    @property
    def caches_drafts(self) -> bool:
        """Frozen-KV MTP drafts read the target's cache as it is and write none of their own."""
        return self.kind != "frozen_kv_mtp"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Lengths of one batch: ``prefix_lens`` already cached, ``extend_lens`` new tokens per request."""

    name: str
    mode: str
    prefix_lens: tuple[int, ...]
    extend_lens: tuple[int, ...]
    page_size: int
    speculation: Speculation | None = None


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """An entry of ``[[known_failure]]``: the subtest must fail, and in the stated way only."""

    id: str
    action: str
    kind: str
    reason: str
    raises: str = "MismatchError"
    max_abs: tuple[float, float] | None = None
    wrong: tuple[float, float] | None = None
    packages: tuple[str, ...] = ()
    """Requirement specifiers (``"flash-attn-4<4.1"``); the entry holds only where all of them are met."""
    capability: str | None = None
    """Device capability specifier (``">=9.0"``); the entry holds only on such a device."""


@dataclass(frozen=True, kw_only=True)
class Native:
    """What a backend needs on a GPU, where it runs its library and nothing in its place."""

    packages: tuple[str, ...] = ()
    """Requirement specifiers (``"flash-attn-4>=4.0"``)."""
    capability: str | None = None
    """Device capability specifier (``">=9.0,<11"``)."""


@dataclass(frozen=True, kw_only=True)
class Subtest:
    """One point of the matrix; ``id`` is ``method.backend.sweep.rest`` and names it everywhere."""

    id: str
    adapter: str
    """Dotted path ``package.module:Class`` of the backend under test."""
    model: Model
    case: Case
    runner: str
    seq_lens: str
    """What ``batch.seq_lens`` means: ``prefix``, or ``total`` (prefix + extend)."""
    tolerance: Tolerance
    layout: str = "shuffled_pages"
    pad_style: str | None = None
    multiplier: int = 1
    known_failure: KnownFailure | None = None
    requires: tuple[str, ...] = ()
    """Requirement specifiers (``"triton"``) without which the subtest is ``unavailable`` everywhere."""
    native: Native | None = None
    """Without which it is ``unavailable`` on a GPU."""

    @property
    def seed(self) -> int:
        """63-bit seed that depends on the id alone, so that no other edit of the spec moves the data."""
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:8], "big") >> 1

    def __str__(self) -> str:
        """The id without method, backend and sweep, which the module and the test function already name."""
        return self.id.split(".", 3)[3]
