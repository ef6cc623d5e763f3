"""The oracle against an independent formulation and hand-made masks."""

from __future__ import annotations

import torch

from kits import reference
from kits.reference.masks import depths_of


def test_causal_mask_is_bottom_right() -> None:
    assert reference.causal_mask(2, 2, None).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_window_counts_the_query_itself() -> None:
    assert reference.causal_mask(3, 1, 2).int().tolist() == [[0, 0, 1, 1]]
    assert reference.causal_mask(0, 3, 1).int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_tree_mask_sees_ancestors_only() -> None:
    assert reference.tree_mask(1, (-1, 0, 0), None).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]


def test_siblings_share_a_window() -> None:
    assert reference.tree_mask(3, (-1, 0, 0), 2).int().tolist() == [
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 0, 1],
    ]
    assert depths_of((-1, 0, 0, 1)) == [0, 1, 1, 2]


def test_draft_mask_by_branch_and_step() -> None:
    mask = reference.draft_mask(1, 2, 2, True, None)
    assert mask.int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]
    assert reference.draft_mask(2, 1, 2, False, None).int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]


def test_attention_against_a_loop_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 8, generator=generator) for n, h in ((3, 10), (7, 2), (7, 2)))
    sinks = torch.randn(10, generator=generator)
    allowed = reference.causal_mask(4, 3, 5)
    got = reference.attention(q, k, v, allowed, scale=0.4, softcap=3.0, sinks=sinks)
    for token in range(3):
        for head in range(10):
            weights, total = [], torch.exp(sinks[head].double())
            for key in range(7):
                score = float(q[token, head].double() @ k[key, head // 5].double()) * 0.4
                capped = 3.0 * torch.tanh(torch.tensor(score / 3.0, dtype=torch.float64))
                weights.append(torch.exp(capped) if allowed[token, key] else torch.zeros((), dtype=torch.float64))
            total = total + sum(weights)
            wanted = sum(w / total * v[key, head // 5].double() for key, w in enumerate(weights))
            assert torch.allclose(got[token, head].double(), wanted, atol=1e-6)
