"""suite.schema.json is current, and says of a file what the generator says of its shape."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomli
from spec_tools import HERE, ROOT, SMALL, codes_in, errors_of

from generator.schema import schema, schema_text

VALIDATOR = jsonschema.Draft202012Validator(json.loads(schema_text()))
SHAPE = {"E-unknown-key", "E-missing-key", "E-wrong-type", "E-bad-value", "E-out-of-range", "E-empty", "E-too-long"}


def as_json(path: Path) -> Any:
    """A TOML file as an editor's schema checker sees it: dates are strings."""
    return json.loads(json.dumps(tomli.loads(path.read_text(encoding="utf-8")), default=plain))


def plain(value: object) -> str:
    assert isinstance(value, datetime.date)
    return value.isoformat()


def test_the_committed_schema_is_current() -> None:
    assert (ROOT / "suite.schema.json").read_text(encoding="utf-8") == schema_text()


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text()))


@pytest.mark.parametrize("path", [ROOT / "suite.toml", SMALL], ids=lambda path: path.name)
def test_sound_specs_are_accepted(path: Path) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(as_json(path))] == []


def test_the_suite_names_its_schema() -> None:
    assert (ROOT / "suite.toml").read_text(encoding="utf-8").startswith("#:schema ./suite.schema.json\n")


def test_wrong_shapes_are_refused_by_the_schema_too() -> None:
    checked = 0
    for path in sorted((HERE / "malformed").glob("*.toml")):
        if path.stem in ("not_finite", "wrong_type_date") or not SHAPE & set(codes_in(errors_of(path))):
            continue  # JSON has no NaN and no dates; other mistakes have a sound shape
        assert list(VALIDATOR.iter_errors(as_json(path))), path.stem
        checked += 1
    assert checked > 20


def test_every_key_is_described_or_plain() -> None:
    """No title that pydantic makes up is left: editors would show it instead of the description."""
    assert '"title"' not in schema_text().replace('"title": "attnmatrix suite"', "")


def test_every_key_is_explained_where_people_look_for_it() -> None:
    """In an editor, by the schema, and on the page made of it."""
    page = (ROOT / "docs/suite.md").read_text(encoding="utf-8")
    whole = schema()
    for name, table in {"The file": whole, **whole["$defs"]}.items():
        of_table = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
        for key, value in table["properties"].items():
            assert value.get("description") or "$ref" in value, f"{name}.{key}"
            row = next(line for line in of_table.splitlines() if line.startswith(f"| `{key}` |"))
            assert len(row.split("|")[4].strip()) > 5, row
