"""Checks that every cell can run: the backend supports what the cell asks of it, and the sweep says all it must."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from generator.index import Choice, Index, Variant, axis_values
from generator.problems import Loc, Problem, quote
from generator.spec import SPECULATIVE_MODES, Backend, Cell, Method, Speculation
from generator.subtests import case_point, features_needed, heads_of, model_point
from generator.values import hidden_scale, listing

RUNNER_MODES = {
    "eager": frozenset({"EXTEND", "DECODE", "MIXED"}) | SPECULATIVE_MODES,
    "cuda_graph": frozenset({"DECODE"}) | SPECULATIVE_MODES,
    "cuda_graph_multi_step": frozenset({"DECODE"}),
    "pcg": frozenset({"EXTEND", "MIXED"}),
    "bcg": frozenset({"EXTEND", "MIXED"}),
}
CONVENTIONS = {
    "EXTEND": ("total",),
    "DECODE": ("total",),
    "MIXED": ("total",),
    "TARGET_VERIFY": ("prefix",),
    "DRAFT_EXTEND": ("total",),
    "DRAFT_EXTEND_V2": ("total", "prefix"),
}
DRAFT_CONVENTION = ("prefix",)
"""Of the DECODE steps of a draft: seq_lens is the committed prefix, each step adds its own tokens."""

PADDED_RUNNERS = frozenset({"cuda_graph", "cuda_graph_multi_step"})


def check_support(index: Index) -> Iterator[Problem]:
    """All problems of sweeps and cells. A problem of a sweep and its twin alike is reported once."""
    seen: set[tuple[str, Loc, str]] = set()
    for problem in _problems(index):
        key = (problem.code, problem.loc, problem.message)
        if key not in seen:
            seen.add(key)
            yield problem


def _problems(index: Index) -> Iterator[Problem]:
    for variant in index.variants:
        yield from base_point(variant)
        for number, cell in enumerate(variant.sweep.cell):
            loc: Loc = ("sweep", variant.index, "cell", number)
            yield from cell_keys(variant, cell, loc)
            yield from cell_axes(variant, cell, loc)
            yield from cell_modes(index, variant, cell, loc)
            for at, name in enumerate(cell.backends):
                backend = index.spec.backends.get(name)
                if backend is not None:
                    yield from on_backend(index, variant, cell, loc, (*loc, "backends", at), name, backend)
    yield from collapses(index)
    yield from models(index)
    yield from windows(index)


def collapses(index: Index) -> Iterator[Problem]:
    """A collapsed sweep has a point to collapse to."""
    for name, profile in index.spec.profiles.items():
        for at, sweep in enumerate(profile.collapse):
            named = [variant for variant in index.variants if variant.name == sweep]
            if named and not any(variant.base is not None and axis_values(variant.axes) for variant in named):
                message = f"sweep {quote(sweep)} cannot be collapsed"
                hint = "give the sweep axes and a base point"
                yield Problem("E-collapse", ("profiles", name, "collapse", at), message, hint)


def models(index: Index) -> Iterator[Problem]:
    """The heads of every model that a method, a backend and a case make together."""
    for variant in index.variants:
        for number, cell in enumerate(variant.sweep.cell):
            method = index.spec.methods.get(cell.method)
            if method is None or method.q_heads % method.kv_heads:
                continue
            backends = [index.spec.backends[name] for name in cell.backends if name in index.spec.backends]
            loc: Loc = ("sweep", variant.index, "cell", number)
            yield from shape_axes(variant, cell, loc, method)
            if "heads" in axis_values(variant.axes) | axis_values(cell.axes):
                continue
            for choice in index.choices(variant, cell, loc):
                for backend in backends:
                    model = model_point(cell.method, method, backend, choice.case)
                    if method.v_head_dim is not None and model.k_scale != model.v_scale:
                        message = (
                            f"case {quote(choice.case.name)} gives method {quote(cell.method)} a K scale of "
                            f"{model.k_scale} and a V scale of {model.v_scale}, but its values are a part of its keys"
                        )
                        hint = f'say lacks.{cell.method} = ["kv_scales"] for the backend, if the case only rides'
                        yield Problem("E-latent-scales", ("case", choice.case_index), message, hint)
                    if model.q_heads % model.kv_heads:
                        message = (
                            f"case {quote(choice.case.name)} makes {model.q_heads} query heads and {model.kv_heads} KV "
                            f"heads of method {quote(cell.method)}"
                        )
                        yield Problem("E-heads", ("case", choice.case_index, "model"), message)


def shape_axes(variant: Variant, cell: Cell, cell_loc: Loc, method: Method) -> Iterator[Problem]:
    """Heads and head dims that an axis gives to the models of a cell."""
    for axes, loc in ((variant.axes, variant.loc), (cell.axes, cell_loc)):
        for at, text in enumerate(axes.heads or ()):
            q_heads, kv_heads = heads_of(text)
            if q_heads % kv_heads:
                message = f"{q_heads} query heads are no multiple of {kv_heads} KV heads"
                yield Problem("E-heads", (*loc, "axes", "heads", at), message)
        for at, head_dim in enumerate(axes.head_dim or ()):
            where: Loc = (*loc, "axes", "head_dim", at)
            if method.v_head_dim is not None:
                message = f"the head dim of method {quote(cell.method)} cannot vary: it has a v_head_dim"
                yield Problem("E-head-dim", where, message)
            else:
                yield from hidden_scale(method.scale, head_dim, where)


def windows(index: Index) -> Iterator[Problem]:
    """A backend of a windowed method has the feature."""
    for name, backend in index.spec.backends.items():
        for at, method_name in enumerate(backend.methods):
            method = index.spec.methods.get(method_name)
            if method is not None and method.window is not None and "window" not in backend.features_for(method_name):
                message = f"method {quote(method_name)} has a window, but backend {quote(name)} lacks the feature"
                hint = 'add "window" to its features'
                yield Problem("E-backend-feature", ("backends", name, "methods", at), message, hint)


def base_point(variant: Variant) -> Iterator[Problem]:
    """The base point of a sweep names one existing value of each of its axes."""
    if variant.base is None:
        return
    loc = (*variant.loc, "base")
    axes, base = axis_values(variant.axes), axis_values(variant.base)
    for name in axes.keys() - base.keys():
        yield Problem("E-base", loc, f"the base point says nothing about the axis {name}")
    for name, (value,) in base.items():
        if name not in axes:
            yield Problem("E-base", (*loc, name), f"{name} is no axis of the sweep {quote(variant.name)}")
        elif value not in axes[name]:
            values = ", ".join(quote(item) for item in axes[name])
            yield Problem(
                "E-base", (*loc, name), f"{quote(value)} is no value of the axis {name}", f"its values are {values}"
            )


def cell_keys(variant: Variant, cell: Cell, loc: Loc) -> Iterator[Problem]:
    """A cell has cases, or it has spec and a shape."""
    if (cell.cases is None) == (cell.spec is None):
        have = "both cases and spec" if cell.spec is not None else "neither cases nor spec"
        yield Problem("E-cell-cases", loc, f"the cell has {have}", "it needs one of them")
    if cell.spec is not None and cell.shape is None and variant.sweep.shape is None:
        yield Problem(
            "E-cell-shape", (*loc, "spec"), "spec needs a shape", "name a case as shape of the cell or of the sweep"
        )
    if cell.spec is None and cell.shape is not None:
        yield Problem("E-cell-shape", (*loc, "shape"), "a shape without spec does nothing", "list the case in cases")


def cell_axes(variant: Variant, cell: Cell, loc: Loc) -> Iterator[Problem]:
    """Axes are stated once, padding comes as a pair, and seq_lens is stated."""
    outer, inner = axis_values(variant.axes), axis_values(cell.axes)
    for name in outer.keys() & inner.keys():
        yield Problem("E-axis-twice", (*loc, "axes", name), f"the sweep has the axis {name} already")
    axes = {**outer, **inner}
    where = (*loc, "axes") if "pad_style" in inner or "multiplier" in inner else (*variant.loc, "axes")
    if ("pad_style" in axes) != ("multiplier" in axes):
        here, missing = ("pad_style", "multiplier") if "pad_style" in axes else ("multiplier", "pad_style")
        yield Problem("E-pad-axis", where, f"the axis {here} needs the axis {missing}")
    elif "pad_style" in axes:
        for runner in variant.runners:
            if runner not in PADDED_RUNNERS:
                message = f"the runner {quote(runner)} pads nothing"
                yield Problem("E-pad-axis", where, message, f"padded are {', '.join(sorted(PADDED_RUNNERS))}")
    stated = [cell.seq_lens is not None, variant.sweep.seq_lens is not None, "seq_lens" in axes]
    if not any(stated):
        message = f"the cell does not say what seq_lens means in {quote(variant.name)}"
        yield Problem(
            "E-seq-lens-unstated", loc, message, 'add seq_lens = "total" or "prefix" to the cell or the sweep'
        )
    elif sum(stated) > 1:
        yield Problem("E-seq-lens-twice", loc, "seq_lens is stated by more than one of cell, sweep and axes")


def cell_modes(index: Index, variant: Variant, cell: Cell, loc: Loc) -> Iterator[Problem]:
    """Each case fits the runner, the speculation and the seq_lens convention."""
    axes = {**axis_values(variant.axes), **axis_values(cell.axes)}
    stated = axes.get("seq_lens", [cell.seq_lens or variant.sweep.seq_lens])
    for choice in index.choices(variant, cell, loc):
        case, mode = choice.case, choice.case.mode
        for runner in variant.runners:
            if mode not in RUNNER_MODES[runner]:
                message = f"the runner {quote(runner)} cannot run {mode}, the mode of case {quote(case.name)}"
                yield Problem("E-runner-mode", choice.loc, message)
        multi_step = "cuda_graph_multi_step" in variant.runners
        if choice.speculation is None and (mode in SPECULATIVE_MODES or multi_step):
            message = f"case {quote(case.name)} needs a speculation here"
            yield Problem("E-case-needs-spec", choice.loc, message, "use it as a shape with spec")
        if choice.speculation is not None and mode not in SPECULATIVE_MODES and not multi_step:
            yield Problem("E-case-no-spec", choice.loc, f"shape {quote(case.name)} is {mode}, which has no draft")
        known = DRAFT_CONVENTION if multi_step and mode == "DECODE" else CONVENTIONS[mode]
        for value in stated:
            if value is not None and value not in known:
                of = "a draft's DECODE" if known is DRAFT_CONVENTION else mode
                message = f"seq_lens is {quote(value)}, but {of} knows only {' and '.join(known)}"
                yield Problem("E-seq-lens-mode", choice.loc, message)
        speculation = index.spec.speculations.get(choice.speculation or "")
        if speculation is not None:
            yield from draft_lengths(choice, speculation)


def draft_lengths(choice: Choice, speculation: Speculation) -> Iterator[Problem]:
    """Stated extend_lens fit the number of draft tokens."""
    case, count = choice.case, speculation.draft_tokens
    stated = case.extend_lens or []
    exact = case.mode in ("TARGET_VERIFY", "DRAFT_EXTEND_V2")
    if (exact and any(item != count for item in stated)) or (
        case.mode == "DRAFT_EXTEND" and max(stated, default=0) > count
    ):
        wanted = f"{'exactly' if exact else 'at most'} {count}"
        message = f"case {quote(case.name)} has extend_lens {stated}, but {quote(choice.speculation)} wants {wanted}"
        yield Problem("E-lens-mode", choice.loc, message)


def on_backend(
    index: Index, variant: Variant, cell: Cell, cell_loc: Loc, loc: Loc, name: str, backend: Backend
) -> Iterator[Problem]:
    """What one backend of a cell lacks. Cases that lack the same thing share one problem."""
    label = f"backend {quote(name)}"
    method = index.spec.methods.get(cell.method)
    if cell.method in index.spec.methods and cell.method not in backend.methods:
        yield Problem("E-backend-method", loc, f"{label} does not implement {quote(cell.method)}", has(backend.methods))
        return
    for runner in variant.runners:
        if runner not in backend.runners:
            yield Problem(
                "E-backend-runner", loc, f"{label} does not support the runner {quote(runner)}", has(backend.runners)
            )
    axes = {**axis_values(variant.axes), **axis_values(cell.axes)}
    for dtype in axes.get("dtype", [backend.dtype]):
        if dtype not in (backend.dtype, *backend.dtypes):
            known = has([backend.dtype, *backend.dtypes])
            yield Problem("E-backend-dtype", loc, f"{label} does not support the dtype {dtype}", known)
        elif method is not None and dtype not in method.tolerance:
            message = f"method {quote(cell.method)} states no tolerance for {dtype}, a dtype of {label}"
            yield Problem("E-no-tolerance", ("methods", cell.method, "tolerance"), message)
    for head_dim in axes.get("head_dim", [method.head_dim] if method is not None else []):
        if backend.head_dims and head_dim not in backend.head_dims:
            known = f"its head dims are {listing(backend.head_dims)}"
            yield Problem("E-backend-head-dim", loc, f"{label} does not support the head dim {head_dim}", known)
    modes: dict[str, list[str]] = {}
    pages: dict[int, list[str]] = {}
    features: dict[str, list[str]] = {}
    for choice in index.choices(variant, cell, cell_loc):
        case = choice.case
        if case.mode not in backend.modes:
            modes.setdefault(case.mode, []).append(case.name)
        for page in axes.get("page_size", [case.page_size or backend.page_size]):
            if page not in backend.page_sizes and backend.page_size in backend.page_sizes:
                pages.setdefault(page, []).append(case.name)  # type: ignore[arg-type]
        speculation = index.spec.speculations.get(choice.speculation or "")
        needed = features_needed(case.model)
        if speculation is not None and branches(speculation):
            needed.add("tree")
        for feature in sorted(needed - backend.features_for(cell.method)):
            features.setdefault(feature, []).append(case_point(case, backend, choice.speculation, speculation).name)
    for mode, cases in modes.items():
        message = f"{label} does not support {mode}, the mode of {some(cases)}"
        yield Problem("E-backend-mode", loc, message, f"{has(backend.modes)}; {OWN_CELL}")
    for page, cases in pages.items():
        message = f"{label} does not have pages of {page}, which {some(cases)} need{'s' * (len(cases) == 1)}"
        yield Problem("E-backend-page", loc, message, f"its page sizes are {listing(backend.page_sizes)}; {OWN_CELL}")
    for feature, cases in features.items():
        message = (
            f"{label} does not have the feature {quote(feature)} for {quote(cell.method)}, which {some(cases)} "
            f"need{'s' * (len(cases) == 1)}"
        )
        yield Problem("E-backend-feature", loc, message, OWN_CELL)


OWN_CELL = "state it in the backend's table, or give the backend a cell of its own with the cases it can run"


def branches(speculation: Speculation) -> bool:
    """Whether the draft is a tree rather than a chain."""
    parents = [parent for parent in speculation.parents if parent >= 0]
    return speculation.topk > 1 or len(parents) != len(set(parents))


def has(values: Iterable[str]) -> str:
    """A hint that lists what there is."""
    return f"it has {', '.join(values)}"


def some(cases: list[str]) -> str:
    """The cases a problem is about, the first few by name."""
    names = list(dict.fromkeys(cases))
    shown = ", ".join(quote(name) for name in names[:3])
    return f"case{'s' * (len(names) > 1)} {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
