"""``--update-golden`` rewrites the expected messages of malformed specs; read the diff before committing it."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/generator/malformed/*.txt")
