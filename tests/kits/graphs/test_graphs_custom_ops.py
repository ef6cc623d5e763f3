"""Custom ops are recorded whole: what they change, return and promise comes from their schema and fake kernel."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kits.errors import CaptureError, KernelFault, ReplayError
from kits.graphs import new_graph, to_host

Tensor = torch.Tensor


class Ops:
    """Defines throw-away ops of one test."""

    def __init__(self) -> None:
        self.library = torch.library.Library("graphs_test", "FRAGMENT")
        self.ran: list[str] = []

    def define(self, schema: str, kernel: Callable, fake: Callable | None) -> Callable:
        name = schema.split("(")[0]

        def counted(*args, **kwargs):
            self.ran.append(name)
            return kernel(*args, **kwargs)

        self.library.define(schema)
        self.library.impl(name, counted, "CPU")
        self.library.impl(name, counted, "CUDA")
        if fake is not None:
            torch.library.register_fake(f"graphs_test::{name}", fake, lib=self.library)
        return getattr(torch.ops.graphs_test, name)


@pytest.fixture
def ops() -> Iterator[Ops]:
    made = Ops()
    yield made
    made.library._destroy()


def nothing(*args, **kwargs) -> None:
    return None


def test_not_run_at_capture(cpu, ops):
    double = ops.define("double(Tensor x) -> Tensor", lambda x: x * 2, lambda x: x.new_empty(x.shape))
    x = torch.ones(2, device=cpu)
    graph = new_graph(cpu)
    with graph.capture():
        out = double(x)
    assert ops.ran == []
    graph.replay()
    graph.replay()
    assert ops.ran == ["double"] * 2
    assert to_host(out).tolist() == [2, 2]


def test_mutates_arguments(device, ops):
    def kernel(x: Tensor, out: Tensor, count: Tensor) -> None:
        out.copy_(x + count)
        count.add_(1)

    step = ops.define("step(Tensor x, Tensor(a!) out, Tensor(b!) count) -> ()", kernel, nothing)
    x, out, count = torch.ones(2, device=device), torch.zeros(2, device=device), torch.zeros(1, device=device)
    graph = new_graph(device)
    with graph.capture():
        step(x, out, count)
        after = out * 10
    out.zero_()
    count.zero_()
    for replay in range(2):
        graph.replay()
        assert to_host(after).tolist() == [10.0 * (replay + 1)] * 2
    assert {use.argument for use in graph.writes.values()} == {"out", "count"}
    assert {use.argument for use in graph.reads.values()} == {"x", "out", "count"}


def test_returns_several_and_optional(device, ops):
    def kernel(x: Tensor, mask: Tensor | None = None, *, lse: bool = False):
        out = x.sum(1) if mask is None else (x * mask).sum(1)
        return out.to(torch.float16), x.max(1).indices, [x + 1, x[:, :1].clone()]

    def fake(x: Tensor, mask: Tensor | None = None, *, lse: bool = False):
        rows = x.shape[0]
        return (
            x.new_empty(rows, dtype=torch.float16),
            x.new_empty(rows, dtype=torch.int64),
            [x.new_empty(x.shape), x.new_empty(rows, 1)],
        )

    many = ops.define(
        "many(Tensor x, Tensor? mask=None, *, bool lse=False) -> (Tensor, Tensor, Tensor[])", kernel, fake
    )
    x, mask = torch.arange(6.0, device=device).reshape(2, 3), torch.ones(3, device=device)
    graph = new_graph(device)
    with graph.capture():
        first, second, others = many(x, lse=True)
        masked, *_ = many(x, mask)
    mask.zero_()
    graph.replay()
    wanted = many(x)
    assert torch.equal(first, wanted[0])
    assert torch.equal(second, wanted[1])
    assert all(torch.equal(a, b) for a, b in zip(others, wanted[2], strict=True))
    assert to_host(masked).tolist() == [0, 0]


def test_lists_of_tensors(device, ops):
    def kernel(parts: list[Tensor], outs: list[Tensor]) -> None:
        for part, out in zip(parts, outs, strict=True):
            out.copy_(part * 2)

    scatter = ops.define("scatter(Tensor[] parts, Tensor(a!)[] outs) -> ()", kernel, nothing)
    parts = [torch.ones(2, device=device), torch.ones(3, device=device)]
    outs = [torch.zeros(2, device=device), torch.zeros(3, device=device)]
    graph = new_graph(device)
    with graph.capture():
        scatter(parts, outs)
    parts[0].fill_(4)
    graph.replay()
    assert [to_host(out).tolist() for out in outs] == [[8.0] * 2, [2.0] * 3]
    assert len(graph.reads) == 4
    assert len(graph.writes) == 2


def test_returns_a_view_of_its_argument(device, ops):
    head = ops.define("head(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], lambda x: x[:1])
    x = torch.ones(3, device=device)
    graph = new_graph(device)
    with graph.capture():
        view = head(x)
        view.add_(1)
    before = to_host(x).tolist()
    graph.replay()
    assert to_host(x).tolist() == [before[0] + 1, 1.0, 1.0]


def test_returns_its_argument(device, ops):
    bump = ops.define("bump(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1), lambda x: x)
    x = torch.zeros(2, device=device)
    graph = new_graph(device)
    with graph.capture():
        same = bump(x)
    assert same is x
    x.zero_()
    graph.replay()
    assert to_host(x).tolist() == [1, 1]


def test_decorated_op(device, ops):
    @torch.library.custom_op("graphs_test::decorated", mutates_args=("out",))
    def decorated(x: Tensor, out: Tensor, scale: float) -> Tensor:
        out.copy_(x * scale)
        return x + scale

    decorated.register_fake(lambda x, out, scale: x.new_empty(x.shape))
    x, out = torch.ones(2, device=device), torch.zeros(2, device=device)
    graph = new_graph(device)
    with graph.capture():
        new = decorated(x, out, 3.0)
    graph.replay()
    assert to_host(out).tolist() == [3, 3]
    assert to_host(new).tolist() == [4, 4]


def test_no_fake_kernel(cpu, ops):
    blind = ops.define("blind(Tensor x) -> Tensor", lambda x: x * 2, None)
    match = r"no_fake_kernel: graphs_test::blind .*register_fake"
    with pytest.raises(CaptureError, match=match), new_graph(cpu).capture():
        blind(torch.ones(2, device=cpu))


def test_data_dependent_fake(cpu, ops):
    def fake(x: Tensor) -> Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    keep = ops.define("keep(Tensor x) -> Tensor", lambda x: x[x > 0], fake)
    with pytest.raises(CaptureError) as caught, new_graph(cpu).capture():
        keep(torch.ones(2, device=cpu))
    assert caught.value.rule == "data_dependent_shape"


def test_host_argument_of_a_kernel(cpu, ops):
    double = ops.define("double(Tensor x) -> Tensor", lambda x: x * 2, lambda x: x.new_empty(x.shape))
    for value in (torch.ones(2), torch.tensor(1.0)):
        match = r"host_tensor_read: graphs_test::double argument x"
        with pytest.raises(CaptureError, match=match), new_graph(cpu).capture():
            double(value)
    assert ops.ran == []


def test_wrong_fake_is_seen_at_the_first_replay(cpu, ops):
    wrong = ops.define("wrong(Tensor x) -> Tensor", lambda x: x[:1].clone(), lambda x: x.new_empty(x.shape))
    graph = new_graph(cpu)
    with graph.capture():
        wrong(torch.ones(3, device=cpu))
    with pytest.raises(ReplayError, match=r"op #1 graphs_test::wrong returned float32 \(1,\), but .* float32 \(3,\)"):
        graph.replay()


def test_result_in_the_memory_of_an_argument(cpu, ops):
    sneaky = ops.define("sneaky(Tensor x) -> Tensor", lambda x: x.view(-1), lambda x: x.new_empty(x.numel()))
    x = torch.ones(3, device=cpu)
    graph = new_graph(cpu)
    with graph.capture():
        sneaky(x)
    with pytest.raises(ReplayError, match="returned memory of an argument"):
        graph.replay()


def test_result_in_memory_that_the_op_keeps(cpu, ops):
    workspace: list[Tensor] = []

    def kernel(x: Tensor) -> Tensor:
        if not workspace:
            workspace.append(torch.empty_like(x))
        return workspace[0].copy_(x * 2)

    cached = ops.define("cached(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape))
    x = torch.ones(3, device=cpu)
    cached(x)
    once, twice = new_graph(cpu), new_graph(cpu)
    with once.capture():
        cached(x)
    with twice.capture():
        cached(cached(x))
    once.replay()
    for graph in (once, twice):
        with pytest.raises(ReplayError, match="also keeps"):
            graph.replay()


def test_results_that_share_memory_of_their_own(cpu, ops):
    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.stack([x, x + 1])
        return both[0], both[1]

    pair = ops.define(
        "pair(Tensor x) -> (Tensor, Tensor)", kernel, lambda x: (x.new_empty(x.shape), x.new_empty(x.shape))
    )
    graph = new_graph(cpu)
    with graph.capture():
        first, second = pair(torch.ones(2, device=cpu))
    graph.replay()
    assert to_host(first).tolist() == [1, 1]
    assert to_host(second).tolist() == [2, 2]


def test_a_kernel_fault_keeps_its_type_and_gains_its_place(cpu, ops):
    def kernel(x: Tensor) -> Tensor:
        raise KernelFault("gather", "ids", "row 3 is 99")

    gather = ops.define("gather(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(x.shape))
    graph = new_graph(cpu)
    with graph.capture():
        gather(torch.ones(3, device=cpu) * 2)
    with pytest.raises(KernelFault, match="row 3 is 99") as caught:
        graph.replay()
    assert caught.value.kernel == "gather"
    assert caught.value.__notes__ == ["in a replay, op #2 graphs_test::gather"]


def test_an_index_out_of_bounds_is_a_kernel_fault(cpu):
    x, ids = torch.ones(3, device=cpu), torch.tensor([0, 2], device=cpu)
    graph = new_graph(cpu)
    with graph.capture():
        x[ids]
    ids.fill_(7)
    with pytest.raises(KernelFault, match=r"op #0 aten::index.Tensor: .*out of bounds"):
        graph.replay()


def test_poisoned_ids_fault(cpu):
    """Large garbage, not zeros or -1: an index that nothing writes in the replay cannot pass for a real one."""
    x = torch.ones(3, device=cpu)
    graph = new_graph(cpu)
    with graph.capture():
        ids = torch.empty(2, dtype=torch.int64, device=cpu)
        x.index_select(0, ids)
    ids.zero_()
    with pytest.raises(KernelFault):
        graph.replay()


def test_modes_of_the_caller_see_no_kernel_of_a_replay(cpu):
    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, device=cpu)
    graph = new_graph(cpu)
    with graph.capture():
        out = x * 2
    with Seeing():
        graph.replay()
    assert seen == []
    assert to_host(out).tolist() == [2.0] * 3
