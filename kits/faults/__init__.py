"""Seeded faults: public bugs planted on purpose, to measure what the suite catches.

A fault is one function in a module of this package, registered with ``@fault``; CONTRIBUTING shows how to add one.
"""

from __future__ import annotations

from kits.faults.registry import (
    KINDS,
    Fault,
    Plant,
    Touches,
    UnknownFaultError,
    active,
    fault,
    find,
    load_all,
    planted,
    planted_from_environment,
)

__all__ = [
    "KINDS",
    "Fault",
    "Plant",
    "Touches",
    "UnknownFaultError",
    "active",
    "fault",
    "find",
    "load_all",
    "planted",
    "planted_from_environment",
]
