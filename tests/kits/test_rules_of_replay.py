"""A replay is a replay: each backend that breaks one rule is caught, with a message that names the rule."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import kits
from kits import errors
from kits.runners.graph import CapturedGraph, GraphRunner
from kits.world import Request
from tests.kits.subtests import make


def breaker(name: str, **keywords: object) -> kits.Subtest:
    return make(f"tests.kits.breakers:{name}", **keywords)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("CallsItem", "host_read"),
        ("CallsTolist", "host_read"),
        ("BuildsFromList", "host_list"),
        ("IndexesByMask", "boolean_mask"),
        ("ReadsHostTensor", "pageable_copy"),
        ("LaunchesTriton", "raw_triton_launch"),
    ],
)
def test_what_a_capture_refuses(name: str, rule: str) -> None:
    with pytest.raises(errors.CaptureError) as caught:
        kits.run(breaker(name))
    assert caught.value.rule == rule
    assert str(caught.value).startswith(f"{rule}: ")


def test_rebound_metadata() -> None:
    with pytest.raises(errors.PointerError, match="cache_seqlens_int32"):
        kits.run(breaker("Rebinds"))


def test_constant_freed_after_capture() -> None:
    with pytest.raises(errors.PointerError, match="one"):
        kits.run(breaker("DropsConstant"))


def test_host_scalar_kept_from_capture() -> None:
    with pytest.raises(errors.MismatchError, match="replay of own"):
        kits.run(breaker("KeepsHostScalar"))


def test_mode_left_active() -> None:
    with pytest.raises(errors.ModeLeakError, match="Forgotten"):
        kits.run(breaker("LeavesModeActive"))


def test_the_unbroken_backend_passes() -> None:
    kits.run(make("kits.backends.flash_attention:FA3Backend"))


def test_silent_eager_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that does not find its graph and runs the batch eagerly gives right answers, and is refused."""

    def run_eagerly(self: GraphRunner, captured: CapturedGraph, requests: Sequence[Request]) -> list[torch.Tensor]:
        self.forward(captured.batch)
        return self._outputs(requests)

    monkeypatch.setattr(GraphRunner, "run", run_eagerly)
    with pytest.raises(errors.NothingReplayedError, match="ran eagerly"):
        kits.run(make("kits.backends.flash_attention:FA3Backend"))
