"""What libraries ask a GPU when they are imported, asked without initialising CUDA. Free of torch."""

from __future__ import annotations

import contextlib
import os


def name_architecture() -> None:
    """Tell FlashInfer what the GPUs of this host are, in its variable ``FLASHINFER_CUDA_ARCH_LIST``.

    It would find the same by itself, when it is imported, but by initialising CUDA, after which a process cannot be
    forked. It builds for SM 9.0 and later with their own instructions, which only newer versions of it make of a number
    without an ``a``. Where the GPUs differ, and for SM 12, whose name depends on the compiler, it is left to itself.
    """
    try:
        import pynvml
    except ImportError:  # FlashInfer needs it, and so is not here either
        return
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        found = {tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles}
        pynvml.nvmlShutdown()
        major, minor = found.pop() if len(found) == 1 else (12, 0)
        if major < 12:
            os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
