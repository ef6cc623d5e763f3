"""The one place that imports Triton, and that decides between its compiler and its interpreter.

Triton binds the choice when a kernel is decorated, and reads it from ``TRITON_INTERPRET`` when it is imported.
"""

from __future__ import annotations

import os
import sys

import torch

from kits.errors import Unavailable


def _wants_interpreter() -> bool:
    device = os.environ.get("ATTNMATRIX_DEVICE")
    return device == "cpu" if device else not torch.cuda.is_available()


def _import_triton() -> bool:
    """Import Triton in the right mode and say whether kernels are interpreted."""
    interpret = _wants_interpreter()
    if interpret and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
    except ImportError as error:
        raise Unavailable("package", f"triton cannot be imported: {error}") from error
    if interpret and not triton.knobs.runtime.interpret:
        raise RuntimeError(
            "Triton was imported in compiled mode before kits.kernels could ask for its interpreter, and there is "
            "no GPU to compile for. Set TRITON_INTERPRET=1 in the environment, or import kits.kernels first."
        )
    return interpret


INTERPRETED = _import_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

__all__ = ["INTERPRETED", "tl", "triton"]
