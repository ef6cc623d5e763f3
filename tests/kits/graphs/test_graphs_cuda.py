"""What surrounds a CUDA capture, on any machine: CUDA's own calls are replaced, and meta tensors stand for the device.

The other files of this folder test the real thing, where ``ATTNMATRIX_DEVICE=cuda``.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kits.errors import CaptureError, ReplayError
from kits.graphs import cuda, is_capturing

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"


def test_no_op_of_a_capture_imports_the_compiler() -> None:
    """torch wraps the method of a mode that does not say otherwise, and the wrapper imports all of torch._dynamo."""
    assert not hasattr(cuda._Observer.__torch_dispatch__, "__wrapped__")

    class Careless(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert hasattr(Careless.__torch_dispatch__, "__wrapped__"), "torch wraps no more: _should_skip_dynamo can go"


class FakeCuda:
    """Notes the calls that matter, and fails where it is told to."""

    def __init__(self, monkeypatch) -> None:
        self.calls: list[str] = []
        self.end_error: str | None = None
        outer = self

        class CUDAGraph:
            def capture_begin(self, pool=None):
                outer.calls.append("begin")

            def capture_end(self):
                outer.calls.append("end")
                if outer.end_error:
                    message, outer.end_error = outer.end_error, None
                    raise RuntimeError(message)

            def replay(self):
                outer.calls.append("replay")

        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "CUDAGraph": CUDAGraph,
            "synchronize": lambda: None,
            "current_device": lambda: 0,
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda s: nullcontext(),
            "device": lambda d: nullcontext(),
            "graph_pool_handle": lambda: (0, 1),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(
                torch._C, name, lambda device, pool, name=name: self.calls.append(name.split("_")[2]), raising=False
            )
        monkeypatch.setattr(cuda, "_capture_streams", {})
        monkeypatch.setattr(cuda, "_failed", [])
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: zeros(*a, device="meta", **k))


@pytest.fixture
def fake(cpu, own_session, monkeypatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def new_graph() -> cuda.CudaGraph:
    return cuda.CudaGraph(torch.device("cuda", 0))


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_counts_and_observes(fake):
    x, weight, out = on_device(3, 4), on_device(4, 4), on_device(3, 4)
    ids = on_device(2, dtype=torch.int64)
    graph = new_graph()
    with torch.no_grad(), graph.capture():
        assert is_capturing()
        y = x[1:] @ weight
        y.add_(1)
        z = torch.empty_like(x)
        z.copy_(x)
        out[:2].copy_(y.index_select(0, ids))
        host = torch.ones(3).sum()
    assert not is_capturing()
    assert fake.calls == ["begin", "end"]
    assert [op.split("::")[1] for op in graph.ops] == [
        *("mm", "add_.Tensor", "empty_like", "copy_", "index_select", "copy_"),
    ]
    assert [(use.op, use.argument) for use in graph.reads.values()] == [
        ("aten::mm", "self"),
        ("aten::mm", "mat2"),
        ("aten::index_select", "index"),
    ]
    assert [key.holds(t) for key, t in zip(graph.reads, (x, weight, ids), strict=True)] == [True] * 3
    (written,) = graph.writes
    assert written.holds(out)
    graph.replay()
    assert (graph.captures, graph.replays) == (1, 1)
    assert host.item() == 3
    del weight
    with pytest.raises(ReplayError, match=r"aten::mm \(argument mat2"):
        graph.replay()
    assert fake.calls == ["begin", "end", "replay"]


@pytest.mark.parametrize("inference", [False, True])
def test_composites_are_looked_into(fake, inference):
    x, weight = on_device(3, 4), on_device(5, 4)
    graph = new_graph()
    with torch.inference_mode(inference), torch.no_grad(), graph.capture():
        torch.nn.functional.linear(x, weight).t().reshape(-1)
    assert graph.ops == ["aten::mm", "aten::clone"]
    assert len(graph.reads) == 2


def refused_by_cuda(call) -> None:
    """Make a call as CUDA would refuse it: with CUDA's words, after the call was seen."""
    try:
        call()
    except Exception as error:
        raise RuntimeError(NOT_PERMITTED) from error
    raise RuntimeError(NOT_PERMITTED)


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda x: x.tolist(), "host_read"),
        (lambda x: x.item(), "host_read"),
        (lambda x: x.nonzero(), "data_dependent_shape"),
        (lambda x: x[x > 0], "boolean_mask"),
        (lambda x: x[[0]], "host_list"),
        (lambda x: x.copy_(torch.ones(1)), "pageable_copy"),
        (lambda x: x + 1, "not_permitted"),  # nothing noted
    ],
)
def test_refusals_of_cuda_get_the_name_of_what_was_noted(fake, call, rule):
    x, graph = on_device(1), new_graph()
    with cuda.asking_cuda(), pytest.raises(CaptureError) as caught, graph.capture():
        refused_by_cuda(lambda: call(x))
    assert caught.value.rule == rule
    assert NOT_PERMITTED in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert graph.captures == 0


