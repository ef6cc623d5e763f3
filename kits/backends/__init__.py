"""Backends under test. ``load`` finds one by the dotted path that the spec gives."""

from __future__ import annotations

import importlib

from kits.backends.base import Backend, Capabilities, Geometry
from kits.errors import KitError

__all__ = ["Backend", "Capabilities", "Geometry", "libraries_of", "load"]


def load(adapter: str) -> Backend:
    """A new instance of ``package.module:Class``."""
    return class_of(adapter)()


def libraries_of(adapter: str) -> tuple[str, ...]:
    """What the backend takes seconds to import; nothing where it cannot be loaded, which ``load`` will say."""
    try:
        return class_of(adapter).libraries
    except Exception:
        return ()


def class_of(adapter: str) -> type[Backend]:
    module_name, _, class_name = adapter.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise KitError(f"adapter {adapter!r} of suite.toml cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise KitError(f"adapter {adapter!r} is not a subclass of kits.backends.Backend")
    return found
