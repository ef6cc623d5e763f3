"""Comparing real rows with what they must be, and saying how close it was."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kits.errors import MismatchError
from kits.subtest import Tolerance
from kits.transfer import Key

Pair = tuple[torch.Tensor, torch.Tensor]
"""What is, and what must be."""


@dataclass(frozen=True)
class Difference:
    """``max_abs``: largest absolute difference. ``margin``: largest one as a multiple of its tolerance.

    ``wrong``: share of values outside the tolerance. A NaN counts as infinitely far.
    """

    max_abs: float
    margin: float
    wrong: float
    row: int
    at: tuple[int, ...]
    got: float
    expected: float


def difference(got: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, row_lens: Sequence[int]) -> Difference:
    """Compare ``(tokens, ...)`` in float32; ``row_lens`` are the tokens of each request, to name the row."""
    if got.shape != expected.shape:
        raise ValueError(f"compared shapes differ: {tuple(got.shape)} and {tuple(expected.shape)}")
    left, right = got.detach().float().cpu(), expected.detach().float().cpu()
    distance = (left - right).abs()
    finite = torch.isfinite(distance)
    distance = torch.where(finite, distance, torch.inf)
    used = torch.where(finite, distance / (tolerance.atol + tolerance.rtol * right.abs()), torch.inf)
    worst = int(used.argmax())
    at: list[int] = []
    rest = worst
    for size in reversed(used.shape):
        rest, index = divmod(rest, size)
        at.insert(0, index)
    figures = [distance.max(), used.max(), (used > 1).float().mean(), left.flatten()[worst], right.flatten()[worst]]
    max_abs, margin, wrong, got_value, expected_value = torch.stack(figures).tolist()
    row = bisect.bisect_right(list(itertools.accumulate(row_lens)), at[0])
    return Difference(max_abs, margin, wrong, row, tuple(at), got_value, expected_value)


def require_close(what: str, found: Difference, tolerance: Tolerance) -> None:
    """Raise a MismatchError that names row, value and figures where ``found`` exceeds the tolerance."""
    if found.margin <= 1:
        return
    raise MismatchError(
        f"{what}: row {found.row}, element {list(found.at)}: got {found.got:.6g}, expected {found.expected:.6g}; "
        f"max abs difference {found.max_abs:.4g}, {found.wrong:.1%} of values outside atol={tolerance.atol:g} "
        f"rtol={tolerance.rtol:g} (margin {found.margin:.3g})",
        max_abs=found.max_abs,
        wrong=found.wrong,
        margin=found.margin,
        row=found.row,
    )


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(values: torch.Tensor) -> torch.Tensor:
    """The values as integers of the same size, which compare as they are stored: NaN equals itself."""
    return values.view(_BITS[values.dtype.itemsize])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise equality."""
    return torch.equal(bits(left), bits(right))


def differing(pairs: Mapping[Key, Pair]) -> dict[Key, torch.Tensor]:
    """Whether the tensors of each pair differ in bits, as a bool on their device."""
    return {name: (bits(left) != bits(right)).any() for name, (left, right) in pairs.items()}
