"""Where each value of a TOML file stands, so that an error can point at it.

No TOML reader keeps the positions of values that are valid TOML, but tree-sitter's syntax tree has them. The map is
built only when something has to be pointed at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from generator.problems import Loc

if TYPE_CHECKING:
    from tree_sitter import Node

Point = tuple[int, int]


class Positions:
    """Maps a ``loc`` to the line and column of its key and of its value, both counted from 1."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._keys: dict[Loc, Point] | None = None
        self._values: dict[Loc, Point] = {}

    def find(self, loc: Loc, *, key: bool = False) -> Point:
        """The place of ``loc``, or of the nearest table that contains it."""
        if self._keys is None:
            self._keys = {}
            self._read()
        for size in range(len(loc), 0, -1):
            part = loc[:size]
            exact = size == len(loc)
            point = self._keys.get(part) if (key and exact) or part not in self._values else self._values[part]
            if point:
                return point
        return (1, 1)

    def _read(self) -> None:
        import tree_sitter
        import tree_sitter_toml

        self._lines = self._text.encode().split(b"\n")
        parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_toml.language()))
        counts: dict[Loc, int] = {}
        for node in parser.parse(self._text.encode()).root_node.named_children:
            if node.type == "pair":
                self._pair(node, ())
            elif node.type in ("table", "table_array_element"):
                header, *pairs = (child for child in node.named_children if child.type != "comment")
                base = self._resolve(_keys(header), counts, array=node.type == "table_array_element")
                self._mark(base, header)
                for pair in pairs:
                    if pair.type == "pair":
                        self._pair(pair, base)

    def _resolve(self, keys: list[str], counts: dict[Loc, int], *, array: bool) -> Loc:
        """The path of a table header: every array of tables on the way stands for its last element."""
        path: Loc = ()
        for number, name in enumerate(keys):
            path = (*path, name)
            if array and number == len(keys) - 1:
                counts[path] = counts.get(path, -1) + 1
            if path in counts:
                path = (*path, counts[path])
        return path

    def _pair(self, node: Node, base: Loc) -> None:
        key, value = (child for child in node.named_children if child.type != "comment")
        path = base
        for name in _keys(key):
            path = (*path, name)
            self._mark(path, key)
        self._values[path] = self._point(value)
        self._value(value, path)

    def _value(self, node: Node, path: Loc) -> None:
        children = [child for child in node.named_children if child.type != "comment"]
        if node.type == "inline_table":
            for pair in children:
                self._pair(pair, path)
        elif node.type == "array":
            for index, child in enumerate(children):
                self._values[(*path, index)] = self._point(child)
                self._mark((*path, index), child)
                self._value(child, (*path, index))

    def _mark(self, path: Loc, node: Node) -> None:
        """Give ``path``, and every table above it that has no place yet, the place of ``node``."""
        assert self._keys is not None
        point = self._point(node)
        for size in range(1, len(path) + 1):
            self._keys.setdefault(path[:size], point)

    def _point(self, node: Node) -> Point:
        row, column = node.start_point
        # tree-sitter counts bytes, an editor counts characters
        return row + 1, len(self._lines[row][:column].decode(errors="replace")) + 1


def _keys(node: Node) -> list[str]:
    """The parts of a possibly dotted and quoted key."""
    return list(_parts(node))


def _parts(node: Node) -> Iterator[str]:
    if node.type == "dotted_key":
        for child in node.named_children:
            yield from _parts(child)
        return
    text = (node.text or b"").decode(errors="replace")
    if node.type == "quoted_key":
        import tomli

        yield next(iter(tomli.loads(f"{text} = 0")))
    else:
        yield text
