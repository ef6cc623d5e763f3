"""Each rule is broken once, or in several ways, and the error names it."""

from collections.abc import Callable

import numpy
import pytest
import torch

from kits.errors import CaptureError, CheckFailed
from kits.graphs import RULES, host_tensor, is_capturing, new_graph, synchronize, to_host
from kits.graphs.refusals import OWN_RULES, explain_cuda_error, refuse


class Setting:
    """Tensors for a rule to be broken with, made before the capture."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.x = torch.arange(12.0, device=device).reshape(3, 4)
        self.one = torch.ones((), device=device)
        self.ids = torch.tensor([0, 2], device=device)
        self.mask = torch.tensor([True, False, True], device=device)
        self.host = torch.ones(3, 4)
        self.host_ids = torch.tensor([0, 2])
        self.pinned = host_tensor([1.0] * 4, pinned=True)
        self.pinned_out = host_tensor([0.0] * 4, pinned=True)


Act = Callable[[Setting], object]

BROKEN: list[tuple[str, str, Act]] = [
    ("host_read", "item", lambda s: s.one.item()),
    ("host_read", "int", lambda s: int(s.one)),
    ("host_read", "float", lambda s: float(s.one)),
    ("host_read", "index", lambda s: range(s.ids[0])),
    ("host_read", "bool", lambda s: 1 if s.one > 0 else 0),
    ("host_read", "tolist", lambda s: s.x.tolist()),
    ("host_read", "repr", lambda s: repr(s.x)),
    ("host_read", "format", lambda s: f"{s.one:.2f}"),
    ("host_read", "cpu", lambda s: s.x.cpu()),
    ("host_read", "to_host", lambda s: to_host(s.x)),
    ("host_read", "to_cpu", lambda s: s.x.to("cpu")),
    ("host_read", "to_a_host_tensor", lambda s: s.x.to(s.host)),
    ("host_read", "as_tensor_of_the_host", lambda s: torch.as_tensor(s.x, device="cpu")),
    ("host_read", "equal", lambda s: torch.equal(s.x, s.x)),
    ("host_read", "allclose", lambda s: torch.allclose(s.x, s.x)),
    ("host_read", "contains", lambda s: 1.0 in s.x),
    ("host_read", "max_of_two", lambda s: max(s.one, s.one)),
    ("host_read", "select_by_tensor", lambda s: s.x[s.ids[0]]),
    ("host_read", "assignment_by_tensor", lambda s: s.x.__setitem__(s.ids[0], 1.0)),
    ("host_read", "slice_by_tensor", lambda s: s.x[: s.ids[1]]),
    ("host_read", "arange_by_tensor", lambda s: torch.arange(s.ids[1], device=s.device)),
    ("host_read", "host_arange_by_tensor", lambda s: torch.arange(s.ids[1])),
    ("host_read", "into_a_host_tensor", lambda s: s.host.copy_(s.x)),
    ("host_read", "synchronize", lambda s: synchronize(s.device)),
    ("host_list", "tensor", lambda s: torch.tensor([1.0, 2.0], device=s.device)),
    ("host_list", "tensor_of_a_scalar", lambda s: torch.tensor(1.0, device=s.device)),
    ("host_list", "as_tensor", lambda s: torch.as_tensor([1, 2], device=s.device)),
    ("host_list", "as_tensor_of_numpy", lambda s: torch.as_tensor(numpy.ones(2), device=s.device)),
    ("host_list", "new_tensor", lambda s: s.x.new_tensor([1.0])),
    ("host_list", "list_index", lambda s: s.x[[0, 2]]),
    ("host_list", "list_index_of_a_dim", lambda s: s.x[:, [0, 2]]),
    ("host_list", "list_index_assignment", lambda s: s.x.__setitem__([0, 2], s.x[:2].clone())),
    ("host_list", "numpy_index", lambda s: s.x[numpy.array([0, 2])]),
    ("host_list", "numpy_index_of_a_dim", lambda s: s.x[:, numpy.array([0, 2])]),
    ("boolean_mask", "index", lambda s: s.x[s.mask]),
    ("boolean_mask", "index_of_a_dim", lambda s: s.x[0, s.x[0] > 1]),
    ("boolean_mask", "assign_tensor", lambda s: s.x.__setitem__(s.mask, s.x[:2].clone())),
    ("boolean_mask", "assign_scalar_tensor", lambda s: s.x.__setitem__(s.mask, s.one)),
    ("boolean_mask", "index_put", lambda s: s.x.index_put_((s.mask,), s.x[:2].clone())),
    ("data_dependent_shape", "nonzero", lambda s: s.x.nonzero()),
    ("data_dependent_shape", "where", lambda s: torch.where(s.mask)),
    ("data_dependent_shape", "masked_select", lambda s: s.x.masked_select(s.x > 3)),
    ("data_dependent_shape", "unique", lambda s: s.ids.unique()),
    ("data_dependent_shape", "bincount", lambda s: s.ids.bincount()),
    ("data_dependent_shape", "repeat_interleave", lambda s: s.x[:2].repeat_interleave(s.ids, dim=0)),
    ("pageable_copy", "to_device", lambda s: s.host.to(s.device)),
    ("pageable_copy", "to_device_tensor", lambda s: s.host.to(s.x)),
    ("pageable_copy", "to_device_non_blocking", lambda s: s.host.to(s.device, non_blocking=True)),
    ("pageable_copy", "copy", lambda s: s.x.copy_(s.host)),
    ("pageable_copy", "scalar_at_an_index_tensor", lambda s: s.x.__setitem__(s.ids, 0.0)),
    ("blocking_copy", "from_pinned", lambda s: s.x[0].copy_(s.pinned)),
    ("blocking_copy", "to_pinned", lambda s: s.pinned_out.copy_(s.x[0])),
    ("host_tensor_read", "add", lambda s: s.x + s.host),
    ("host_tensor_read", "matmul", lambda s: s.x @ s.host.t()),
    ("host_tensor_read", "index_select", lambda s: s.x.index_select(0, s.host_ids)),
    ("host_tensor_read", "index", lambda s: s.x[s.host_ids]),
    ("host_tensor_read", "derived", lambda s: s.x.index_select(0, s.host_ids.cumsum(0) - s.host_ids)),
    ("random", "randn", lambda s: torch.randn(3, device=s.device)),
    ("random", "dropout", lambda s: torch.nn.functional.dropout(s.x, 0.5)),
    ("random", "in_place", lambda s: s.x.uniform_()),
    ("nested_capture", "capture", lambda s: new_graph(s.device).capture().__enter__()),
]

# What CUDA would do otherwise, and the recorder refuses: see the comment of each.
ONLY_ON_CPU: list[tuple[str, str, Act]] = [
    ("host_list", "tensor_of_the_host", lambda s: torch.tensor([1.0, 2.0])),  # CUDA refuses its upload
    ("host_list", "legacy_constructor", lambda s: torch.FloatTensor([1.0, 2.0])),  # the same
    ("host_read", "numpy", lambda s: s.x.numpy()),  # never possible on CUDA
    ("host_read", "asarray", lambda s: numpy.asarray(s.x)),  # the same
    ("resize", "resize", lambda s: s.x.resize_(5, 4)),  # CUDA moves the memory and keeps the old addresses
    ("resize", "out", lambda s: torch.cumsum(s.x, 0, out=torch.empty(0, device=s.device))),  # the same
    ("unsupported_op", "higher_order", lambda s: torch.cond(s.mask[0], torch.sin, torch.cos, (s.x,))),
]


@pytest.mark.parametrize(("rule", "act"), [pytest.param(r, a, id=f"{r}-{n}") for r, n, a in BROKEN])
def test_rule(device, rule, act):
    setting = Setting(device)
    graph = new_graph(device)
    with pytest.raises(CaptureError) as caught, graph.capture():
        act(setting)
    assert caught.value.rule == rule
    assert str(caught.value).startswith(f"{rule}: ")
    assert graph.captures == 0
    assert not is_capturing()
    with graph.capture():  # the next capture is not disturbed
        out = setting.x * 2
    graph.replay()
    assert torch.equal(out, setting.x * 2)


CUDA_TAKES = {
    "equal": "the same tensor twice: there is a short cut",
    "synchronize": "it is refused before CUDA is asked",
    "capture": "the same",
}
"""Names of BROKEN in which CUDA itself finds nothing wrong."""


@pytest.mark.parametrize(
    ("rule", "act"),
    [pytest.param(r, a, id=f"{r}-{n}") for r, n, a in BROKEN if r not in OWN_RULES and n not in CUDA_TAKES],
)
def test_cuda_refuses_the_same(device, rule, act):
    """Our rules are not stricter than CUDA, nor are these its words by accident."""
    if device.type != "cuda":
        pytest.skip("asks CUDA")
    from kits.graphs.cuda import asking_cuda

    setting, graph = Setting(device), new_graph(device)
    with asking_cuda(), pytest.raises(CaptureError) as caught, graph.capture():
        act(setting)
    assert caught.value.rule == rule
    with graph.capture():
        out = setting.x * 2
    graph.replay()
    assert torch.equal(out, setting.x * 2)


@pytest.mark.parametrize(("rule", "act"), [pytest.param(r, a, id=f"{r}-{n}") for r, n, a in ONLY_ON_CPU])
def test_rule_of_the_recorder(cpu, rule, act):
    test_rule(cpu, rule, act)


def test_every_rule_is_broken_somewhere():
    elsewhere = {"raw_triton_launch", "unjoined_stream", "no_fake_kernel", "not_permitted"}
    assert {r for r, *_ in BROKEN + ONLY_ON_CPU} | elsewhere == set(RULES)


ALLOWED: list[tuple[str, Act]] = [
    ("mask_of_a_scalar", lambda s: s.x.__setitem__(s.mask, 7.0)),
    ("mask_of_a_dim", lambda s: s.x.__setitem__((slice(None), s.x[0] > 1), 7)),
    ("mask_of_a_host_scalar", lambda s: s.x.__setitem__(s.mask, torch.tensor(7.0))),
    ("masked_fill", lambda s: s.x.masked_fill_(s.x > 3, 1.0)),
    ("where", lambda s: torch.where(s.x > 3, s.x, 0.0)),
    ("index_put", lambda s: s.x.index_put_((s.ids,), s.x[:2] * 2)),
    ("assign_at_ids", lambda s: s.x.__setitem__(s.ids, s.x[:2] * 2)),
    ("index_fill", lambda s: s.x.index_fill_(0, s.ids, 4.0)),
    ("index", lambda s: s.x[s.ids]),
    ("scalar_assignment", lambda s: s.x.__setitem__((slice(0, 2), 1), 3.0)),
    ("host_scalar", lambda s: s.x * torch.tensor(2.0)),
    ("host_ops", lambda s: (s.host + 1).sum().item()),
    ("host_list_on_the_host", lambda s: s.host_ids.tolist()),
    ("upload_from_pinned", lambda s: s.x[0].copy_(s.pinned, non_blocking=True)),
    ("to_from_pinned", lambda s: s.pinned.to(s.device, non_blocking=True)),
    ("download_to_pinned", lambda s: s.pinned_out.copy_(s.x[0], non_blocking=True)),
    ("dropout_in_eval", lambda s: torch.nn.functional.dropout(s.x, 0.5, training=False)),
    ("data_ptr", lambda s: s.x.data_ptr()),
    ("repeat_interleave_sized", lambda s: s.x[:2].repeat_interleave(s.ids, dim=0, output_size=2)),
    ("shape_queries", lambda s: (s.x.shape, s.x.stride(), len(s.x), s.x.is_contiguous(), s.x.dtype)),
]


@pytest.mark.parametrize("act", [pytest.param(a, id=n) for n, a in ALLOWED])
def test_allowed(device, act):
    setting = Setting(device)
    graph = new_graph(device)
    with graph.capture():
        kept = act(setting)
        torch.zeros(1, device=device)
    graph.replay()
    synchronize(device)
    del kept


def test_a_masked_assignment_is_replayed_with_the_mask_of_now(device):
    x, mask = torch.zeros(4, device=device), torch.tensor([True, False, False, False], device=device)
    graph = new_graph(device)
    with graph.capture():
        x[mask] = 5.0
    mask.copy_(torch.tensor([False, False, True, True]))
    graph.replay()
    assert to_host(x).tolist() == [0.0, 0.0, 5.0, 5.0]


def test_a_pinned_source_is_read_at_the_replay(device):
    x, source = torch.zeros(2, device=device), host_tensor([1.0, 2.0], pinned=True)
    graph = new_graph(device)
    with graph.capture():
        x.copy_(source, non_blocking=True)
    source.fill_(9.0)
    graph.replay()
    assert to_host(x).tolist() == [9.0, 9.0]
    assert [read.argument for read in graph.reads.values()] == ["src"]


def test_messages_say_what_and_why(cpu):
    x, host = torch.ones(3, device=cpu), torch.ones(3)
    for act, message in (
        (lambda: x + host, "host_tensor_read: aten::add.Tensor argument other: a kernel reads a tensor of the host"),
        (lambda: x.tolist(), "host_read: Tensor.tolist(): the host reads a value of the device: it has none while"),
    ):
        with pytest.raises(CaptureError) as caught, new_graph(cpu).capture():
            act()
        assert str(caught.value).startswith(message)


def test_rules_have_a_sentence_each():
    assert all(text and not text.endswith(".") for text in RULES.values())
    error = refuse("host_read", "Tensor.item()")
    assert error.rule == "host_read"
    assert isinstance(error, CheckFailed)


@pytest.mark.parametrize(
    ("text", "noted", "rule"),
    [
        ("CUDA error: operation not permitted when stream is capturing", None, "not_permitted"),
        ("CUDA error: operation not permitted when stream is capturing", "boolean_mask", "boolean_mask"),
        (
            "CUDA error: operation not permitted when stream is capturing",
            "data_dependent_shape",
            "data_dependent_shape",
        ),
        ("CUDA error: operation failed due to a previous error during capture", None, "not_permitted"),
        (
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.",
            "host_list",
            "host_list",
        ),
        (
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.",
            "random",
            "pageable_copy",
        ),
        (
            "CUDA error: capture sequence contains an unjoined stream: cudaErrorStreamCaptureUnjoined",
            None,
            "unjoined_stream",
        ),
        ("Offset increment outside graph capture encountered unexpectedly.", None, "random"),
        ("Expected all tensors to be on the same device, but found at least two devices", None, "host_tensor_read"),
        ("CUDA error: an illegal memory access was encountered", "host_read", None),
        ("shape mismatch", "host_read", None),
    ],
)
def test_errors_of_cuda_are_explained(text, noted, rule):
    note = refuse(noted, "the last call") if noted else None
    explained = explain_cuda_error(RuntimeError(text + "\nmore lines"), note)
    assert (explained.rule if explained else None) == rule
    if explained:
        assert text in str(explained)
