"""What a generated test imports. Free of torch until a subtest runs."""

from __future__ import annotations

from kits.subtest import Case, KnownFailure, Model, Native, Speculation, Subtest, Tolerance

__all__ = ["Case", "KnownFailure", "Model", "Native", "Speculation", "Subtest", "Tolerance", "run"]


def run(subtest: Subtest) -> None:
    """Run one subtest; raises a ``kits.errors.CheckFailed`` where something is wrong."""
    from kits.runners import run as run_subtest

    run_subtest(subtest)
