"""The points of the matrix as plain values. They mirror ``kits.subtest``, which the generator does not import."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from generator.problems import Loc
from generator.spec import Backend, Case, KnownFailure, Method, ModelChanges, Speculation, Tolerance


@dataclass(frozen=True, slots=True)
class ModelPoint:
    """The model a subtest runs: the method's, with the changes of backend and case."""

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


@dataclass(frozen=True, slots=True)
class SpeculationPoint:
    """The draft of a speculative case."""

    kind: str
    draft_tokens: int
    topk: int = 1
    steps: int = 0
    parents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NativePoint:
    """What a backend needs on a GPU."""

    packages: tuple[str, ...] = ()
    capability: str | None = None


@dataclass(frozen=True, slots=True)
class CasePoint:
    """The lengths of a batch, with everything filled in that the case leaves to mode, backend or speculation."""

    name: str
    mode: str
    prefix_lens: tuple[int, ...]
    extend_lens: tuple[int, ...]
    page_size: int
    speculation: SpeculationPoint | None = None


class Subtest(NamedTuple):
    """One point of the matrix. A named tuple, because a hundred thousand frozen dataclasses take seconds to make."""

    id: str
    adapter: str
    model: ModelPoint
    case: CasePoint
    runner: str
    seq_lens: str
    tolerance: Tolerance
    layout: str
    pad_style: str | None
    multiplier: int
    requires: tuple[str, ...]
    native: NativePoint | None
    weight: float
    method: str
    backend: str
    sweep: str
    shape: str
    """The ``[[case]]`` it is made from; ``case.name`` has the speculation too."""
    speculation: str | None
    loc: Loc
    """The cell that asks for it."""
    case_loc: Loc
    known_failure: KnownFailure | None = None

    @property
    def cost(self) -> float:
        """Roughly what it costs to run, relative to an eager one; recorded durations know better."""
        return round(RUNNER_COST[self.runner] * self.weight, 3)

    @property
    def rest(self) -> str:
        """The id without what the module and the test function already name."""
        return self.id.split(".", 3)[3]

    @property
    def file(self) -> str:
        """The generated module that holds it."""
        return module_file(self.method, self.backend)

    @property
    def inputs(self) -> tuple[object, ...]:
        """Every value that reaches the kernel or the replay plan. Names, ids and tolerances do not."""
        case = self.case
        return (
            self.adapter,
            self.model,
            (case.mode, case.prefix_lens, case.extend_lens, case.page_size, case.speculation),
            self.runner,
            self.seq_lens,
            self.layout,
            self.pad_style,
            self.multiplier,
        )

    @property
    def fingerprint(self) -> str:
        """A short hash of ``inputs``."""
        return hashlib.sha256(repr(self.inputs).encode()).hexdigest()[:16]


RUNNER_COST = {"eager": 1.0, "pcg": 3.0, "bcg": 3.0, "cuda_graph": 5.0, "cuda_graph_multi_step": 6.0}


def module_file(method: str, backend: str) -> str:
    """The name of the generated module of a method and a backend."""
    return f"test_{method}_{backend}.py"


FEATURE_OF = {"softcap": "softcap", "sinks": "sinks", "k_scale": "kv_scales", "v_scale": "kv_scales"}
"""The backend feature that a change of the model needs; the other changes need none."""


def changes_of(changes: ModelChanges) -> dict[str, object]:
    """The keys that are stated, with their values."""
    return {name: getattr(changes, name) for name in changes.model_fields_set}


def features_needed(changes: ModelChanges) -> set[str]:
    """The features that a backend must have to run these changes."""
    return {FEATURE_OF[name] for name in changes_of(changes) if name in FEATURE_OF}


def model_point(name: str, method: Method, backend: Backend, case: Case) -> ModelPoint:
    """The method's model with what the backend asks for, what the case asks for, and what rides on the case."""
    model = ModelPoint(
        method=name,
        q_heads=method.q_heads,
        kv_heads=method.kv_heads,
        head_dim=method.head_dim,
        v_head_dim=method.v_head_dim or method.head_dim,
        scale=method.scale,
        dtype=backend.dtype,
        layers=tuple(method.layers),
        window=method.window,
    )
    rides = {
        key: value
        for key, value in changes_of(case.rides).items()
        if key not in FEATURE_OF or FEATURE_OF[key] in backend.features_for(name)
    }
    changes = {**changes_of(backend.model), **changes_of(case.model), **rides}
    return replace(model, **changes) if changes else model  # type: ignore[arg-type]


def with_shape(model: ModelPoint, case: CasePoint, shape: Mapping[str, object]) -> tuple[ModelPoint, CasePoint]:
    """Model and case with the values of the axes ``heads``, ``head_dim``, ``dtype`` and ``page_size``."""
    changes: dict[str, object] = {}
    if "heads" in shape:
        changes["q_heads"], changes["kv_heads"] = heads_of(str(shape["heads"]))
    if "head_dim" in shape:
        changes["head_dim"] = changes["v_head_dim"] = shape["head_dim"]
    if "dtype" in shape:
        changes["dtype"] = shape["dtype"]
    if changes:
        model = replace(model, **changes)  # type: ignore[arg-type]
    if "page_size" in shape:
        case = replace(case, page_size=shape["page_size"])  # type: ignore[arg-type]
    return model, case


def heads_of(text: str) -> tuple[int, int]:
    """``8:1`` as query heads and KV heads."""
    q_heads, _, kv_heads = text.partition(":")
    return int(q_heads), int(kv_heads)


def case_point(case: Case, backend: Backend, name: str | None, speculation: Speculation | None) -> CasePoint:
    """A case on a backend, with the speculation ``name``."""
    draft = None
    rows = len(case.prefix_lens)
    each = 1
    if speculation is not None:
        each = speculation.draft_tokens if case.mode != "DECODE" else 1
        draft = SpeculationPoint(
            kind=speculation.kind,
            draft_tokens=speculation.draft_tokens,
            topk=speculation.topk,
            steps=speculation.steps,
            parents=tuple(speculation.parents) or tuple(range(-1, speculation.draft_tokens - 1)),
        )
    return CasePoint(
        name=f"{case.name}_{name}" if name else case.name,
        mode=case.mode,
        prefix_lens=tuple(case.prefix_lens),
        extend_lens=tuple(case.extend_lens or (each,) * rows),
        page_size=case.page_size or backend.page_size,
        speculation=draft,
    )


def native_point(backend: Backend) -> NativePoint | None:
    """What a backend states to need on a GPU; None if nothing."""
    native = backend.native
    return None if native is None else NativePoint(tuple(native.packages), native.capability)


def differences(point: ModelPoint | NativePoint, base: ModelPoint | NativePoint) -> dict[str, object]:
    """The fields in which ``point`` differs from ``base``."""
    return {
        item.name: getattr(point, item.name)
        for item in fields(point)
        if getattr(point, item.name) != getattr(base, item.name)
    }
