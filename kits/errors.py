"""What can go wrong in a subtest, one class per kind, so that verdicts never parse messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def during(what: str) -> Iterator[None]:
    """Put ``what`` in front of the message of a check that fails in the block, where it is not there yet."""
    try:
        yield
    except CheckFailed as error:
        if not str(error).startswith(what):
            error.args = (f"{what}: {error}",)
        raise


class KitError(Exception):
    """Base of everything the kit raises on purpose."""


class CheckFailed(KitError, AssertionError):
    """A check of the suite failed; ``check`` names it (``metadata_invariants``, ``kv_integrity``, ...)."""

    check = "check"


class MismatchError(CheckFailed):
    """Real rows differ from the reference, or from the eager leg.

    ``max_abs`` is the largest absolute difference, ``wrong`` the share of values outside the tolerance (0..1),
    ``margin`` the largest difference as a multiple of its tolerance, ``row`` the request row of that difference.
    """

    check = "compare"

    def __init__(self, message: str, *, max_abs: float, wrong: float, margin: float, row: int) -> None:
        super().__init__(message)
        self.max_abs, self.wrong, self.margin, self.row = max_abs, wrong, margin, row


class MetadataError(CheckFailed):
    """Metadata of all B rows break an invariant after host-side preparation."""

    check = "metadata_invariants"


class PointerError(CheckFailed):
    """A storage that the captured graph reads died, or the object that named it now names another."""

    check = "pointer_guard"


class KVIntegrityError(CheckFailed):
    """A forward or a replay wrote outside its own write set or into a guard zone, or left its write slots without the
    new tokens."""

    check = "kv_integrity"


class InputError(CheckFailed):
    """A forward changed its own q, k or v, which belong to the caller, or a replay gave the model other tokens."""

    check = "inputs"


class OutputError(CheckFailed):
    """A replay changed what an earlier one had returned."""

    check = "outputs"


class ResultError(CheckFailed):
    """A forward returned a result of another dtype or shape than the layer has."""

    check = "result"


class NeighbourError(CheckFailed):
    """A row changed although only its neighbours did."""

    check = "neighbour_independence"


class RepeatError(CheckFailed):
    """The same batch, replayed twice, gave two results."""

    check = "repeatability"


class NothingReplayedError(CheckFailed):
    """A graph subtest in which no graph was captured or replayed: a silent eager fallback."""

    check = "replay_count"


class ModeLeakError(CheckFailed):
    """A subtest left a dispatch or function mode active, which would change every later one."""

    check = "mode_leak"


class CaptureError(CheckFailed):
    """The recorded part did what a CUDA graph capture refuses, or what a replay would not repeat."""

    check = "capture"

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class ReplayError(CheckFailed):
    """A replay read memory that no longer exists."""

    check = "replay"


class KernelFault(CheckFailed):
    """A kernel read or wrote out of bounds: an illegal memory access on a GPU."""

    check = "kernel_fault"

    def __init__(self, kernel: str, argument: str, message: str) -> None:
        super().__init__(f"{kernel}: {argument}: {message}")
        self.kernel, self.argument = kernel, argument


class Unavailable(KitError):
    """The subtest cannot run on this host; ``kind`` is ``no_device``, ``architecture`` or ``package``."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
