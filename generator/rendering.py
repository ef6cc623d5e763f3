"""Views to text. The templates hold layout only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from generator.modules import ModuleView
from generator.tables import KnownView, ReadmeView


@cache
def environment() -> Environment:
    """Jinja without escaping (nothing here is HTML) and without forgiving a missing name."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def module_text(view: ModuleView) -> str:
    """A test module."""
    return environment().get_template("module.py.j2").render(view=view)


def readme_text(view: ReadmeView) -> str:
    """The part of README.md between the markers."""
    return environment().get_template("readme.md.j2").render(view=view)


def known_failures_text(views: Sequence[KnownView]) -> str:
    """KNOWN_FAILURES.md."""
    return environment().get_template("known_failures.md.j2").render(views=views)
