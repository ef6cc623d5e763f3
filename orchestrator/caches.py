"""Where the libraries under test keep what they compiled: in one place, from run to run, for all workers alike.

Each of them writes its files whole or under a lock, so that workers may share them. What the user has set stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

VARIABLE = "ATTNMATRIX_CACHE"
"""Names another place than ``DEFAULT``, such as one that a runner's clean-up does not reach."""
DEFAULT = Path(".attnmatrix/cache")


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
    return {name: value for name, value in wanted.items() if name not in env}
