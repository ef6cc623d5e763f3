"""A replay repeats the captured kernels on the captured memory, and nothing else."""

import pytest
import torch

from kits.graphs import Graph, host_tensor, new_graph, to_host


def captured(device, function) -> Graph:
    graph = new_graph(device)
    with graph.capture():
        function()
    return graph


def test_capture_runs_nothing_and_replay_does(device):
    x = torch.arange(6.0, device=device)
    out = torch.zeros(6, device=device)
    graph = captured(device, lambda: out.copy_(x * 2 + 1))
    assert to_host(out).tolist() == [0.0] * 6
    graph.replay()
    assert to_host(out).tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
    assert (graph.captures, graph.replays) == (1, 1)


def test_replay_reads_the_inputs_of_now(device):
    x = torch.zeros(3, device=device)
    graph = new_graph(device)
    with graph.capture():
        out = x + 1
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert to_host(out).tolist() == [value + 1] * 3


def test_scalars_are_those_of_the_capture(device):
    x = torch.ones(3, device=device)
    length = host_tensor(3)
    graph = new_graph(device)
    with graph.capture():
        out = x * int(length)
        by_tensor = x * length  # a pointwise kernel takes a zero-dimensional host tensor as a scalar
    length.fill_(100)
    graph.replay()
    assert to_host(out).tolist() == [3.0] * 3
    assert to_host(by_tensor).tolist() == [3.0] * 3


def test_python_does_not_run_again(device):
    calls = []
    x = torch.ones(2, device=device)
    graph = captured(device, lambda: calls.append(x + 1))
    graph.replay()
    graph.replay()
    assert len(calls) == 1


def test_state_accumulates_over_replays(device):
    total = torch.zeros(1, device=device)
    graph = captured(device, lambda: total.add_(1))
    for _ in range(3):
        graph.replay()
    assert total.item() == 3


def test_a_graph_can_be_captured_again(device):
    x = torch.ones(2, device=device)
    graph = new_graph(device)
    for factor in (2, 3):
        with graph.capture():
            out = x * factor
        graph.replay()
        assert to_host(out).tolist() == [factor] * 2
    assert graph.captures == 2
    assert graph.replays == 2


def test_replay_without_capture_is_an_error(device):
    with pytest.raises(RuntimeError, match="no capture"):
        new_graph(device).replay()


