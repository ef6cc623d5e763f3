"""What a seeded fault is, and how one is planted and taken out again."""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kits.errors import KitError
from kits.kernels import _ops

VARIABLE = "ATTNMATRIX_FAULT"
"""Names the fault that is planted for a whole process."""

KINDS = {
    1: "padded rows",
    2: "KV extent",
    3: "pointers and stale buffers",
    4: "host scalars",
    5: "page table and layout",
    6: "masks",
    7: "dispatch",
    8: "scale, dtype and heads",
    9: "multi-step and speculation",
    10: "order and determinism",
    11: "harness",
}

_ID = re.compile(r"[A-Z]{1,2}\d{2}[a-z]?")


@dataclass(frozen=True, kw_only=True)
class Touches:
    """Which subtests run the changed code, by fields of the manifest; an empty tuple means any.

    This only saves time: too wide costs subtests in which the fault is not exercised, too narrow hides a kill.
    """

    backends: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    sweeps: tuple[str, ...] = ()
    runners: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    pad_styles: tuple[str, ...] = ()
    multipliers: tuple[int, ...] = ()

    def covers(self, entry: Mapping[str, Any]) -> bool:
        """Whether a subtest of the manifest can run the changed code."""
        return all(
            not wanted or entry[name] in wanted
            for name, wanted in (
                ("backend", self.backends),
                ("method", self.methods),
                ("sweep", self.sweeps),
                ("runner", self.runners),
                ("mode", self.modes),
                ("layout", self.layouts),
                ("pad_style", self.pad_styles),
                ("multiplier", self.multipliers),
            )
        )


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A registered fault. ``id`` is a row of the catalogue, with a letter where a row has several mutants.

    ``F``: counted faults; ``S``: spares; ``C``: controls, changes that no output can show and no check may report.
    """

    id: str
    title: str
    references: tuple[str, ...]
    kind: int
    axes: str
    touches: Touches
    control: bool
    apply: Callable[[Plant], None] = field(repr=False, compare=False)

    @property
    def row(self) -> str:
        """The catalogue row: ``F17`` of ``F17b``."""
        return self.id.rstrip("abcdefghijklmnopqrstuvwxyz")

    @property
    def module(self) -> str:
        return self.apply.__module__


class UnknownFaultError(KitError):
    """No fault has this id."""


_MISSING = object()


class Changes:
    """Attributes of the kit that are replaced for a while."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._undo: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
        """Put ``make(original)`` in place of ``owner.attribute``; owner is a class, a module or an instance.

        The original of a class is what lies in the class: a plain function, a property or a staticmethod object.
        """
        if not hasattr(owner, attribute):
            raise AttributeError(f"{self.name}: {owner!r} has no {attribute!r} to replace; the kit has changed")
        own = vars(owner).get(attribute, _MISSING)
        original = own
        if own is _MISSING:
            classes = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
            original = next((vars(c)[attribute] for c in classes if attribute in vars(c)), _MISSING)
            if original is _MISSING or not isinstance(owner, type):
                original = getattr(owner, attribute)
        self._undo.append((owner, attribute, own))
        setattr(owner, attribute, make(original))

    def replace_everywhere(self, function: Callable[..., Any], make: Callable[[Any], Any]) -> None:
        """As ``replace``, in every module of the kit that holds ``function`` under its name."""
        name, replacement = function.__name__, make(function)
        for module in _kit_modules():
            if vars(module).get(name) is function:
                self.replace(module, name, lambda _original: replacement)

    @property
    def places(self) -> list[str]:
        """``module.attribute`` of everything that is replaced now."""
        owners = ((owner if hasattr(owner, "__name__") else type(owner), name) for owner, name, _ in self._undo)
        return [f"{getattr(owner, '__module__', owner.__name__)}.{name}" for owner, name in owners]

    def undo(self) -> None:
        """Put everything back, last change first."""
        while self._undo:
            owner, attribute, own = self._undo.pop()
            if own is _MISSING:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, own)


