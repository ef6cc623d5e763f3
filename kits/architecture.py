"""What libraries ask a GPU when they are imported, asked without initialising CUDA. Free of torch."""

from __future__ import annotations

import contextlib
import os


def name_architecture() -> None:
    """Tell libraries what the GPUs of this host are, in their own variables.

    Each would find the same by itself when it is imported, but by initialising CUDA, after which a process cannot be
    forked. Where the GPUs differ, libraries are left to themselves.

    ``CUTE_DSL_ARCH`` is for CuTe DSL, which FA4 and FlashInfer import: ``sm_90a``. ``FLASHINFER_CUDA_ARCH_LIST`` is
    for FlashInfer: ``9.0a``. Both build for SM 9.0 and later with the instructions that only these have, which older
    versions of FlashInfer do not make of a number without an ``a``; its name for SM 12 depends on the compiler, and is
    left to it.
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
        if len(found) != 1:
            return
        major, minor = found.pop()
        own = "a" if major >= 9 else ""
        os.environ.setdefault("CUTE_DSL_ARCH", f"sm_{major}{minor}{own}")
        if major < 12:
            os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{own}")