def test_a_note_is_forgotten_at_the_next_call(fake):
    x, graph = on_device(1), new_graph()
    with cuda.asking_cuda(), pytest.raises(CaptureError) as caught, graph.capture():
        refused_by_cuda(lambda: (x.add_(torch.ones(())), x.copy_(torch.ones(1)), x + 1))
    assert caught.value.rule == "not_permitted"


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda x: x.tolist(), "host_read"),
        (lambda x: torch.equal(x, x), "host_read"),
        (lambda x: x[x.long()[0]], "host_read"),
        (lambda x: x.unique(), "data_dependent_shape"),
        (lambda x: x.index_put_((x > 0,), x), "boolean_mask"),
        (lambda x: x[numpy.array([0])], "host_list"),
        (lambda x: x.copy_(torch.ones(1)), "pageable_copy"),
        (lambda x: x.uniform_(), "random"),
        (lambda x: x.resize_(2), "resize"),
    ],
)
def test_a_rule_is_raised_before_the_call(fake, call, rule):
    x, graph = on_device(1), new_graph()
    with pytest.raises(CaptureError) as caught, graph.capture():
        call(x)
    assert caught.value.rule == rule
    assert fake.calls == ["begin", "end"]
    assert graph.ops in ([], ["aten::gt.Scalar"], ["aten::_to_copy"])


def test_our_own_rules_hold_while_cuda_is_asked(fake):
    x, graph = on_device(1), new_graph()
    with cuda.asking_cuda(), pytest.raises(CaptureError) as caught, graph.capture():
        x.uniform_()
    assert caught.value.rule == "random"


def test_scalars_and_writes_by_index_are_allowed(fake):
    """What pools and backends do in a graph: numbers that torch turns into host tensors are no host tensors."""
    x, slots, graph = on_device(3, 4), on_device(2, dtype=torch.int64), new_graph()
    with torch.no_grad(), graph.capture():
        kept = torch.where(slots == -1, 0, slots)
        x.index_put_((kept,), x[:2] / 2.0)
        x[:, 1] = 3.0
        x.masked_fill_(x > 3, float("-inf"))
        torch.clamp(slots - 1, min=0)
        torch.where(x > 3, x, 0.0)
        torch.full_like(x, 2.0)
        x.index_select(0, slots).logaddexp(x[:2]).to(torch.float16).contiguous()
    assert graph.captures == 1


def test_other_errors_stay_what_they_are(fake):
    graph = new_graph()
    with pytest.raises(RuntimeError, match=r"a and b must have|size mismatch"), graph.capture():
        on_device(2, 3) @ on_device(2, 3)
    assert fake.calls == ["begin", "end"]
    with pytest.raises(RuntimeError, match="no capture"):
        graph.replay()


def test_a_capture_that_cannot_end_is_cleaned_up(fake):
    graph = new_graph()
    fake.end_error = "CUDA error: capturing stream has unjoined work"
    with pytest.raises(CaptureError) as caught, graph.capture():
        on_device(1).add(1)
    assert caught.value.rule == "unjoined_stream"
    assert fake.calls == ["begin", "end", "endAllocateToPool", "releasePool", "begin", "end"]
    assert len(cuda._failed) == 1
    with graph.capture():
        on_device(1).add(1)
    assert graph.captures == 1


def test_the_first_error_is_told_when_the_end_fails_too(fake):
    graph = new_graph()
    fake.end_error = "CUDA error: operation failed due to a previous error during capture"
    with cuda.asking_cuda(), pytest.raises(CaptureError) as caught, graph.capture():
        refused_by_cuda(lambda: on_device(1).item())
    assert caught.value.rule == "host_read"
    assert NOT_PERMITTED in str(caught.value)
    assert fake.calls[:4] == ["begin", "end", "endAllocateToPool", "releasePool"]
