"""Values that hide nothing: each shows a wrong backend that stays green without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kits
from kits import backends, errors, layers, world
from kits.kernels import flash_attn, triton_ops
from tests.kits.generated import planned
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


MUST_PASS = [subtest for subtest in planned().values() if subtest.known_failure is None]


def _forward(subtest: kits.Subtest) -> str:
    """The forward mode, a multi-step draft apart."""
    return "DRAFT" if subtest.runner == "cuda_graph_multi_step" else subtest.case.mode


def test_what_a_backend_has_rides_in_every_forward_mode() -> None:
    """A path that drops the cap, the sinks or the scales of one mode alone has nowhere to hide."""
    rides: dict[tuple[str, str], set[str]] = {}
    for subtest in MUST_PASS:
        if subtest.model.method == "dense":
            model = subtest.model
            has = {"softcap": model.softcap is not None, "sinks": model.sinks, "kv_scales": model.k_scale != 1.0}
            of_mode = rides.setdefault((subtest.adapter, _forward(subtest)), set())
            of_mode.update(name for name, rides_here in has.items() if rides_here)
    for (adapter, mode), ridden in rides.items():
        can = backends.load(adapter).capabilities
        assert {name for name in ("softcap", "sinks", "kv_scales") if getattr(can, name)} <= ridden, (adapter, mode)


def test_trees_are_verified_on_grouped_heads() -> None:
    """As many heads in a group as there are KV heads, or one, hide which of the two a layout is by."""
    verified: dict[str, bool] = {}
    for subtest in MUST_PASS:
        model, speculation = subtest.model, subtest.case.speculation
        if subtest.case.mode == "TARGET_VERIFY" and model.method == "dense" and speculation and speculation.topk > 1:
            grouped = model.q_heads // model.kv_heads not in (1, model.kv_heads)
            verified[subtest.adapter] = verified.get(subtest.adapter, False) or grouped
    assert verified
    assert all(verified.values()), verified


def test_every_forward_mode_of_a_backend_is_run() -> None:
    run: dict[str, set[str]] = {}
    for subtest in MUST_PASS:
        run.setdefault(subtest.adapter, set()).add(subtest.case.mode)
    for adapter, modes in run.items():
        assert modes >= backends.load(adapter).capabilities.forward_modes, adapter


def test_an_extend_through_a_window_fills_more_than_a_tile_of_queries() -> None:
    """The window's start differs from tile to tile, and the tile counts the heads of a group as rows."""
    for method in ("swa", "mla"):
        rows = [
            max(subtest.case.extend_lens) * subtest.model.q_heads // subtest.model.kv_heads
            for subtest in MUST_PASS
            if subtest.model.method == method and ".triton." in subtest.id and subtest.case.mode == "EXTEND"
        ]
        assert max(rows) > triton_ops.MOST_QUERIES
