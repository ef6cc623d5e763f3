"""The pointer guard sees what the host rebinds and what died, and nothing else."""

import types
from dataclasses import dataclass, field

import pytest
import torch

from kits.errors import PointerError
from kits.graphs import PointerGuard, new_graph


@dataclass
class Metadata:
    kv_indptr: torch.Tensor
    page_table: torch.Tensor


class Slotted:
    __slots__ = ("__private", "table", "unset")

    def __init__(self, table):
        self.table = table
        self.__private = table


@dataclass
class Backend:
    device: torch.device
    metadata: dict = field(default_factory=dict)
    current: object = None
    unused: object = None

    def __post_init__(self):
        at = self.device
        self.metadata[4] = Metadata(torch.zeros(5, dtype=torch.int32, device=at), torch.zeros(4, 2, device=at))
        self.slotted = Slotted(torch.zeros(3, device=at))
        self.steps = [torch.zeros(2, device=at), (torch.zeros(2, device=at),)]
        self.unused = torch.zeros(2, device=at)
        self.loop = self

    def forward(self):
        metadata = self.metadata[4]
        return (
            metadata.kv_indptr.sum()
            + metadata.page_table.sum()
            + self.slotted.table.sum()
            + self.steps[0]
            + self.steps[1][0]
        )


@pytest.fixture
def backend(device):
    return Backend(device)


@pytest.fixture
def guard(device, backend):
    backend.graph = new_graph(device)
    with backend.graph.capture():
        backend.out = backend.forward()
    return PointerGuard(backend.graph, {"backend": backend})


def test_paths(guard):
    assert set(guard.paths) == {
        "backend.metadata[4].kv_indptr",
        "backend.metadata[4].page_table",
        "backend.slotted.table",
        "backend.slotted._Slotted__private",
        "backend.steps[0]",
        "backend.steps[1][0]",
    }


def test_in_place_is_fine(guard, backend):
    backend.metadata[4].kv_indptr.copy_(torch.arange(5))
    backend.steps[0].add_(1)
    backend.unused = torch.ones(2)
    backend.out = None
    guard.check()
    backend.graph.replay()
    guard.check()


def rebind_field(backend):
    backend.metadata[4].kv_indptr = backend.metadata[4].kv_indptr + 1


def rebind_holder(backend):
    old = backend.metadata[4]
    backend.kept = old
    backend.metadata[4] = Metadata(old.kv_indptr, old.page_table.clone())


def rebind_slot(backend):
    backend.kept = backend.slotted.table
    backend.slotted.table = backend.slotted.table.clone()


def rebind_item(backend):
    backend.kept = backend.steps[0]
    backend.steps[0] = backend.steps[0].clone()


@pytest.mark.parametrize(
    ("rebind", "path", "argument"),
    [
        (rebind_holder, "backend.metadata[4].page_table (field page_table)", "self"),
        (rebind_slot, "backend.slotted.table (field table)", "self"),
        (rebind_item, "backend.steps[0] (field 0)", "other"),
    ],
)
def test_rebound(guard, backend, rebind, path, argument):
    rebind(backend)
    with pytest.raises(PointerError) as caught:
        guard.check()
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"pointer_rebound: {path}: op #")
    assert f"(argument {argument}, " in line
    assert "copy into it, do not rebind it" in line


def test_rebound_and_freed_are_both_reported(guard, backend):
    rebind_field(backend)
    with pytest.raises(PointerError) as caught:
        guard.check()
    freed, rebound = str(caught.value).splitlines()
    assert freed.startswith("pointer_freed: backend.metadata[4].kv_indptr: op #")
    assert rebound.startswith("pointer_rebound: backend.metadata[4].kv_indptr (field kv_indptr): op #0 aten::sum")


def test_freed_without_a_path(device):
    constant, x = torch.ones(3, device=device), torch.ones(3, device=device)
    graph = new_graph(device)
    with graph.capture():
        out = x * constant
    guard = PointerGuard(graph, {"batch": {"x": x}})
    guard.check()
    del constant
    with pytest.raises(PointerError, match=r"pointer_freed: op #0 aten::mul.Tensor \(argument other, float32 3\)"):
        guard.check()
    del out


def test_resized(device):
    x = torch.ones(3, device=device)
    graph = new_graph(device)
    with graph.capture():
        out = x * 2
    guard = PointerGuard(graph, {"batch": {"x": x}})
    x.resize_(4096)
    with pytest.raises(PointerError, match="pointer_moved: batch"):
        guard.check()
    del out


def test_a_path_that_is_gone_names_nothing_else(guard, backend):
    backend.kept = backend.metadata.pop(4), backend.steps[0]
    backend.steps[0] = None
    del backend.slotted._Slotted__private
    guard.check()


def test_the_guard_keeps_nothing_alive(device):
    backend = Backend(device)
    graph = new_graph(device)
    with graph.capture():
        out = backend.forward()
    guard = PointerGuard(graph, {"backend": backend})
    del backend.loop, backend
    with pytest.raises(PointerError, match="pointer_freed"):
        guard.check()
    del out


def test_roots_of_any_kind(device):
    x = torch.ones(2, device=device)
    roots = {
        "namespace": types.SimpleNamespace(x=x),
        "mapping": {"a": {("k", 1): [x]}},
        "module": torch.nn.ParameterList([torch.nn.Parameter(x)]),
        "tensor": x,
    }
    graph = new_graph(device)
    with graph.capture():
        out = x * 2
    guard = PointerGuard(graph, roots)
    assert {"namespace.x", "mapping['a'][('k', 1)][0]", "module._parameters['0']", "tensor"} <= set(guard.paths)
    guard.check()
    roots["namespace"].x = x.clone()
    with pytest.raises(PointerError, match=r"namespace\.x"):
        guard.check()
    del out


def test_properties_are_not_run(device):
    class Costly:
        def __init__(self, x):
            self.x = x

        @property
        def bomb(self):
            raise AssertionError("a guard runs no code of the object")

        def __getattr__(self, name):
            raise AssertionError(f"asked for {name}")

    costly = Costly(torch.ones(2, device=device))
    graph = new_graph(device)
    with graph.capture():
        out = costly.x * 2
    guard = PointerGuard(graph, {"costly": costly})
    assert list(guard.paths) == ["costly.x"]
    guard.check()
    del out
