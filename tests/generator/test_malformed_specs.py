"""One golden message for each malformed spec, all with suite.toml:LINE:COL."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from spec_tools import HERE, SMALL, codes_in, errors_of

from generator.problems import CODES

MALFORMED = sorted((HERE / "malformed").glob("*.toml"))
ELSEWHERE = {
    "E-no-file": "test_spec_files",
    "E-encoding": "test_spec_files",
    "E-drift": "test_generated_tree",
    "E-missing-file": "test_generated_tree",
    "E-stale-file": "test_generated_tree",
    "E-foreign-file": "test_generated_tree",
    "E-markers": "test_generated_tree",
    "E-output": "test_generator_cli",
    "E-unknown-id": "test_generator_cli",
    "E-results": "test_results",
    "E-run-folder": "test_results",
}
"""Codes that no spec alone can show, and the test that shows them."""


@pytest.mark.parametrize("path", MALFORMED, ids=lambda path: path.stem)
def test_message(path: Path, request: pytest.FixtureRequest) -> None:
    found = errors_of(path)
    golden = path.with_suffix(".txt")
    if request.config.getoption("--update-golden", default=False):
        golden.write_text(found, encoding="utf-8")
    assert found == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", MALFORMED, ids=lambda path: path.stem)
def test_every_error_has_a_place(path: Path) -> None:
    lines = [line for line in errors_of(path).splitlines() if not line.startswith("    ")]
    assert lines
    size = path.read_text(encoding="utf-8").split("\n")
    for line in lines:
        match = re.match(r"suite\.toml:(\d+):(\d+): error\[E-[a-z-]+\]: .", line)
        assert match, line
        row, column = int(match[1]), int(match[2])
        assert 1 <= row <= len(size)
        assert 1 <= column <= len(size[row - 1]) + 1


def test_no_golden_without_its_spec() -> None:
    assert {path.stem for path in (HERE / "malformed").glob("*.txt")} == {path.stem for path in MALFORMED}


def test_every_code_is_shown() -> None:
    shown = {code for path in MALFORMED for code in codes_in(errors_of(path))}
    assert shown | ELSEWHERE.keys() == CODES.keys()
    assert not shown & ELSEWHERE.keys()


def test_errors_of_several_tables_and_stages_come_together() -> None:
    codes = set(codes_in(errors_of(HERE / "malformed" / "many_at_once.toml")))
    assert {"E-unknown-key", "E-wrong-type", "E-bad-value", "E-unknown-backend", "E-unknown-case"} <= codes


def test_the_spec_they_are_made_from_is_sound() -> None:
    assert errors_of(SMALL) == ""
