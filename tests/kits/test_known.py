"""A known failure must fail in its stated way, where it is said to hold."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from generator.spec import Raises
from kits import KnownFailure, errors, known
from kits.errors import CheckFailed, MetadataError, MismatchError
from tests.kits.subtests import make

ENTRY = KnownFailure(id="entry", action="xfail", kind="bug", reason="a reason", max_abs=(0.3, 1.6), wrong=(0.6, 0.97))


def mismatch(max_abs: float, wrong: float) -> MismatchError:
    return MismatchError("x", max_abs=max_abs, wrong=wrong, margin=9.0, row=0)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (mismatch(0.5, 0.8), None),
        (mismatch(0.1, 0.8), "max_abs is 0.1, outside the stated range 0.3 to 1.6"),
        (mismatch(float("nan"), 0.8), "max_abs is nan"),
        (mismatch(0.5, 1.0), "wrong is 1, outside"),
        (MetadataError("x"), "it raised MetadataError, the entry expects MismatchError"),
    ],
)
def test_stated_way_only(error: Exception, says: str | None) -> None:
    problem = known.differs_from_entry(ENTRY, error)
    assert problem is None if says is None else says in str(problem)


@pytest.mark.parametrize(
    ("packages", "capability", "holds"),
    [
        ((), None, True),
        (("torch>=2",), None, True),
        (("torch<2",), None, False),
        (("no-such-package",), None, False),
        ((), ">=999", False),
    ],
)
def test_when(packages: tuple[str, ...], capability: str | None, holds: bool) -> None:
    entry = dataclasses.replace(ENTRY, packages=packages, capability=capability)
    assert known.applies(make("x:y", known_failure=entry)) is holds


def test_a_known_failure_may_end_in_every_failed_check() -> None:
    checks = {
        kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CheckFailed)
    }
    assert set(get_args(Raises)) == checks - {"CheckFailed"}
