"""Where tree-sitter says that values stand."""

from __future__ import annotations

import pytest

from generator.positions import Positions
from generator.problems import Loc

TEXT = """\
top = 1
list = [
    { name = "a", inner = { deep = [1, 2] } },
    { name = "✓✓", other = 2 },
]
dotted.key = 3

[table]
x = 1
"quo ted" = 2

[table.sub]
y = 2

[[entry]]
name = "one"

[[entry]]
name = "two"
[entry.also]
z = 3
[[entry.cell]]
w = 1
[[entry.cell]]
w = 2
"""


@pytest.mark.parametrize(
    ("loc", "value", "key"),
    [
        (("top",), (1, 7), (1, 1)),
        (("list", 0), (3, 5), (3, 5)),
        (("list", 0, "name"), (3, 14), (3, 7)),
        (("list", 0, "inner", "deep", 1), (3, 40), (3, 40)),
        (("list", 1, "other"), (4, 28), (4, 20)),
        (("dotted", "key"), (6, 14), (6, 1)),
        (("table",), (8, 2), (8, 2)),
        (("table", "x"), (9, 5), (9, 1)),
        (("table", "quo ted"), (10, 13), (10, 1)),
        (("table", "sub", "y"), (13, 5), (13, 1)),
        (("entry", 0, "name"), (16, 8), (16, 1)),
        (("entry", 1), (18, 3), (18, 3)),
        (("entry", 1, "also", "z"), (21, 5), (21, 1)),
        (("entry", 1, "cell", 1, "w"), (25, 5), (25, 1)),
    ],
)
def test_find(loc: Loc, value: tuple[int, int], key: tuple[int, int]) -> None:
    positions = Positions(TEXT)
    assert positions.find(loc) == value
    assert positions.find(loc, key=True) == key


def test_what_is_missing_is_placed_at_its_table() -> None:
    positions = Positions(TEXT)
    assert positions.find(("entry", 0, "gone")) == positions.find(("entry", 0))
    assert positions.find(("list", 1, "gone", 3)) == (4, 5)
    assert positions.find(("nowhere",)) == (1, 1)
