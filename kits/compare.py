"""Comparing real rows with what they must be, and saying how close it was."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kits.errors import MismatchError
from kits.subtest import Tolerance


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
    at = tuple(int(index) for index in torch.unravel_index(torch.tensor(worst), used.shape))
    ends = list(itertools.accumulate(row_lens))
    row = bisect.bisect_right(ends, at[0])
    return Difference(
        max_abs=float(distance.max()),
        margin=float(used.max()),
        wrong=float((used > 1).float().mean()),
        row=row,
        at=at,
        got=float(left.flatten()[worst]),
        expected=float(right.flatten()[worst]),
    )


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


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise equality, which NaN does not break."""
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
