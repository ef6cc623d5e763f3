"""Where a worker was when it ended, from what Python's fault handler dumped."""

from __future__ import annotations

import sysconfig

from orchestrator.endings import innermost

STDLIB = sysconfig.get_path("stdlib")


def thread(*files: str, head: str = "Thread 0x00007f (most recent call first):") -> str:
    return "\n".join([head, *(f'  File "{file}", line {n} in f{n}' for n, file in enumerate(files, 1))]) + "\n"


def test_libraries_and_the_worker_itself_are_passed_over():
    files = (f"{STDLIB}/json/decoder.py", "/x/site-packages/torch/nn.py", "<string>", "/y/case.py", "/y/outer.py")
    assert innermost(f"noise\nTimeout (0:00:02)!\n{thread(*files)}") == "/y/case.py:4 (f4)"
    assert innermost(thread("/x/site-packages/torch/nn.py", f"{STDLIB}/runpy.py")) == ""
    assert innermost("no stack at all") == ""


def test_the_thread_at_fault_counts_else_the_last():
    """The main thread is dumped last."""
    current = thread("/y/guilty.py", head="Current thread 0x00007f [python] (most recent call first):")
    modules = "\nExtension modules: numpy.random, torch._C (total: 2)\n"
    assert innermost(f"{current}\n{thread('/y/main.py')}{modules}") == "/y/guilty.py:1 (f1)"
    assert innermost(f"{thread('/y/helper.py')}\n{thread('/y/main.py')}{modules}") == "/y/main.py:1 (f1)"
