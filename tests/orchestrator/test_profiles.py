"""``--profile``: a profile whose subtests are all in the manifest is run by leaving the others out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.errors import OrchestratorError
from orchestrator.folder import Run
from orchestrator.manifest import parse_manifest
from orchestrator.running import Request, describe, prepare
from orchestrator.selection import Selection, select

PROFILES = {"one": ["smoke", "old"], "two": [], "three": ["old"]}


def raw(profiles: object = None) -> dict[str, Any]:
    """A manifest of three subtests; ``profiles`` replaces what the first of them says."""
    rows: list[dict[str, Any]] = [
        {
            "id": f"dense.fa3.eager.{name}",
            "node": f"generated_tests/test_dense_fa3.py::test_eager[{name}]",
            "method": "dense",
            "backend": "fa3",
            "sweep": "eager",
            "profiles": found,
        }
        for name, found in PROFILES.items()
    ]
    if profiles is not None:
        rows[0]["profiles"] = profiles
    return {"format": 1, "profile": "ci", "spec_sha256": "0", "subtests": rows}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "manifest.json").write_text(json.dumps(raw()))
    (tmp_path / "test_dense_fa3.py").write_text("")
    return tmp_path


def chosen(profile: str) -> list[str]:
    subtests = parse_manifest(raw(), Path("generated_tests"), "0").subtests
    return [planned.id.rsplit(".", 1)[-1] for planned in select(subtests, Selection(profile=profile))]


def test_a_profile_leaves_the_others_out() -> None:
    assert (chosen("smoke"), chosen("old")) == (["one"], ["one", "three"])


@pytest.mark.parametrize(
    ("profile", "hint"), [("smok", "did you mean smoke?"), ("nightly", "one that has more subtests is generated into")]
)
def test_a_profile_that_is_not_there(profile: str, hint: str) -> None:
    with pytest.raises(OrchestratorError) as caught:
        chosen(profile)
    assert caught.value.code == "O113"
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("profiles", ["smoke", [1], ["a\x1b[31m"], {"smoke": 1}])
def test_profiles_that_cannot_be_read(profiles: object) -> None:
    with pytest.raises(OrchestratorError) as caught:
        parse_manifest(raw(profiles), Path("generated_tests"), "0")
    assert caught.value.code == "O105"


def test_an_older_manifest_says_nothing_of_profiles() -> None:
    old = raw()
    for row in old["subtests"]:
        del row["profiles"]
    assert all(planned.profiles == () for planned in parse_manifest(old, Path("generated_tests"), "0").subtests)


def test_the_manifests_own_profile_is_everything(folder: Path) -> None:
    for profile, count, said in (("ci", 3, "ci"), ("old", 2, "old"), (None, 3, "ci")):
        request = Request(tests=folder, selection=Selection(profile=profile))
        manifest, plan = prepare(request, "cpu")
        assert len(plan.subtests) == count
        run = describe(request, manifest, plan, Lanes())  # type: ignore[arg-type]
        assert isinstance(run, Run)
        assert run.profile == said
        assert run.selection == (["--profile", "old"] if said == "old" else [])


class Lanes:
    """What ``describe`` asks of the lanes of a run."""

    kind = "cpu"
    devices = ("cpu",)


def test_the_command_line_takes_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--tests", str(folder), "--profile", "smoke", "--shards", "1"]) == 0
    assert "1 subtest " in capsys.readouterr().out
    assert main(["run", "--tests", str(folder), "--profile", "smoke", "--resume", str(folder)]) != 0
    assert "O508" in capsys.readouterr().err
