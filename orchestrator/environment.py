"""What a worker runs on and with: the facts that make a recorded time or a difference comparable."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

PACKAGES = (
    "torch", "triton", "flashinfer-python", "sglang-kernel", "sgl-kernel", "flash-attn-3", "flash-attn-4", "flash-mla",
    "sglang", "vllm",
)  # fmt: skip
"""What may be under test. Of these, the versions of those that are installed are recorded."""


def environment() -> dict[str, object]:
    """Plain data: system, processor, cores that this process may use, and versions. Asks no device for anything."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    if cuda:
        versions["cuda"] = str(cuda)
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "versions": versions,
    }


def processor() -> str:
    """The processor by its own name, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return " ".join(value.split())
    except OSError:
        pass
    return platform.processor()
