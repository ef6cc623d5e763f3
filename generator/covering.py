"""The few subtests that hold every pair of axis values.

The library builds covering arrays from factors and constraints, row by row. Here rows may not be invented: the one
constraint lets a row grow only while some subtest still has all of its values. Of subtests that look alike the
cheapest is taken, and in the end those that the others make superfluous are left out.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial

from covertable import criteria
from covertable.main import Controller

from generator.subtests import Subtest

Values = tuple[object, ...]
Pair = tuple[tuple[int, object], tuple[int, object]]


def covering(subtests: list[Subtest]) -> list[Subtest]:
    """Some of ``subtests``, in their order, which hold every pair of axis values that all of them hold."""
    cheapest: dict[Values, Subtest] = {}
    costs: dict[Values, float] = {}
    for subtest in subtests:
        values, cost = axis_values_of(subtest), subtest.cost
        if cost < costs.get(values, math.inf):
            cheapest[values], costs[values] = subtest, cost
    if len(cheapest) < 2:
        return list(cheapest.values())
    kept = {cheapest[values].id for values in needed(array(costs), costs)}
    return [subtest for subtest in subtests if subtest.id in kept]


def axis_values_of(subtest: Subtest) -> Values:
    """Everything that is crossed, by hand or by an axis: what a bug may depend on in pairs."""
    model, case = subtest.model, subtest.case
    return (
        subtest.method,
        subtest.backend,
        subtest.runner,
        case.mode,
        subtest.speculation,
        subtest.seq_lens,
        subtest.layout,
        subtest.pad_style,
        subtest.multiplier,
        case.page_size,
        model.dtype,
        model.head_dim,
        (model.q_heads, model.kv_heads),
        model.softcap is not None,
        model.sinks,
        (model.k_scale, model.v_scale) != (1.0, 1.0),
        model.hidden is not None,
    )


def array(costs: Mapping[Values, float]) -> list[Values]:
    """Rows of a covering array of strength 2, each of them a key of ``costs``."""
    rows = list(costs)
    having: list[dict[object, int]] = [{} for _ in rows[0]]
    """For each factor and value the set of rows that have it, as a bit mask."""
    for number, row in enumerate(rows):
        for factor, value in enumerate(row):
            having[factor][value] = having[factor].get(value, 0) | 1 << number

    def price(factor: int, value: object) -> float:
        prices = [cost for row, cost in costs.items() if row[factor] == value]
        return sum(prices) / len(prices)

    def possible(begun: Mapping[int, object]) -> bool | None:
        """False where no subtest has these values; None, which is "not known yet", while values are missing."""
        left = -1
        for factor, value in begun.items():
            left &= having[factor][value]
        if not left:
            return False
        return True if len(begun) == len(having) else None

    # open values of a row are tried in the order given here: cheap ones first, else as the spec has them
    factors = [sorted(values, key=partial(price, factor)) for factor, values in enumerate(having)]
    controller = Controller(
        factors,
        criterion=criteria.simple,
        constraints=[{"operator": "fn", "requires": [], "evaluate": possible}],
    )
    return [tuple(row) for row in controller.make()]


def needed(rows: list[Values], costs: Mapping[Values, float]) -> list[Values]:
    """The rows without those, dearest first, whose pairs all occur in other rows."""
    held = Counter(pair for row in rows for pair in pairs(row))
    kept = []
    for row in sorted(rows, key=lambda row: -costs[row]):
        mine = pairs(row)
        if all(held[pair] > 1 for pair in mine):
            held.subtract(mine)
        else:
            kept.append(row)
    return kept


def pairs(row: Values) -> list[Pair]:
    """Every two values of a row, each with the number of its factor."""
    return list(itertools.combinations(enumerate(row), 2))
