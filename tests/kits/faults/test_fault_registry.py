"""Faults are planted whole, taken out without a trace, and never taken for one another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kits.errors import KitError
from kits.faults import Fault, Plant, Touches, UnknownFaultError, active, fault, find, load_all, planted, registry
from kits.faults.registry import planted_from_environment
from kits.faults.sources import edited
from kits.graphs import device_session, new_graph
from orchestrator.power.planning import read_matrix
from tests.kits.generated import GENERATED

FAULTS = load_all()
MATRIX = read_matrix(GENERATED)
CONTROLS = {"C06", "C12", "C14", "C19", "C23"}


class Thing:
    """What the tests below change."""

    number = 1

    def double(self, value: int) -> int:
        return 2 * value


class Heir(Thing):
    pass


@pytest.fixture
def plant() -> Iterator[Plant]:
    made = Plant(FAULTS["F01"])
    yield made
    made.undo()


def test_every_row_of_the_catalogue_is_there() -> None:
    counted = {found.row for found in FAULTS.values() if found.id.startswith("F")}
    assert counted == {f"F{number:02}" for number in range(1, 50)}


def test_spares_and_controls_are_there() -> None:
    assert sum(found.id.startswith("S") for found in FAULTS.values()) >= 10
    assert {found.id for found in FAULTS.values() if found.control} == CONTROLS


@pytest.mark.parametrize("fault_id", FAULTS)
def test_a_fault_says_where_it_is_from(fault_id: str) -> None:
    found = FAULTS[fault_id]
    assert found.references
    assert all(reference.strip() for reference in found.references)
    assert found.title
    assert found.axes
    assert found.control == fault_id.startswith("C")


@pytest.mark.parametrize("fault_id", FAULTS)
def test_a_fault_touches_subtests_of_the_matrix(fault_id: str) -> None:
    touches = FAULTS[fault_id].touches
    assert any(touches.covers(entry) for entry in MATRIX.entries)
    for name, values in vars(touches).items():
        field = {"methods": "method", "backends": "backend", "sweeps": "sweep", "runners": "runner", "modes": "mode"}
        known = {entry[field[name]] for entry in MATRIX.entries} if name in field else set(values)
        assert set(values) <= known, f"{name} names what the manifest does not have"


@pytest.mark.parametrize("fault_id", FAULTS)
def test_taken_out_without_a_trace(fault_id: str) -> None:
    before = _attributes()
    with planted(fault_id):
        changed = _attributes()
        assert changed != before
    assert _attributes() == before


def _attributes() -> dict[tuple[str, str], int]:
    """Identity of every attribute of every module and class of the kit."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".", 1)[0] != "kits" or name.startswith("kits.faults"):
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found |= {(f"{name}.{key}", inner): id(part) for inner, part in vars(value).items()}
    return found


def test_one_fault_at_a_time() -> None:
    with planted("F01"), pytest.raises(KitError, match=r"cannot plant F02 over F01"), planted("F02"):
        pass
    assert active() is None


def test_an_unknown_fault_names_the_nearest() -> None:
    with pytest.raises(UnknownFaultError, match=r"no seeded fault is called 'F0l'; did you mean F01 \("):
        find("F0l")


def test_the_environment_plants_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with planted_from_environment() as nothing:
        assert nothing is None
    monkeypatch.setenv("ATTNMATRIX_FAULT", "F01")
    with planted_from_environment() as found:
        assert found is active()
    monkeypatch.setenv("ATTNMATRIX_FAULT", "F0l")
    with pytest.raises(UnknownFaultError), planted_from_environment():
        pass


def test_a_broken_fault_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(plant: Plant) -> None:
        plant.replace(Thing, "number", lambda _: 2)
        raise RuntimeError("half planted")

    monkeypatch.setitem(registry._registry, "F98", _fault("F98", breaks))
    with pytest.raises(RuntimeError), planted("F98"):
        pass
    assert Thing.number == 1
    assert active() is None


