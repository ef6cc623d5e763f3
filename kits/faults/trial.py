"""One subtest against the fault that is planted, in this process."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kits
from kits import record
from kits.faults.registry import active
from kits.subtest import Subtest
from kits.verdict import GREEN, judge


@dataclass(frozen=True)
class Trial:
    """How a subtest ended, after so many seconds of CPU. ``exercised``: the planted fault changed a value in it; True
    where none is planted."""

    id: str
    outcome: str
    check: str | None
    message: str
    seconds: float
    exercised: bool

    @property
    def killed(self) -> bool:
        """Whether somebody who runs this subtest would look into it."""
        return self.outcome not in GREEN and self.outcome != "unavailable"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def attempt(subtest: Subtest) -> Trial:
    """Run a subtest as pytest would, and judge it by the same rule."""
    plant = active()
    if plant is not None:
        plant.reset()
    error: BaseException | None = None
    start = time.process_time()
    try:
        kits.run(subtest)
    except KeyboardInterrupt:
        raise
    except BaseException as raised:
        error = raised
    verdict = judge(subtest, error, record.latest(subtest.id))
    message = verdict.reason or (verdict.failure or {}).get("message") or ""
    return Trial(
        id=subtest.id,
        outcome=verdict.outcome,
        check=verdict.check,
        message=message.splitlines()[0] if message else "",
        seconds=time.process_time() - start,
        exercised=plant is None or plant.changed > 0,
    )


def load_subtests(folder: Path) -> dict[str, Subtest]:
    """All subtests of a generated folder by id, from its modules themselves."""
    found: dict[str, Subtest] = {}
    for path in sorted(folder.glob("test_*.py")):
        name = f"attnmatrix_power.{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        for value in vars(module).values():
            if isinstance(value, list):
                found.update((item.id, item) for item in value if isinstance(item, Subtest))
    return found
