"""The line between host and device, and a session that leaves nothing behind."""

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode

from kits.errors import ModeLeakError
from kits.graphs import device_session, host_tensor, is_capturing, is_host, is_pinned, new_graph, to_host, unobserved

MADE = {
    "tensor": lambda **at: torch.tensor([1.0, 2.0], **at),
    "zeros": lambda **at: torch.zeros(2, **at),
    "full": lambda **at: torch.full((2,), 3.0, **at),
    "arange": lambda **at: torch.arange(2, **at),
    "rand": lambda **at: torch.rand(2, **at),
    "as_tensor": lambda **at: torch.as_tensor([1, 2], **at),
    "as_tensor_of_numpy": lambda **at: torch.as_tensor(numpy.ones(2), **at),
    "linear": lambda **at: torch.nn.Linear(2, 2, **at).weight,
    "buffer": lambda **at: torch.nn.Embedding(2, 2, **at).weight,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
def test_a_place_is_what_the_device_argument_says(device, make):
    assert is_host(make())
    assert is_host(make(device="cpu"))
    assert not is_host(make(device=device))


def test_default_device_of_a_with_block(device):
    with device:
        assert not is_host(torch.zeros(2))


def test_made_from_a_tensor_follows_it(device):
    x, h = torch.ones(3, device=device), torch.ones(3)
    for make in (
        torch.zeros_like,
        torch.empty_like,
        torch.rand_like,
        lambda t: t.new_zeros(2),
        lambda t: t.new_tensor([1]),
    ):
        assert not is_host(make(x))
        assert is_host(make(h))
    assert not is_host(torch.zeros_like(h, device=device))
    assert is_host(torch.zeros_like(x, device="cpu"))
    assert is_host(x.new_zeros(2, device="cpu"))


def test_computed_from_hosts_alone_is_of_the_host(device):
    x, h = torch.ones(3, device=device), torch.ones(3)
    for of_host in (h + 1, h[1:], h.cumsum(0), torch.cat([h, h]), h.to(torch.int32), *h.split(1), h.max(0).values, -h):
        assert is_host(of_host)
    for of_device in (x + 1, x[1:], torch.cat([x, x]), x.to(torch.int32), x + torch.tensor(1.0), *x.split(1)):
        assert not is_host(of_device)


def test_downloads_are_copies(device):
    x = torch.ones(3, device=device)
    for down in (x.cpu(), x.to("cpu"), to_host(x), x.to(torch.ones(1)), x[1:].cpu(), x.to("cpu", torch.float64)):
        assert is_host(down)
        x.add_(1)
        assert set(down.tolist()) != set(to_host(x).tolist())


def test_a_stale_mirror_stays_stale(device):
    lens = torch.tensor([1, 2], device=device)
    mirror = lens.cpu()
    lens.add_(10)
    assert mirror.tolist() == [1, 2]


def test_uploads_are_copies(device):
    h = torch.ones(2, 3)
    for up in (h.to(device), h.to(device, torch.float64), h.to(device, non_blocking=True), h.t().to(device)):
        assert not is_host(up)
        h.add_(1)
        assert not torch.equal(to_host(up).to(h.dtype).sum(), h.sum())
    array = numpy.ones(2)
    up = torch.as_tensor(array, device=device)
    array += 1
    assert to_host(up).tolist() == [1, 1]
    assert h.t().to(device).stride() == h.t().stride()


def test_copies_between(device):
    x, h = torch.zeros(3, device=device), torch.ones(3)
    x.copy_(h)
    h.zero_()
    h.copy_(x)
    assert h.tolist() == [1, 1, 1]
    assert is_host(h)
    assert not is_host(x)


def test_same_place_is_no_copy(device):
    x, h = torch.ones(3, device=device), torch.ones(3)
    assert x.to(device) is x
    assert h.to("cpu") is h
    assert h.cpu() is h


def test_pinned(device):
    assert not is_pinned(torch.ones(2))
    assert not is_pinned(host_tensor([1]))
    for pinned in (torch.ones(2).pin_memory(), torch.ones(2, pin_memory=True), host_tensor([1], pinned=True)):
        assert is_host(pinned)
        assert is_pinned(pinned)
        assert pinned.is_pinned()
        assert not is_pinned(pinned.to(device))
    assert not is_pinned(torch.ones(2, device=device))


def test_host_tensor(device):
    made = host_tensor([1, 2], dtype=torch.int32)
    assert is_host(made)
    assert (made.dtype, made.tolist()) == (torch.int32, [1, 2])


def test_module_to_device(device):
    layer = torch.nn.Linear(2, 2)
    assert is_host(layer.weight)
    assert not is_host(layer.to(device).weight)


def test_a_host_storage_that_died_says_nothing_of_the_next(cpu):
    for _ in range(300):  # past the limit at which the register is cleaned
        h = torch.ones(1000)
        assert is_host(h)
        del h
        assert not is_host(torch.ones(1000, device=cpu))


def test_no_split_outside_of_a_session(cpu, own_session):
    assert not is_host(torch.ones(2))
    x = torch.ones(2)
    assert x.cpu() is x
    assert to_host(x) is not x
    assert is_host(to_host(x))


def test_a_capture_outside_of_a_session_draws_the_line_itself(cpu, own_session):
    x = torch.ones(2)
    graph = new_graph(cpu)
    with graph.capture():
        h = torch.zeros(2)
        assert is_host(h)
        out = x * 2
    graph.replay()
    assert out.tolist() == [2, 2]


# Sessions


class LeakyDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class LeakyFunction(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Stubborn(LeakyDispatch):
    def __exit__(self, *error):
        raise RuntimeError("will not go")


def stacks():
    return list(_get_current_function_mode_stack()), list(_get_current_dispatch_mode_stack())


LEAKS = {
    "dispatch": (lambda: LeakyDispatch().__enter__(), "dispatch mode .*LeakyDispatch left active"),
    "function": (lambda: LeakyFunction().__enter__(), "function mode .*LeakyFunction left active"),
    "stubborn": (lambda: Stubborn().__enter__(), "Stubborn left active"),
    "default_device": (lambda: torch.device("meta").__enter__(), "DeviceContext left active"),
    "grad": (lambda: torch.set_grad_enabled(False), "grad mode left off"),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "default dtype left at torch.float64"),
    "two": (lambda: (LeakyDispatch().__enter__(), LeakyFunction().__enter__()), "LeakyFunction left active; dispatch"),
}


@pytest.mark.parametrize(("leak", "message"), LEAKS.values(), ids=LEAKS.keys())
def test_a_leak_is_named_and_removed(device, own_session, leak, message):
    before = stacks(), torch.is_grad_enabled(), torch.get_default_dtype()
    with pytest.raises(ModeLeakError, match=message), device_session(device):
        leak()
    assert (stacks(), torch.is_grad_enabled(), torch.get_default_dtype()) == before
    with device_session(device):
        assert (torch.ones(2, device=device) + 1).dtype == torch.float32


def test_a_capture_left_open_is_a_leak(cpu, own_session):
    left_open = new_graph(cpu).capture()
    with pytest.raises(ModeLeakError, match="Recording left active"), device_session(cpu):
        left_open.__enter__()
    assert not is_capturing()
    del left_open
    with device_session(cpu), new_graph(cpu).capture():
        assert is_capturing()


def test_a_removed_mode_is_put_back(device, own_session):
    mode = LeakyDispatch()
    mode.__enter__()
    with pytest.raises(ModeLeakError, match="LeakyDispatch of the caller removed"), device_session(device):
        mode.__exit__(None, None, None)
    assert _get_current_dispatch_mode_stack() == [mode]
    _pop_mode()
    assert _get_current_dispatch_mode_stack() == []


def test_a_failure_keeps_its_error_and_notes_the_leak(device, own_session):
    before = stacks()
    with pytest.raises(ZeroDivisionError) as caught, device_session(device):
        LeakyDispatch().__enter__() and 1 // 0
    assert "LeakyDispatch left active" in caught.value.__notes__[0]
    assert stacks() == before


def test_a_clean_session_leaves_no_trace(device, own_session):
    before = stacks()
    with device_session(device):
        with device_session(device):
            assert is_host(torch.ones(1))
        assert is_host(torch.ones(1))
    assert stacks() == before


def test_unobserved_goes_past_the_split(cpu):
    with unobserved():
        x = torch.ones(2)
        assert not is_host(x)
        assert x.cpu() is x
    assert is_host(torch.ones(2))
