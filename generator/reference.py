"""docs/suite.md: every table and key of suite.toml, from the same descriptions that editors show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from generator.schema import schema
from generator.tables import Table, inline

HEAD = """# suite.toml, key by key

Generated from the generator's own models by `nox -s generate`. [suite.toml](../suite.toml) is the example: it holds the
whole matrix.
"""


def reference_text() -> str:
    """The page."""
    whole = schema()
    known = whole["$defs"]
    tables = [section("The file", whole, known), *(section(name, known[name], known) for name in in_order(whole))]
    return "\n".join([HEAD, *tables])


def in_order(whole: dict[str, Any]) -> list[str]:
    """The tables, each behind the one that first uses it."""
    found: dict[str, None] = {}

    def follow(node: Any) -> None:
        for name in referenced(node):
            if name not in found:
                found[name] = None
                follow(whole["$defs"][name])

    follow(whole["properties"])
    return list(found)


def referenced(node: Any) -> Iterator[str]:
    """The tables that a part of the schema refers to."""
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from referenced(item)


def section(name: str, table: dict[str, Any], known: dict[str, Any]) -> str:
    """A table of the file with its keys. One that refers to a table means what that says of itself."""
    required = table.get("required", [])
    rows = []
    for key, value in table["properties"].items():
        meaning = value.get("description") or known[next(referenced(value))]["description"]
        rows.append([f"`{key}`", inline(kind_of(value)), "yes" if key in required else "", inline(meaning)])
    keys = Table(["key", "value", "required", "meaning"], rows, words=4).text()
    return f"## {name}\n\n{table.get('description', '')}\n\n{keys}\n"


def kind_of(value: dict[str, Any]) -> str:
    """What a key takes, in a few words."""
    if "$ref" in value:
        return value["$ref"].rpartition("/")[2]
    if "enum" in value:
        return " or ".join(map(str, value["enum"]))
    if "const" in value:
        return str(value["const"])
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(kind_of(item) for item in value["anyOf"] if item.get("type") != "null"))
    if value.get("type") == "array":
        return f"list of {kind_of(value['items'])}"
    if value.get("type") == "object":
        (of,) = value["patternProperties"].values() if "patternProperties" in value else [value["additionalProperties"]]
        return f"table of {kind_of(of)}"
    return str(value.get("format", value["type"]))