class Plant(Changes):
    """One fault in place: it changes the kit, puts it back, and counts how often the change mattered.

    ``ran``: how often the changed code ran; ``changed``: how often it changed a value. A fault that changed nothing in
    a subtest was not exercised by it.
    """

    def __init__(self, planted_fault: Fault) -> None:
        super().__init__(planted_fault.id)
        self.fault = planted_fault
        self.ran = 0
        self.changed = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called when a value is changed: who outlives this process may want to know."""

    def witness(self, changed: bool = True) -> None:
        """Called by the changed code: it ran, and ``changed`` says whether it changed a value."""
        self.ran += 1
        if changed:
            self.changed += 1
            self.on_change()

    def swap(self, right: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
        """Return ``wrong``, and witness whether it differs from ``right``.

        In recorded code the comparison is recorded too and made at each replay; on CUDA, where a replay cannot ask,
        recorded code counts as having changed a value.
        """
        comparable = right.shape == wrong.shape and right.dtype == wrong.dtype
        unasked = right.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if unasked or not comparable:
            self.witness()
        else:
            _compare(right, wrong)
        return wrong

    def reset(self) -> None:
        """Start to count anew, for the next subtest."""
        self.ran = self.changed = 0


_registry: dict[str, Fault] = {}
_active: list[Plant] = []


def fault(
    fault_id: str,
    *,
    title: str,
    references: tuple[str, ...],
    kind: int,
    axes: str,
    touches: Touches,
    control: bool = False,
) -> Callable[[Callable[[Plant], None]], Callable[[Plant], None]]:
    """Register the function below as the fault ``fault_id``; it receives a ``Plant`` and changes the kit through it."""

    def register(apply: Callable[[Plant], None]) -> Callable[[Plant], None]:
        if not _ID.fullmatch(fault_id):
            raise ValueError(f"fault id {fault_id!r} is not of the form F01, F17b, S03 or C14")
        if kind not in KINDS:
            raise ValueError(f"{fault_id}: kind {kind} is none of {sorted(KINDS)}")
        known = _registry.get(fault_id)
        if known is not None and known.module != apply.__module__:
            raise ValueError(f"{fault_id} is registered twice: in {known.module} and in {apply.__module__}")
        if known is not None and known.apply.__qualname__ != apply.__qualname__:
            raise ValueError(f"{fault_id} is registered twice in {known.module}")
        _registry[fault_id] = Fault(
            id=fault_id,
            title=title,
            references=references,
            kind=kind,
            axes=axes,
            touches=touches,
            control=control,
            apply=apply,
        )
        return apply

    return register


def load_all() -> dict[str, Fault]:
    """All faults by id, in the order of their ids; imports every module of this package."""
    package = importlib.import_module("kits.faults")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"kits.faults.{module.name}")
    return dict(sorted(_registry.items()))


def find(fault_id: str) -> Fault:
    """The fault of this id; the error for an unknown one names the nearest."""
    faults = load_all()
    if fault_id in faults:
        return faults[fault_id]
    near = max(faults, key=lambda known: difflib.SequenceMatcher(None, known, fault_id.upper()).ratio())
    raise UnknownFaultError(
        f"no seeded fault is called {fault_id!r}; did you mean {near} ({faults[near].title})? "
        "`python -m orchestrator.power --list` prints all"
    )


@contextmanager
def planted(fault_id: str) -> Iterator[Plant]:
    """Plant a fault for the length of a block; one at a time."""
    found = find(fault_id)
    if _active:
        raise KitError(f"cannot plant {fault_id} over {_active[0].fault.id}: a kill could not be attributed")
    plant = Plant(found)
    _active.append(plant)
    try:
        found.apply(plant)
        yield plant
    finally:
        plant.undo()
        _active.clear()


@contextmanager
def planted_from_environment() -> Iterator[Plant | None]:
    """Plant what ``ATTNMATRIX_FAULT`` names, or nothing where it is not set."""
    name = os.environ.get(VARIABLE)
    if not name:
        yield None
        return
    with planted(name) as plant:
        yield plant


def active() -> Plant | None:
    """The fault that is planted now."""
    return _active[0] if _active else None


def _kit_modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.split(".", 1)[0] == "kits"]


def _note_difference(right: torch.Tensor, wrong: torch.Tensor) -> None:
    """Runs outside of capture, or at each replay of what was captured."""
    plant = active()
    if plant is not None:
        bits = (value.detach().reshape(-1).contiguous().view(torch.uint8) for value in (right, wrong))
        plant.witness(changed=not torch.equal(*bits))


_compare = _ops.define(
    "fault_witness(Tensor right, Tensor wrong) -> ()",
    cpu=_note_difference,
    cuda=_note_difference,
    fake=_ops.fake_none,
)
