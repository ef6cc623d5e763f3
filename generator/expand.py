"""A checked spec to the subtests of one profile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from generator.index import Choice, Index, Selection, Variant, axis_values
from generator.problems import Loc, Problem, one_each
from generator.spec import DEFAULT_LAYOUT, Cell
from generator.subtests import (
    CasePoint,
    ModelPoint,
    Subtest,
    case_point,
    heads_of,
    model_point,
    native_point,
    with_shape,
)

SHAPE_AXES = ("heads", "head_dim", "dtype", "page_size")
"""The axes that change model and case; the others say what is done with them. In the order of an id, as ``Axes``."""
PLAN_AXES = ("seq_lens", "layout", "pad_style", "multiplier")
PREFIXES = {"head_dim": "d", "page_size": "p", "multiplier": "x"}


def expand(index: Index, profile: str) -> list[Subtest]:
    """All subtests of a profile in the order of the file, without known failures attached."""
    selection = index.selection(profile)
    subtests = list(itertools.chain.from_iterable(of_variant(index, item, selection) for item in index.variants))
    if selection.cover is None:
        return subtests
    from generator.covering import covering  # needs a library that nothing else does

    return covering(subtests)


def of_variant(index: Index, variant: Variant, selection: Selection) -> Iterator[Subtest]:
    """The subtests of one sweep or twin."""
    if not selection.has(variant):
        return
    axes = axis_values(variant.axes)
    if variant.name in selection.collapse and variant.base is not None:
        axes = axis_values(variant.base)
    for number, cell in enumerate(variant.sweep.cell):
        yield from of_cell(index, variant, cell, ("sweep", variant.index, "cell", number), axes)


def of_cell(index: Index, variant: Variant, cell: Cell, loc: Loc, outer: dict[str, list[object]]) -> Iterator[Subtest]:
    """Backends x cases x runners x axes of one cell."""
    spec = index.spec
    axes = {**outer, **axis_values(cell.axes)}
    shapes, points = crossed(axes, SHAPE_AXES), crossed(axes, PLAN_AXES)
    stated = {"seq_lens": cell.seq_lens or variant.sweep.seq_lens}
    method = spec.methods[cell.method]
    choices = index.choices(variant, cell, loc)
    for backend_name in cell.backends:
        backend = spec.backends[backend_name]
        requires, native = tuple(backend.requires), native_point(backend)
        for choice in choices:
            plain = resolved(index, cell.method, backend_name, choice)
            shaped = [(labels, *with_shape(*plain, shape)) for labels, shape in shapes]
            head = f"{cell.method}.{backend_name}.{variant.name}.{choice.speculation or choice.case.name}"
            for runner in variant.runners:
                start = f"{head}.{runner}" if variant.runner_varies else head
                for (middle, model, case), (ends, point) in itertools.product(shaped, points):
                    values = {**stated, **point}
                    yield Subtest(
                        id=".".join((start, *middle, *ends)),
                        adapter=backend.adapter,
                        model=model,
                        case=case,
                        runner=runner,
                        seq_lens=str(values["seq_lens"]),
                        tolerance=method.tolerance[model.dtype],  # type: ignore[index]
                        layout=str(values.get("layout", DEFAULT_LAYOUT)),
                        pad_style=values.get("pad_style"),  # type: ignore[arg-type]
                        multiplier=values.get("multiplier", 1),  # type: ignore[arg-type]
                        requires=requires,
                        native=native,
                        weight=backend.weight,
                        method=cell.method,
                        backend=backend_name,
                        sweep=variant.name,
                        shape=choice.case.name,
                        speculation=choice.speculation,
                        loc=loc,
                        case_loc=("case", choice.case_index),
                    )


def resolved(index: Index, method: str, backend_name: str, choice: Choice) -> tuple[ModelPoint, CasePoint]:
    """The model and the case of a choice on a backend."""
    spec = index.spec
    backend = spec.backends[backend_name]
    draft = spec.speculations[choice.speculation] if choice.speculation else None
    return (
        model_point(method, spec.methods[method], backend, choice.case),
        case_point(choice.case, backend, choice.speculation, draft),
    )


def crossed(axes: dict[str, list[object]], names: tuple[str, ...]) -> list[tuple[list[str], dict[str, object]]]:
    """All points of those axes that are stated, each with its labels."""
    names = tuple(name for name in names if name in axes)
    return [
        ([label(name, value) for name, value in zip(names, point, strict=True)], dict(zip(names, point, strict=True)))
        for point in itertools.product(*(axes[name] for name in names))
    ]


def label(axis: str, value: object) -> str:
    """How a value of an axis appears in an id: ``q8_kv1``, ``d96``, ``p32``, ``x2``, or the value itself."""
    if axis == "heads":
        return "q{}_kv{}".format(*heads_of(str(value)))
    return f"{PREFIXES.get(axis, '')}{value}"


def check_unique(subtests: list[Subtest]) -> list[Problem]:
    """No id twice, and no two ids for the same kernel inputs and replay plan; one problem a cell."""
    return one_each(list(_repeated(subtests)))


def _repeated(subtests: list[Subtest]) -> Iterator[Problem]:
    ids: dict[str, Subtest] = {}
    inputs: dict[tuple[object, ...], Subtest] = {}
    for subtest in subtests:
        first = ids.setdefault(subtest.id, subtest)
        if first is not subtest:
            yield Problem("E-duplicate-id", subtest.loc, f"the id {subtest.id} exists already")
            continue
        twin = inputs.setdefault(subtest.inputs, subtest)
        if twin is not subtest:
            message = f"{subtest.id} has the same kernel inputs and replay plan as {twin.id}"
            yield Problem("E-same-inputs", subtest.loc, message, "nothing is counted twice: remove one")