def test_an_error_in_the_capture_leaves_no_graph(device):
    graph = new_graph(device)
    with pytest.raises(ZeroDivisionError):
        captured(device, lambda: torch.ones(2, device=device) / (1 // 0))
    assert graph.captures == 0
    with pytest.raises(RuntimeError, match="no capture"):
        graph.replay()
    captured(device, lambda: torch.ones(2, device=device)).replay()  # and the next capture works


def test_ops_reads_and_writes(device):
    x, unused, out = (torch.ones(4, device=device) for _ in range(3))
    graph = new_graph(device)
    with graph.capture():
        y = x[1:3] * 2
        out[:2].copy_(y)
        del unused
    assert graph.ops == ["aten::mul.Tensor", "aten::copy_"]
    (read,) = graph.reads.items()
    (written,) = graph.writes.items()
    assert read[0].holds(x)
    assert (read[1].op, read[1].argument, read[1].index, read[1].shape) == ("aten::mul.Tensor", "self", 0, (2,))
    assert written[0].holds(out)
    assert (written[1].op, written[1].argument, written[1].index) == ("aten::copy_", "self", 1)


def test_updated_in_place_is_read_and_written(device):
    x = torch.ones(2, device=device)
    graph = captured(device, lambda: x.add_(1))
    assert list(graph.reads) == list(graph.writes)


# Each function returns new tensors, or changes its argument; eager and replayed results must agree bit for bit.


def _index_put(x):
    x.index_put_((torch.arange(2, device=x.device),), torch.zeros(2, 4, device=x.device))
    return x


def _set_items(x):
    x[1:2] = 5.0
    x[0] = x[2]
    x[x > 9] = -1.0
    x.masked_fill_(x == 4, 0.5)
    return x


def _foreach(x):
    parts = list(x.unbind(0))
    torch._foreach_mul_(parts, 2.0)
    doubled = torch._foreach_add(parts, 1.0)
    torch._foreach_copy_(parts[:1], doubled[1:2])
    return torch.stack(doubled)


def _out_variants(x):
    out = torch.empty(3, 4, device=x.device)
    torch.cumsum(x, 0, out=out)
    torch.add(out, x, out=out[:])
    return out


def _strides(x):
    y = x.t().contiguous().t() + x.t().clone().t()
    return y.reshape(-1), y.transpose(0, 1).flatten(), x.expand(2, 3, 4).sum(0)


def _inplace_views(x):
    y = x * 1
    y.unsqueeze_(0).transpose_(1, 2).squeeze_(0)
    return y + 1


def _set(x):
    y = torch.empty(0, device=x.device)
    y.set_(x)
    y.add_(1)
    return y * 2


def _dtypes(x):
    ids = x.to(torch.int32)
    return ids.long().cumsum(0), ids.to(torch.float16), (ids > 3).to(torch.uint8), x.double(), x.bfloat16().float()


def _constants(x):
    made = [torch.zeros(3, device=x.device), torch.ones_like(x).sum(1), torch.full((3,), 7.0, device=x.device)]
    return x.new_full((3,), 2.0) + sum(made), torch.arange(5, device=x.device), torch.where(x > 3, x, 0.0)


def _reductions(x):
    top, where = x.max(1)
    return top, where, x.softmax(-1), torch.logsumexp(x, 0), torch.topk(x, 2).indices


def _gather(x):
    at = torch.arange(3, device=x.device).flip(0)
    return x[at], x[1, at], x.index_select(0, at), x.gather(1, at[:, None]), torch.cat([x, x[at]]), torch.stack([x, x])


def _linear(x):
    weight = torch.ones(5, 4, device=x.device)
    return torch.nn.functional.linear(x, weight), torch.einsum("ij,kj->ik", x, weight), torch.bmm(x[None], x.t()[None])


def _repeat(x):
    return torch.repeat_interleave(x, torch.tensor([1, 2, 0], device=x.device), dim=0, output_size=3)


def _attention(x):
    q = x[None, None]
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


FUNCTIONS = [
    _index_put,
    _set_items,
    _foreach,
    _out_variants,
    _strides,
    _inplace_views,
    _set,
    _dtypes,
    _constants,
    _reductions,
    _gather,
    _linear,
    _attention,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference"])
def test_replay_equals_eager(device, function, inference):
    fresh = torch.arange(12.0, device=device).reshape(3, 4)
    with torch.inference_mode(inference):
        x = fresh.clone()
        function(x)
        x.copy_(fresh)
        graph = new_graph(device)
        with graph.capture():
            got = function(x)
        for shift in (0.0, 3.0):
            wanted = function(fresh + shift)
            x.copy_(fresh + shift)
            graph.replay()
            for mine, theirs in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, wanted)), strict=True):
                assert mine.dtype == theirs.dtype
                assert mine.stride() == theirs.stride()
                assert torch.equal(mine, theirs)


def test_repeat_interleave_with_an_output_size(device):
    x, repeats = torch.arange(3.0, device=device), torch.tensor([1, 2, 0], device=device)
    graph = new_graph(device)
    with graph.capture():
        out = torch.repeat_interleave(x, repeats, output_size=3)
    graph.replay()
    assert to_host(out).tolist() == [0.0, 1.0, 1.0]


def test_a_view_of_a_static_buffer_is_written_in_place(device):
    pool = torch.zeros(8, 2, device=device)
    slots = torch.tensor([1, 3], device=device)
    new = torch.ones(2, 2, device=device)
    graph = new_graph(device)
    with graph.capture():
        pool.view(4, 2, 2)[:, 1].index_copy_(0, slots, new)
    graph.replay()
    assert to_host(pool).nonzero()[:, 0].tolist() == [3, 3, 7, 7]


def test_autograd_does_not_disturb(device):
    layer = torch.nn.Linear(4, 2, device=device)
    x = torch.ones(3, 4, device=device)
    with torch.enable_grad():
        layer(x)  # a library of CUDA cannot set itself up inside a capture
        graph = new_graph(device)
        with graph.capture():
            out = layer(x)
    graph.replay()
    torch.testing.assert_close(out, layer(x))


def test_largest_first_captures_share_static_buffers(device):
    x = torch.zeros(4, device=device)
    graphs = {}
    for size in (4, 2):
        graphs[size] = new_graph(device)
        with graphs[size].capture():
            out = x[:size] * 2
        graphs[size].out = out
    x.copy_(torch.arange(4.0, device=device))
    for size in (4, 2, 4):
        graphs[size].replay()
        assert to_host(graphs[size].out).tolist() == [2.0 * i for i in range(size)]
