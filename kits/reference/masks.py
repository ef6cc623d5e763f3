"""Which keys a query may see. Each rule is stated once, here."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def causal_mask(prefix: int, extend: int, window: int | None) -> torch.Tensor:
    """Bool ``(extend, prefix + extend)``: query ``i`` stands at position ``prefix + i`` and sees itself and the past.

    With a window, it sees the last ``window`` positions, its own included (Hugging Face's ``sliding_window``).
    """
    return _within(torch.arange(prefix, prefix + extend), prefix + extend, window)


def _within(positions: torch.Tensor, keys: int, window: int | None) -> torch.Tensor:
    distance = positions[:, None] - torch.arange(keys)[None, :]
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)


def tree_mask(prefix: int, parents: Sequence[int], window: int | None) -> torch.Tensor:
    """Bool ``(draft, prefix + draft)`` of a verify tree: a draft token sees the prefix, its ancestors and itself.

    A draft token stands at position ``prefix + depth``; the window counts positions, so siblings share it.
    """
    depths = depths_of(parents)
    draft = len(parents)
    seen = [[True] * prefix + [False] * draft for _ in range(draft)]
    for token in range(draft):
        ancestor = token
        while ancestor >= 0:
            seen[token][prefix + ancestor] = True
            ancestor = parents[ancestor]
    allowed = torch.tensor(seen, dtype=torch.bool).view(draft, prefix + draft)
    if window is not None:
        key_positions = torch.cat([torch.arange(prefix), prefix + torch.tensor(depths)])
        distance = (prefix + torch.tensor(depths))[:, None] - key_positions[None, :]
        allowed &= distance < window
    return allowed


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depth of each tree token; a root (parent -1) has depth 0. A parent must come before its children."""
    depths: list[int] = []
    for token, parent in enumerate(parents):
        if parent >= token:
            raise ValueError(f"tree token {token} has parent {parent}, which does not come before it")
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def positions(prefix: int, extend: int, parents: Sequence[int] = ()) -> list[int]:
    """Where new tokens stand: one behind the other, or at the depths of a verify tree."""
    return [prefix + depth for depth in (depths_of(parents) if parents else range(extend))]


def draft_positions(prefix: int, topk: int, steps: int, cached: bool) -> list[int]:
    """Where the tokens of a multi-step draft stand, in the order (branch, step): the branches of a step share a place,
    and drafts that are not cached stay at the last cached token."""
    return [prefix + step if cached else prefix - 1 for _ in range(topk) for step in range(steps)]


def draft_mask(prefix: int, topk: int, steps: int, cached: bool, window: int | None) -> torch.Tensor:
    """Bool ``(topk * steps, prefix + topk * steps)`` of a multi-step draft, tokens in the order (branch, step).

    A step's query sees the prefix and, where drafts are ``cached``, its branch up to itself; it stands behind them.
    """
    own = torch.zeros(topk, steps, topk, steps, dtype=torch.bool)
    for branch in range(topk):
        own[branch, :, branch] = torch.ones(steps, steps, dtype=torch.bool).tril() & cached
    step_of = torch.arange(steps).repeat(topk)
    queries = torch.tensor(draft_positions(prefix, topk, steps, cached))
    keys = torch.cat([torch.arange(prefix), prefix + step_of])
    allowed = torch.cat(
        [torch.ones(topk * steps, prefix, dtype=torch.bool), own.view(topk * steps, topk * steps)], dim=1
    )
    return allowed if window is None else allowed & (queries[:, None] - keys[None, :] < window)
