"""What a subtest needs of this host: a device, packages, a device capability."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import metadata

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kits.errors import KitError, Unavailable
from kits.subtest import Subtest


def asked_for() -> str:
    """``ATTNMATRIX_DEVICE`` (``cpu`` or ``cuda``) if set, else CUDA where there is one."""
    name = os.environ.get("ATTNMATRIX_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise KitError(f"ATTNMATRIX_DEVICE is {name!r}; it takes cpu or cuda")
    return name


def chosen_device() -> torch.device:
    """The device that was asked for; ``Unavailable`` where there is none."""
    name = asked_for()
    if name == "cuda" and not torch.cuda.is_available():
        raise Unavailable("no_device", "ATTNMATRIX_DEVICE is cuda, but torch sees no CUDA device")
    return torch.device(name)


def require(subtest: Subtest, device: torch.device) -> None:
    """``Unavailable`` if this host lacks what the subtest states to need."""
    native = subtest.native if device.type == "cuda" else None
    if native is not None and not has_capability(native.capability, device):
        major, minor = torch.cuda.get_device_capability(device)
        reason = f"it needs device capability {native.capability}, this device has {major}.{minor}"
        raise Unavailable("architecture", reason)
    lacking = missing((*subtest.requires, *(native.packages if native is not None else ())))
    if lacking:
        raise Unavailable("package", f"it needs {' and '.join(lacking)}")


def missing(requirements: Iterable[str]) -> list[str]:
    """Those that no installed distribution meets, each with what is installed instead."""
    lacking = []
    for text in requirements:
        requirement = Requirement(text)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            lacking.append(f"{text} (not installed)")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            lacking.append(f"{text} (installed is {version})")
    return lacking


def has_capability(specifier: str | None, device: torch.device) -> bool:
    """Whether the device is a GPU of that capability; None asks for nothing."""
    if specifier is None:
        return True
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return SpecifierSet(specifier).contains(f"{major}.{minor}")


def interpreter_problem(triton_version: str, numpy_version: str) -> str | None:
    """Why these do not interpret: Triton before 3.7 makes a number of an array with one element, which numpy refuses
    from 2.4 on."""
    if Version(triton_version) >= Version("3.7") or Version(numpy_version) < Version("2.4"):
        return None
    return (
        f"the interpreter of triton {triton_version} does not run beside numpy {numpy_version}: "
        "install triton 3.7 or newer, or numpy older than 2.4"
    )
