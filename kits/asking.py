"""Checks of what a device holds, that share one question to it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from kits.graphs import unobserved
from kits.transfer import fetch

Result = TypeVar("Result")
Check: TypeAlias = Generator[Mapping[Any, torch.Tensor], dict[Any, torch.Tensor], Result]
"""Yields once, the tensors that it wants to see; is given them on the host, under the same keys; raises or returns."""


def settle(*checks: Check[Any]) -> list[Any]:
    """Fetch what all checks want to see, by one question, then let them judge in their order.

    Returns what each returned; the first that fails raises, be it with what it asks for: those before it judge first.
    A check that nobody settles has not looked at anything.
    """
    wanted: list[Mapping[Any, torch.Tensor]] = []
    with unobserved():
        try:
            for check in checks:
                wanted.append(next(check))
        finally:
            found = fetch({(number, key): value for number, asked in enumerate(wanted) for key, value in asked.items()})
            returned = [
                judged(check, {key: found[number, key] for key in asked})
                for number, (check, asked) in enumerate(zip(checks, wanted, strict=False))
            ]
    return returned


def judged(check: Check[Any], found: dict[Any, torch.Tensor]) -> Any:
    """What a check that has asked returns."""
    try:
        check.send(found)
    except StopIteration as done:
        return done.value
    raise RuntimeError(f"{check} asks a second time")


def seeing(tensors: Sequence[torch.Tensor]) -> Check[list[torch.Tensor]]:
    """No check: brings these tensors to the host with what the others ask for, and returns them there."""
    found = yield dict(enumerate(tensors))
    return list(found.values())
