"""Files that are no specs: a clear error, and never a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from spec_tools import SMALL, codes_in, errors_of


def test_no_file(tmp_path: Path) -> None:
    assert codes_in(errors_of(tmp_path / "suite.toml")) == ["E-no-file"]


def test_folder_instead_of_file(tmp_path: Path) -> None:
    assert codes_in(errors_of(tmp_path)) == ["E-no-file"]


def test_encoding(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_bytes(b"[suite]\nformat = 1 # \xff\n")
    assert errors_of(path).startswith("suite.toml:2:14: error[E-encoding]: byte 0xff is not UTF-8")


def test_deep_nesting(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text("x = " + "[" * 5000 + "]" * 5000)
    assert codes_in(errors_of(path)) == ["E-syntax"]


@pytest.mark.parametrize("seed", range(60))
def test_damaged_files(seed: int, tmp_path: Path) -> None:
    """Lines lost, doubled, cut or swapped, words exchanged: errors or none, but no exception."""
    rng = random.Random(seed)
    lines = SMALL.read_text(encoding="utf-8").split("\n")
    words = ["0", "-1", "true", '""', '"fa3"', "[]", "{}", "1e400", "nan", '"@all"', "2026-01-01", '"prefix"']
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(lines))
        change = rng.randrange(5)
        if change == 0:
            del lines[at]
        elif change == 1:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif change == 2:
            lines[at] = lines[at][: rng.randint(0, len(lines[at]))]
        elif change == 3:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif " = " in lines[at]:
            lines[at] = f"{lines[at].split(' = ')[0]} = {rng.choice(words)}"
    path = tmp_path / "suite.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    text = errors_of(path)
    assert not text or codes_in(text)
