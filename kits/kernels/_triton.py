"""The one place that imports Triton, and that decides between its compiler and its interpreter.

Triton reads ``TRITON_INTERPRET`` when a kernel is decorated. Its own library functions (``tl.sum``, ``tl.zeros``) are
decorated when Triton is imported, so that a Triton which something else imported in compiled mode cannot interpret
them; our kernels call none, and are interpreted all the same.
"""

from __future__ import annotations

import os

import torch

from kits.errors import Unavailable
from kits.needs import interpreter_problem


def _wants_interpreter() -> bool:
    """Compile only for a GPU that is used: ``ATTNMATRIX_DEVICE``, and without it whether there is one."""
    device = os.environ.get("ATTNMATRIX_DEVICE")
    return device == "cpu" if device else not torch.cuda.is_available()


INTERPRETED = _wants_interpreter()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

try:
    import numpy
    import triton
    import triton.language as tl
except ImportError as error:
    raise Unavailable("package", f"triton or numpy cannot be imported: {error}") from error

if INTERPRETED:
    problem = interpreter_problem(triton.__version__, numpy.__version__)
    if problem is not None:
        raise Unavailable("package", problem)


def check_mode(kernel: object) -> None:
    """Raise where a kernel was decorated in another mode than this process needs."""
    if isinstance(kernel, triton.runtime.JITFunction) == INTERPRETED:
        wanted, other = ("interpreted", "compiled") if INTERPRETED else ("compiled", "interpreted")
        raise RuntimeError(
            f"Triton kernels must be {wanted} on this device but were decorated as {other}: TRITON_INTERPRET was "
            "changed in this process. Leave it to kits.kernels, and choose with ATTNMATRIX_DEVICE=cpu or cuda."
        )


__all__ = ["INTERPRETED", "check_mode", "tl", "triton"]
