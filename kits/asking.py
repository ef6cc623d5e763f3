"""Checks of what a device holds, that share one question to it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, TypeAlias, TypeVar

import torch

from kits.graphs import unobserved
from kits.transfer import fetch

Result = TypeVar("Result")
Check: TypeAlias = Generator[Mapping[Any, torch.Tensor], dict[Any, torch.Tensor], Result]
"""Yields once, the tensors that it wants to see; is given them on the host, under the same keys; raises or returns."""


def settle(*checks: Check[Any]) -> list[Any]:
    """Fetch what all checks want to see, by one question, then let them judge in their order.

    Returns what each returned; the first that fails raises. A check that nobody settles has not looked at anything.
    """
    with unobserved():
        wanted = [next(check) for check in checks]
        found = fetch({(number, key): value for number, asked in enumerate(wanted) for key, value in asked.items()})
        returned = []
        for number, (check, asked) in enumerate(zip(checks, wanted, strict=True)):
            try:
                check.send({key: found[number, key] for key in asked})
            except StopIteration as done:
                returned.append(done.value)
            else:
                raise RuntimeError(f"{check} asks a second time")
    return returned


def seeing(tensors: Mapping[Any, torch.Tensor]) -> Check[dict[Any, torch.Tensor]]:
    """No check: brings these tensors to the host with what the others ask for."""
    return (yield tensors)
