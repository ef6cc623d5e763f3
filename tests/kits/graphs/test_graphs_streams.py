"""Side streams: late without a wait, in order with one."""

import pytest
import torch

from kits.errors import CaptureError
from kits.graphs import (
    current_stream,
    device_session,
    host_tensor,
    is_capturing,
    new_graph,
    stream,
    synchronize,
    to_host,
)


@pytest.fixture
def buffers(device):
    return torch.zeros(2, device=device), torch.ones(2, device=device)


@pytest.fixture
def graph(device, buffers):
    made = new_graph(device)
    with made.capture():
        made.out = buffers[0] * 10
    return made


@pytest.mark.parametrize("wait", ["side", "current", "synchronize"])
def test_waited_work_is_seen(device, buffers, graph, wait):
    side = stream(device)
    with side.work():
        buffers[0].copy_(buffers[1] + 1)
    if wait == "side":
        side.wait()
    elif wait == "current":
        current_stream().wait(side)
    else:
        synchronize(device)
    graph.replay()
    assert to_host(graph.out).tolist() == [20.0] * 2


def test_work_that_nobody_waits_for_comes_after_the_next_replay(cpu, buffers, graph):
    side = stream(cpu)
    with side.work():
        buffers[0].copy_(buffers[1] + 1)
    assert to_host(buffers[0]).tolist() == [0, 0]
    graph.replay()
    assert to_host(graph.out).tolist() == [0, 0]
    assert to_host(buffers[0]).tolist() == [2, 2]
    graph.replay()
    assert to_host(graph.out).tolist() == [20, 20]


def test_results_are_poison_until_waited_for(cpu, buffers):
    side = stream()
    with side.work():
        made = buffers[1] + 1
        first, second = made.max(0)
    assert made.isnan().all()
    side.wait()
    assert to_host(made).tolist() == [2, 2]
    assert (first.item(), second.item()) == (2, 0)


def test_streams_wait_for_each_other(cpu, buffers):
    one, two = stream(cpu), stream(cpu)
    with one.work():
        buffers[0].add_(buffers[1])
    two.wait(one)
    with two.work():
        buffers[1].copy_(buffers[0])
    two.wait()
    assert to_host(buffers[1]).tolist() == [1, 1]


def test_a_host_read_waits_for_its_stream(device, buffers):
    side = stream(device)
    with side.work():
        buffers[0].add_(5)
        assert buffers[0][0].item() == 5
        buffers[0].add_(1)
        assert buffers[0].tolist() == [6, 6]
        assert buffers[0].cpu().tolist() == [6, 6]


def test_pageable_sources_are_staged_and_pinned_are_not(cpu, buffers):
    pageable, pinned = torch.full((2,), 3.0), host_tensor([4.0, 4.0], pinned=True)
    other = torch.zeros(2, device=cpu)
    side = stream(cpu)
    with side.work():
        buffers[0].copy_(pageable)
        other.copy_(pinned, non_blocking=True)
        buffers[1][0] = 9.0
    pageable.zero_()
    pinned.zero_()
    side.wait()
    assert to_host(buffers[0]).tolist() == [3, 3]
    assert to_host(other).tolist() == [0, 0]
    assert to_host(buffers[1]).tolist() == [9, 1]


def test_nothing_of_a_stream_outlives_its_session(cpu, own_session):
    with device_session(cpu):
        x = torch.zeros(2, device=cpu)
        side = stream(cpu)
        with side.work():
            x.add_(1)
    side.wait()
    assert x.tolist() == [0, 0]


# Within a capture


def test_a_joined_branch_is_part_of_the_graph(device, buffers):
    side, out = stream(device), torch.zeros(2, device=device)
    graph = new_graph(device)
    with graph.capture():
        with side.work():
            doubled = buffers[1] * 2
            temporary = doubled + 1
            doubled = doubled + temporary
            del temporary
        main = buffers[0] + 1
        side.wait()
        out.copy_(main + doubled)
    for value in (1.0, 2.0):
        buffers[1].fill_(value)
        graph.replay()
        assert to_host(out).tolist() == [1 + 4 * value + 1] * 2


def test_a_branch_may_be_joined_twice(cpu, buffers):
    side, out = stream(cpu), torch.zeros(2, device=cpu)
    graph = new_graph(cpu)
    with graph.capture():
        for _ in range(2):
            with side.work():
                out.add_(buffers[1])
            current_stream().wait(side)
    graph.replay()
    assert to_host(out).tolist() == [2, 2]


def test_read_before_the_join(cpu, buffers):
    """What the main branch reads of a side branch before it joins is not there yet."""
    side = stream(cpu)
    graph = new_graph(cpu)
    with graph.capture():
        with side.work():
            doubled = buffers[1] * 2
        early = doubled + 1
        side.wait()
        late = doubled + 1
    graph.replay()
    assert early.isnan().all()
    assert to_host(late).tolist() == [3, 3]


def test_an_unjoined_branch_is_refused(device, buffers):
    side = stream(device)
    graph = new_graph(device)
    with pytest.raises(CaptureError) as caught, graph.capture(), side.work():
        buffers[0].add_(1)
    assert caught.value.rule == "unjoined_stream"
    assert not is_capturing()
    with pytest.raises(RuntimeError, match="no capture"):
        graph.replay()
