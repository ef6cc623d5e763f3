"""Raw Triton launches during a capture are refused by name; launches inside a custom op are not."""

import importlib.util
import subprocess
import sys
import textwrap

import pytest
import torch

from kits.errors import CaptureError
from kits.graphs import launches, new_graph

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

KERNEL = """
import os
{interpret}
import torch
import triton
import triton.language as tl

@triton.jit
def add_one(x, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(x + at, tl.load(x + at) + 1)
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch, device):
    """A module with a Triton kernel, interpreted on a CPU."""
    path = tmp_path / "graphs_test_kernels.py"
    interpret = "os.environ['TRITON_INTERPRET'] = '1'" if device.type == "cpu" else ""
    path.write_text(KERNEL.format(interpret=interpret))
    if device.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop(path.stem, None)
    yield importlib.import_module(path.stem)
    sys.modules.pop(path.stem, None)


def test_raw_launch(device, kernels):
    x = torch.zeros(8, device=device)
    kernels.add_one[(1,)](x, n=8)  # warm-up: outside of a capture it is nobody's business
    graph = new_graph(device)
    with pytest.raises(CaptureError, match=r"^raw_triton_launch: add_one: ") as caught, graph.capture():
        kernels.add_one[(1,)](x, n=8)
    assert caught.value.rule == "raw_triton_launch"
    kernels.add_one[(1,)](x, n=8)
    assert x.tolist() == [2.0] * 8


def test_launch_in_a_custom_op(device, kernels):
    def bump(x):
        kernels.add_one[(1,)](x, n=8)  # what a launch returns is nothing to return

    with torch.library._scoped_library("graphs_test_launch", "DEF") as library:
        library.define("bump(Tensor(a!) x) -> ()")
        for key in ("CPU", "CUDA"):
            library.impl("bump", bump, key)
        library.impl("bump", lambda x: None, "Meta")
        x = torch.zeros(8, device=device)
        torch.ops.graphs_test_launch.bump(x)
        graph = new_graph(device)
        with graph.capture():
            torch.ops.graphs_test_launch.bump(x)
        before = x.tolist()
        graph.replay()
        graph.replay()
        assert x.tolist() == [value + 2 for value in before]


def test_triton_is_wrapped_when_somebody_imports_it(cpu, kernels):
    """In a process of its own, since the other tests import triton."""
    code = f"""
        import sys
        sys.path[:0] = {[kernels.__file__.rsplit("/", 1)[0], *filter(None, sys.path)]!r}
        import torch
        from kits.errors import CaptureError
        from kits.graphs import new_graph

        graph, x = new_graph(torch.device("cpu")), torch.zeros(8)
        with graph.capture():
            x + 1
        assert "triton" not in sys.modules, "imported for nothing"
        try:
            with graph.capture():
                import graphs_test_kernels
                graphs_test_kernels.add_one[(1,)](x, n=8)
        except CaptureError as error:
            assert error.rule == "raw_triton_launch", error
        else:
            raise AssertionError("not refused")
        graphs_test_kernels.add_one[(1,)](x, n=8)
        assert x.tolist() == [1.0] * 8
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=240)


def test_nothing_is_refused_after_a_capture(cpu):
    with new_graph(cpu).capture():
        assert launches._refusing
    assert not launches._refusing
    assert not any(isinstance(finder, launches._Finder) for finder in sys.meta_path)
