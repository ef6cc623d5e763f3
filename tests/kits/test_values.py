"""Values that hide nothing: each shows a wrong backend that stays green without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kits
from kits import errors, layers, world
from kits.kernels import flash_attn
from tests.kits.subtests import make


def test_scales_of_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {
        "method": "swa",
        "kv_heads": 2,
        "layers": ("window", "full"),
        "window": 8,
        "k_scale": 0.375,
        "v_scale": 2.1,
    }
    subtest = make("tests.kits.breakers:ScalesOfFirstLayer", dtype="float16", **model)  # type: ignore[arg-type]
    with pytest.raises(errors.MismatchError, match="layer 1"):
        kits.run(subtest)
    monkeypatch.setattr(layers, "_of_layer", lambda scale, index: scale)
    kits.run(subtest)


@pytest.mark.parametrize("least", [0.0, -90.0], ids=["no maximum", "a maximum that starts too high"])
def test_softmax_without_the_maximum(least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right for scores of ordinary size; overflows at large ones, and loses all keys at large negative ones."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, **_rest: Any) -> Any:
        scores = torch.einsum("thd,nhd->htn", q.float(), k.float()) * scale
        top = scores.amax(dim=2, keepdim=True).clamp(min=least) if least else 0.0
        weights = torch.exp(scores - top)
        total = weights.sum(dim=2, keepdim=True)
        return torch.einsum("htn,nhd->thd", weights / (total + 1e-30), v.float()), torch.log(total[..., 0]).t()

    monkeypatch.setattr(flash_attn, "attend", attend)
    subtest = make("kits.backends.flash_attention:FA3Backend", runner="eager")
    with pytest.raises(errors.MismatchError):
        kits.run(subtest)
    monkeypatch.setattr(world, "SHARED_SCORE", 0.0)
    kits.run(subtest)
