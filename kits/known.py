"""Whether a known failure holds here, and whether what happened is what it states."""

from __future__ import annotations

from kits.needs import chosen_device, has_capability, missing
from kits.subtest import KnownFailure, Subtest


def applies(subtest: Subtest) -> bool:
    """Whether the entry's ``when`` holds on this host: all packages at the stated versions, the stated capability."""
    entry = subtest.known_failure
    if entry is None:
        return False
    return not missing(entry.packages) and has_capability(entry.capability, chosen_device())


def differs_from_entry(entry: KnownFailure, error: BaseException) -> str | None:
    """How ``error`` differs from the failure that the entry states; None where it is that failure."""
    if type(error).__name__ != entry.raises:
        return f"it raised {type(error).__name__}, the entry expects {entry.raises}"
    for name, bounds in (("max_abs", entry.max_abs), ("wrong", entry.wrong)):
        if bounds is None:
            continue
        value = getattr(error, name, None)
        if value is None:
            return f"{type(error).__name__} carries no {name}, but the entry states a range for it"
        if not bounds[0] <= value <= bounds[1]:
            return f"{name} is {value:.4g}, outside the stated range {bounds[0]:g} to {bounds[1]:g}"
    return None
