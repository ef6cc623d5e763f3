"""Checks that share one question to the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import kits
from kits import asking
from kits.asking import Check, seeing, settle
from kits.runners import common, cuda_graph
from kits.runners.graph import GraphRunner
from tests.kits.subtests import make


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[Any, torch.Tensor]]:
    asked: list[Mapping[Any, torch.Tensor]] = []
    fetch = asking.fetch

    def counted(tensors: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        asked.append(tensors)
        return fetch(tensors)

    monkeypatch.setattr(asking, "fetch", counted)
    return asked


def equals(value: int, tensor: torch.Tensor) -> Check[str]:
    found = yield {"it": tensor}
    assert list(found) == ["it"]
    assert found["it"].item() == value, f"not {value}"
    return f"is {value}"


def test_checks_see_their_own_by_one_question(questions: list[Any]) -> None:
    one, two = torch.tensor(1), torch.tensor(2)
    assert settle(equals(1, one), equals(2, two), seeing([two])) == ["is 1", "is 2", [two]]
    assert len(questions) == 1


def test_the_first_check_that_fails_says_so() -> None:
    with pytest.raises(AssertionError, match="not 5"):
        settle(equals(2, torch.tensor(2)), equals(5, torch.tensor(2)), equals(6, torch.tensor(2)))


def test_who_asked_before_judges_before() -> None:
    """What one check cannot even ask for may be the fault of what another one sees."""

    def broken() -> Check[None]:
        raise ValueError("nothing to see")
        yield {}

    with pytest.raises(AssertionError, match="not 5"):
        settle(equals(5, torch.tensor(2)), broken())
    with pytest.raises(ValueError, match="nothing to see"):
        settle(equals(2, torch.tensor(2)), broken(), equals(5, torch.tensor(2)))


def test_a_check_asks_once() -> None:
    def twice() -> Check[None]:
        yield {}
        yield {}

    with pytest.raises(RuntimeError, match="asks a second time"):
        settle(twice())


def test_a_replay_asks_twice(questions: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after it; so does an eager forward, and a capture once: other processes' work comes between."""

    def count(owner: type, name: str) -> list[Any]:
        called: list[Any] = []
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: called.append(given) or call(*given))
        return called

    replays = count(cuda_graph.GraphSubtest, "_replay_checked")
    eager = count(common.SubtestRun, "forward_eagerly")
    captures = count(GraphRunner, "capture")
    kits.run(make("kits.backends.triton:TritonBackend", dtype="float16"))
    assert len(replays) > 2
    assert len(eager) > 1
    assert captures
    assert len(questions) == 2 * len(replays) + 2 * len(eager) + len(captures)
