"""Which interpreter a session gets. nox itself is not needed: the environment of the tests has none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def noxfile(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of noxfile.py, on a host with a GPU."""
    nox: Any = ModuleType("nox")
    nox.session = lambda **_: lambda function: function
    nox.options, nox.Session = SimpleNamespace(), object
    monkeypatch.setitem(sys.modules, "nox", nox)
    names: dict[str, Any] = {"__file__": str(ROOT / "noxfile.py"), "__name__": "noxfile"}
    exec(compile((ROOT / "noxfile.py").read_text(encoding="utf-8"), "noxfile.py", "exec"), names)
    names["has_gpu"] = lambda: True
    names["shutil"] = SimpleNamespace(which=lambda name: f"/somewhere/{name}")
    return names


def session(backend: str | None) -> Any:
    """A session of a nox that got ``--force-venv-backend``, of which ``--no-venv`` is the short form."""
    config = SimpleNamespace(force_venv_backend=backend)
    return SimpleNamespace(
        _runner=SimpleNamespace(global_config=config), log=lambda text: None, error=error, posargs=["--method", "dense"]
    )


def error(text: str) -> NoReturn:
    raise RuntimeError(text)


def test_on_a_gpu_host_the_matrix_runs_in_the_python_on_the_path(noxfile: dict[str, Any]) -> None:
    assert noxfile["matrix_python"](session(None)) == "/somewhere/python"


def test_no_venv_is_the_interpreter_that_runs_nox(noxfile: dict[str, Any]) -> None:
    """Also where another python comes first on the PATH."""
    assert noxfile["matrix_python"](session("none")) == sys.executable
    noxfile["has_gpu"] = lambda: False
    assert noxfile["matrix_python"](session("none")) == sys.executable


def test_a_missing_manifest_says_what_writes_it(noxfile: dict[str, Any]) -> None:
    assert noxfile["suite_of"](session(None)) == ("generated_tests", ["--method", "dense"])
    noxfile["MANIFEST"] = ROOT / "generated_tests" / "none.json"
    with pytest.raises(RuntimeError, match=r"none\.json is missing: run `nox -s generate`"):
        noxfile["suite_of"](session(None))


@pytest.mark.parametrize("backend", [None, "none"])
def test_a_python_that_is_too_old_is_refused_before_anything_is_installed(
    noxfile: dict[str, Any], backend: str | None
) -> None:
    noxfile["OLDEST"] = (99, 1)
    with pytest.raises(RuntimeError, match=r"needs Python 99\.1 or newer, and nox runs on 3\."):
        noxfile["environment"](session(backend), "light")
