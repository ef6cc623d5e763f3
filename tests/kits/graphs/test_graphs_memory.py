"""Private memory is poison until a replay writes it; external memory is held weakly."""

import gc
import weakref

import pytest
import torch

from kits.errors import ReplayError
from kits.graphs import new_graph, to_host

DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
    torch.bool,
]


def is_poison(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.bool:
        return bool(tensor.all())
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.to(torch.complex64 if tensor.dtype.is_complex else torch.float32).isnan().all())
    return bool((tensor > torch.iinfo(tensor.dtype).max // 2).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_fresh_memory_is_poison(cpu, dtype):
    with new_graph(cpu).capture():
        made = torch.empty(3, 2, dtype=dtype, device=cpu)
        computed = torch.zeros(5, dtype=dtype, device=cpu).clone()
    assert is_poison(made)
    assert is_poison(computed)


def test_private_memory_is_poisoned_before_each_replay(cpu):
    graph = new_graph(cpu)
    with graph.capture():
        scratch = torch.empty(4, device=cpu)
        scratch[:2].fill_(1)
    for _ in range(2):
        scratch.fill_(7)  # what an earlier replay or the host left there
        graph.replay()
        assert to_host(scratch[:2]).tolist() == [1, 1]
        assert is_poison(scratch[2:])


def test_empty_family_is_poisoned_again(cpu):
    x = torch.ones(2, 3, device=cpu)
    graph = new_graph(cpu)
    with graph.capture():
        made = [
            torch.empty(3, device=cpu),
            torch.empty_like(x),
            x.new_empty(2),
            torch.empty_strided((2,), (3,), device=cpu),
        ]
    for tensor in made:
        tensor.fill_(1)
    graph.replay()
    assert all(is_poison(tensor) for tensor in made)


def test_memory_of_a_dropped_tensor_is_poisoned_at_that_point(cpu):
    """Seen by an op that reads memory by an address it kept, as a kernel may."""
    kept: list[torch.Tensor] = []

    def peek(out: torch.Tensor) -> None:
        out.copy_(kept[-1])

    library = torch.library.Library("graphs_test_drop", "DEF")
    library.define("keep(Tensor x) -> ()")
    library.define("peek(Tensor(a!) out) -> ()")
    library.impl("keep", lambda x: kept.append(x), "CPU")
    library.impl("peek", peek, "CPU")
    for name in ("keep", "peek"):
        library.impl(name, lambda x: None, "Meta")
    ops = torch.ops.graphs_test_drop
    before, after = torch.zeros(2, device=cpu), torch.zeros(2, device=cpu)
    graph = new_graph(cpu)
    with graph.capture():
        temporary = torch.ones(2, device=cpu) * 3
        ops.keep(temporary)
        ops.peek(before)
        del temporary
        ops.peek(after)
    graph.replay()
    assert to_host(before).tolist() == [3, 3]
    assert is_poison(after)


def test_a_view_keeps_private_memory(cpu):
    graph = new_graph(cpu)
    with graph.capture():
        view = (torch.ones(4, device=cpu) * 2)[1:3]
        torch.ones(4, device=cpu)
    graph.replay()
    assert to_host(view).tolist() == [2, 2]


def test_outputs_outlive_the_graph(cpu):
    graph = new_graph(cpu)
    with graph.capture():
        out = torch.ones(2, device=cpu) + 1
    graph.replay()
    del graph
    gc.collect()
    assert to_host(out).tolist() == [2, 2]


def test_a_dropped_graph_needs_no_garbage_collector(cpu):
    gc.collect()
    gc.disable()
    try:
        graph = new_graph(cpu)
        with graph.capture():
            out = torch.ones(2, device=cpu) + 1
        graph.replay()
        alive = weakref.ref(graph)
        del graph
        assert alive() is None
        del out
    finally:
        gc.enable()


# External memory


def test_a_freed_constant_is_named(device):
    x, constant = torch.ones(3, device=device), torch.full((3,), 2.0, device=device)
    graph = new_graph(device)
    with graph.capture():
        y = x + 1
        out = y * constant
    graph.replay()
    assert to_host(out).tolist() == [4.0] * 3
    del constant
    with pytest.raises(ReplayError, match=r"op #1 aten::mul.Tensor \(argument other, float32 3\) reads .* freed"):
        graph.replay()
    assert graph.replays == 1


def test_a_freed_output_buffer_is_named(device):
    out = torch.zeros(3, device=device)
    graph = new_graph(device)
    with graph.capture():
        out.copy_(torch.ones(3, device=device))
    del out
    with pytest.raises(ReplayError, match=r"aten::copy_ \(argument self.* writes"):
        graph.replay()


def test_freed_and_replaced_is_freed(device):
    """Neither the same address nor the same storage handle makes a new tensor the old one."""
    constant = torch.full((1024,), 2.0, device=device)
    address, cdata = constant.data_ptr(), constant.untyped_storage()._cdata
    graph = new_graph(device)
    with graph.capture():
        out = constant * 2
    del constant
    replacements = []
    for _ in range(64):
        replacements.append(torch.full((1024,), 3.0, device=device))
        if replacements[-1].data_ptr() == address:
            break
    assert all(r.untyped_storage()._cdata != cdata for r in replacements)
    with pytest.raises(ReplayError, match="freed"):
        graph.replay()
    del out


def test_rebound_data_is_freed(device):
    parameter = torch.nn.Parameter(torch.ones(3, device=device))
    graph = new_graph(device)
    with graph.capture():
        out = parameter * 2
    parameter.data = torch.zeros(3, device=device)
    with pytest.raises(ReplayError, match="freed"):
        graph.replay()
    del out


def test_resized_is_moved(device):
    x = torch.ones(3, device=device)
    graph = new_graph(device)
    with graph.capture():
        out = x * 2
    x.resize_(4096)
    with pytest.raises(ReplayError, match="resized"):
        graph.replay()
    del out


def test_freed_during_the_capture(device):
    holder = [torch.ones(3, device=device)]
    graph = new_graph(device)
    with graph.capture():
        out = holder.pop() * 2
    with pytest.raises(ReplayError, match="freed"):
        graph.replay()
    del out


def test_a_wrapper_that_comes_and_goes_frees_nothing(device):
    """Python's storage object may die and be made anew while the storage lives."""
    x = torch.ones(3, device=device)
    graph = new_graph(device)
    with graph.capture():
        out = x * 2
    for _ in range(3):
        x.untyped_storage()
        gc.collect()
        graph.replay()
    assert to_host(out).tolist() == [2.0] * 3


def test_a_view_keeps_external_memory_alive(device):
    base = torch.arange(6.0, device=device)
    graph = new_graph(device)
    with graph.capture():
        out = base[:2] + base[4:]
    base = base[5:]
    graph.replay()
    assert to_host(out).tolist() == [4.0, 6.0]


def test_empty_tensors(device):
    nothing = torch.empty(0, 4, device=device)
    graph = new_graph(device)
    with graph.capture():
        out = torch.cat([nothing, torch.ones(1, 4, device=device), nothing * 2])
    graph.replay()
    assert to_host(out).tolist() == [[1.0] * 4]