def _fault(fault_id: str, apply: Any) -> Fault:
    return Fault(
        id=fault_id, title="t", references=("r",), kind=1, axes="a", touches=Touches(), control=False, apply=apply
    )


def test_ids_are_checked_at_registration() -> None:
    options: dict[str, Any] = {"title": "t", "references": (), "axes": "", "touches": Touches()}
    with pytest.raises(ValueError, match="not of the form"):
        fault("fault one", kind=1, **options)(lambda plant: None)
    with pytest.raises(ValueError, match="kind 12"):
        fault("F97", kind=12, **options)(lambda plant: None)
    with pytest.raises(ValueError, match="F01 is registered twice"):
        fault("F01", kind=1, **options)(lambda plant: None)


def test_replace_in_a_class_a_subclass_and_an_instance(plant: Plant) -> None:
    thing, heir = Thing(), Heir()
    plant.replace(Heir, "double", lambda original: lambda self, value: original(self, value) + 1)
    assert (thing.double(2), heir.double(2)) == (4, 5)
    plant.replace(thing, "double", lambda original: lambda value: original(value) + 2)
    assert (thing.double(2), Thing().double(2)) == (6, 4)
    plant.replace(Thing, "number", lambda original: original + 1)
    assert Heir.number == 2
    plant.undo()
    assert (thing.double(2), heir.double(2), Thing.number) == (4, 4, 1)
    assert "double" not in vars(Heir)
    assert not vars(thing)


def test_replace_says_that_the_kit_has_changed(plant: Plant) -> None:
    with pytest.raises(AttributeError, match=r"F01: .*Thing.* has no 'triple' to replace; the kit has changed"):
        plant.replace(Thing, "triple", lambda original: original)


def test_replace_everywhere_reaches_names_imported_elsewhere(plant: Plant) -> None:
    from kits.backends import flash_attention, paging, triton

    original = paging.indptr
    plant.replace_everywhere(original, lambda _: "another")
    assert (paging.indptr, triton.indptr, flash_attention.indptr) == ("another",) * 3
    plant.undo()
    assert paging.indptr is triton.indptr is flash_attention.indptr is original


def test_a_witness_counts_runs_and_changes(plant: Plant) -> None:
    plant.witness()
    plant.witness(changed=False)
    assert (plant.ran, plant.changed) == (2, 1)
    plant.reset()
    assert (plant.ran, plant.changed) == (0, 0)


def test_a_swap_in_a_graph_is_witnessed_by_its_replays() -> None:
    device = torch.device("cpu")
    with planted("F01") as plant, device_session(device):
        one, other = torch.ones(3, device=device), torch.ones(3, device=device)
        graph = new_graph(device)
        with graph.capture():
            plant.swap(one, other)
        assert plant.ran == 0
        graph.replay()
        assert (plant.ran, plant.changed) == (1, 0)
        other.fill_(2)
        graph.replay()
        assert (plant.ran, plant.changed) == (2, 1)


@pytest.mark.parametrize(
    ("right", "wrong", "changed"),
    [
        (torch.tensor(1), torch.tensor(1), 0),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), 0),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 1),
        (torch.tensor([1, 2]), torch.tensor([1, 2, 3]), 1),
        (torch.tensor([1]), torch.tensor([1], dtype=torch.int32), 1),
        (torch.tensor([True]), torch.tensor([False]), 1),
    ],
)
def test_a_swap_compares_bits(right: torch.Tensor, wrong: torch.Tensor, changed: int) -> None:
    with planted("F01") as plant:
        assert plant.swap(right, wrong) is wrong
        assert (plant.ran, plant.changed) == (1, changed)


def test_a_source_that_moved_is_an_error() -> None:
    with pytest.raises(KitError, match=r"holds '3 \* value' 0 times, not once: the kit changed"):
        edited(Thing.double, ("3 * value", "4 * value"))
    assert edited(Thing.double, ("2 * value", "factor * value"), factor=5)(None, 2) == 10
