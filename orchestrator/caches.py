"""Where the libraries under test keep what they compiled: in one place, from run to run, for all workers alike.

Each of them writes its files whole or under a lock, so that workers may share them; so does Python with the bytecode of
their modules. What the user has set stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "ATTNMATRIX_CACHE"
"""Names another place than ``DEFAULT``, such as one that a runner's clean-up does not reach."""
DEFAULT = Path(".attnmatrix/cache")
BYTECODE = "PYTHONPYCACHEPREFIX"


def cache_env(env: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to ``env``."""
    home = Path(env.get(VARIABLE) or DEFAULT).resolve()
    wanted = {
        "TRITON_CACHE_DIR": str(home / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more of them are processes, each of which imports torch
        "FLASHINFER_WORKSPACE_BASE": str(home / "flashinfer"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(home / "flash_attention_cute"),
        "CUTE_DSL_CACHE_DIR": str(home / "cute_dsl"),
        "CUDA_CACHE_PATH": str(home / "cuda"),
    }
    added = {name: value for name, value in wanted.items() if name not in env}
    if BYTECODE not in env and compiles_again():
        added |= {BYTECODE: str(home / "bytecode" / installation()), "PYTHONDONTWRITEBYTECODE": ""}
    return added


def compiles_again() -> bool:
    """Whether each process that imports torch's compiler compiles its source: no bytecode lies beside it, and none may
    be written there. Images of containers are often made so, and it takes two thirds of the time of such an import."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    source = Path(torch.origin).parent / "_inductor" / "compile_fx.py"
    if not source.exists() or Path(importlib.util.cache_from_source(str(source))).exists():
        return False
    return sys.dont_write_bytecode or not os.access(source.parent, os.W_OK)


def installation() -> str:
    """A name for what is installed. Python takes a source whose time and size are the same for the same, and images
    that are built twice alike give other versions the same time."""
    found = []
    for entry in sys.path:
        with contextlib.suppress(OSError):  # Python passes over such an entry, too
            for path in Path(entry).glob("*.*-info"):
                record = path / "RECORD"  # which names the hash of each file
                found.append(f"{path.name} {digest(record.read_bytes() if record.is_file() else b'')}")
    return digest("\n".join(sorted(found)).encode())[:16]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
