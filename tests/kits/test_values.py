"""Values that hide nothing: each shows a wrong backend that stays green without it."""

from __future__ import annotations

import pytest

import kits
from kits import errors, layers
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
