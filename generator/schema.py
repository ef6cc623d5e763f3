"""suite.schema.json: the shape of suite.toml for editors."""

from __future__ import annotations

import json
from typing import Any

from generator.spec import Spec


def schema_text() -> str:
    """The file."""
    return json.dumps(schema(), indent=2) + "\n"


def schema() -> dict[str, Any]:
    """The JSON Schema of the spec, without the titles that pydantic makes up."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "attnmatrix suite",
        **untitled(Spec.model_json_schema()),
    }


def untitled(node: Any) -> Any:
    """The schema without ``title`` keywords; properties of that name stay."""
    if isinstance(node, list):
        return [untitled(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: {name: untitled(item) for name, item in value.items()}
        if key in ("properties", "$defs")
        else untitled(value)
        for key, value in node.items()
        if not (key == "title" and isinstance(value, str))
    }
